//! Event files for TensorBoard: records with a length, checksums and a protobuf message (`Event` in
//! TensorFlow's event.proto).
//!
//! Each start of a run writes a new numbered file: TensorBoard reads files in the order of their
//! names, and never reads an earlier file again. A file begins with a session event. TensorBoard
//! then forgets later steps of earlier files, which the run trains again. A reader stops at a
//! record that a crash has torn.

mod settings;

use crate::append_file::{AppendFile, MetricsError, Pieces};
use files::directory::Directory;
use files::held::LockedRunDir;
use files::utc::unix_seconds as now;
use rustix::fs::OFlags;
use serde_json::Value;
use std::ffi::OsString;
use std::sync::Arc;

/// Prefix of a file's name, before the number. TensorBoard looks for names with `tfevents`.
const BEFORE: &str = "events.out.tfevents.";
/// Suffix of a file's name, after the number.
const BEHIND: &str = ".onebox";

/// Event files in `dir` with their numbers, in no order.
pub fn files(dir: &Directory) -> Vec<(u64, String)> {
    let numbered = |name: OsString| {
        let name = name.into_string().ok()?;
        let number = name.strip_prefix(BEFORE)?.strip_suffix(BEHIND)?.parse().ok()?;
        Some((number, name))
    };
    dir.names().unwrap_or_default().into_iter().filter_map(numbered).collect()
}

/// Writer of the event file of one start of a run.
#[derive(Debug)]
pub struct Events {
    run: Arc<LockedRunDir>,
    file: AppendFile,
}

impl Events {
    /// Creates a new file in the directory of `run`, for the steps after `last_step`.
    ///
    /// # Errors
    /// [`MetricsError`] if the file cannot be created.
    pub fn create(run: &Arc<LockedRunDir>, last_step: u64) -> Result<Self, MetricsError> {
        let name = |number: u64| format!("{BEFORE}{number:010}{BEHIND}");
        let failed =
            |number| move |source| MetricsError { path: run.called(&name(number)), source };
        let dir = run.check().map_err(failed(1))?;
        let number = files(dir).iter().map(|(number, _)| number + 1).max().unwrap_or(1);
        // The file can be read too: if it is removed, the writer copies it from the open file.
        let created = dir.open_or_create(&name(number), OFlags::EXCL | OFlags::APPEND);
        let created = created.and_then(|file| dir.sync().map(|()| file));
        let file = created.map_err(failed(number))?;
        let mut file = AppendFile::new(run, &name(number), Pieces::Records, file, 0);
        let now = now();
        file.write(&record(&event(now, 0, &VERSION)));
        file.write(&record(&event(now, last_step + 1, &SESSION)));
        Ok(Self { run: Arc::clone(run), file })
    }

    /// Appends a point to each curve, after `step`.
    pub(crate) fn scalars(&mut self, step: u64, curves: &[(&str, f32)]) {
        if self.file.is_over() {
            match Self::create(&self.run, step) {
                Ok(next) => *self = next,
                Err(error) => return self.file.fail(&error.source),
            }
        }
        self.file.write(&record(&scalars(now(), step, curves)));
    }

    /// Appends the settings of the run, as a text and as hyperparameters, before the steps after
    /// `step`.
    pub(crate) fn settings(&mut self, step: u64, text: &str, config: &Value) {
        self.file.write(&record(&settings::text(now(), step, "config", text)));
        self.file.write(&record(&settings::hyperparameters(now(), config)));
    }

    /// Syncs the file to the disk. A failure is a warning.
    pub(crate) fn sync(&mut self) {
        self.file.sync();
    }
}

/// Wire type of a protobuf field.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn key(into: &mut Vec<u8>, field: u64, wire: Wire) {
    varint(into, field << 3 | wire as u64);
}

fn bytes(into: &mut Vec<u8>, field: u64, value: &[u8]) {
    key(into, field, Wire::Bytes);
    varint(into, value.len() as u64);
    into.extend(value);
}

/// `Event.file_version`, the first event of a file.
const VERSION: Content<'_> = Content { field: 3, bytes: b"brain.Event:2" };
/// `Event.session_log` with the `status` `START`: its step and all later steps are new.
const SESSION: Content<'_> = Content { field: 7, bytes: &[0x08, 1] };

/// Content of an event: a protobuf field and its bytes.
struct Content<'a> {
    field: u64,
    bytes: &'a [u8],
}

/// Encodes an event: `Event.wall_time`, `Event.step` and the content.
fn event(wall_time: f64, step: u64, content: &Content<'_>) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, Wire::Fixed64);
    event.extend(wall_time.to_le_bytes());
    if step > 0 {
        key(&mut event, 2, Wire::Varint);
        varint(&mut event, step);
    }
    bytes(&mut event, content.field, content.bytes);
    event
}

/// Encodes `Event.summary`, with a `Value` (a `tag` and a `simple_value`) for each curve.
fn scalars(wall_time: f64, step: u64, curves: &[(&str, f32)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, number) in curves {
        let mut value = Vec::new();
        bytes(&mut value, 1, tag.as_bytes());
        key(&mut value, 2, Wire::Fixed32);
        value.extend(number.to_le_bytes());
        bytes(&mut summary, 1, &value);
    }
    event(wall_time, step, &Content { field: 5, bytes: &summary })
}

/// Encodes a record of TensorFlow's files: length and message, each with a checksum after it.
fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(checksum(&length).to_le_bytes());
    record.extend(message);
    record.extend(checksum(message).to_le_bytes());
    record
}

/// CRC-32C, masked as TensorFlow does, since checksums of checksums are weak.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Expected bytes from tensorboard 2.21: `RecordWriter` of tensorboard/summary/writer writes
    /// events of its own event.proto.
    #[test]
    fn records_are_the_bytes_that_tensorboard_writes() {
        for (event, expected) in [
            (event(1.5, 0, &VERSION), OF_VERSION),
            (event(1.5, 300, &SESSION), OF_SESSION),
            (scalars(1.5, 300, &[("loss/train", 2.5), ("loss/eval", f32::NAN)]), SCALARS),
        ] {
            assert_eq!(hex(&record(&event)), expected);
        }
    }

    const OF_VERSION: &str =
        "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
    const OF_SESSION: &str = "100000000000000095fbfe1809000000000000f83f10ac023a020801713b788a";
    const SCALARS: &str = "33000000000000000ca7205609000000000000f83f10ac022a250a110a0a6c6f73732f747261696e15000020400a100a096c6f73732f6576616c150000c07fada9dd30";

    #[test]
    fn each_start_has_a_file_of_its_own_behind_those_before() {
        let folder = tempfile::tempdir().unwrap();
        let run = LockedRunDir::unlocked(folder.path()).unwrap();
        let dir = run.check().unwrap();
        dir.create_new("events.out.tfevents.1.theirs").unwrap();
        for last_step in [0, 0, 7] {
            Events::create(&run, last_step).unwrap();
        }
        let mut files = files(dir);
        files.sort();
        let expected = (1..=3).map(|n| (n, format!("events.out.tfevents.000000000{n}.onebox")));
        assert_eq!(files, expected.collect::<Vec<_>>());
    }
}
