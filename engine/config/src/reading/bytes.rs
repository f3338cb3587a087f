//! Sizes in bytes as people write them: `"512MiB"`, `"31.7GiB"`, `"8GB"`.

use super::short;
use topology::units::UNITS;

/// Reads a size such as `"512MiB"`: a decimal number, then `KiB MiB GiB TiB kB MB GB TB` or `B`.
///
/// Digits may be grouped by `_`, a space may stand before the unit, and a fraction of a byte is
/// dropped. The error is a text that continues "the size".
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_'))
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let scale = unit_scale(unit.trim_start())?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: String = whole.chars().chain(fraction.chars()).filter(|c| *c != '_').collect();
    if digits.is_empty() || fraction.contains('.') {
        return Err("does not start with a number".into());
    }
    if digits.len() > 24 {
        return Err("has more than 24 digits".into());
    }
    let value: u128 = digits.parse().map_err(|_| "does not start with a number".to_string())?;
    let decimals = fraction.chars().filter(|c| *c != '_').count();
    let bytes = value.checked_mul(scale.into()).map(|b| b / 10_u128.pow(decimals as u32));
    bytes.and_then(|b| u64::try_from(b).ok()).ok_or_else(|| "does not fit in 64 bits".into())
}

fn unit_scale(unit: &str) -> Result<u64, String> {
    if let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) {
        return Ok(*scale);
    }
    let near = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    Err(match (unit, near) {
        ("", _) => "has no unit (B, KiB, MiB, GiB, TiB, kB, MB, GB or TB)".into(),
        (_, Some((name, _))) => format!("has the unit `{unit}`, which is written `{name}`"),
        ("G" | "M" | "K" | "T" | "k", None) => {
            format!("has the unit `{unit}`: say `{unit}iB` or `{unit}B`").replace("kiB", "KiB")
        }
        _ => format!(
            "has an unknown unit `{}` (B, KiB, MiB, GiB, TiB, kB, MB, GB or TB)",
            short(unit)
        ),
    })
}

/// Writes a size so that [`parse_bytes`] reads the same number. Uses the largest unit that fits if
/// two decimals are enough, else a smaller unit without decimals.
pub fn format_bytes(bytes: u64) -> String {
    let binary = UNITS.iter().rev().filter(|(unit, _)| unit.ends_with("iB"));
    for (index, (unit, scale)) in binary.filter(|(_, scale)| bytes >= *scale).enumerate() {
        let value = bytes as f64 / *scale as f64;
        let decimals = if index == 0 { 0..=2 } else { 0..=0 };
        let mut written = decimals.map(|decimals| format!("{value:.decimals$}{unit}"));
        if let Some(exact) = written.find(|text| parse_bytes(text) == Ok(bytes)) {
            return exact;
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_kinds_of_units() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("31.7GiB"), Ok(34_037_615_820));
        assert_eq!(parse_bytes("1.5 kB"), Ok(1500));
        assert_eq!(parse_bytes("8GB"), Ok(8_000_000_000));
        assert_eq!(parse_bytes("1_000B"), Ok(1000));
        assert_eq!(parse_bytes("16777215TiB"), Ok(16_777_215 << 40));
    }

    #[test]
    fn bad_sizes_say_what_is_wrong() {
        for (text, part) in [
            ("512", "no unit"),
            ("", "no unit"),
            ("MiB", "start with a number"),
            ("1.2.3GiB", "start with a number"),
            ("-1GiB", "unknown unit"),
            ("2gib", "written `GiB`"),
            ("2kib", "written `KiB`"),
            ("2G", "say `GiB`"),
            ("99999999TiB", "64 bits"),
            ("1111111111111111111111111B", "24 digits"),
        ] {
            let error = parse_bytes(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn written_sizes_are_read_back() {
        let mut state = 1_u64;
        for shift in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = state >> (shift % 64);
            assert_eq!(parse_bytes(&format_bytes(bytes)), Ok(bytes));
        }
        assert_eq!(format_bytes(512 << 20), "512MiB");
        assert_eq!(format_bytes(34_037_615_820), "31.7GiB");
        assert_eq!(format_bytes(0), "0B");
    }
}
