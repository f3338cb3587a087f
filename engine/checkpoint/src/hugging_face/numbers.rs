//! Number format of an export.

use half::bf16;

/// Number format of the exported parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// 4 bytes, unchanged.
    F32,
    /// 2 bytes, rounded to the nearest.
    Bf16,
}

impl Numbers {
    pub(super) const fn width(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
        }
    }

    /// Name of the type in torch.
    pub(super) const fn of_torch(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The value of `x` after it is written and read.
    pub(super) fn kept(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// Appends a number. The bytes of a BF16 number are the upper half of its fp32 value.
    pub(super) fn write(self, x: f32, bytes: &mut Vec<u8>) {
        bytes.extend(&self.kept(x).to_le_bytes()[4 - self.width() as usize..]);
    }
}
