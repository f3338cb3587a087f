//! Keys that split the network and the samples of a step over the ranks.

use super::declare::section;
use super::fine_tune::{FineTune, default_samples};
use super::reading::KeyDefault;
use serde::Serialize;

section! {
    /// Grid of the ranks.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ParallelConfig, read(s) {
        /// Tensor-parallel (TP) degree: number of GPUs that share one replica of the model.
        tensor: usize = uint(1..=4096, KeyDefault::Default(1)), resume: Layout;
        /// Data-parallel (DP) degree: number of replicas of the model.
        data: usize = uint(1..=4096, KeyDefault::Default(1)), resume: Layout;
        /// Whether norms, dropout and residuals are split by tokens over the TP ranks (sequence
        /// parallelism).
        sequence: bool = flag(KeyDefault::Default(false)), resume: Layout;
        /// Whether sums over ranks exchange 32-bit numbers: partial sums of TP, and gradients over
        /// DP, whose sum is rounded once. Otherwise NCCL rounds 16-bit sums at each hop; in-process
        /// sums are fp32 in any case. With `parallel.data` above 1 and 16-bit storage it needs 4
        /// bytes of GPU memory for each element of the longest gradient piece, about
        /// `offload.bucket_elements` at most.
        reduce_fp32: bool = flag(KeyDefault::Default(false)), resume: Layout;
        /// Whether a TP group may have ranks in several processes, under `mpirun` or `srun`; its
        /// sums inside layers then cross the network. `false`: the ranks of a process must be whole
        /// TP groups.
        tensor_across_nodes: bool = flag(KeyDefault::Default(false)), resume: Layout;
    }
}

/// Largest number of samples of a key: 2^31.
const SAMPLES: u64 = 1 << 31;

section! {
    /// Batch sizes in samples of `model.seq_len` tokens.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct BatchConfig, read(s, parallel: &ParallelConfig, tune: Option<FineTune>) {
        /// Number of samples that each replica of the model (`parallel.data`) computes in one pass:
        /// the micro-batch size.
        micro: usize = uint(1..=SAMPLES, KeyDefault::Default(1)), resume: Layout;

        let pass = micro * parallel.data;
        /// Number of samples of an optimizer step over all replicas; a multiple of `batch.micro` x
        /// `parallel.data`, which is the default. The default with pretrained weights is 8, or the
        /// next multiple.
        global: usize = uint(1..=SAMPLES, match tune {
            Some(_) => KeyDefault::Derived(
                default_samples(pass),
                "8, or the next multiple of micro x data: default of pretrained weights",
                &["model.from", "model.weights", "batch.micro", "parallel.data"],
            ),
            None => KeyDefault::Derived(pass, "micro x data", &["batch.micro", "parallel.data"]),
        }), resume: Experiment;
    }
}
