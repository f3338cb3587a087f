//! Storage of states: fp32, or fewer bytes.

use crate::update::halves::{as_bf16_parameter, from_halves, lower_half};
use device::{Device, Dtype, Error, Tensor, ViewMut};
use std::ops::Range;

/// Elements that are converted at a time.
const BLOCK: usize = 1024;

/// Storage of states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storage {
    /// The storage type of momentum and variance: `F32`, or `Bf16` with stochastic rounding.
    pub moments: Dtype,
    /// Whether masters are kept as the bf16 parameters and 16 bits more each: the same numbers, bit for bit.
    pub split_master: bool,
}

impl Default for Storage {
    fn default() -> Self {
        Self { moments: Dtype::F32, split_master: false }
    }
}

/// A state of a run of parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    tensor: Tensor,
    /// The upper halves, where `tensor` holds the lower ones.
    upper: Option<Tensor>,
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

    /// Whether it has no elements.
    pub const fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// Cuts the elements `range` out of it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self {
            tensor: self.tensor.slice(range.clone()),
            upper: self.upper.map(|upper| upper.slice(range)),
        }
    }

    /// Reads its values.
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

    /// The tensors in which it is kept.
    pub(crate) fn tensors(&self) -> Vec<Tensor> {
        std::iter::once(self.tensor).chain(self.upper).collect()
    }

    /// Sets elements `at..` of views of [`tensors`](Self::tensors), and of the parameter behind them if it is there, which is
    /// kept as `parameter`: the view does not tell, since what a GPU holds is staged in fp32.
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
            let (own, behind) = views.split_at_mut(1 + usize::from(self.upper.is_some()));
            match own {
                [lower, upper] => {
                    put(lower, &|x| f32::from(lower_half(x)));
                    put(upper, &as_bf16_parameter);
                }
                own => own.iter_mut().for_each(|view| view.store(at, values)),
            }
            for view in behind {
                match parameter {
                    Dtype::Bf16 => put(view, &as_bf16_parameter),
                    _ => view.store(at, values),
                }
            }
        }
    }

    /// Gives `work` runs of the values, on all of the rank's kernel threads: the first one's index, and some.
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
