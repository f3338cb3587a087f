//! How the network is cut over the ranks, and the samples of a step dealt to them.

use super::declare::section;
use super::reading::KeyDefault;
use serde::Serialize;

section! {
    /// The rank grid.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ParallelConfig, read(s) {
        /// TP degree: GPUs that share one replica of the model.
        tensor: usize = uint(1..=4096, KeyDefault::Default(1)), resume: Layout;
        /// DP degree: replicas of the model.
        data: usize = uint(1..=4096, KeyDefault::Default(1)), resume: Layout;
        /// Sequence parallelism: norms, dropout and residuals are split by tokens over TP.
        sequence: bool = flag(KeyDefault::Default(false)), resume: Layout;
        /// Sums over ranks exchange 32-bit numbers: TP's partial sums, and gradients over DP, whose sum is rounded
        /// once. NCCL otherwise rounds 16-bit sums at each hop; in-process sums are fp32 in any case. With DP it takes
        /// 4 bytes for each element of the longest bucket.
        reduce_fp32: bool = flag(KeyDefault::Default(false)), resume: Layout;
        /// Under `mpirun` or `srun`: a TP group may have ranks in several processes, whose sums inside layers then go
        /// through the network. Without it the ranks of a process must be whole TP groups.
        tensor_across_nodes: bool = flag(KeyDefault::Default(false)), resume: Layout;
    }
}

/// Samples of any kind: 2^31.
const SAMPLES: u64 = 1 << 31;

section! {
    /// Batch sizes in samples of `seq_len` tokens.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct BatchConfig, read(s, parallel: &ParallelConfig) {
        /// Samples of a rank in one pass.
        micro: usize = uint(1..=SAMPLES, KeyDefault::Default(1)), resume: Layout;
        /// Samples of an optimizer step over all ranks; a multiple of micro x data.
        global: usize = uint(1..=SAMPLES, KeyDefault::Derived(
            micro * parallel.data, "micro x data", &["batch.micro", "parallel.data"]
        )), resume: Experiment;
    }
}
