//! One library that stands in for `libcuda`, `libnvrtc`, `libcublasLt`, `libnccl` and `libcudnn` on
//! machines without a GPU.
//!
//! For tests only. The code under test opens the five libraries by name, as cudarc does. It must
//! therefore run in a **child process** whose `LD_LIBRARY_PATH` is [`library_folder`]. Environment
//! variables set everything else; they are read at the first call:
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | 1 | number of devices |
//! | `FAKECUDA_SM` | 80 | compute capability, e.g. 70 or 90 |
//! | `FAKECUDA_MEMORY` | 8 GiB | bytes per device; beyond it `CUDA_ERROR_OUT_OF_MEMORY` |
//! | `FAKECUDA_BESIDE` | 100 | percent of the usual memory overhead, see below; 0: none |
//! | `FAKECUDA_ACCOUNTING` | 0 | 1: memory is addresses without bytes, see below |
//! | `FAKECUDA_CHAOS_US` | 0 | longest random sleep before each stream op, in microseconds |
//! | `FAKECUDA_SEED` | 1 | seed of these sleeps |
//! | `FAKECUDA_QUEUE` | no limit | capacity of a queue in ops (about 1,000 on a real device) |
//! | `FAKECUDA_CONNECTIONS` | 0 | 1: streams share hardware queues, see below |
//! | `FAKECUDA_BLOCKING` | 0 | 1: a full queue also blocks queries, see below |
//! | `FAKECUDA_NCCL_HOPS` | 0 | 1: 16-bit sums go around a ring and are rounded at each hop |
//! | `FAKECUDA_FAIL` | none | failures on demand, see below |
//! | `FAKECUDA_WRONG` | none | wrong results on demand, see below |
//! | `FAKECUDA_PEER` | 1 | 0: devices cannot access each other |
//! | `FAKECUDA_DRIVER` | 13000 | result of `cuDriverGetVersion` |
//! | `FAKECUDA_NVRTC` | 12.9 | result of `nvrtcVersion`; 13 and newer compile for sm_75 and newer |
//! | `FAKECUDA_NVRTC_ARCHS` | by version | compute capabilities that NVRTC knows, e.g. `70,80,90` |
//! | `FAKECUDA_CUBLASLT` | 120900 | result of `cublasLtGetVersion`, see below |
//! | `FAKECUDA_ALGORITHMS` | none | simulated times of cuBLASLt's algorithms, see below |
//! | `FAKECUDA_EPILOGUE_US` | 0 | microseconds that an epilogue other than a bias adds to a matmul |
//! | `FAKECUDA_KERNEL_US` | 0 | microseconds of a kernel, if matmuls have simulated times |
//! | `FAKECUDA_NOISE` | 0 | largest random part of simulated times, in percent of the time |
//! | `FAKECUDA_EPILOGUES` | 1 | 0: cuBLASLt's search refuses an epilogue other than a bias as invalid |
//! | `FAKECUDA_CUDNN_VERSION` | 91900 | result of `cudnnGetVersion` |
//! | `FAKECUDA_CUDNN_CUDART` | 12090 | result of `cudnnGetCudartVersion` |
//! | `FAKECUDA_NCCL` | 22403 | result of `ncclGetVersion` |
//! | `NCCL_MULTI_RANK_GPU_ENABLE` | 0 | 1 and NCCL 2.30 or newer: ranks may share a device |
//!
//! - `FAKECUDA_BESIDE`: contexts, code, streams, events, NCCL and page tables use device memory.
//! - `FAKECUDA_ACCOUNTING`: copies, kernels, matmuls and collectives are checked, ordered and
//!   counted, but move no data.
//! - `FAKECUDA_QUEUE`: a full queue stops every launch of the process.
//! - `FAKECUDA_CONNECTIONS`: streams use the device's hardware queues in turn. A queue runs the ops
//!   of all its streams in the order of submission. A device has `CUDA_DEVICE_MAX_CONNECTIONS`
//!   queues (8 if unset, 32 at most).
//! - `FAKECUDA_BLOCKING`: queries of events and streams, and waits for them, begin only when no
//!   thread is blocked in a full queue.
//! - `FAKECUDA_CUBLASLT`: needs a driver of the same or a newer major version. From 13 on it has no
//!   matmuls for sm_70.
//! - `FAKECUDA_ALGORITHMS`: microseconds of each algorithm that cuBLASLt has for a matmul, in the order
//!   of its heuristic, such as `2000,1000`. An algorithm of 0 microseconds is refused when it should
//!   run, with `ALLOC_FAILED`. Algorithm i sums i + 1 parts of k one after another, so its bits differ.
//!   Events then have a simulated clock, which only matmuls and kernels move.
//!
//! `FAKECUDA_FAIL` is a comma-separated list of `kind:N`, or `kind:N@D` to count on device D only;
//! N counts from 1:
//!
//! | kind | the Nth | what happens |
//! |---|---|---|
//! | `launch` | kernel launch | the call is refused: `LAUNCH_OUT_OF_RESOURCES` |
//! | `kernel` | kernel that runs | the device is lost with `LAUNCH_FAILED` |
//! | `memcpy` | copy | the call is refused: `INVALID_VALUE` |
//! | `alloc` | device allocation | `OUT_OF_MEMORY` |
//! | `hostalloc` | pinned allocation or registration | `OUT_OF_MEMORY` |
//! | `lost` | stream op | the device is lost: `ILLEGAL_ADDRESS` from every later call |
//! | `stall` | kernel that runs | the kernel runs for eight seconds |
//! | `compile` | NVRTC compilation | a compilation error |
//! | `gemm` | matmul | the call is refused: `EXECUTION_FAILED` |
//! | `heuristic` | list of cuDNN's engines | the call is refused: `NOT_SUPPORTED` |
//! | `plan` | plan of cuDNN | the call is refused: `EXECUTION_FAILED` |
//! | `graph` | graph of cuDNN | the call is refused: `EXECUTION_FAILED` |
//! | `nccl-init` | communicator rank | `ncclSystemError` |
//! | `nccl` | collective of each communicator | never completes, until the communicator is aborted |
//! | `nccl-error` | collective of each communicator | the same, and `ncclRemoteError` as its async error |
//!
//! `FAKECUDA_WRONG` is a comma-separated list of kinds of work. All work of such a kind returns
//! success and has wrong results:
//!
//! | kind | what is wrong |
//! |---|---|
//! | `kernel=NAME` | the last block of the kernel does not run |
//! | `copy` | a copy between pinned memory and a device leaves out the last four bytes |
//! | `gemm` | the sums of matmuls leave out the last product |
//! | `tf32` | matmuls of fp32 round their operands to TF32 |
//! | `graph` | the numbers of the host in a graph of cuDNN count twice |
//! | `nccl` | sums leave out the last rank |
//!
//! Behaviour of the stand-ins:
//! - Streams run asynchronously, one thread for each queue.
//! - An async copy from pageable memory blocks; an async copy from pinned memory does not.
//! - New memory is filled with `0xFF` (NaN), freed memory with `0xEE`.
//! - Addresses are checked before a copy, matmul, graph or collective runs.
//! - cuDNN computes any graph of its operations on four axes, with f32 for intermediate results. The
//!   best engine of its heuristic sums in another order in every other run.
//! - Contexts, code and buffers of libraries use device memory, some only from their first use on.
//! - Memory registered without `PORTABLE` is pinned for one context.
//! - A kernel with an argument in another device's memory needs peer access; a copy does not.
//!
//! Not simulated: other timing, races within a kernel (see [`ptx`]), legacy default-stream ordering.

#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "the C interfaces are as they are, and what they demand of a caller is in CUDA's manuals"
)]

mod blaslt;
mod call;
mod clock;
mod code;
mod config;
mod counters;
mod cudnn;
mod driver;
mod emulator;
mod failure;
mod folder;
mod fp8;
mod handles;
mod health;
mod machine;
mod memory;
mod nccl;
mod number;
mod nvrtc;
mod overhead;
pub mod ptx;
mod stats;
mod stream;
mod sync;
mod wrong;

pub use counters::{MemoryUse, Stats};
pub use folder::library_folder;
pub use stats::{advance, memory_use, stats};
