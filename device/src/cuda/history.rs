//! The last ops of each stream, so that an error that comes out late can say near which op it happened.

use super::driver::Failure;
use super::progress::Passed;
use crate::error::Site;
use crate::{Admitted, LANES, Lane};
use cudarc::driver::sys::CUresult;
use std::sync::{Mutex, PoisonError};

const REMEMBERED: usize = 1024;

#[derive(Debug)]
pub(super) struct History {
    ops: Mutex<Vec<[Option<Entry>; LANES]>>,
    /// Per stream.
    passed: Vec<Passed>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    tick: u64,
    op: &'static str,
    site: Site,
}

/// Where an error came out, and what is known of its cause.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) op: &'static str,
    pub(super) site: Option<Site>,
    pub(super) problem: String,
}

impl History {
    pub(super) fn new(passed: Vec<Passed>) -> Self {
        Self { ops: Mutex::new(vec![[None; LANES]; REMEMBERED]), passed }
    }

    pub(super) fn remember(&self, op: &Admitted) {
        let mut ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = Entry { tick: op.tick, op: op.op.name(), site: op.site };
        ops[op.tick as usize % REMEMBERED][op.lane as usize] = Some(entry);
    }

    fn find(&self, lane: usize, tick: u64) -> Option<Entry> {
        let ops = self.ops.lock().unwrap_or_else(PoisonError::into_inner);
        ops[tick as usize % REMEMBERED][lane].filter(|entry| entry.tick == tick)
    }

    /// `failure` came out of a call about op `tick` of `lane`.
    pub(super) fn place(&self, lane: Lane, tick: u64, failure: &Failure) -> Place {
        let found = self.find(lane as usize, tick);
        let (op, site) = found.map_or(("an op", None), |entry| (entry.op, Some(entry.site)));
        let mut problem = failure.to_string();
        if is_sticky(failure.code) {
            problem += ". It came out here and was caused here or by an earlier op of any lane";
            problem += &self.passed();
        }
        Place { op, site, problem }
    }

    /// How far each stream is known to have come.
    fn passed(&self) -> String {
        let mut text = String::new();
        for (lane, passed) in Lane::ALL.into_iter().zip(&self.passed) {
            // The low part of the tick: full ticks of the ring agree with it.
            let tick = passed.look().tick;
            if let Some(Entry { op, site, .. }) = self.find(lane as usize, tick) {
                text += &format!("; {lane:?} had passed {op} at {site}");
            }
        }
        text
    }
}

/// The context is lost: every later call fails with the same code.
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
