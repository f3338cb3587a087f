//! Counts of a launch: instructions and memory accesses.

use std::collections::BTreeMap;

use super::op::{Alu, Kind, Op, Space};

/// Kinds of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// Sums, products and comparisons of f32.
    Single,
    /// All operations of f64.
    Double,
    /// Integers and bits.
    Integer,
    /// Conversions between types.
    Convert,
    /// Copies between registers; mostly absent from machine code.
    Move,
    /// Quotients, roots and exponentials.
    Special,
    /// `mma`.
    Tensor,
    /// `ldmatrix`.
    Matrix,
    /// Reads of global memory.
    LoadGlobal,
    /// Writes of global memory.
    StoreGlobal,
    /// Reads of shared memory.
    LoadShared,
    /// Writes of shared memory.
    StoreShared,
    /// `cp.async`.
    Copy,
    /// Waits for `cp.async`.
    Wait,
    /// Shuffles.
    Shuffle,
    /// Barriers and fences.
    Barrier,
    /// Branches and ends.
    Branch,
}

pub(super) fn unit(op: &Op) -> Unit {
    match op {
        Op::Alu { f: Alu::Move | Alu::Pack | Alu::Low | Alu::High, .. } | Op::Window { .. } => {
            Unit::Move
        }
        Op::Alu { f: Alu::Reciprocal | Alu::Root | Alu::Exp2, ty, .. } if ty.bits == 32 => {
            Unit::Special
        }
        Op::Alu { f: Alu::Div | Alu::Rem, ty, .. } if ty.bits == 32 || ty.kind != Kind::Float => {
            Unit::Special
        }
        Op::Alu { ty, .. } | Op::Set { ty, .. } if ty.kind == Kind::Float && ty.bits == 64 => {
            Unit::Double
        }
        Op::Alu { ty, .. } | Op::Set { ty, .. } if ty.kind == Kind::Float => Unit::Single,
        Op::Alu { .. } | Op::Set { .. } => Unit::Integer,
        Op::Convert { .. } | Op::ToFp8 { .. } => Unit::Convert,
        Op::Load { space: Space::Shared, .. } => Unit::LoadShared,
        Op::Store { space: Space::Shared, .. } => Unit::StoreShared,
        Op::Load { .. } => Unit::LoadGlobal,
        Op::Store { .. } => Unit::StoreGlobal,
        Op::CopyAsync { .. } => Unit::Copy,
        Op::Shuffle { .. } => Unit::Shuffle,
        Op::LoadMatrices { .. } => Unit::Matrix,
        Op::Multiply { .. } | Op::MultiplyQuarters { .. } => Unit::Tensor,
        Op::WaitCopies { .. } => Unit::Wait,
        Op::Barrier | Op::WarpBarrier { .. } | Op::Fence | Op::CloseCopies => Unit::Barrier,
        Op::Branch { .. } | Op::Return => Unit::Branch,
    }
}

/// Counts of a launch. A request is one memory instruction of one warp.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of warp instructions, by kind.
    pub instructions: BTreeMap<Unit, u64>,
    /// Number of thread instructions.
    pub threads: u64,
    /// Requests to global memory.
    pub requests: u64,
    /// Sectors of 32 bytes that the requests access.
    pub sectors: u64,
    /// Sectors that the same bytes need if they are adjacent.
    pub least_sectors: u64,
    /// Bytes read from global memory; a byte counts at each read.
    pub read: u64,
    /// Bytes written to global memory.
    pub written: u64,
    /// Distinct bytes read plus distinct bytes written, in global memory.
    pub touched: u64,
    /// Passes over shared memory.
    pub passes: u64,
    /// Passes over shared memory without bank conflicts.
    pub least_passes: u64,
}

impl Counts {
    /// Number of warp instructions.
    pub fn executed(&self) -> u64 {
        self.instructions.values().sum()
    }

    /// Mean number of threads that take part in an instruction, out of 32.
    pub fn lanes(&self) -> f64 {
        self.threads as f64 / self.executed().max(1) as f64
    }

    /// Counts one request to global memory.
    pub(super) fn global(&mut self, addresses: &[u64], bytes: usize, write: bool) {
        let last = |at: u64| (at + bytes as u64 - 1) / 32;
        let mut sectors: Vec<u64> = addresses.iter().flat_map(|&at| at / 32..=last(at)).collect();
        sectors.sort_unstable();
        sectors.dedup();
        let mut distinct: Vec<u64> = addresses.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        self.requests += 1;
        self.sectors += sectors.len() as u64;
        self.least_sectors += (distinct.len() * bytes).div_ceil(32) as u64;
        *(if write { &mut self.written } else { &mut self.read }) +=
            (addresses.len() * bytes) as u64;
    }

    /// Counts one request to shared memory, which has 32 banks of 4 bytes. Accesses of 8 bytes run
    /// by halves of a warp, and of 16 bytes by quarters.
    pub(super) fn shared(&mut self, addresses: &[(usize, u64)], bytes: usize) {
        let group = 128 / bytes.max(4);
        for first in (0..32).step_by(group) {
            let mut words: Vec<u64> = addresses
                .iter()
                .filter(|(lane, _)| (first..first + group).contains(lane))
                .flat_map(|&(_, at)| at / 4..=(at + bytes as u64 - 1) / 4)
                .collect();
            if words.is_empty() {
                continue;
            }
            words.sort_unstable();
            words.dedup();
            let mut banks = [0_u64; 32];
            words.iter().for_each(|word| banks[(word % 32) as usize] += 1);
            self.passes += banks.iter().copied().max().unwrap_or(0);
            self.least_passes += 1;
        }
    }
}
