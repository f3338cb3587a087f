//! Element types of cuBLASLt in memory.
#![expect(unsafe_code, reason = "reads and writes elements by address")]

use crate::fp8::Fp8;
use half::{bf16, f16};

/// A floating-point storage type; arithmetic uses `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    Bf16,
    Fp8(Fp8),
}

impl Float {
    /// Number that identifies the type.
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
            Self::Fp8(Fp8::E4m3) => 3,
            Self::Fp8(Fp8::E5m2) => 4,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8(_) => 1,
        }
    }

    /// # Safety
    /// Element `index` from `base` is readable.
    pub(crate) unsafe fn load(self, base: usize, index: usize) -> f32 {
        // SAFETY: as demanded above.
        unsafe {
            match self {
                Self::F32 => (base as *const f32).add(index).read_unaligned(),
                Self::F16 => (base as *const f16).add(index).read_unaligned().to_f32(),
                Self::Bf16 => (base as *const bf16).add(index).read_unaligned().to_f32(),
                Self::Fp8(format) => format.value((base as *const u8).add(index).read()),
            }
        }
    }

    /// # Safety
    /// Element `index` from `base` is writable.
    pub(crate) unsafe fn store(self, base: usize, index: usize, value: f32) {
        // SAFETY: as demanded above.
        unsafe {
            match self {
                Self::F32 => (base as *mut f32).add(index).write_unaligned(value),
                Self::F16 => (base as *mut f16).add(index).write_unaligned(f16::from_f32(value)),
                Self::Bf16 => (base as *mut bf16).add(index).write_unaligned(bf16::from_f32(value)),
                Self::Fp8(format) => (base as *mut u8).add(index).write(format.code(value)),
            }
        }
    }

    /// The value rounded to the type.
    pub(crate) fn rounded(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
            Self::Fp8(format) => format.value(format.code(value)),
        }
    }
}
