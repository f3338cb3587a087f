//! The start of an optimizer: initial parameters, or the states of an earlier run.

use crate::control;
use crate::optimizer::Optimizer;
use crate::speculation::SpeculationBuffers;
use crate::state::State;
use device::{Device, Error, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements that a kernel thread writes in one call.
const BLOCK: usize = 1 << 16;

/// Returns whether to stop. It is called often, since initial values may take minutes.
pub type StopCheck<'a> = dyn Fn() -> bool + Sync + 'a;

/// Position of the first element of a run of a state.
#[derive(Clone, Copy, Debug)]
pub struct StatePosition {
    /// Number of the segment.
    pub segment: usize,
    /// Number of the state in [`OwnedRun::states`](crate::OwnedRun::states); 3: the delayed
    /// gradient. A frozen parameter has state 0 alone.
    pub state: usize,
    /// First element of the run in the segment's flat buffer.
    pub first: usize,
}

/// Fills a run of a state. All kernel threads of a rank call it at the same time.
pub type StateSource<'a> = dyn Fn(StatePosition, &mut [f32]) -> Result<(), Error> + Sync + 'a;

/// Fills parameters before the first step: (segment, first element in its flat buffer, values).
pub type ParameterSource<'a> = dyn Fn(usize, usize, &mut [f32]) + Sync + 'a;

/// Fills a block: the index of its first element in the run, and its memory.
type BlockFill<'a> = dyn FnMut(usize, &mut [f32]) -> Result<(), Error> + 'a;

/// The blocks in which threads fill memory, until a stop is requested.
pub(crate) struct FillBlocks<'a> {
    should_stop: &'a StopCheck<'a>,
    stopped: AtomicBool,
}

impl FillBlocks<'_> {
    /// Passes the blocks of a run of `run` elements to `fill`. Ends early if a stop is requested.
    pub(crate) fn each(&self, run: usize, fill: &mut BlockFill<'_>) -> Result<(), Error> {
        let mut block = vec![0.0; BLOCK.min(run)];
        for at in (0..run).step_by(BLOCK) {
            if (self.should_stop)() {
                self.stopped.store(true, Ordering::Relaxed);
                return Ok(());
            }
            fill(at, &mut block[..BLOCK.min(run - at)])?;
        }
        Ok(())
    }

    /// Whether a stop was requested.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

impl Optimizer {
    /// Sets the states before step 1; the moments are zero. Returns false if `should_stop` returned
    /// true; the states are then incomplete.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn init(
        &mut self,
        dev: &Device,
        parameters: &ParameterSource<'_>,
        should_stop: &StopCheck<'_>,
    ) -> Result<bool, Error> {
        let words = self.initial_control();
        let fill = |StatePosition { segment, state, first }: StatePosition, values: &mut [f32]| {
            match state {
                0 => parameters(segment, first, values),
                _ => values.fill(0.0),
            }
            Ok(())
        };
        self.restore(dev, &words, false, &fill, should_stop)
    }

    /// Sets all states to zero, piece by piece, for devices without data.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn init_blank(&mut self, dev: &Device) -> Result<(), Error> {
        let (layout, words) = (Arc::clone(&self.layout), self.initial_control());
        for (s, w) in layout.segments.iter().zip(&mut self.work) {
            for piece in &w.pieces {
                let (first, owned) = (piece.flat_start(self.rank), piece.owned.clone());
                let store = &s.stores[piece.store];
                for state in store.states(0) {
                    let tensors = state.slice(owned.clone()).tensors();
                    tensors.into_iter().try_for_each(|t| dev.write(t, &|_| 0.0))?;
                }
                let of_device = || s.spec.params.slice(first..first + owned.len());
                let param = store.staging().map_or_else(of_device, |up| up.slice(owned.clone()));
                dev.write(param, &|_| 0.0)?;
            }
            w.unpublished = true;
        }
        (0..layout.segments.len()).try_for_each(|segment| self.blank_frozen(dev, segment))?;
        self.blank_speculation(dev)?;
        dev.write(layout.control, &|i| words[i])?;
        dev.write(layout.device_control, &|i| words[i])
    }

    /// Writes zeros to the second arrays, since a speculative update may stop before it writes
    /// them.
    fn blank_speculation(&self, dev: &Device) -> Result<(), Error> {
        let stores = self.layout.segments.iter().flat_map(|s| &s.stores);
        let buffers: Vec<&SpeculationBuffers> =
            stores.filter_map(|store| store.speculation.as_ref()).collect();
        buffers.iter().try_for_each(|buffers| dev.write(buffers.factor, &|_| 0.0))?;
        let mut arrays = buffers.into_iter().flat_map(SpeculationBuffers::own_arrays);
        arrays.try_for_each(|array| {
            dev.write_runs(&[array], &|_, views| {
                let (zeros, view) = ([0.0; 1024], &mut views[0]);
                for at in (0..view.len()).step_by(zeros.len()) {
                    view.store(at, &zeros[..zeros.len().min(view.len() - at)]);
                }
                Ok(())
            })
        })
    }

    /// The control block before step 1.
    pub fn initial_control(&self) -> [f64; control::WORDS] {
        self.layout.initial_control()
    }

    /// Sets states and control block as an update leaves them. The first forward pass publishes the
    /// parameters, cast from the fp32 masters. With `delayed` it also sets the gradient of a last
    /// update, which the caller queues or [delays](Self::delay_update). Returns false if
    /// `should_stop` returned true; the states are then incomplete.
    ///
    /// # Errors
    /// As [`Device::write`], and the errors of `fill`.
    pub fn restore(
        &mut self,
        dev: &Device,
        words: &[f64; control::WORDS],
        delayed: bool,
        fill: &StateSource<'_>,
        should_stop: &StopCheck<'_>,
    ) -> Result<bool, Error> {
        let blocks = FillBlocks { should_stop, stopped: AtomicBool::new(false) };
        let layout = Arc::clone(&self.layout);
        for (segment, (s, w)) in layout.segments.iter().zip(&mut self.work).enumerate() {
            for piece in &w.pieces {
                let (flat, store) = (piece.flat_start(self.rank), &s.stores[piece.store]);
                let gradient = delayed.then(|| State::whole(store.gradient(0)));
                for (number, state) in store.states(0).into_iter().chain(gradient).enumerate() {
                    let state = state.slice(piece.owned.clone());
                    let of_device = || s.spec.params.slice(flat..flat + piece.owned.len());
                    let of_host = |up: Tensor| up.slice(piece.owned.clone());
                    let parameter =
                        (number == 0).then(|| store.staging().map_or_else(of_device, of_host));
                    let parameter_dtype = s.spec.params.dtype();
                    let mut targets = state.tensors();
                    // The upper half of a split master is the parameter.
                    let is_whole = targets.len() == 1;
                    targets.extend(parameter.filter(|_| is_whole));
                    dev.write_runs(&targets, &|first, views| {
                        let run = views[0].len();
                        blocks.each(run, &mut |at, values| {
                            let first = flat + first + at;
                            fill(StatePosition { segment, state: number, first }, values)?;
                            state.store(&mut *views, parameter_dtype, at, values);
                            Ok(())
                        })
                    })?;
                    if blocks.is_stopped() {
                        return Ok(false);
                    }
                }
            }
            w.unpublished = true;
        }
        for segment in 0..layout.segments.len() {
            if !self.fill_frozen(dev, segment, fill, &blocks)? {
                return Ok(false);
            }
        }
        self.blank_speculation(dev)?;
        let mut words = *words;
        words[control::STATE_BUFFER] = 0.0;
        if let Some(predicted) = layout.predicted {
            // A delayed update from a checkpoint has no speculative part.
            dev.write(predicted, &|i| words[i])?;
            words[control::STATE_BUFFER] =
                f64::from(u8::from(delayed && words[control::SKIP] == 0.0));
        }
        dev.write(layout.control, &|i| words[i])?;
        dev.write(layout.device_control, &|i| words[i])?;
        Ok(true)
    }
}
