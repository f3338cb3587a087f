//! `libcuda`, `libnvrtc`, `libcublasLt` and `libnccl` for machines without a GPU, in one library.
//!
//! For tests only. The code under test opens the four libraries by name, as cudarc does, so it must
//! run in a **child process** whose `LD_LIBRARY_PATH` is [`library_folder`]; everything else is set
//! by environment variables, read at the first call:
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `FAKECUDA_DEVICES` | 1 | number of devices |
//! | `FAKECUDA_SM` | 80 | compute capability, e.g. 70 or 90 |
//! | `FAKECUDA_MEMORY` | 8 GiB | bytes per device; beyond it `CUDA_ERROR_OUT_OF_MEMORY` |
//! | `FAKECUDA_BESIDE` | 100 | percent of what context, code, streams, events, NCCL and page tables take of them; 0: nothing |
//! | `FAKECUDA_ACCOUNTING` | 0 | 1: memory is addresses without bytes; copies, kernels, products and collectives are checked, ordered and counted, and move nothing |
//! | `FAKECUDA_CHAOS_US` | 0 | each stream op first sleeps up to so many microseconds |
//! | `FAKECUDA_SEED` | 1 | seed of these delays |
//! | `FAKECUDA_QUEUE` | no limit | ops that a queue holds, some 1,000 on a real device; a full one stops every launch of the process |
//! | `FAKECUDA_CONNECTIONS` | 0 | 1: streams share the device's hardware queues, `CUDA_DEVICE_MAX_CONNECTIONS` (8 unless set, 32 at most), in turn; each runs its ops in the order of submission, whosever they are |
//! | `FAKECUDA_BLOCKING` | 0 | 1: asking and waiting for events and streams begins when no thread sits in a full queue |
//! | `FAKECUDA_NCCL_HOPS` | 0 | 1: sums of 16-bit types go around a ring and are rounded to 16 bits at each hop |
//! | `FAKECUDA_FAIL` | none | failures on demand, see below |
//! | `FAKECUDA_PEER` | 1 | 0: devices cannot access each other |
//! | `FAKECUDA_DRIVER` | 13000 | what `cuDriverGetVersion` says |
//! | `FAKECUDA_NVRTC` | 12.9 | what `nvrtcVersion` says; 13 and newer compile for sm_75 and newer |
//! | `FAKECUDA_NVRTC_ARCHS` | those of its version | compute capabilities for which NVRTC compiles, such as `70,80,90` |
//! | `FAKECUDA_CUBLASLT` | 120900 | what `cublasLtGetVersion` says; not with a driver of an older major, from 13 on not on sm_70 |
//! | `FAKECUDA_NCCL` | 22403 | what `ncclGetVersion` says |
//! | `NCCL_MULTI_RANK_GPU_ENABLE` | 0 | 1 and NCCL 2.30 or newer: ranks may share a device |
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
//! | `stall` | kernel that runs | takes eight seconds |
//! | `compile` | NVRTC compilation | a compilation error |
//! | `gemm` | matrix product | the call is refused: `EXECUTION_FAILED` |
//! | `nccl-init` | communicator rank | `ncclSystemError` |
//! | `nccl` | collective of each communicator | never completes, until the communicator is aborted |
//! | `nccl-error` | collective of each communicator | the same, and `ncclRemoteError` as its async error |
//!
//! What it does like the real thing: streams run asynchronously, one thread each; an async copy
//! from pageable memory blocks and one from pinned memory does not; new memory is filled with `0xFF`
//! (NaN), freed memory with `0xEE`; addresses are checked before a copy, matrix product or
//! collective runs; contexts, code and buffers of libraries take device memory, some at their first use;
//! memory registered without `PORTABLE` is pinned for one context; a kernel with an argument in another device's memory
//! needs peer access, and a copy does not. What it does not: timing, races within a kernel (see
//! [`ptx`]), legacy default-stream ordering.

#![expect(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "the C interfaces are as they are, and what they demand of a caller is in CUDA's manuals"
)]

mod blaslt;
mod call;
mod code;
mod config;
mod counters;
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

pub use counters::{MemoryUse, Stats};
pub use folder::library_folder;
pub use stats::{advance, memory_use, stats};
