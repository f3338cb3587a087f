//! What the process takes of the host's memory besides the plan.
//!
//! How the figures were got: runs of 1, 4 and 16 ranks with 1, 2 and 8 kernel threads each, whose `RssAnon` of
//! /proc/PID/status was read every 3 ms, had at most 4.2 MiB more than their plans. A cgroup also counts pages of files that wait
//! for the disk, and the kernel's own for threads and page tables: a run of one rank was never killed under a limit 10.6 MiB
//! above its plan, and sometimes under one of 8.6 MiB.

use crate::run::export::window_bytes;
use crate::train::build::Built;

/// Of the process: what its program and libraries write to, lists, files that wait for the disk.
const PROCESS: u64 = 8 << 20;
/// Of each rank: its thread, its lists of operations and pieces.
const RANK: u64 = 1 << 20;
/// Of each kernel thread: its stack, and the block in which it brings in states.
const THREAD: u64 = 512 << 10;
/// A page table has 8 bytes for each page of 4 KiB.
const PAGES_OF_A_TABLE: u64 = 512;

/// Bytes of the host that the process takes besides the plan, `planned` bytes of all ranks.
pub(super) fn beside(built: &Built, planned: u64) -> u64 {
    let ranks = (built.gpt.shape().tp_size * built.layout.dp_size()) as u64;
    let threads = built.scratch.threads.max(1) as u64;
    let of_ranks = ranks * (RANK + threads * THREAD);
    PROCESS + of_ranks + window_bytes(&built.gpt) + planned / PAGES_OF_A_TABLE
}
