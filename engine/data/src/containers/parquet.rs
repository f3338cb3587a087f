//! A Parquet table: each row becomes a line with an object. Structures are objects, lists are lists.

use super::output::Output;
use crate::progress::Reading;
use crate::unpack_error::UnpackError;
use device::panics::quietly;
use files::foreign_text::{foreign, reason};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Writes each row of the table as a line; returns the number of these rows, and of all rows.
pub(super) fn rows(
    file: File,
    bytes: u64,
    reading: &dyn Reading,
    out: &mut Output<'_>,
) -> (Result<(), UnpackError>, [u64; 2]) {
    let mut count = [0, 0];
    // The library panics on some damaged files.
    let done = AssertUnwindSafe(|| write(file, bytes, reading, out, &mut count));
    let done = quietly(|| catch_unwind(done)).unwrap_or_else(|_| {
        let [row, _] = count;
        Err(UnpackError::Damaged(format!("the parquet library fails behind row {row}")))
    });
    (done, count)
}

fn write(
    file: File,
    bytes: u64,
    reading: &dyn Reading,
    out: &mut Output<'_>,
    [row, all]: &mut [u64; 2],
) -> Result<(), UnpackError> {
    let reader = SerializedFileReader::new(file).map_err(|error| unread(&error, 0))?;
    *all = u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0);
    let (mut line, mut shown) = (Vec::new(), 0);
    for next in reader {
        let next = next.map_err(|error| unread(&error, *row))?;
        *row += 1;
        line.clear();
        write_object(&mut line, &next)
            .map_err(|why| UnpackError::Unusable(format!("row {row}: {why}")))?;
        line.push(b'\n');
        out.write(&line)?;
        let done = (bytes as f64 * *row as f64 / (*all).max(1) as f64) as u64;
        reading.add(done.saturating_sub(shown));
        shown = done.max(shown);
    }
    match row == all {
        true => Ok(()),
        false => Err(UnpackError::Damaged(format!("it has {row} rows, and says {all}"))),
    }
}

fn unread(error: &ParquetError, row: u64) -> UnpackError {
    match error {
        ParquetError::NYI(why) => UnpackError::Unusable(format!(
            "the parquet library cannot read it: {}; write it anew with pyarrow",
            reason(why)
        )),
        ParquetError::General(why) if why.starts_with("Disabled feature") => {
            UnpackError::Unusable(format!(
                "onebox does not unpack its compression ({}): write it anew, with compression=\"zstd\"",
                reason(why)
            ))
        }
        error => UnpackError::Damaged(format!("{}, behind row {row}", reason(error))),
    }
}

fn write_object(to: &mut Vec<u8>, row: &Row) -> Result<(), String> {
    let fields = row.get_column_iter();
    write_fields(to, fields.map(|(name, field)| (name.as_str(), field)))
}

fn write_fields<'a>(
    to: &mut Vec<u8>,
    fields: impl Iterator<Item = (&'a str, &'a Field)>,
) -> Result<(), String> {
    to.push(b'{');
    for (i, (name, field)) in fields.enumerate() {
        to.extend_from_slice(if i == 0 { b"" } else { b", " });
        write_text(to, name);
        to.extend_from_slice(b": ");
        write_value(to, field).map_err(|why| match why.starts_with("column ") {
            true => why,
            false => format!("column \"{}\" {why}", foreign(name)),
        })?;
    }
    to.push(b'}');
    Ok(())
}

fn write_text(to: &mut Vec<u8>, text: &str) {
    to.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
}

/// Writes a value as JSON. The error completes "column "a"".
fn write_value<'a>(to: &mut Vec<u8>, field: &'a Field) -> Result<(), String> {
    match field {
        Field::Null => to.extend_from_slice(b"null"),
        Field::Bool(value) => to.extend_from_slice(value.to_string().as_bytes()),
        Field::Byte(_)
        | Field::Short(_)
        | Field::Int(_)
        | Field::Long(_)
        | Field::UByte(_)
        | Field::UShort(_)
        | Field::UInt(_)
        | Field::ULong(_) => to.extend_from_slice(field.to_string().as_bytes()),
        Field::Float16(value) => write_float(to, f64::from(*value), None)?,
        Field::Float(value) => write_float(to, f64::from(*value), Some(*value))?,
        Field::Double(value) => write_float(to, *value, None)?,
        Field::Str(text) => write_text(to, text),
        // Older programs write texts without saying so.
        Field::Bytes(bytes) => match str::from_utf8(bytes.data()) {
            Ok(text) => write_text(to, text),
            Err(_) => {
                return Err("has bytes that are no text: leave it out, with Dataset.remove_columns of datasets".into());
            }
        },
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => write_text(to, &field.to_string()),
        // A column has the keys of all its rows, so a null stands for a key that this row lacks.
        Field::Group(row) => {
            let fields = row.get_column_iter().filter(|(_, field)| !matches!(field, Field::Null));
            write_fields(to, fields.map(|(name, field)| (name.as_str(), field)))?;
        }
        Field::ListInternal(list) => {
            to.push(b'[');
            for (i, value) in list.elements().iter().enumerate() {
                to.extend_from_slice(if i == 0 { b"" } else { b", " });
                write_value(to, value)?;
            }
            to.push(b']');
        }
        Field::MapInternal(map) => {
            let named = |(key, value): &'a (Field, Field)| match key {
                Field::Str(key) => Ok((key.as_str(), value)),
                _ => Err("has a map with keys that are no texts: write a list of structures"),
            };
            let entries: Vec<_> = map.entries().iter().map(named).collect::<Result<_, _>>()?;
            write_fields(to, entries.into_iter())?;
        }
    }
    Ok(())
}

/// Writes a number. NaN stands for a missing value, as pandas writes it. `short` is the same
/// number in 32 bits, if the column has numbers of 32 bits.
fn write_float(to: &mut Vec<u8>, value: f64, short: Option<f32>) -> Result<(), String> {
    if value.is_infinite() {
        return Err("has an infinite number, which JSON has not: replace it".into());
    }
    let text = match short {
        _ if value.is_nan() => Ok("null".to_owned()),
        Some(short) => serde_json::to_string(&short),
        None => serde_json::to_string(&value),
    };
    to.extend_from_slice(text.map_err(|error| error.to_string())?.as_bytes());
    Ok(())
}
