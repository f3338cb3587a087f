//! Values of the `FAKECUDA_*` environment variables.

use std::sync::LazyLock;

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    pub(crate) sm: i32,
    pub(crate) memory: usize,
    pub(crate) overhead_percent: usize,
    pub(crate) accounting: bool,
    pub(crate) chaos_us: u64,
    pub(crate) queue: usize,
    /// Number of hardware queues of a device; `None`: each stream has its own queue.
    pub(crate) connections: Option<usize>,
    pub(crate) blocking: bool,
    /// Whether NCCL sums 16-bit types around a ring and rounds them at each hop.
    pub(crate) hops: bool,
    pub(crate) seed: u64,
    pub(crate) peer: bool,
    pub(crate) driver_version: i32,
    pub(crate) nvrtc_version: (i32, i32),
    /// Compute capabilities for which NVRTC compiles; `None`: those known to its version.
    pub(crate) nvrtc_architectures: Option<Vec<i32>>,
    pub(crate) cublaslt_version: usize,
    /// Microseconds of cuBLASLt's algorithms for a matmul; without any it has one, and events have
    /// the machine's clock.
    pub(crate) algorithms: Vec<u64>,
    /// Microseconds that an epilogue other than a bias adds to a matmul, and those of a kernel.
    pub(crate) epilogue_us: u64,
    pub(crate) kernel_us: u64,
    /// Largest random part of these times, in percent.
    pub(crate) noise_percent: u64,
    /// Whether cuBLASLt has epilogues other than a bias.
    pub(crate) epilogues: bool,
    pub(crate) cudnn_version: usize,
    pub(crate) cudnn_cudart: usize,
    pub(crate) nccl_version: i32,
    pub(crate) shared_devices: bool,
}

/// The configuration, read from the environment at the first call.
pub(crate) fn config() -> &'static Config {
    static CONFIG: LazyLock<Config> = LazyLock::new(Config::from_environment);
    &CONFIG
}

impl Config {
    fn from_environment() -> Self {
        let nccl_version = number("FAKECUDA_NCCL", 22403) as i32;
        Self {
            devices: number("FAKECUDA_DEVICES", 1) as usize,
            sm: number("FAKECUDA_SM", 80) as i32,
            memory: number("FAKECUDA_MEMORY", 8 << 30) as usize,
            overhead_percent: number("FAKECUDA_BESIDE", 100) as usize,
            accounting: number("FAKECUDA_ACCOUNTING", 0) != 0,
            chaos_us: number("FAKECUDA_CHAOS_US", 0),
            queue: number("FAKECUDA_QUEUE", u64::MAX) as usize,
            connections: (number("FAKECUDA_CONNECTIONS", 0) != 0)
                .then(|| number("CUDA_DEVICE_MAX_CONNECTIONS", 8).clamp(1, 32) as usize),
            blocking: number("FAKECUDA_BLOCKING", 0) != 0,
            hops: number("FAKECUDA_NCCL_HOPS", 0) != 0,
            seed: number("FAKECUDA_SEED", 1),
            peer: number("FAKECUDA_PEER", 1) != 0,
            driver_version: number("FAKECUDA_DRIVER", 13000) as i32,
            nvrtc_version: dotted("FAKECUDA_NVRTC", (12, 9)),
            nvrtc_architectures: std::env::var("FAKECUDA_NVRTC_ARCHS").ok().map(|text| {
                text.split(',').filter_map(|number| number.trim().parse().ok()).collect()
            }),
            cublaslt_version: number("FAKECUDA_CUBLASLT", 120_900) as usize,
            algorithms: std::env::var("FAKECUDA_ALGORITHMS").map_or_else(
                |_| Vec::new(),
                |text| text.split(',').filter_map(|number| number.trim().parse().ok()).collect(),
            ),
            epilogue_us: number("FAKECUDA_EPILOGUE_US", 0),
            kernel_us: number("FAKECUDA_KERNEL_US", 0),
            noise_percent: number("FAKECUDA_NOISE", 0),
            epilogues: number("FAKECUDA_EPILOGUES", 1) != 0,
            cudnn_version: number("FAKECUDA_CUDNN_VERSION", 91_900) as usize,
            cudnn_cudart: number("FAKECUDA_CUDNN_CUDART", 12_090) as usize,
            nccl_version,
            shared_devices: nccl_version >= 23000 && number("NCCL_MULTI_RANK_GPU_ENABLE", 0) == 1,
        }
    }

    /// Whether libraries of this major version work with the driver.
    pub(crate) const fn takes_major(&self, major: i32) -> bool {
        major <= self.driver_version / 1000
    }

    /// Largest dynamic shared memory of a kernel, in bytes.
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

/// The version in a variable: (12, 9) for `12.9`, and `default` if the variable is not a version.
fn dotted(name: &str, default: (i32, i32)) -> (i32, i32) {
    let text = std::env::var(name).unwrap_or_default();
    let parsed =
        text.trim().split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parsed.unwrap_or(default)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}
