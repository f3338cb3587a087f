//! Storage of states: fp32, or fewer bytes.

use crate::update::halves::{as_bf16_parameter, from_halves, lower_half};
use device::{Device, Dtype, Error, Tensor, ViewMut};
use std::ops::Range;

/// Number of elements that are converted at a time.
const BLOCK: usize = 1024;

/// Storage types of the states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storage {
    /// The storage type of momentum and variance: `F32`, or `Bf16` with stochastic rounding.
    pub moments: Dtype,
    /// Whether a master is stored as its bf16 parameter and 16 further bits, without loss.
    pub split_master: bool,
}

impl Default for Storage {
    fn default() -> Self {
        Self { moments: Dtype::F32, split_master: false }
    }
}

/// One state (masters or a moment) of a run of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    tensor: Tensor,
    /// Upper halves, if `tensor` holds the lower halves.
    upper: Option<Tensor>,
}

/// Writes elements `at..` of parameters of type `dtype` to a view, which may be fp32.
pub(crate) fn store_parameter(view: &mut ViewMut<'_>, dtype: Dtype, at: usize, values: &[f32]) {
    if dtype != Dtype::Bf16 {
        return view.store(at, values);
    }
    let mut part = [0.0; BLOCK];
    for (i, values) in values.chunks(BLOCK).enumerate() {
        let part = &mut part[..values.len()];
        part.iter_mut().zip(values).for_each(|(to, x)| *to = as_bf16_parameter(*x));
        view.store(at + i * BLOCK, part);
    }
}

impl State {
    pub(crate) const fn whole(tensor: Tensor) -> Self {
        Self { tensor, upper: None }
    }

    pub(crate) const fn halves(lower: Tensor, upper: Tensor) -> Self {
        Self { tensor: lower, upper: Some(upper) }
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.tensor.len()
    }

    /// Whether the state has no elements.
    pub const fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// The elements `range` of the state.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self {
            tensor: self.tensor.slice(range.clone()),
            upper: self.upper.map(|upper| upper.slice(range)),
        }
    }

    /// Reads the values of the state.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn read(&self, dev: &Device, out: &mut [f32]) -> Result<(), Error> {
        dev.read_f32(self.tensor, out)?;
        let Some(upper) = self.upper else { return Ok(()) };
        let mut block = [0.0; 1024];
        for (i, out) in out.chunks_mut(block.len()).enumerate() {
            let (from, block) = (i * block.len(), &mut block[..out.len()]);
            dev.read_f32(upper.slice(from..from + out.len()), block)?;
            let pairs = out.iter_mut().zip(block);
            pairs.for_each(|(x, upper)| *x = from_halves(*upper, *x as u16));
        }
        Ok(())
    }

    /// The tensors that store the state.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        std::iter::once(self.tensor).chain(self.upper).collect()
    }

    /// Writes elements `at..` to views of [`tensors`](Self::tensors), and to views of the parameter
    /// after them, if any. `parameter` is the parameter's type: its view may be fp32, since data
    /// for a GPU is staged in fp32.
    pub(crate) fn store(
        &self,
        views: &mut [ViewMut<'_>],
        parameter: Dtype,
        at: usize,
        values: &[f32],
    ) {
        let mut part = [0.0; BLOCK];
        for (i, values) in values.chunks(BLOCK).enumerate() {
            let (at, part) = (at + i * BLOCK, &mut part[..values.len()]);
            let mut put = |view: &mut ViewMut<'_>, of: &dyn Fn(f32) -> f32| {
                part.iter_mut().zip(values).for_each(|(to, x)| *to = of(*x));
                view.store(at, part);
            };
            let (own, others) = views.split_at_mut(1 + usize::from(self.upper.is_some()));
            match own {
                [lower, upper] => {
                    put(lower, &|x| f32::from(lower_half(x)));
                    put(upper, &as_bf16_parameter);
                }
                own => own.iter_mut().for_each(|view| view.store(at, values)),
            }
            for view in others {
                store_parameter(view, parameter, at, values);
            }
        }
    }

    /// Passes runs of the values to `work`, on all kernel threads of the rank: the index of the
    /// first value, and the values.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn read_runs(
        &self,
        dev: &Device,
        work: &(impl Fn(usize, &[f32]) + Sync),
    ) -> Result<(), Error> {
        dev.read_runs(&self.tensors(), &|first, views| {
            let (mut block, mut upper) = ([0.0; BLOCK], [0.0; BLOCK]);
            for at in (0..views[0].len()).step_by(BLOCK) {
                let n = BLOCK.min(views[0].len() - at);
                let block = &mut block[..n];
                views[0].load(at, block);
                if let Some(view) = views.get(1) {
                    view.load(at, &mut upper[..n]);
                    let pairs = block.iter_mut().zip(&upper);
                    pairs.for_each(|(x, upper)| *x = from_halves(*upper, *x as u16));
                }
                work(first + at, block);
            }
        })
    }
}
