//! A time as date and time of day in UTC.

use jiff::Timestamp;
use std::time::{SystemTime, UNIX_EPOCH};

/// Letters of the directives of C's `strftime` for a date or a time of day.
const DIRECTIVES: &str = "%YymdeBbhAaHIMSpFT";

/// Seconds since 1970 by this machine's clock; 0 before 1970.
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A time in UTC, not before 1970.
#[derive(Clone, Copy, Debug)]
pub struct Utc(Timestamp);

impl Utc {
    /// The time of this machine's clock.
    pub fn now() -> Self {
        Self::of(SystemTime::now())
    }

    /// Converts a time. A time before 1970 or after the year 9999 becomes the first second of 1970.
    pub fn of(time: SystemTime) -> Self {
        let first = Timestamp::UNIX_EPOCH;
        Self(Timestamp::try_from(time).map_or(first, |time| time.max(first)))
    }

    /// The time as `YYYYmmdd-HHMMSS`.
    pub fn name(&self) -> String {
        self.0.strftime("%Y%m%d-%H%M%S").to_string()
    }

    /// Formats the time with directives of C's `strftime` for a date or a time of day, in English.
    ///
    /// # Errors
    /// Returns a message with the first unknown directive.
    pub fn format(&self, format: &str) -> Result<String, String> {
        let (mut out, mut left) = (String::new(), format.chars());
        while let Some(c) = left.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = left.next();
            // `%-` omits leading zeros, as in glibc.
            let unpadded = directive == Some('-');
            if unpadded {
                directive = left.next();
            }
            let part = match directive {
                Some('Z') => "UTC".to_owned(),
                Some(known) if DIRECTIVES.contains(known) => {
                    self.0.strftime(&format!("%{known}")).to_string()
                }
                other => {
                    let other = other.map_or_else(String::new, String::from);
                    let minus = if unpadded { "-" } else { "" };
                    return Err(format!("`%{minus}{other}` of {format:?} is not known"));
                }
            };
            let zeros = part.trim_start_matches('0');
            out += match (unpadded, zeros) {
                (true, "") => "0",
                (true, number) => number,
                (false, _) => &part,
            };
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    fn written(seconds: u64, format: &str) -> Result<String, String> {
        Utc::of(UNIX_EPOCH + Duration::from_secs(seconds)).format(format)
    }

    #[test]
    fn times_are_written_in_utc() {
        for (seconds, text) in [
            (0, "19700101-000000"),
            (951_782_399, "20000228-235959"),
            (951_782_400, "20000229-000000"),
            (951_868_800, "20000301-000000"),
            (1_735_689_599, "20241231-235959"),
            (1_795_219_788, "20261121-000948"),
            (4_107_542_400, "21000301-000000"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(Utc::of(time).name(), text);
            assert_eq!(written(seconds, "%Y%m%d-%H%M%S").unwrap(), text);
        }
    }

    /// The expected texts come from `datetime.strftime` of Python.
    #[test]
    fn directives_are_those_of_python() {
        let all = "%A %a %B %b %h %d %-d %m %-m %y %e|%F %T %H %-H %I %-I %M %S %p %%";
        for (seconds, text) in [
            (
                951_782_400,
                "Tuesday Tue February Feb Feb 29 29 02 2 00 29|2000-02-29 00:00:00 00 0 12 12 00 00 AM %",
            ),
            (
                1_735_689_599,
                "Tuesday Tue December Dec Dec 31 31 12 12 24 31|2024-12-31 23:59:59 23 23 11 11 59 59 PM %",
            ),
            (
                1_795_219_788,
                "Saturday Sat November Nov Nov 21 21 11 11 26 21|2026-11-21 00:09:48 00 0 12 12 09 48 AM %",
            ),
            (
                4_107_585_605,
                "Monday Mon March Mar Mar 01 1 03 3 00  1|2100-03-01 12:00:05 12 12 12 12 00 05 PM %",
            ),
        ] {
            assert_eq!(written(seconds, all).unwrap(), text);
        }
        for (wrong, named) in [("%Y %Q", "`%Q`"), ("%", "`%`"), ("%-", "`%-`"), ("%é", "`%é`")] {
            let why = written(0, wrong).unwrap_err();
            assert!(why.contains(named), "{wrong}: {why}");
        }
    }
}
