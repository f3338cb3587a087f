//! Lists the ops of a step in program order, for `onebox plan --ops`.

use super::dtype_name;
use config::Config;
use device::recorder::{self, ListedOp};
use device::{Error, Mode};
use engine::dry_run::{IDLE, first_rank, play_steps};
use layout::build::RankLayout;
use serde::Serialize;
use std::cell::Cell;
use std::rc::Rc;

/// An op of the step.
#[derive(Clone, Debug, Serialize)]
pub struct Op {
    /// Number in program order, from 1. Ops of the previous step have numbers up to 0.
    pub number: i64,
    /// Source file that submits the op, relative to the root of the repository.
    pub file: &'static str,
    /// Line in the source file.
    pub line: u32,
    /// Name of the lane: `Compute`, `TpComm`, `DpComm`, `H2d`, `D2h`, `ActivationsUp`,
    /// `ActivationsDown` or `Host`.
    pub lane: String,
    /// Name of the op: `gemm`, `all_reduce`, `adam_tile`, ...
    pub name: &'static str,
    /// Ranges that the op reads or writes.
    pub tensors: Vec<TouchedRange>,
    /// Bytes read and written; for a copy, its length. 0 if the op does nothing in most steps.
    pub bytes: u64,
    /// Floating-point operations of the dense work; a multiply-add counts 2.
    pub flops: f64,
    /// Numbers of the ops on other lanes for which the op waits.
    pub waits: Vec<i64>,
}

/// A range that an op touches.
#[derive(Clone, Debug, Serialize)]
pub struct TouchedRange {
    /// Name of the planned buffer.
    pub name: String,
    /// `read`, `write` or `update` (read and written in place).
    pub mode: String,
    /// Element type: `f16`, `bf16`, `f32`, `f64` or `i32`.
    pub dtype: String,
    /// Rows and columns.
    pub shape: (usize, usize),
}

/// Calls `tell` for every op of rank 0 in a typical step.
///
/// # Errors
/// Returns an error if the step fails its own checks, which is a defect of onebox.
pub fn list(
    config: &Config,
    built: &RankLayout,
    mut tell: impl FnMut(&Op) + 'static,
) -> Result<(), Error> {
    // Number of ops before the listed step.
    let before: Rc<Cell<Option<u64>>> = Rc::default();
    let seen = Rc::new(Cell::new(0));
    let (of_step, last) = (Rc::clone(&before), Rc::clone(&seen));
    let listener = move |listed: ListedOp| {
        last.set(listed.number);
        if let Some(before) = of_step.get() {
            tell(&op(listed, before));
        }
    };
    let dev = recorder::list(first_rank(config), &built.plan, Box::new(listener));
    play_steps(config, built, &dev, 2, &mut || before.set(Some(seen.get())))
}

fn op(listed: ListedOp, before: u64) -> Op {
    let number = |n: u64| n as i64 - before as i64;
    let touched = |(mode, name, t): (Mode, String, device::Tensor)| TouchedRange {
        name,
        mode: format!("{mode:?}").to_lowercase(),
        dtype: dtype_name(t.dtype()),
        shape: t.shape(),
    };
    Op {
        number: number(listed.number),
        file: listed.site.file(),
        line: listed.site.line(),
        lane: format!("{:?}", listed.lane),
        name: listed.name,
        tensors: listed.tensors.into_iter().map(touched).collect(),
        bytes: if listed.name == IDLE { 0 } else { listed.bytes },
        flops: listed.flops,
        waits: listed.waits.into_iter().map(number).collect(),
    }
}
