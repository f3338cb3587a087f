//! What the process takes of the host's memory besides the plan.
//!
//! How the figures were got: runs of 1, 4 and 16 ranks with 1, 2 and 8 kernel threads each, whose `RssAnon` of
//! /proc/PID/status was read every 3 ms, had at most 4.2 MiB more than their plans. A cgroup also counts pages of files that wait
//! for the disk, and the kernel's own for threads and page tables: a run of one rank was never killed under a limit 10.6 MiB
//! above its plan, and sometimes under one of 8.6 MiB.

use super::windows::window_bytes;
use config::{Config, DeviceConfig};
use device::{Arena, message_bytes};
use layout::build::RankLayout;

/// Of the process: what its program and libraries write to, lists, files that wait for the disk.
const PROCESS: u64 = 8 << 20;
/// Of each rank: its thread, its lists of operations and pieces.
const RANK: u64 = 1 << 20;
/// Of each kernel thread: its stack, and the block in which it brings in states.
const THREAD: u64 = 512 << 10;
/// A page table has 8 bytes for each page of 4 KiB.
const PAGES_OF_A_TABLE: u64 = 512;

/// Bytes of the host that the processes of this machine take besides the plan, `planned` bytes of their ranks.
pub fn beside(config: &Config, built: &RankLayout, planned: u64) -> u64 {
    let machine = &built.machine;
    let (ranks, processes) = (machine.ranks(config) as u64, machine.processes() as u64);
    let threads = built.scratch.threads.max(1) as u64;
    let of_ranks = ranks * (RANK + threads * THREAD);
    let of_processes = processes * (PROCESS + window_bytes(&built.decoder));
    of_processes + of_ranks + planned / PAGES_OF_A_TABLE + letters(config, built)
}

/// Bytes of letters between the processes of virtual GPUs, whose ranks do one collective at a time. On GPUs NCCL moves the data, and
/// letters have a few numbers.
pub fn letters(config: &Config, built: &RankLayout) -> u64 {
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
