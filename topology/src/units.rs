//! Text form of byte counts.

/// Units by name, from small to large.
pub const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("kB", 1_000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
    ("TB", 1_000_000_000_000),
    ("TiB", 1 << 40),
];

/// A number with its noun: `1 file`, `2 files`; `1 micro-batch`, `2 micro-batches`.
pub fn counted(n: impl std::fmt::Display, one: &str) -> String {
    let n = n.to_string();
    let more = match n == "1" {
        true => "",
        false if one.ends_with("ch") || one.ends_with('s') => "es",
        false => "s",
    };
    format!("{n} {one}{more}")
}

/// Writes bytes with two decimals in the largest binary unit that fits, `1.50 GiB`; below 1 KiB
/// exactly, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    if bytes < 1 << 10 {
        return format!("{bytes} B");
    }
    let binary = UNITS.iter().filter(|(name, _)| name.ends_with("iB"));
    let mut text = String::new();
    for (name, unit) in binary {
        let hundredths = (u128::from(bytes) * 100 + u128::from(unit / 2)) / u128::from(*unit);
        text = format!("{}.{:02} {name}", hundredths / 100, hundredths % 100);
        // Compared after rounding, so that no text reads "1024.00 KiB".
        if hundredths < 1024 * 100 {
            break;
        }
    }
    text
}

/// The smallest amount of at least `bytes` that [`format_bytes`] does not round up.
pub fn up_to_hundredths(bytes: u64) -> u64 {
    let mut up = bytes;
    for (_, unit) in UNITS.iter().filter(|(name, _)| name.ends_with("iB")) {
        let unit = u128::from(*unit);
        let hundredths = (u128::from(bytes) * 100).div_ceil(unit);
        up = u64::try_from(hundredths * unit / 100).unwrap_or(u64::MAX);
        if hundredths < 1024 * 100 {
            break;
        }
    }
    up
}

/// Reads an amount of bytes: a decimal number, then one of B, kB, KiB, MB, MiB, GB, GiB, TB, TiB,
/// or no unit for bytes. Examples are `31.7GiB`, `80 GB` and `1024`. A fraction is exact up to
/// rounding to the nearest byte.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let number_end =
        trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit_name) = trimmed.split_at(number_end);
    if number.is_empty() {
        return Err(format!(
            "{text:?} is not an amount of bytes: expected a number that is not negative, \
             then a unit, like \"512MiB\""
        ));
    }
    let unit = unit_named(unit_name.trim(), text)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(format!("{text:?} is not an amount of bytes: {number:?} is not a number"));
    }
    if unit == 1 && number.contains('.') {
        return Err(format!("{text:?} is not an amount of bytes: a byte has no fractions"));
    }
    let too_large = || format!("{text:?} is too large: at most {} bytes can be counted", u64::MAX);
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = u128::from(whole) * u128::from(unit) + fraction_of(fraction, unit);
    u64::try_from(bytes).map_err(|_| too_large())
}

/// The bytes of the unit called `name`.
fn unit_named(name: &str, text: &str) -> Result<u64, String> {
    if name.is_empty() {
        return Ok(1);
    }
    if let Some((_, unit)) = UNITS.iter().find(|(known, _)| *known == name) {
        return Ok(*unit);
    }
    let hint = match UNITS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
        Some((known, _)) => format!("did you mean {known}?"),
        None => format!("expected one of {}", UNITS.map(|(known, _)| known).join(", ")),
    };
    Err(format!("{text:?} is not an amount of bytes: unknown unit {name:?}, {hint}"))
}

/// `0.{digits}` of `unit`, to the nearest byte. Digits beyond the eighteenth are below half a byte
/// of any unit.
fn fraction_of(digits: &str, unit: u64) -> u128 {
    let (mut numerator, mut denominator) = (0, 1);
    for digit in digits.bytes().take(18) {
        numerator = numerator * 10 + u128::from(digit - b'0');
        denominator *= 10;
    }
    (numerator * u128::from(unit) + denominator / 2) / denominator
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hundredths_are_no_less_and_read_as_they_are_written() {
        for bytes in [1, 1023, 1024, 1025, 1_048_575, 1 << 20, 330_000_000_001, 1_099_511_627_775] {
            let up = up_to_hundredths(bytes);
            assert!(up >= bytes && up <= bytes + bytes / 100 + 11, "{bytes}: {up}");
            let read = parse_bytes(&format_bytes(up)).unwrap();
            assert!(read.abs_diff(up) <= 1 && format_bytes(read) == format_bytes(up), "{bytes}");
            assert_eq!(up_to_hundredths(up), up);
        }
    }

    #[test]
    fn every_unit_is_understood_with_and_without_spaces() {
        for (text, bytes) in [
            ("1024", 1024),
            ("0", 0),
            ("7B", 7),
            ("3kB", 3_000),
            ("3 KiB", 3 << 10),
            (" 2MB ", 2_000_000),
            ("512MiB", 512 << 20),
            ("80GB", 80_000_000_000),
            ("2\tGiB", 2 << 30),
            ("1TB", 1_000_000_000_000),
            ("1TiB", 1 << 40),
            ("31.7GiB", 34_037_615_821),
            ("0.5KiB", 512),
            ("1.0001kB", 1_000),
            ("1.50 GiB", 3 << 29),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused_with_the_text_and_the_reason() {
        for (text, reason) in [
            ("", "expected a number"),
            ("-1", "not negative"),
            ("-1GiB", "not negative"),
            ("NaN", "expected a number"),
            ("inf", "expected a number"),
            ("GiB", "expected a number"),
            (".5GiB", "not a number"),
            ("1.GiB", "not a number"),
            ("1.2.3GiB", "not a number"),
            ("1e9", "unknown unit \"e9\""),
            ("1,5GiB", "unknown unit"),
            ("5 parsecs", "expected one of B, kB, KiB"),
            ("5gb", "did you mean GB?"),
            ("5KB", "did you mean kB?"),
            ("1.5", "no fractions"),
            ("1.5B", "no fractions"),
            ("18446744073709551616", "too large"),
            ("99999999999999999999999999999999TiB", "too large"),
            ("16777216TiB", "too large"),
        ] {
            let error = parse_bytes(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
            assert!(error.contains(&format!("{text:?}")), "{text}: {error}");
        }
    }

    #[test]
    fn one_of_a_thing_is_not_several() {
        assert_eq!(["file", "batch"].map(|one| counted(1, one)), ["1 file", "1 batch"]);
        assert_eq!(["file", "batch"].map(|one| counted(0, one)), ["0 files", "0 batches"]);
        assert_eq!([counted(11, "GPU"), counted(2u64, "bus")], ["11 GPUs", "2 buses"]);
    }

    #[test]
    fn bytes_are_written_in_the_largest_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (3 << 29, "1.50 GiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            ((1 << 30) - 1, "1.00 GiB"),
            (34_037_615_821, "31.70 GiB"),
            (u64::MAX, "16777216.00 TiB"),
        ] {
            assert_eq!(format_bytes(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn what_is_written_reads_back_within_its_two_decimals() {
        for shift in 0..54 {
            for bytes in [1u64 << shift, (1 << shift) + (1 << shift) / 3, (1 << shift) - 1] {
                let text = format_bytes(bytes);
                let back = parse_bytes(&text).unwrap();
                assert!(back.abs_diff(bytes) <= bytes / 200, "{bytes} {text} {back}");
            }
        }
    }
}
