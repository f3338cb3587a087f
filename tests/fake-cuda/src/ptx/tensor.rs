//! Matrix operations of a warp.

use half::{bf16, f16};

use super::op::{Kind, Type};

/// The values of a register in all lanes.
pub(super) type Lanes = [u64; 32];

/// d (16, 8) = a (16, 16) b (16, 8) + c, with the lanes' shares of m16n8k16. Each product is added in order of k and
/// rounded to fp32; a GPU leaves order and width unspecified.
pub(super) fn multiply(ty: Type, a: &[Lanes; 4], b: &[Lanes; 2], c: &[Lanes; 4]) -> [Lanes; 4] {
    let a = a.map(|lanes| lanes.map(|x| widen(ty, x)));
    let b = b.map(|lanes| lanes.map(|x| widen(ty, x)));
    let mut d = *c;
    for lane in 0..32 {
        for (e, sum) in d.iter_mut().enumerate() {
            let mut total = f32::from_bits(sum[lane] as u32);
            for pair in 0..8 {
                let x = a[pair / 4 * 2 + e / 2][lane / 4 * 4 + pair % 4];
                let y = b[pair / 4][lane % 4 * 8 + e % 2 * 4 + pair % 4];
                total += x[0] * y[0];
                total += x[1] * y[1];
            }
            sum[lane] = u64::from(total.to_bits());
        }
    }
    d
}

/// d (8, 8) = a (8, 4) b (4, 8) + c, for each of four groups of lanes, with the lanes' shares of m8n8k4: lanes whose numbers
/// are equal in bits 2 and 3 are a group. Each product is added in order of k and rounded to fp32.
pub(super) fn multiply_quarters(
    rows: bool,
    a: &[Lanes; 2],
    b: &[Lanes; 2],
    c: &[Lanes; 8],
) -> [Lanes; 8] {
    let half = Type { kind: Kind::Float, bits: 16 };
    let element = |of: &[Lanes; 2], lane: usize, i: usize| widen(half, of[i / 2][lane])[i % 2];
    let mut d = *c;
    for lane in 0..32 {
        // The lane of the group that has row (or column) i of eight.
        let of = |i: usize| lane / 4 % 4 * 4 + i % 4 + i / 4 * 16;
        for (i, sum) in d.iter_mut().enumerate() {
            let (row, col) = (lane % 2 + (i & 2) + lane / 16 * 4, (lane & 2) + i % 2 + i / 4 * 4);
            let mut total = f32::from_bits(sum[lane] as u32);
            for k in 0..4 {
                let y = if rows {
                    element(b, of(col / 4 * 4 + k), col % 4)
                } else {
                    element(b, of(col), k)
                };
                total += element(a, of(row), k) * y;
            }
            sum[lane] = u64::from(total.to_bits());
        }
    }
    d
}

/// The two 16-bit numbers of a register.
fn widen(ty: Type, x: u64) -> [f32; 2] {
    [x as u16, (x >> 16) as u16].map(|x| {
        if ty.kind == Kind::Brain {
            bf16::from_bits(x).to_f32()
        } else {
            f16::from_bits(x).to_f32()
        }
    })
}

/// A lane's two elements of an 8 x 8 matrix of 16-bit elements, given as rows of 16 bytes.
pub(super) fn share(rows: &[[u8; 16]; 8], lane: usize, transposed: bool) -> u64 {
    let (outer, inner) = (lane / 4, lane % 4 * 2);
    let element = |row: usize, col: usize| {
        u64::from(u16::from_le_bytes([rows[row][2 * col], rows[row][2 * col + 1]]))
    };
    if transposed {
        element(inner, outer) | element(inner + 1, outer) << 16
    } else {
        element(outer, inner) | element(outer, inner + 1) << 16
    }
}
