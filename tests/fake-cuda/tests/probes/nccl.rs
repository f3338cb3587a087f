//! NCCL under the names by which a run finds it. cudarc knows only `libnccl.so`, which packages for
//! programs do not contain.

use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use device::cuda::testing::NCCL_NAMES;
use libloading::{Library, Symbol};
use std::ffi::c_int;

pub(crate) struct Nccl(Library);

/// A rank's communicator.
#[derive(Clone, Copy)]
pub(crate) struct Comm(ncclComm_t);

type ReduceFunction = unsafe extern "C" fn(
    u64,
    u64,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    CUstream,
) -> c_int;

impl Nccl {
    pub(crate) fn open() -> Self {
        // SAFETY: the library's initialisers do nothing unusual.
        let open = |name: &&str| unsafe { Library::new(*name) }.ok();
        Self(NCCL_NAMES.iter().find_map(open).unwrap_or_else(|| panic!("none of {NCCL_NAMES:?}")))
    }

    fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: each caller gives this name its type in nccl.h.
        unsafe { self.0.get(name.as_bytes()) }.unwrap()
    }

    pub(crate) fn new_id(&self) -> ncclUniqueId {
        let mut id = ncclUniqueId { internal: [0; 128] };
        let get =
            self.function::<unsafe extern "C" fn(*mut ncclUniqueId) -> c_int>("ncclGetUniqueId");
        // SAFETY: a pointer to a local.
        assert_eq!(unsafe { get(&raw mut id) }, 0);
        id
    }

    /// Creates a rank on the bound context; returns when all ranks have joined.
    pub(crate) fn connect(&self, rank: usize, ranks: usize, id: ncclUniqueId) -> Comm {
        type Init = unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> c_int;
        let mut comm = std::ptr::null_mut();
        let init = self.function::<Init>("ncclCommInitRank");
        // SAFETY: a pointer to a local.
        assert_eq!(unsafe { init(&raw mut comm, ranks as c_int, id, rank as c_int) }, 0);
        Comm(comm)
    }

    /// Sets `x` to the sum of all ranks' `len` floats.
    pub(crate) fn all_reduce(&self, comm: Comm, x: u64, len: usize, stream: CUstream) {
        self.sum("ncclAllReduce", comm, (x, x), len, stream);
    }

    /// Sets the floats of `to` to this rank's `len` floats of the sum.
    pub(crate) fn reduce_scatter(
        &self,
        comm: Comm,
        (from, to): (u64, u64),
        len: usize,
        stream: CUstream,
    ) {
        self.sum("ncclReduceScatter", comm, (from, to), len, stream);
    }

    fn sum(&self, name: &str, Comm(comm): Comm, at: (u64, u64), len: usize, stream: CUstream) {
        let (dtype, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
        let function = self.function::<ReduceFunction>(name);
        // SAFETY: a live communicator, stream and buffers, which are synchronized with before they go.
        assert_eq!(unsafe { function(at.0, at.1, len, dtype, sum, comm, stream) }, 0);
    }

    /// Destroys a rank's communicator.
    pub(crate) fn disconnect(&self, Comm(comm): Comm) {
        let destroy = self.function::<unsafe extern "C" fn(ncclComm_t) -> c_int>("ncclCommDestroy");
        // SAFETY: the communicator is no longer used.
        assert_eq!(unsafe { destroy(comm) }, 0);
    }
}
