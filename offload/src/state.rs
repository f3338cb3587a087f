//! How states are kept: in fp32, or in fewer bytes.

use device::numerics::{as_bf16_parameter, from_halves, lower_half};
use device::{Device, Dtype, Error, Tensor};
use std::ops::Range;

/// How many bytes a state takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storage {
    /// Momentum and variance: `F32`, or `Bf16` with stochastic rounding.
    pub moments: Dtype,
    /// Masters as the bf16 parameters and 16 bits more each: the same numbers, bit for bit.
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
    /// Upper halves, where `tensor` holds the lower ones.
    upper: Option<Tensor>,
}

impl State {
    pub(crate) const fn whole(tensor: Tensor) -> Self {
        Self { tensor, upper: None }
    }

    pub(crate) const fn halves(lower: Tensor, upper: Tensor) -> Self {
        Self { tensor: lower, upper: Some(upper) }
    }

    /// Elements.
    pub const fn len(&self) -> usize {
        self.tensor.len()
    }

    /// No elements.
    pub const fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// Elements `range`.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self {
            tensor: self.tensor.slice(range.clone()),
            upper: self.upper.map(|upper| upper.slice(range)),
        }
    }

    /// The values.
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

    /// Sets the values, each an fp32.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub(crate) fn write(&self, dev: &Device, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        let Some(upper) = self.upper else { return dev.write(self.tensor, value) };
        dev.write(upper, &|i| f64::from(as_bf16_parameter(value(i) as f32)))?;
        dev.write(self.tensor, &|i| f64::from(lower_half(value(i) as f32)))
    }
}
