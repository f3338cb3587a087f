//! `onebox plan --ops`: prints a line for every op of a step, or one JSON document. The ops are
//! written while the step is recorded, since large models have millions of ops.

use super::defect;
use crate::commands::{CommandError, Failable, code, seen};
use crate::report::progress::si;
use config::Config;
use files::path_text::lines;
use layout::build::RankLayout;
use predict::plan::{Op, TouchedRange, list};
use std::cell::RefCell;
use std::io::{BufWriter, Result, Stdout, Write, stdout};
use std::rc::Rc;
use topology::format_bytes;

/// Output of the ops, with the first write error.
struct Sink {
    out: BufWriter<Stdout>,
    json: bool,
    listed: u64,
    written: Result<()>,
}

pub(super) fn run(
    config: &Config,
    built: &RankLayout,
    json: bool,
) -> std::result::Result<(), CommandError> {
    let out = BufWriter::with_capacity(1 << 16, stdout());
    let mut sink = Sink { out, json, listed: 0, written: Ok(()) };
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    let name = serde_json::to_string(&config.name).fail_with(code::INTERNAL)?;
    sink.written = match json {
        true => write!(
            sink.out,
            "{{\"name\":{name},\"tensor\":{tensor},\"data\":{data},\"rank\":0,\"ops\":["
        ),
        false => sink.out.write_all(HEADER.as_bytes()),
    };
    let sink = Rc::new(RefCell::new(sink));
    let shared = Rc::clone(&sink);
    list(config, built, move |op| shared.borrow_mut().tell(op)).map_err(|e| defect(&e))?;
    let sink = &mut *sink.borrow_mut();
    let end = if json { "\n]}\n" } else { "" };
    let written = std::mem::replace(&mut sink.written, Ok(()));
    let written = written.and_then(|()| sink.out.write_all(end.as_bytes()));
    seen(written.and_then(|()| sink.out.flush())).map(drop)
}

const HEADER: &str = "\
# A step of rank 0 like most, in program order: number, lane, op, source line, bytes moved, FLOPs, ops that it waits for\n\
# (0 and below: of the step before), tensors read -> written (+ in place)\n";

impl Sink {
    fn tell(&mut self, op: &Op) {
        if self.written.is_ok() {
            self.written = if self.json { self.value(op) } else { self.line(op) };
            self.listed += 1;
        }
    }

    fn value(&mut self, op: &Op) -> Result<()> {
        let comma = if self.listed == 0 { "\n" } else { ",\n" };
        self.out.write_all(comma.as_bytes())?;
        Ok(serde_json::to_writer(&mut self.out, op)?)
    }

    fn line(&mut self, op: &Op) -> Result<()> {
        let place = format!("{}:{}", op.file, op.line);
        let flops = if op.flops > 0.0 { si(op.flops) } else { "-".into() };
        let waits: Vec<String> = op.waits.iter().map(i64::to_string).collect();
        let waits = if waits.is_empty() { "-".into() } else { waits.join(",") };
        let line = format!(
            "{:>6}  {:<8} {:<20} {place:<42} {:>11} {flops:>8}  {waits:<10}  {}\n",
            op.number,
            op.lane,
            op.name,
            format_bytes(op.bytes),
            tensors(&op.tensors)
        );
        self.out.write_all(lines(&line).as_bytes())
    }
}

/// Names of read and written tensors, with `+` for in place: `x.0 block.0.params -> +grads`.
fn tensors(all: &[TouchedRange]) -> String {
    let of = |read: bool| {
        let those = all.iter().filter(|t| (t.mode == "read") == read);
        let names: Vec<String> = those
            .map(|t| format!("{}{}", if t.mode == "update" { "+" } else { "" }, t.name))
            .collect();
        names.join(" ")
    };
    format!("{} -> {}", of(true), of(false)).trim().to_owned()
}
