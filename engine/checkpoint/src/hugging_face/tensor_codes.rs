//! Tensors in MXFP4 (OCP Microscaling Formats 1.0, section 5.4): codes of 4 bits, and a scale of 8
//! bits for each 32 neighbours of a row. Two tensors stand for the matrices of all experts of a layer:
//! codes (E, rows, columns / 32, 16) and scales (E, rows, columns / 32). The low half of a byte comes
//! first.

use files::json::Object;
use serde_json::Value;
use std::ops::Range;

/// Number of codes with one scale.
const GROUP: usize = 32;
/// Numbers of the codes from 0 to 7; the codes from 8 on are their negatives.
const NUMBERS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The scale 2^0.
const UNIT: i32 = 127;

/// Whether the weights of a folder with this `config.json` are codes, which onebox reads as numbers.
pub fn has_codes(config_json: &[u8]) -> bool {
    let found = serde_json::from_slice::<Object<Value>>(config_json);
    found.is_ok_and(|Object(keys)| keys.get("quantization_config").is_some_and(|v| !v.is_null()))
}

/// Shapes of codes and of scales for `experts` matrices. Columns that fill no group make the shapes
/// of no tensor.
pub(super) fn shapes(experts: usize, rows: usize, columns: usize) -> [Vec<usize>; 2] {
    let groups = if columns.is_multiple_of(GROUP) { columns / GROUP } else { 0 };
    [vec![experts, rows, groups, GROUP / 2], vec![experts, rows, groups]]
}

/// The number of a code with its scale. It is exact, or infinite.
fn number(code: u8, scale: u8) -> f32 {
    let size = f64::from(NUMBERS[usize::from(code & 7)]);
    let number = size * 2f64.powi(i32::from(scale) - UNIT);
    // Sizes have 2 significant bits, and exponents down to -128 are denormal fp32 numbers.
    (if code & 8 == 0 { number } else { -number }) as f32
}

/// Sets `out` to the numbers from number `first` on. `codes`: bytes from the byte of this number on;
/// `scales`: bytes from the one of its group on.
pub(super) fn decode(first: usize, codes: &[u8], scales: &[u8], out: &mut [f32]) {
    for (index, out) in (first..).zip(out) {
        let byte = codes[index / 2 - first / 2];
        let code = if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        *out = number(code, scales[index / GROUP - first / GROUP]);
    }
}

/// Bytes of the codes and of the scales of the numbers from `range.start` to `range.end`.
pub(super) const fn bytes(range: &Range<usize>) -> [Range<usize>; 2] {
    let Range { start, end } = *range;
    [start / 2..end.div_ceil(2), start / GROUP..end.div_ceil(GROUP)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_exact_over_all_scales() {
        assert_eq!([1, 7, 9, 15].map(|code| number(code, 127)), [0.5, 6.0, -0.5, -6.0]);
        // The smallest number is a denormal, and the largest finite one has the exponent 127.
        assert_eq!(number(1, 0).to_bits(), 1 << 21);
        assert_eq!(number(5, 253), 1.5 * 2f32.powi(127));
        assert!(number(7, 254).is_infinite());
        assert!(number(8, 127).is_sign_negative());
    }
}
