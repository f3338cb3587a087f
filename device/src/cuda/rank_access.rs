//! Reads and writes of a rank's own thread between steps, on a stream of its own.

use super::Gpu;
use super::driver::Failure;
use super::marks::STREAMS;
use crate::numerics::{E4m3, E5m2};
use crate::{Arena, Dtype, Error, Tensor};

/// Bytes that `read_own` and `write_own` move at a time.
const OWN_BYTES: usize = 1 << 20;

impl Gpu {
    /// Converts the result of a driver call of the rank's own thread, made while nothing in the
    /// lanes conflicts.
    pub(super) fn own<T>(&self, call: &str, done: Result<T, Failure>) -> Result<T, Error> {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        done.map_err(|e| Error::GpuSetup { rank, gpu, problem: format!("{call}: {e}") })
    }

    /// Reads a tensor of the GPU.
    pub(super) fn read_own(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        let (at, size) = (self.peer.at(t), t.dtype().bytes() as usize);
        let own = &self.streams[STREAMS];
        let mut bytes = vec![0u8; OWN_BYTES.min(out.len() * size)];
        for (i, out) in out.chunks_mut(OWN_BYTES / size).enumerate() {
            let bytes = &mut bytes[..out.len() * size];
            self.own("read", own.download(at + (i * OWN_BYTES) as u64, bytes))?;
            let values = bytes.chunks_exact(size).map(|b| decode(t.dtype(), b));
            out.iter_mut().zip(values).for_each(|(o, x)| *o = x);
        }
        Ok(())
    }

    /// Sets each element of a tensor of either arena to the value of its index.
    pub(super) fn write_own(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        if self.host.is_rehearsal() {
            return Ok(());
        }
        if t.arena() == Arena::Pinned {
            self.host.memory.view_mut(t).fill(value);
            return Ok(());
        }
        let (at, size) = (self.peer.at(t), t.dtype().bytes() as usize);
        let own = &self.streams[STREAMS];
        let mut bytes = Vec::with_capacity(OWN_BYTES.min(t.len() * size));
        for start in (0..t.len()).step_by(OWN_BYTES / size) {
            let end = t.len().min(start + OWN_BYTES / size);
            bytes.clear();
            (start..end).for_each(|i| encode(t.dtype(), value(i), &mut bytes));
            self.own("write", own.upload(&bytes, at + (start * size) as u64))?;
        }
        Ok(())
    }

    /// Sets a tensor of the GPU to fp32 values, rounded. States and weights come this way: values that keep their type are
    /// copied without a call for each.
    pub(super) fn write_own_f32(&self, t: Tensor, values: &[f32]) -> Result<(), Error> {
        if t.dtype() != Dtype::F32 || t.arena() == Arena::Pinned || self.host.is_rehearsal() {
            return self.write_own(t, &|i| f64::from(values[i]));
        }
        let (at, own) = (self.peer.at(t), &self.streams[STREAMS]);
        let mut bytes = vec![0u8; OWN_BYTES.min(4 * values.len())];
        for (i, values) in values.chunks(OWN_BYTES / 4).enumerate() {
            let bytes = &mut bytes[..4 * values.len()];
            let to = bytes.as_chunks_mut().0.iter_mut();
            to.zip(values).for_each(|(to, x)| *to = x.to_le_bytes());
            self.own("write", own.upload(bytes, at + (i * OWN_BYTES) as u64))?;
        }
        Ok(())
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    use half::{bf16, f16};
    macro_rules! number {
        ($t:ty) => {
            bytes.try_into().map_or(f64::NAN, |b| f64::from(<$t>::from_le_bytes(b)))
        };
    }
    match dtype {
        Dtype::F16 => number!(f16),
        Dtype::Bf16 => number!(bf16),
        Dtype::F32 => number!(f32),
        Dtype::F64 => number!(f64),
        Dtype::I32 => number!(i32),
        Dtype::U16 => number!(u16),
        Dtype::E4m3 => bytes.first().map_or(f64::NAN, |byte| f64::from(E4m3(*byte).to_f32())),
        Dtype::E5m2 => bytes.first().map_or(f64::NAN, |byte| f64::from(E5m2(*byte).to_f32())),
    }
}

/// Rounds as the cpu backend does: through f32, unless the type is F64.
fn encode(dtype: Dtype, value: f64, out: &mut Vec<u8>) {
    use half::f16;
    let single = value as f32;
    match dtype {
        Dtype::F16 => out.extend(f16::from_f32(single).to_le_bytes()),
        Dtype::Bf16 => out.extend(crate::numerics::view::round_bf16(single).to_le_bytes()),
        Dtype::F32 => out.extend(single.to_le_bytes()),
        Dtype::F64 => out.extend(value.to_le_bytes()),
        Dtype::I32 => out.extend((single as i32).to_le_bytes()),
        Dtype::U16 => out.extend((single as u16).to_le_bytes()),
        Dtype::E4m3 => out.push(E4m3::from_f32(single).0),
        Dtype::E5m2 => out.push(E5m2::from_f32(single).0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn storage_types_round_trip() {
        for dtype in Dtype::ALL {
            // Halves have no sign.
            let last = if dtype == Dtype::U16 { 65_535.0 } else { -3.0 };
            for value in [0.0, 1.0, 96.0, last] {
                let mut bytes = Vec::new();
                encode(dtype, value, &mut bytes);
                assert_eq!(bytes.len() as u64, dtype.bytes());
                assert_eq!(decode(dtype, &bytes), value);
            }
        }
    }
}
