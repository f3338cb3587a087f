//! What an optimizer starts from: initial parameters, or the states of a run that is gone on with.

use crate::optimizer::Optimizer;
use crate::state::State;
use device::numerics::{as_bf16_parameter, control};
use device::{Device, Dtype, Error};
use std::sync::Arc;

/// Elements that are brought in at once.
const BLOCK: usize = 1 << 16;

/// Sets a run of a state: ((segment, state), first element in the segment's flat buffer, values). State 3 is the gradient
/// of an update that waits.
pub type Fill<'a> = dyn FnMut((usize, usize), usize, &mut [f32]) -> Result<(), Error> + 'a;

impl Optimizer {
    /// The states before step 1. `param` gives an element of a segment's flat buffer.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn init(&mut self, dev: &Device, param: &dyn Fn(usize, usize) -> f64) -> Result<(), Error> {
        self.restore(dev, &self.initial_control(), false, &mut |(segment, state), first, values| {
            let value = |i| if state == 0 { param(segment, first + i) as f32 } else { 0.0 };
            values.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
            Ok(())
        })
    }

    /// [`init`](Self::init) with zeros, piece by piece: for devices that hold no data, where no value is ever asked for.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub fn init_blank(&mut self, dev: &Device) -> Result<(), Error> {
        let (layout, words) = (Arc::clone(&self.layout), self.initial_control());
        for (s, w) in layout.segments.iter().zip(&mut self.work) {
            for piece in &w.pieces {
                let (first, owned) = (piece.flat_start(self.rank), piece.owned.clone());
                let store = &s.stores[piece.store];
                for state in store.states() {
                    state.slice(owned.clone()).write(dev, &|_| 0.0)?;
                }
                let of_device = || s.spec.params.slice(first..first + owned.len());
                let param = store.up.map_or_else(of_device, |up| up.slice(owned.clone()));
                dev.write(param, &|_| 0.0)?;
            }
            w.unpublished = true;
        }
        dev.write(layout.control, &|i| words[i])?;
        dev.write(layout.device_control, &|i| words[i])
    }

    /// The control block before step 1.
    pub fn initial_control(&self) -> [f64; control::WORDS] {
        self.layout.initial_control()
    }

    /// States and control block, as if an update had just left them; the first forward pass publishes the
    /// parameters, cast from the fp32 ones, like any other. Of what `fill` gets, states are counted as in [`Owned`](crate::Owned).
    /// With `late` also the gradient of a last update, which the caller queues or [defers](Self::defer).
    ///
    /// # Errors
    /// As [`Device::write`], and those of `fill`.
    pub fn restore(
        &mut self,
        dev: &Device,
        words: &[f64; control::WORDS],
        late: bool,
        fill: &mut Fill<'_>,
    ) -> Result<(), Error> {
        let layout = Arc::clone(&self.layout);
        let mut block = vec![0.0; BLOCK];
        for (segment, (s, w)) in layout.segments.iter().zip(&mut self.work).enumerate() {
            for piece in &w.pieces {
                let (first, store) = (piece.flat_start(self.rank), &s.stores[piece.store]);
                let gradient = late.then(|| State::whole(store.gradient(0)));
                let states = store.states().into_iter().chain(gradient);
                for from in (0..piece.owned.len()).step_by(BLOCK) {
                    let values = &mut block[..BLOCK.min(piece.owned.len() - from)];
                    let start = piece.owned.start + from;
                    let (flat, owned) = (first + from, start..start + values.len());
                    for (number, state) in states.clone().enumerate() {
                        fill((segment, number), flat, values)?;
                        let value = |i: usize| f64::from(values[i]);
                        state.slice(owned.clone()).write(dev, &value)?;
                        if number == 0 {
                            let of_device = || s.spec.params.slice(flat..flat + values.len());
                            let param =
                                store.up.map_or_else(of_device, |up| up.slice(owned.clone()));
                            let rounds = param.dtype() == Dtype::Bf16;
                            let as_parameter = |i: usize| match rounds {
                                true => f64::from(as_bf16_parameter(values[i])),
                                false => value(i),
                            };
                            dev.write(param, &as_parameter)?;
                        }
                    }
                }
            }
            w.unpublished = true;
        }
        dev.write(layout.control, &|i| words[i])?;
        dev.write(layout.device_control, &|i| words[i])
    }
}
