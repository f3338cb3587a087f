//! Host memory that the process needs in addition to the plan.
//!
//! The constants were measured. In runs of 1, 4 and 16 ranks with 1, 2 and 8 kernel threads each,
//! `RssAnon` in /proc/PID/status, read every 3 ms, was at most 4.2 MiB above the plan. A cgroup
//! also counts file pages that wait for the disk, and the kernel's pages for threads and page
//! tables. A run of one rank was never killed at a limit 10.6 MiB above its plan, and sometimes at
//! 8.6 MiB.

use super::windows::window_bytes;
use config::{Config, DeviceConfig};
use device::{Arena, message_bytes};
use layout::build::RankLayout;

/// Bytes of a process: data that its program and libraries write, lists, and unwritten file pages.
const PROCESS: u64 = 8 << 20;
/// Bytes of a rank: its thread, and its lists of operations and pieces.
const RANK: u64 = 1 << 20;
/// Bytes of a kernel thread: its stack, and the block through which it loads states.
const THREAD: u64 = 512 << 10;
/// Bytes of memory for each byte of a page table, which has 8 bytes per page of 4 KiB.
const PAGES_OF_A_TABLE: u64 = 512;

/// Bytes of host memory that the processes of this machine need in addition to the plan. `planned`:
/// bytes that the plan needs for their ranks.
pub fn process_overhead(config: &Config, built: &RankLayout, planned: u64) -> u64 {
    let machine = &built.machine;
    let (ranks, processes) = (machine.ranks(config) as u64, machine.processes() as u64);
    let threads = built.scratch.threads.max(1) as u64;
    let of_ranks = ranks * (RANK + threads * THREAD);
    let of_processes = processes * (PROCESS + window_bytes(&built.decoder));
    of_processes + of_ranks + planned / PAGES_OF_A_TABLE + process_messages(config, built)
}

/// Bytes of the messages between processes with virtual GPUs; each rank runs one collective at a
/// time. 0 on real GPUs: NCCL moves the data, and the messages have a few numbers.
pub fn process_messages(config: &Config, built: &RankLayout) -> u64 {
    if !matches!(config.device, DeviceConfig::Cpu { .. }) {
        return 0;
    }
    let entries = built.plan.entries().iter().filter(|entry| entry.arena == Arena::Device);
    let largest = entries.map(|entry| entry.range.end - entry.range.start).max().unwrap_or(0);
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    let of_group = |(step, size): (usize, usize)| {
        message_bytes(largest, size as u64, built.machine.remote_members(config, step, size) as u64)
    };
    built.machine.ranks(config) as u64 * of_group((1, tensor)).max(of_group((tensor, data)))
}
