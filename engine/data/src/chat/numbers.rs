//! Arithmetic of Python's numbers, up to 128 bits.

use super::value::{ValueKind, ValueResult};
use minijinja::Value;
use std::cmp::Ordering;

/// A number for arithmetic.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value) -> Option<Self> {
        match ValueKind::of(value) {
            ValueKind::Bool(value) => Some(Self::Int(value.into())),
            ValueKind::Int(number) => Some(Self::Int(number)),
            ValueKind::Float(number) => Some(Self::Float(number)),
            _ => None,
        }
    }

    /// The number as a float, exact or rounded once.
    pub(super) fn float(self) -> f64 {
        match self {
            Self::Int(number) => number as f64,
            Self::Float(number) => number,
        }
    }
}

pub(super) fn arithmetic(operator: &str, a: Number, b: Number) -> ValueResult {
    if b.float() == 0.0 && matches!(operator, "/" | "//" | "%") {
        return Err(format!("`{operator}` by zero"));
    }
    let wide = || format!("`{operator}` of integers beyond 128 bits");
    if let (Number::Int(a), Number::Int(b)) = (a, b) {
        let number = match operator {
            "+" => a.checked_add(b),
            "-" => a.checked_sub(b),
            "*" => a.checked_mul(b),
            "//" => floor_divided(a, b).map(|(quotient, _)| quotient),
            "%" => floor_divided(a, b).map(|(_, rest)| rest),
            "**" if b >= 0 => match a {
                0 | 1 => Some(if b == 0 { 1 } else { a }),
                -1 => Some(if b % 2 == 0 { 1 } else { -1 }),
                _ => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            },
            "/" => {
                const EXACT: u128 = 1 << 53;
                if a.unsigned_abs() > EXACT || b.unsigned_abs() > EXACT {
                    return Err("`/` of integers beyond 53 bits".into());
                }
                return Ok(Value::from(a as f64 / b as f64));
            }
            _ => return power(a as f64, b as f64),
        };
        return number.map(Value::from).ok_or_else(wide);
    }
    let (a, b) = (a.float(), b.float());
    let found = match operator {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" => a / b,
        "**" => return power(a, b),
        // Division and remainder of floats, as in Python.
        _ => {
            let mut rest = a % b;
            let mut quotient = (a - rest) / b;
            if rest == 0.0 {
                rest = rest.copysign(b);
            } else if (b < 0.0) != (rest < 0.0) {
                rest += b;
                quotient -= 1.0;
            }
            if operator == "%" {
                rest
            } else if quotient == 0.0 {
                0.0_f64.copysign(a / b)
            } else {
                let floor = quotient.floor();
                if quotient - floor > 0.5 { floor + 1.0 } else { floor }
            }
        }
    };
    Ok(Value::from(found))
}

/// A power of floats.
pub(super) fn power(a: f64, b: f64) -> ValueResult {
    let found = a.powf(b);
    if (a == 0.0 && b < 0.0) || found.is_nan() || (found.is_infinite() && a.is_finite()) {
        return Err("`**` of these numbers is no number".into());
    }
    Ok(Value::from(found))
}

/// Quotient and remainder of a division that rounds down.
pub(super) fn floor_divided(a: i128, b: i128) -> Option<(i128, i128)> {
    let (quotient, rest) = (a.checked_div(b)?, a.checked_rem(b)?);
    match rest != 0 && (rest < 0) != (b < 0) {
        true => Some((quotient - 1, rest + b)),
        false => Some((quotient, rest)),
    }
}

pub(super) fn order_of_numbers(a: Number, b: Number) -> Option<Ordering> {
    match (a, b) {
        (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
        (Number::Float(a), Number::Float(b)) => a.partial_cmp(&b),
        (Number::Int(a), Number::Float(b)) => order_of_both(a, b),
        (Number::Float(a), Number::Int(b)) => order_of_both(b, a).map(Ordering::reverse),
    }
}

/// Exact order of an integer and a float. None: the float is NaN.
pub(super) fn order_of_both(a: i128, b: f64) -> Option<Ordering> {
    if b.is_nan() {
        return None;
    }
    if b >= i128::MAX as f64 {
        return Some(Ordering::Less);
    }
    if b < i128::MIN as f64 {
        return Some(Ordering::Greater);
    }
    let whole = b.trunc();
    Some(a.cmp(&(whole as i128)).then(0.0_f64.partial_cmp(&(b - whole))?))
}
