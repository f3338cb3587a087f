//! A time as date and hour in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From that of 1970-01-01.
const WEEKDAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
/// Letters of a short name.
const SHORT: usize = 3;

/// A second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Utc {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    /// Since 1970-01-01.
    seconds: u64,
}

impl Utc {
    pub(crate) fn now() -> Self {
        Self::of(SystemTime::now())
    }

    /// Days to dates as in Hinnant, "chrono-Compatible Low-Level Date Algorithms": years begin in March, so that the leap day
    /// is the last.
    pub(crate) fn of(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let days = seconds / 86_400 + 719_468; // since 0000-03-01
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self { year, month, day, seconds }
    }

    /// `YYYYmmdd-HHMMSS`.
    pub(crate) fn name(&self) -> String {
        let Self { year, month, day, seconds } = self;
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
    }

    /// A text with directives of C's `strftime`: those that name a date or a time of day, in English.
    ///
    /// # Errors
    /// The directive that is none of them.
    pub(crate) fn format(&self, format: &str) -> Result<String, String> {
        let (mut out, mut left) = (String::new(), format.chars());
        while let Some(c) = left.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = left.next();
            // As glibc has it.
            let unpadded = directive == Some('-');
            if unpadded {
                directive = left.next();
            }
            let part = directive.and_then(|directive| self.part(directive)).ok_or_else(|| {
                let directive: String = directive.into_iter().collect();
                let minus = if unpadded { "-" } else { "" };
                format!("`%{minus}{directive}` of {format:?} is not known")
            })?;
            let zeros = part.trim_start_matches('0');
            out += match (unpadded, zeros) {
                (true, "") => "0",
                (true, number) => number,
                (false, _) => &part,
            };
        }
        Ok(out)
    }

    fn part(&self, directive: char) -> Option<String> {
        let Self { year, month, day, seconds } = self;
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        let month_name = MONTHS[*month as usize - 1];
        let weekday = WEEKDAYS[(seconds / 86_400 % 7) as usize];
        let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        Some(match directive {
            '%' => "%".into(),
            'Y' => year.to_string(),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => month_name.into(),
            'b' | 'h' => month_name[..SHORT].into(),
            'A' => weekday.into(),
            'a' => weekday[..SHORT].into(),
            'H' => format!("{hour:02}"),
            'I' => format!("{twelve:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".into(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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

    /// With what `datetime.strftime` of Python makes of them.
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
