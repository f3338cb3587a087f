//! Chrome traces, which Perfetto and chrome://tracing open: one process per rank, one track per
//! lane.

use device::{LANES, Lane, Span, Trace};
use files::output::Output;
use files::regular_file::leads_to;
use predict::sim::Timeline;
use std::fs::File;
use std::io::{BufWriter, Error, Result, Write};
use std::path::{Path, PathBuf};

/// Maximum events of a simulated trace. If there are more, one rank of each kind is written.
const MOST: usize = 2_000_000;

/// Beginning of every trace.
const BEGINNING: &str = r#"{"displayTimeUnit":"ms","traceEvents":["#;
pub(crate) const OUTPUT: Output = Output { what: "trace", beginning: BEGINNING };

/// An op on its lane. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Name of the op.
    pub name: &'static str,
    /// Lane of the op.
    pub lane: Lane,
    /// Start of the op since the trace's zero.
    pub start: f64,
    /// End of the op since the trace's zero.
    pub end: f64,
    /// Bytes that the op moved, if known.
    pub bytes: Option<u64>,
}

/// Writes a trace, rank by rank.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    bytes: u64,
    first: bool,
}

impl Writer {
    /// Creates the file, or replaces another trace.
    ///
    /// # Errors
    /// Errors of the file system, as in every function here.
    pub fn create(path: &Path) -> Result<Self> {
        let file = BufWriter::new(OUTPUT.create(path)?);
        let mut trace = Self { path: path.to_owned(), file, bytes: 0, first: true };
        trace.write(BEGINNING)?;
        trace.write("\n")?;
        Ok(trace)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.bytes += text.len() as u64;
        self.file.write_all(text.as_bytes())
    }

    fn line(&mut self, text: &str) -> Result<()> {
        let comma = if std::mem::take(&mut self.first) { "" } else { ",\n" };
        self.write(comma)?;
        self.write(text)
    }

    /// Writes all ops of a rank.
    pub fn rank(&mut self, rank: usize, events: impl Iterator<Item = Event>) -> Result<()> {
        self.line(&format!(
            r#"{{"ph":"M","name":"process_name","pid":{rank},"args":{{"name":"rank {rank}"}}}}"#
        ))?;
        for (i, lane) in Lane::ALL.into_iter().enumerate().take(LANES) {
            self.line(&format!(
                r#"{{"ph":"M","name":"thread_name","pid":{rank},"tid":{i},"args":{{"name":"{lane:?}"}}}}"#
            ))?;
        }
        for event in events {
            let Event { name, lane, start, end, bytes } = event;
            let (at, long, lane) = (1e6 * start, 1e6 * (end - start), lane as usize);
            let args = bytes.map_or(String::new(), |b| format!(r#","args":{{"bytes":{b}}}"#));
            self.line(&format!(
                r#"{{"ph":"X","name":"{name}","pid":{rank},"tid":{lane},"ts":{at:.3},"dur":{long:.3}{args}}}"#
            ))?;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// The file cannot be written, another file has its name by now, or a part of it is gone.
    pub fn finish(mut self) -> Result<()> {
        self.write("\n]}\n")?;
        self.file.flush()?;
        let file = self.file.get_ref();
        if !leads_to(&self.path, file).unwrap_or(false) {
            return Err(Error::other("it was removed or replaced while it was written"));
        }
        let found = file.metadata()?;
        match found.is_file() && found.len() != self.bytes {
            true => Err(Error::other("it was changed while it was written")),
            false => Ok(()),
        }
    }
}

/// Writes the recorded ops of a real run.
///
/// # Errors
/// Errors of the file system.
pub fn measured(path: &Path, trace: &Trace) -> Result<()> {
    let spans = trace.spans();
    let zero = spans.iter().map(|span| span.start).min().unwrap_or_default();
    let ranks = spans.iter().map(|span| span.rank + 1).max().unwrap_or(0);
    let mut writer = Writer::create(path)?;
    for rank in 0..ranks {
        let event = |span: &Span| Event {
            name: span.name,
            lane: span.lane,
            start: (span.start - zero).as_secs_f64(),
            end: (span.end - zero).as_secs_f64(),
            bytes: None,
        };
        writer.rank(rank, spans.iter().filter(|span| span.rank == rank).map(event))?;
    }
    writer.finish()
}

/// Writes the last simulated step. Returns words about the ranks that were written.
///
/// # Errors
/// Errors of the file system.
pub fn simulated(path: &Path, timeline: &Timeline, ranks: usize) -> Result<String> {
    let (begin, end) = timeline.window();
    let mut chosen: Vec<usize> = (0..ranks).collect();
    if timeline.program().ops().count() / timeline.program().steps().max(1) * ranks > MOST {
        chosen = timeline.representatives();
    }
    let mut writer = Writer::create(path)?;
    for &rank in &chosen {
        let played = timeline.played(rank).filter(|p| p.end > begin && p.start < end);
        let event = |p: predict::sim::SimulatedOp<'_>| Event {
            name: p.work.name,
            lane: p.lane,
            start: p.start - begin,
            end: p.end - begin,
            bytes: Some(p.work.bytes),
        };
        writer.rank(rank, played.map(event))?;
    }
    writer.finish()?;
    Ok(if chosen.len() == ranks {
        format!("{ranks} ranks")
    } else {
        format!("rank {chosen:?}, one of each kind (all {ranks} would be too many events),")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_trace_whose_file_is_removed_replaced_or_cut_off_is_not_taken_as_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let write = |meanwhile: &dyn Fn()| {
            let mut trace = Writer::create(&path).unwrap();
            let event =
                |_| Event { name: "x", lane: Lane::Compute, start: 0.0, end: 1.0, bytes: None };
            // These are more events than the buffer holds.
            trace.rank(0, (0..1000).map(event)).unwrap();
            meanwhile();
            trace.finish().map_err(|why| why.to_string())
        };
        write(&|| {}).unwrap();
        let whole = fs::read(&path).unwrap();
        // Another trace is replaced.
        write(&|| {}).unwrap();
        assert_eq!(fs::read(&path).unwrap(), whole);
        let gone = "it was removed or replaced while it was written";
        assert_eq!(write(&|| fs::remove_file(&path).unwrap()).unwrap_err(), gone);
        let replace = || {
            fs::write(folder.path().join("theirs"), "theirs").unwrap();
            fs::rename(folder.path().join("theirs"), &path).unwrap();
        };
        assert_eq!(write(&replace).unwrap_err(), gone);
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
        fs::remove_file(&path).unwrap();
        let cut = || File::options().write(true).open(&path).unwrap().set_len(9).unwrap();
        assert_eq!(write(&cut).unwrap_err(), "it was changed while it was written");
        // A device is written to directly, and a link that the user names is followed.
        fs::remove_file(&path).unwrap();
        symlink("/dev/null", &path).unwrap();
        write(&|| {}).unwrap();
    }
}
