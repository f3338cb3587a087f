//! Arithmetic of one lane, as the PTX manual defines it. Values are bits, zero-extended to 64.

use half::{bf16, f16};

use super::op::{Alu, Comparison, Kind, Round, Type};

/// The lower `bits` bits of `x`.
pub(super) fn keep(x: u64, bits: u32) -> u64 {
    if bits >= 64 { x } else { x & ((1 << bits) - 1) }
}

/// `x` sign-extended from `bits` bits.
pub(super) fn signed(x: u64, bits: u32) -> i64 {
    let unused = 64 - bits.min(64);
    (x << unused).cast_signed() >> unused
}

pub(super) fn f32_of(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

fn of_f32(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// One lane's result of an operation; `None` if the operation has no such type.
pub(super) fn alu(f: Alu, ty: Type, approx: bool, of: [u64; 4]) -> Option<u64> {
    match (ty.kind, ty.bits) {
        _ if moves(f) => Some(moved(f, ty.bits, of)),
        (Kind::Float, 32) => single(f, approx, of.map(f32_of)),
        (Kind::Float, 64) => double(f, approx, of.map(f64::from_bits)),
        (Kind::Unsigned | Kind::Signed, _) => integer(f, ty, of),
        _ => None,
    }
}

/// Whether an operation only moves bits.
fn moves(f: Alu) -> bool {
    matches!(f, Alu::Move | Alu::Select | Alu::Pack | Alu::Low | Alu::High | Alu::Insert)
}

fn moved(f: Alu, bits: u32, [a, b, c, d]: [u64; 4]) -> u64 {
    match f {
        Alu::Select => keep(if c & 1 == 1 { a } else { b }, bits),
        Alu::Pack => keep(a, bits / 2) | keep(b, bits / 2) << (bits / 2),
        Alu::Low => keep(a, bits / 2),
        Alu::High => keep(a >> (bits / 2), bits / 2),
        Alu::Insert => {
            let (at, count) = (c & 0xff, (d & 0xff) as u32);
            let mask = if at >= 64 { 0 } else { keep(u64::MAX, count.min(bits)) << at };
            keep(b & !mask | a.checked_shl(at as u32).unwrap_or(0) & mask, bits)
        }
        _ => keep(a, bits),
    }
}

fn integer(f: Alu, ty: Type, of: [u64; 4]) -> Option<u64> {
    let bits = ty.bits;
    let of_sign = ty.kind == Kind::Signed;
    let [a, b, c] = [of[0], of[1], of[2]].map(|x| keep(x, bits));
    let [x, y] = [a, b].map(|x| signed(x, bits));
    let wide = |a: u64, b: u64| {
        if of_sign {
            signed(a, bits).wrapping_mul(signed(b, bits)).cast_unsigned()
        } else {
            a.wrapping_mul(b)
        }
    };
    let value = match f {
        Alu::Add => a.wrapping_add(b),
        Alu::Sub => a.wrapping_sub(b),
        Alu::Mul => a.wrapping_mul(b),
        Alu::MulWide => return Some(keep(wide(a, b), 2 * bits)),
        Alu::Mad => a.wrapping_mul(b).wrapping_add(c),
        // The result is unspecified; GPUs return all ones.
        Alu::Div if b == 0 => u64::MAX,
        Alu::Rem if b == 0 => a,
        Alu::Div if of_sign => x.wrapping_div(y).cast_unsigned(),
        Alu::Rem if of_sign => x.wrapping_rem(y).cast_unsigned(),
        Alu::Div => a / b,
        Alu::Rem => a % b,
        Alu::Min if of_sign => x.min(y).cast_unsigned(),
        Alu::Max if of_sign => x.max(y).cast_unsigned(),
        Alu::Min => a.min(b),
        Alu::Max => a.max(b),
        Alu::And => a & b,
        Alu::Or => a | b,
        Alu::Xor => a ^ b,
        Alu::Not => !a,
        Alu::Neg => a.wrapping_neg(),
        // A shift amount has 32 bits; an amount of the width or more shifts out everything.
        Alu::ShiftLeft => a.checked_shl(of[1] as u32).unwrap_or(0),
        Alu::ShiftRight if of_sign => (x >> (of[1] as u32).min(63)).cast_unsigned(),
        Alu::ShiftRight => a.checked_shr(of[1] as u32).unwrap_or(0),
        Alu::Permute => permute(a | b << 32, c),
        _ => return None,
    };
    Some(keep(value, bits))
}

/// Selects four of the eight bytes of `from`. A digit from 8 on repeats the sign of its byte.
fn permute(from: u64, digits: u64) -> u64 {
    let byte = |digit: u64| {
        let byte = from >> (8 * (digit & 7)) & 0xff;
        if digit < 8 { byte } else { (byte >> 7) * 0xff }
    };
    (0..4).map(|i| byte(digits >> (4 * i) & 15) << (8 * i)).sum()
}

/// IEEE 754's minimum or maximum of numbers: a number wins against NaN, and +0 is above -0.
macro_rules! extremum {
    ($a:expr, $b:expr, $above:tt, $negative:expr) => {
        match ($a, $b) {
            (a, b) if a.is_nan() => b,
            (a, b) if b.is_nan() => a,
            (a, b) if a == b => if a.is_sign_negative() == $negative { a } else { b },
            (a, b) => if a $above b { a } else { b },
        }
    };
}

fn single(f: Alu, approx: bool, [a, b, c, _]: [f32; 4]) -> Option<u64> {
    let value = match f {
        Alu::Add => a + b,
        Alu::Sub => a - b,
        Alu::Mul => a * b,
        Alu::Fma => a.mul_add(b, c),
        Alu::Div if !approx => a / b,
        Alu::Min => extremum!(a, b, <, true),
        Alu::Max => extremum!(a, b, >, false),
        Alu::Neg => -a,
        Alu::Reciprocal if approx => flush(reciprocal_towards_zero(flush(a))),
        Alu::Reciprocal => 1.0 / a,
        Alu::Root if !approx => a.sqrt(),
        Alu::Exp2 => flush(flush(a).exp2()),
        _ => return None,
    };
    Some(of_f32(value))
}

/// 1 / x, of the two neighbouring numbers the one that is nearer to 0.
fn reciprocal_towards_zero(x: f32) -> f32 {
    let exact = 1.0 / f64::from(x);
    let nearest = exact as f32;
    if f64::from(nearest).abs() > exact.abs() {
        f32::from_bits(nearest.to_bits() - 1)
    } else {
        nearest
    }
}

/// `x`, with subnormals replaced by 0.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

fn double(f: Alu, approx: bool, [a, b, c, _]: [f64; 4]) -> Option<u64> {
    let value = match f {
        Alu::Add => a + b,
        Alu::Sub => a - b,
        Alu::Mul => a * b,
        Alu::Fma => a.mul_add(b, c),
        Alu::Div if !approx => a / b,
        Alu::Min => extremum!(a, b, <, true),
        Alu::Max => extremum!(a, b, >, false),
        Alu::Neg => -a,
        Alu::Reciprocal if approx => f64::from_bits((1.0 / a).to_bits() & !0xffff_ffff),
        Alu::Reciprocal => 1.0 / a,
        Alu::Root if !approx => a.sqrt(),
        _ => return None,
    };
    Some(value.to_bits())
}

/// Whether a comparison holds.
pub(super) fn holds(compare: Comparison, ty: Type, a: u64, b: u64) -> bool {
    let order = match (ty.kind, ty.bits) {
        (Kind::Float, 32) => f32_of(a).partial_cmp(&f32_of(b)),
        (Kind::Float, 64) => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        (Kind::Signed, bits) => Some(signed(a, bits).cmp(&signed(b, bits))),
        (_, bits) => Some(keep(a, bits).cmp(&keep(b, bits))),
    };
    let Some(order) = order else { return matches!(compare, Comparison::Unordered(_)) };
    match compare {
        Comparison::Unordered(compare) => holds(*compare, ty, a, b),
        Comparison::Eq => order.is_eq(),
        Comparison::Ne => order.is_ne(),
        Comparison::Lt => order.is_lt(),
        Comparison::Le => order.is_le(),
        Comparison::Gt => order.is_gt(),
        Comparison::Ge => order.is_ge(),
    }
}

/// One lane's result of a conversion; `None` if these types have no conversion.
pub(super) fn convert(to: Type, from: Type, round: Round, integral: bool, a: u64) -> Option<u64> {
    use Kind::{Brain, Float, Signed, Unsigned};
    Some(match ((from.kind, from.bits), (to.kind, to.bits)) {
        ((Unsigned, bits), (Unsigned | Signed, wide)) => keep(keep(a, bits), wide),
        ((Signed, bits), (Unsigned | Signed, wide)) => keep(signed(a, bits).cast_unsigned(), wide),
        ((Unsigned, bits), (Float, 32)) => of_f32(keep(a, bits) as f32),
        ((Signed, bits), (Float, 32)) => of_f32(signed(a, bits) as f32),
        ((Unsigned, bits), (Float, 64)) => (keep(a, bits) as f64).to_bits(),
        ((Signed, bits), (Float, 64)) => (signed(a, bits) as f64).to_bits(),
        ((Float, 32), (Unsigned | Signed, _)) => whole(f64::from(f32_of(a)), to, round),
        ((Float, 64), (Unsigned | Signed, _)) => whole(f64::from_bits(a), to, round),
        ((Float, 16), (Float, 32)) => of_f32(f16::from_bits(a as u16).to_f32()),
        ((Brain, 16), (Float, 32)) => keep(a, 16) << 16,
        ((Float, 32), (Float, 16)) => u64::from(f16::from_f32(f32_of(a)).to_bits()),
        ((Float, 32), (Brain, 16)) => u64::from(bf16::from_f32(f32_of(a)).to_bits()),
        ((Float, 32), (Float, 64)) => f64::from(f32_of(a)).to_bits(),
        ((Float, 64), (Float, 32)) if round == Round::Nearest => of_f32(f64::from_bits(a) as f32),
        ((Float, 32), (Float, 32)) if integral => {
            of_f32(rounded(f64::from(f32_of(a)), round) as f32)
        }
        ((Float, 64), (Float, 64)) if integral => rounded(f64::from_bits(a), round).to_bits(),
        _ => return None,
    })
}

fn rounded(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// `x` rounded and clamped to an integer type; 0 for NaN.
fn whole(x: f64, to: Type, round: Round) -> u64 {
    let x = rounded(x, round);
    let value = match (to.kind, to.bits) {
        (Kind::Signed, 64) => (x as i64).cast_unsigned(),
        (Kind::Signed, bits) => {
            let most = (1_i64 << (bits - 1)) as f64;
            (x.clamp(-most, most - 1.0) as i64).cast_unsigned()
        }
        (_, 64) => x as u64,
        (_, bits) => x.clamp(0.0, ((1_u64 << bits) - 1) as f64) as u64,
    };
    keep(value, to.bits)
}
