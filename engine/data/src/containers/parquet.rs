//! A Parquet table: each row becomes a line with an object. Structures are objects, lists are lists.
//! A column that onebox does not read has the reason in place of its values ([`UNREAD`]), which the
//! reader of rows gives if a row uses the column.

use super::output::Output;
use crate::progress::Reading;
use crate::rows::UNREAD;
use crate::unpack_error::UnpackError;
use device::panics::quietly;
use files::foreign_text::{foreign, reason};
use parquet::basic::{ConvertedType, LogicalType, TimeUnit, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
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
    let columns = Columns::of(reader.metadata().file_metadata().schema());
    let columns = columns.map_err(|error| unread(&error, 0))?;
    let rows = RowIter::from_file_into(Box::new(reader)).project(columns.read);
    let (mut line, mut shown) = (Vec::new(), 0);
    for next in rows.map_err(|error| unread(&error, 0))? {
        let next = next.map_err(|error| unread(&error, *row))?;
        *row += 1;
        line.clear();
        write_row(&mut line, &next, &columns.unread);
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

/// The columns of a table.
struct Columns {
    /// The schema of the columns that are read; `None` for all columns.
    read: Option<Type>,
    /// Name of each other column, and why it is not read.
    unread: Vec<(String, String)>,
}

impl Columns {
    fn of(schema: &Type) -> Result<Self, ParquetError> {
        let (mut read, mut unread) = (Vec::new(), Vec::new());
        for column in schema.get_fields() {
            match type_of_nanoseconds(column).or_else(|| unknown_type(column)) {
                None => read.push(column.clone()),
                Some(name) => {
                    let why = format!("of the Parquet type {name} (onebox does not read it)");
                    unread.push((column.name().to_owned(), why));
                }
            }
        }
        let schema = || Type::group_type_builder(schema.name()).with_fields(read).build();
        let read = if unread.is_empty() { None } else { Some(schema()?) };
        Ok(Self { read, unread })
    }
}

/// Name of the type of a column of times in nanoseconds, which the library reads as bare numbers.
fn type_of_nanoseconds(column: &Type) -> Option<String> {
    let name = match column.get_basic_info().logical_type_ref()? {
        LogicalType::Timestamp(time) if time.unit == TimeUnit::NANOS => "TIMESTAMP(NANOS)",
        LogicalType::Time(time) if time.unit == TimeUnit::NANOS => "TIME(NANOS)",
        _ => return None,
    };
    Some(name.to_owned())
}

/// Name of the first type in a column for which the library has no value; it would panic.
fn unknown_type(column: &Type) -> Option<String> {
    use ConvertedType as Kind;
    if !column.is_primitive() {
        return column.get_fields().iter().find_map(|column| unknown_type(column));
    }
    let kind = column.get_basic_info().converted_type();
    let is_known = match column.get_physical_type() {
        Physical::INT32 => matches!(
            kind,
            Kind::NONE
                | Kind::INT_8
                | Kind::INT_16
                | Kind::INT_32
                | Kind::UINT_8
                | Kind::UINT_16
                | Kind::UINT_32
                | Kind::DATE
                | Kind::TIME_MILLIS
                | Kind::DECIMAL
        ),
        Physical::INT64 => matches!(
            kind,
            Kind::NONE
                | Kind::INT_64
                | Kind::UINT_64
                | Kind::TIME_MICROS
                | Kind::TIMESTAMP_MILLIS
                | Kind::TIMESTAMP_MICROS
                | Kind::DECIMAL
        ),
        Physical::BYTE_ARRAY => matches!(
            kind,
            Kind::NONE | Kind::UTF8 | Kind::ENUM | Kind::JSON | Kind::BSON | Kind::DECIMAL
        ),
        Physical::FIXED_LEN_BYTE_ARRAY => matches!(kind, Kind::NONE | Kind::DECIMAL),
        Physical::BOOLEAN | Physical::INT96 | Physical::FLOAT | Physical::DOUBLE => true,
    };
    (!is_known).then(|| format!("{kind:?}"))
}

/// Writes a row as an object. A value that JSON has not, and each value of a column that is not
/// read, becomes an object with the reason.
fn write_row(to: &mut Vec<u8>, row: &Row, unread: &[(String, String)]) {
    to.push(b'{');
    for (i, (name, field)) in row.get_column_iter().enumerate() {
        write_key(to, name, i == 0);
        let start = to.len();
        if let Err(why) = write_value(to, field) {
            to.truncate(start);
            write_unread(to, &format!("a value that onebox does not read (it {why})"));
        }
    }
    for (i, (name, why)) in unread.iter().enumerate() {
        write_key(to, name, i + row.len() == 0);
        write_unread(to, why);
    }
    to.push(b'}');
}

fn write_unread(to: &mut Vec<u8>, why: &str) {
    to.push(b'{');
    write_key(to, UNREAD, true);
    write_text(to, why);
    to.push(b'}');
}

fn write_key(to: &mut Vec<u8>, name: &str, is_first: bool) {
    to.extend_from_slice(if is_first { b"" } else { b", " });
    write_text(to, name);
    to.extend_from_slice(b": ");
}

fn write_fields<'a>(
    to: &mut Vec<u8>,
    fields: impl Iterator<Item = (&'a str, &'a Field)>,
) -> Result<(), String> {
    to.push(b'{');
    for (i, (name, field)) in fields.enumerate() {
        write_key(to, name, i == 0);
        write_value(to, field).map_err(|why| match why.starts_with("has in ") {
            true => why,
            false => format!("has in \"{}\" a value that {why}", foreign(name)),
        })?;
    }
    to.push(b'}');
    Ok(())
}

fn write_text(to: &mut Vec<u8>, text: &str) {
    to.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
}

/// Writes a value as JSON. The error completes "it".
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
                return Err("has bytes that are no text".into());
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
                _ => Err("has a map with keys that are no texts"),
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
        return Err("has an infinite number, which JSON has not".into());
    }
    let text = match short {
        _ if value.is_nan() => Ok("null".to_owned()),
        Some(short) => serde_json::to_string(&short),
        None => serde_json::to_string(&value),
    };
    to.extend_from_slice(text.map_err(|error| error.to_string())?.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silence;
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, FixedLenByteArray};
    use parquet::data_type::{FixedLenByteArrayType, Int64Type};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use std::sync::Arc;

    #[test]
    fn a_column_that_is_not_read_has_its_reason_in_each_row() {
        let schema = "message m {
            required fixed_len_byte_array(12) gone (INTERVAL);
            required binary text (UTF8);
            required int64 at (TIMESTAMP(NANOS,true));
            required double far;
            required binary raw;
        }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let file = tempfile::tempfile().unwrap();
        let copy = file.try_clone().unwrap();
        let mut writer = SerializedFileWriter::new(copy, schema, Default::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let texts = |texts: [&[u8]; 2]| texts.map(|text| ByteArray::from(text.to_vec()));
        let gone = [0, 1].map(|byte| FixedLenByteArray::from(vec![byte; 12]));
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<FixedLenByteArrayType>().write_batch(&gone, None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts([b"a", b"b"]), None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&[1, 2], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&[0.5, f64::INFINITY], None, None).unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts([b"\xff", b"c"]), None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let (bytes, mut made) = (file.metadata().unwrap().len(), Vec::new());
        let mut out = Output::beginning(&mut made, 1 << 20, u64::MAX);
        let (done, count) = rows(file, bytes, &Silence, &mut out);
        done.unwrap();
        assert_eq!(count, [2, 2]);
        let made = String::from_utf8(made).unwrap();
        let read: Vec<serde_json::Value> =
            made.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let unread = |why: &str| serde_json::json!({ UNREAD: why });
        let of =
            |name: &str| unread(&format!("of the Parquet type {name} (onebox does not read it)"));
        let value = |why: &str| unread(&format!("a value that onebox does not read (it {why})"));
        for row in &read {
            assert_eq!(row["gone"], of("INTERVAL"));
            assert_eq!(row["at"], of("TIMESTAMP(NANOS)"));
        }
        let of = |key: &str| read.iter().map(|row| row[key].clone()).collect::<Vec<_>>();
        assert_eq!(of("text"), ["a", "b"]);
        let infinite = value("has an infinite number, which JSON has not");
        assert_eq!(of("far"), [serde_json::json!(0.5), infinite]);
        assert_eq!(of("raw"), [value("has bytes that are no text"), serde_json::json!("c")]);
    }
}
