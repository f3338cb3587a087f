//! The last ops of each lane. An error that appears late can then name the ops around it.

use super::driver::Failure;
use super::progress::StreamProgress;
use crate::error::Site;
use crate::{AdmittedOp, LANES, Lane};
use cudarc::driver::sys::CUresult;
use std::sync::{Mutex, PoisonError};

const REMEMBERED: usize = 1024;

#[derive(Debug)]
pub(super) struct History {
    ops: Mutex<Vec<[Option<Entry>; LANES]>>,
    /// Progress of each stream.
    passed: Vec<StreamProgress>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    tick: u64,
    op: &'static str,
    site: Site,
}

/// The place where an error appeared, and hints at its cause.
#[derive(Debug)]
pub(super) struct ErrorPlace {
    pub(super) op: &'static str,
    pub(super) site: Option<Site>,
    pub(super) problem: String,
}

impl History {
    pub(super) fn new(passed: Vec<StreamProgress>) -> Self {
        Self { ops: Mutex::new(vec![[None; LANES]; REMEMBERED]), passed }
    }

    pub(super) fn remember(&self, op: &AdmittedOp) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = Entry { tick: op.tick, op: op.op.name(), site: op.site };
        ops[op.tick as usize % REMEMBERED][op.lane as usize] = Some(entry);
    }

    fn find(&self, lane: usize, tick: u64) -> Option<Entry> {
        let ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops[tick as usize % REMEMBERED][lane].filter(|entry| entry.tick == tick)
    }

    /// The place of `failure`, which a call for op `tick` of `lane` returned.
    pub(super) fn place(&self, lane: Lane, tick: u64, failure: &Failure) -> ErrorPlace {
        let found = self.find(lane as usize, tick);
        let (op, site) = found.map_or(("an op", None), |entry| (entry.op, Some(entry.site)));
        let mut problem = failure.to_string();
        if is_sticky(failure.code) {
            problem += ". It came out here and was caused here or by an earlier op of any lane";
            problem += &self.passed();
        }
        ErrorPlace { op, site, problem }
    }

    /// A text about the last op that each stream is known to have passed.
    fn passed(&self) -> String {
        let mut text = String::new();
        for (lane, passed) in Lane::ALL.into_iter().zip(&self.passed) {
            // The word holds the low part of a tick. The full ticks in the ring agree with it.
            let tick = passed.look().tick;
            if let Some(Entry { op, site, .. }) = self.find(lane as usize, tick) {
                text += &format!("; {lane:?} had passed {op} at {site}");
            }
        }
        text
    }
}

/// Whether the context is lost, so that every later call fails with the same code.
const fn is_sticky(code: CUresult) -> bool {
    !matches!(
        code,
        CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_INVALID_HANDLE
            | CUresult::CUDA_ERROR_INVALID_CONTEXT
            | CUresult::CUDA_ERROR_OUT_OF_MEMORY
            | CUresult::CUDA_ERROR_NOT_SUPPORTED
            | CUresult::CUDA_ERROR_NOT_FOUND
            | CUresult::CUDA_ERROR_NOT_INITIALIZED
            | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    )
}
