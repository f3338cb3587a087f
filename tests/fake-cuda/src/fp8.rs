//! 8-bit floating-point formats, computed from their definition (arXiv 2209.05433): the value of
//! each code, and the code of the nearest value. Kernels and the cpu backend use other algorithms.

/// An 8-bit floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fp8 {
    E4m3,
    E5m2,
}

const NAN: u8 = 0x7f;

impl Fp8 {
    /// Mantissa bits, exponent bias, and code of the largest finite value.
    fn layout(self) -> (i32, i32, u8) {
        match self {
            Self::E4m3 => (3, 7, 0x7e),
            Self::E5m2 => (2, 15, 0x7b),
        }
    }

    /// The value of a code; NaN for codes beyond the largest finite value.
    pub(crate) fn value(self, code: u8) -> f32 {
        let (mantissa, bias, largest) = self.layout();
        let magnitude = code & 0x7f;
        if magnitude > largest {
            return f32::NAN;
        }
        let (exponent, fraction) = (i32::from(magnitude >> mantissa), magnitude % (1 << mantissa));
        let fraction = f32::from(fraction) * 2f32.powi(-mantissa);
        let value = match exponent {
            0 => fraction * 2f32.powi(1 - bias),
            _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
        };
        if code >= 0x80 { -value } else { value }
    }

    /// Code of the value nearest to `x`; a tie goes to the even code. The largest finite value
    /// stands for all larger `x`.
    pub(crate) fn code(self, x: f32) -> u8 {
        if x.is_nan() {
            return NAN;
        }
        let (_, _, largest) = self.layout();
        let (sign, x) = (u8::from(x.is_sign_negative()) << 7, x.abs());
        // Codes are in the order of their values. The search finds the first value that is at least
        // x.
        let (mut low, mut high) = (0, largest);
        while low < high {
            let middle = low.midpoint(high);
            if self.value(middle) < x { low = middle + 1 } else { high = middle }
        }
        let below = low.saturating_sub(1);
        let (up, down) = (self.value(low) - x, x - self.value(below));
        let takes_below = up > 0.0 && (down < up || down == up && below.is_multiple_of(2));
        sign | if takes_below { below } else { low }
    }
}
