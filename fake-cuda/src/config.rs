//! The `FAKECUDA_*` variables.

use crate::failure::{Failure, parse_failures};

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    pub(crate) sm: i32,
    pub(crate) memory: usize,
    pub(crate) chaos_us: u64,
    pub(crate) queue: usize,
    pub(crate) seed: u64,
    pub(crate) peer: bool,
    pub(crate) driver_version: i32,
    pub(crate) nccl_version: i32,
    pub(crate) shared_devices: bool,
    pub(crate) failures: Vec<Failure>,
}

impl Config {
    pub(crate) fn from_environment() -> Self {
        let nccl_version = number("FAKECUDA_NCCL", 22403) as i32;
        Self {
            devices: number("FAKECUDA_DEVICES", 1) as usize,
            sm: number("FAKECUDA_SM", 80) as i32,
            memory: number("FAKECUDA_MEMORY", 1 << 30) as usize,
            chaos_us: number("FAKECUDA_CHAOS_US", 0),
            queue: number("FAKECUDA_QUEUE", u64::MAX) as usize,
            seed: number("FAKECUDA_SEED", 1),
            peer: number("FAKECUDA_PEER", 1) != 0,
            driver_version: number("FAKECUDA_DRIVER", 13000) as i32,
            nccl_version,
            shared_devices: nccl_version >= 23000 && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1,
            failures: parse_failures(&std::env::var("FAKECUDA_FAIL").unwrap_or_default()),
        }
    }

    /// Largest dynamic shared memory that a kernel may ask for.
    pub(crate) fn shared_memory_optin(&self) -> i32 {
        match self.sm {
            70 | 72 => 96 << 10,
            75 => 64 << 10,
            80 | 87 => 163 << 10,
            86 | 89 | 120.. => 99 << 10,
            90..120 => 227 << 10,
            _ => 48 << 10,
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}
