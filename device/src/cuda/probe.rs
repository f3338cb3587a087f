//! Finds the parts of CUDA on this machine. It runs before other code uses CUDA, and never panics.

use super::driver::{self, Context};
use super::libraries::{LibraryFile, dotted, wheel_cuda};
use super::{blaslt, built_for, cudnn, nccl, nvrtc};
use crate::threads::panics;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use topology::PciAddress;

/// Oldest driver whose streams can wait for a word of host memory without a module parameter.
const OLDEST_DRIVER: i32 = 12_000;

/// A GPU as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's number of the GPU.
    pub ordinal: usize,
    /// The GPU's product name.
    pub name: String,
    /// Compute capability: 70 for V100, 90 for H100.
    pub sm: u32,
    /// Number of multiprocessors.
    pub processors: u32,
    /// Total bytes of the GPU's memory.
    pub memory: u64,
    /// The GPU's PCI address, if the driver reports it.
    pub pci: Option<PciAddress>,
}

/// A library and its version, or the failed search for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryInfo {
    /// Name of the library, such as `NCCL`.
    pub name: &'static str,
    /// The library's version if it was found, otherwise the names that were tried.
    pub version: Result<String, String>,
    /// The file of the library, if it was found.
    pub file: Option<LibraryFile>,
    /// Major version of CUDA of the wheel that has the file, if the name of its package tells it.
    pub wheel_cuda: Option<u32>,
    /// Other files that onebox loads for the library.
    pub parts: Vec<PathBuf>,
    /// Whether training on GPUs needs the library.
    pub required: bool,
}

impl LibraryInfo {
    /// Major version of CUDA for which the library was built. `None` if the library was not found or
    /// does not say it. For NCCL this reads a part of its file.
    pub fn built_for(&self) -> Option<u32> {
        let version = self.version.as_ref().ok()?;
        let own = || match self.name {
            NCCL => built_for::of_nccl(&self.file.as_ref()?.path),
            CUDNN => guarded(cudnn::cuda).ok(),
            // The version of the others is that of CUDA.
            _ => u32::try_from(major(version)?).ok(),
        };
        self.wheel_cuda.or_else(own)
    }
}

/// The parts of CUDA on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// CUDA version of the driver, such as 12.4, or the reason why the driver does not work.
    pub driver: Result<String, String>,
    /// The file of the driver's library, if it was found.
    pub driver_file: Option<PathBuf>,
    /// GPUs in the driver's order, which `CUDA_VISIBLE_DEVICES` changes.
    pub gpus: Vec<GpuInfo>,
    /// NVRTC, cuBLASLt, NCCL, cuDNN.
    pub libraries: Vec<LibraryInfo>,
    /// Compute capabilities for which NVRTC compiles. `None` if it reports none, as before CUDA
    /// 11.2.
    pub architectures: Option<Vec<u32>>,
}

impl Probe {
    /// Whether the driver's library is installed, working or not: this machine is meant to have
    /// GPUs.
    pub fn has_driver(&self) -> bool {
        self.driver.is_ok() || driver::is_present()
    }

    /// The reason why GPUs cannot train here; `None` if they can.
    pub fn missing(&self) -> Option<String> {
        if let Err(why) = &self.driver {
            return Some(why.clone());
        }
        if self.gpus.is_empty() {
            return Some(
                "the driver sees no GPU (CUDA_VISIBLE_DEVICES hides those it excludes)".into(),
            );
        }
        if let Some(old) = self.gpus.iter().find(|gpu| gpu.sm < 70) {
            let GpuInfo { ordinal, name, sm, .. } = old;
            return Some(format!("GPU {ordinal}, {name}, is sm_{sm}; sm_70 (V100) is the oldest"));
        }
        let gone = |l: &LibraryInfo| {
            let why = l.version.as_ref().err().filter(|_| l.required)?;
            Some(format!("{} is missing: {why}", l.name))
        };
        let missing: Vec<String> = self.libraries.iter().filter_map(gone).collect();
        let unfit = self.unfit_libraries().into_iter();
        let unfit = unfit.map(|(name, why, remedy)| format!("{name}: {why}: {remedy}"));
        let missing: Vec<String> = missing.into_iter().chain(unfit).collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }

    /// Libraries that do not work with this driver or these GPUs: name, reason and remedy.
    pub fn unfit_libraries(&self) -> Vec<(&'static str, String, String)> {
        let Some(driver) = self.driver.as_ref().ok().and_then(|text| major(text)) else {
            return Vec::new();
        };
        let oldest = self.gpus.iter().min_by_key(|gpu| gpu.sm);
        let dropped = oldest.filter(|gpu| gpu.sm < TURING);
        let is_unknown = |gpu: &&GpuInfo| {
            self.architectures.as_ref().is_some_and(|known| !known.contains(&gpu.sm))
        };
        // The newest unknown GPU (the first of equals): a compiler for it also knows older GPUs.
        let unknown = self.gpus.iter().rev().filter(is_unknown).max_by_key(|gpu| gpu.sm);
        let one = |library: &LibraryInfo| {
            let version = library.version.as_ref().ok()?;
            // NCCL has its own version numbers.
            let cuda = major(version).filter(|_| library.required)?;
            let (why, remedy) = match dropped {
                Some(GpuInfo { ordinal, name, sm, .. }) if cuda >= WITHOUT_VOLTA => (
                    format!("{version} has no code for GPU {ordinal}, {name}, sm_{sm}"),
                    "install that of CUDA 12.9, the last with code for it".to_owned(),
                ),
                _ if cuda > driver => (
                    format!("{version} is of CUDA {cuda}, and the driver is for CUDA {driver}"),
                    format!("install that of CUDA {driver}, or a driver for CUDA {cuda}"),
                ),
                _ => match unknown.filter(|_| library.name == NVRTC) {
                    Some(GpuInfo { ordinal, name, sm, .. }) => (
                        format!("{version} does not compile for GPU {ordinal}, {name}, sm_{sm}"),
                        compiler_for(*sm),
                    ),
                    None => return None,
                },
            };
            Some((library.name, why, remedy))
        };
        self.libraries.iter().filter_map(one).collect()
    }

    /// Optional libraries that are built for a CUDA version which this driver or these GPUs do not
    /// support: name, reason and remedy.
    pub fn unfit_optional_libraries(&self) -> Vec<(&'static str, String, String)> {
        let Some(driver) = self.driver.as_ref().ok().and_then(|text| major(text)) else {
            return Vec::new();
        };
        let dropped = self.gpus.iter().min_by_key(|gpu| gpu.sm).filter(|gpu| gpu.sm < TURING);
        let one = |library: &LibraryInfo| {
            let version = library.version.as_ref().ok().filter(|_| !library.required)?;
            let cuda = i32::try_from(library.built_for()?).ok()?;
            let is_of_wheel = library.wheel_cuda.is_some();
            let origin = if is_of_wheel { "of a wheel" } else { "built" };
            let (why, fitting) = match dropped {
                Some(GpuInfo { ordinal, name, sm, .. }) if cuda >= WITHOUT_VOLTA => {
                    (format!("which has no code for GPU {ordinal}, {name}, sm_{sm}"), 12)
                }
                _ if cuda > driver => (format!("and the driver is for CUDA {driver}"), driver),
                _ => return None,
            };
            let name = library.name;
            let package = name.to_lowercase();
            let remedy = match is_of_wheel {
                true => format!(
                    "pip uninstall nvidia-{package}-cu{cuda}, then pip install nvidia-{package}-cu{fitting}"
                ),
                false => format!("put {name} for CUDA {fitting} in its place"),
            };
            Some((name, format!("{version} is {origin} for CUDA {cuda}, {why}"), remedy))
        };
        self.libraries.iter().filter_map(one).collect()
    }

    /// Whether NCCL was found.
    pub fn has_nccl(&self) -> bool {
        self.libraries.iter().any(|l| l.name == NCCL && l.version.is_ok())
    }
}

const NVRTC: &str = "NVRTC";
const NCCL: &str = "NCCL";
/// Only for `attention: Cudnn`.
const CUDNN: &str = "cuDNN";

/// The first CUDA version that compiles for each architecture, according to CUDA's release notes.
const SINCE: [(u32, &str); 9] = [
    (86, "11.1"),
    (87, "11.4"),
    (89, "11.8"),
    (90, "11.8"),
    (100, "12.8"),
    (101, "12.8"),
    (120, "12.8"),
    (103, "12.9"),
    (121, "12.9"),
];

/// The remedy text: the NVRTC version that compiles for `sm`.
fn compiler_for(sm: u32) -> String {
    match SINCE.iter().find(|(known, _)| *known == sm) {
        Some((_, version)) => format!("install NVRTC {version} or newer"),
        None => "install a newer NVRTC, such as that of the driver's CUDA version".into(),
    }
}

/// The first CUDA version without code for sm_70, and the oldest architecture that it supports.
const WITHOUT_VOLTA: i32 = 13;
const TURING: u32 = 75;

/// The major version number, such as 12 of `12.9` or `12.9.0`.
fn major(version: &str) -> Option<i32> {
    version.split('.').next()?.parse().ok()
}

/// Looks for the driver, GPUs and libraries. Call it before other threads start: it sets two
/// environment variables that the driver reads at its start, if they are not set.
pub fn probe() -> Probe {
    let asked = guarded(driver_version).and_then(|version| {
        let all = guarded(gpus).map_err(|why| format!("the driver does not list its GPUs: {why}"));
        all.map(|gpus| (version, gpus))
    });
    let (driver, gpus) = match asked {
        Ok((version, gpus)) => (Ok(version), gpus),
        Err(why) => (Err(why), Vec::new()),
    };
    let library = |name, required, version: Result<String, String>, file: fn() -> FoundFile| {
        let file = version.is_ok().then(|| guarded(file).ok()).flatten();
        let wheel_cuda = file.as_ref().and_then(|file| wheel_cuda(&file.path));
        LibraryInfo { name, version, file, wheel_cuda, parts: Vec::new(), required }
    };
    let mut compiler = library(NVRTC, true, guarded(nvrtc_version), nvrtc::file);
    let mut architectures = None;
    if compiler.version.is_ok() {
        compiler.parts = guarded(nvrtc::builtins).ok().flatten().into_iter().collect();
        architectures = guarded(nvrtc::architectures).ok();
    }
    let libraries = vec![
        compiler,
        library("cuBLASLt", true, guarded(blaslt_version), blaslt::file),
        library(NCCL, false, guarded(nccl_version), nccl::file),
        library(CUDNN, false, guarded(cudnn::version), cudnn::file),
    ];
    Probe { driver, driver_file: driver::file(), gpus, libraries, architectures }
}

type FoundFile = Result<LibraryFile, String>;

/// Compiles an empty kernel for the newest GPU, or without a GPU for the newest architecture that
/// NVRTC knows. NVRTC looks for its built-in functions only now.
///
/// # Errors
/// The message of NVRTC.
pub fn try_compiler(probe: &Probe) -> Result<(), String> {
    let known = probe.architectures.iter().flatten().copied();
    let sm = probe.gpus.iter().map(|gpu| gpu.sm).max().or_else(|| known.max());
    let options = [format!("--gpu-architecture=sm_{}", sm.unwrap_or(TURING))];
    let source = "extern \"C\" __global__ void nothing() {}";
    guarded(|| nvrtc::compile("nothing.cu", source, &options).map(drop))
}

/// Free bytes of a GPU after the creation of a context, which also needs memory.
///
/// # Errors
/// The driver's error.
pub fn free_memory(ordinal: usize) -> Result<u64, String> {
    guarded(|| {
        driver::init()?;
        Ok(Context::of(ordinal)?.memory()?.0)
    })
}

/// Turns a panic of cudarc into an error: cudarc panics if a library or a symbol is missing.
pub(super) fn guarded<T>(ask: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    panics::quietly(|| catch_unwind(AssertUnwindSafe(ask)))
        .unwrap_or_else(|_| Err("a library lacks a function that is needed: it is too old".into()))
}

fn driver_version() -> Result<String, String> {
    if !driver::is_present() {
        return Err(
            "no NVIDIA driver: libcuda.so.1 is neither in LD_LIBRARY_PATH nor in the system".into(),
        );
    }
    driver::init()?;
    let version = driver::version()?;
    let text = format!("{}.{}", version / 1000, version % 1000 / 10);
    if version < OLDEST_DRIVER {
        return Err(format!("the NVIDIA driver is for CUDA {text}; 12.0 or newer is needed"));
    }
    Ok(text)
}

fn gpus() -> Result<Vec<GpuInfo>, String> {
    let one = |ordinal| {
        Ok(GpuInfo {
            ordinal,
            name: driver::device_name(ordinal)?,
            sm: driver::device_sm(ordinal)?,
            processors: driver::device_processors(ordinal)?,
            memory: driver::device_memory(ordinal)?,
            pci: driver::device_address(ordinal)?.parse().ok(),
        })
    };
    (0..driver::device_count()?).map(one).collect()
}

fn nvrtc_version() -> Result<String, String> {
    nvrtc::version().map(|(major, minor)| format!("{major}.{minor}"))
}

fn blaslt_version() -> Result<String, String> {
    blaslt::version().map(dotted)
}

fn nccl_version() -> Result<String, String> {
    nccl::version().map(|version| dotted(version as usize))
}
