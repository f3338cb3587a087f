//! Chrome traces, which Perfetto and chrome://tracing open: one process per rank, one track per lane.

use device::{LANES, Lane, Span, Trace};
use files::output::Output;
use predict::sim::Timeline;
use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::path::Path;

/// Most events of a simulated trace; of more, one rank of each kind is written.
const MOST: usize = 2_000_000;

/// Of every trace.
const BEGINNING: &str = r#"{"displayTimeUnit":"ms","traceEvents":["#;
pub(crate) const OUTPUT: Output = Output { what: "trace", beginning: BEGINNING };

/// An op on its lane. Times in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Of the op.
    pub name: &'static str,
    /// On which.
    pub lane: Lane,
    /// Since the trace's zero.
    pub start: f64,
    /// Since the trace's zero.
    pub end: f64,
    /// That it moved, where that is known.
    pub bytes: Option<u64>,
}

/// Writes a trace, rank by rank.
#[derive(Debug)]
pub struct Writer {
    file: BufWriter<File>,
    first: bool,
}

impl Writer {
    /// Creates the file, or replaces another trace.
    ///
    /// # Errors
    /// Of the file system; of every function here.
    pub fn create(path: &Path) -> Result<Self> {
        let mut file = BufWriter::new(OUTPUT.create(path)?);
        writeln!(file, "{BEGINNING}")?;
        Ok(Self { file, first: true })
    }

    fn line(&mut self, text: &str) -> Result<()> {
        let comma = if std::mem::take(&mut self.first) { "" } else { ",\n" };
        self.file.write_all(comma.as_bytes())?;
        self.file.write_all(text.as_bytes())
    }

    /// All ops of a rank.
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
    pub fn finish(mut self) -> Result<()> {
        self.file.write_all(b"\n]}\n")?;
        self.file.flush()
    }
}

/// What was noted of a real run.
///
/// # Errors
/// Of the file system.
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

/// The last simulated step; says in words which ranks were written.
///
/// # Errors
/// Of the file system.
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
