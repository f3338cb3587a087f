//! The message about an op with other results on a GPU: its figures, who computes it, and remedies.

use config::{Attention, Config};
use device::lockstep::Discrepancy;
use layout::LocalMachine;

/// An op that has other results on a GPU than on the `cpu` backend.
#[derive(Clone, Debug)]
pub struct GpuDiscrepancy {
    /// Number of the GPU, as the driver's number, and its product name.
    gpu: String,
    discrepancy: Discrepancy,
    remedy: String,
}

impl GpuDiscrepancy {
    pub(super) fn new(
        config: &Config,
        machine: &LocalMachine,
        gpu: usize,
        found: &Discrepancy,
    ) -> Self {
        let known = machine.cuda().gpus.iter().find(|known| known.ordinal == gpu);
        let name = known.map_or_else(String::new, |known| format!(", {}", known.name));
        let gpu = format!("GPU {gpu}{name}");
        let version = |library: &str| {
            let known = machine.cuda().libraries.iter().find(|known| known.name == library);
            match known.and_then(|known| known.version.as_ref().ok()) {
                Some(version) => format!("{library} {version}"),
                None => library.to_owned(),
            }
        };
        let remedy = match found.op {
            "gemm" | "scaled_gemm" => {
                let library = version("cuBLASLt");
                format!(
                    "{library} computes it: install another version (`onebox doctor` shows its file)"
                )
            }
            "attention" | "attention_backward" if config.attention == Attention::Cudnn => {
                let library = version("cuDNN");
                format!("{library} computes it: set `attention: Own`, or install another version")
            }
            "copy" => {
                "the driver copies it: install another driver, and test the GPU's memory and link"
                    .to_owned()
            }
            "all_reduce" | "reduce_scatter" | "all_gather" | "broadcast" => {
                let library = version("NCCL");
                format!(
                    "{library}, or a kernel of onebox without it, computes it: install another version, and test the links between the GPUs"
                )
            }
            _ => {
                let library = version("NVRTC");
                format!(
                    "a kernel of onebox computes it, which {library} compiled: install another version, or report it"
                )
            }
        };
        Self { gpu, discrepancy: found.clone(), remedy }
    }

    /// The op and its numbers.
    pub const fn discrepancy(&self) -> &Discrepancy {
        &self.discrepancy
    }
}

impl std::error::Error for GpuDiscrepancy {}

impl std::fmt::Display for GpuDiscrepancy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { gpu, discrepancy, remedy } = self;
        write!(
            f,
            "{gpu} computes other numbers than the cpu backend: {discrepancy}\n  {remedy}; a GPU with errors of memory has them in \
             `nvidia-smi -q -d ECC`; `train.proof: false` trains in spite of it"
        )
    }
}
