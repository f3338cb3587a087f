//! NCCL as safe types. cudarc does not expose the handle that a watchdog needs for an abort.
#![expect(unsafe_code, reason = "NCCL's C interface")]

use super::driver::Stream;
use super::launch::DeviceElements;
use super::libraries::{LibraryFile, LoadedLibrary};
use crate::op::CollectiveKind;
use crate::{Dtype, Reduction};
use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Names of the library, in the order of attempts.
pub const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Return code. A newer library may return numbers that an enum of the binding does not have.
type Code = c_int;
type Buffer = *const c_void;
type BufferMut = *mut c_void;
type RawStream = *mut c_void;
type Combine = unsafe extern "C" fn(
    Buffer,
    BufferMut,
    usize,
    ncclDataType_t,
    ncclRedOp_t,
    ncclComm_t,
    RawStream,
) -> Code;

type InitRankConfig =
    unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> Code;

struct Functions {
    loaded: LoadedLibrary,
    get_version: unsafe extern "C" fn(*mut c_int) -> Code,
    get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> Code,
    comm_init_rank: unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> Code,
    /// Missing before 2.14.
    comm_init_rank_config: Option<InitRankConfig>,
    comm_abort: unsafe extern "C" fn(ncclComm_t) -> Code,
    comm_destroy: unsafe extern "C" fn(ncclComm_t) -> Code,
    comm_get_async_error: unsafe extern "C" fn(ncclComm_t, *mut Code) -> Code,
    get_error_string: unsafe extern "C" fn(Code) -> *const c_char,
    all_reduce: Combine,
    reduce_scatter: Combine,
    all_gather: unsafe extern "C" fn(
        Buffer,
        BufferMut,
        usize,
        ncclDataType_t,
        ncclComm_t,
        RawStream,
    ) -> Code,
    broadcast: unsafe extern "C" fn(
        Buffer,
        BufferMut,
        usize,
        ncclDataType_t,
        c_int,
        ncclComm_t,
        RawStream,
    ) -> Code,
}

/// The library, loaded once, or the reason why it is missing.
fn functions() -> Result<&'static Functions, &'static str> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    LOADED.get_or_init(load).as_ref().map_err(String::as_str)
}

fn load() -> Result<Functions, String> {
    super::libraries::load(&NAMES, c"ncclGetVersion", functions_of)
}

fn functions_of(library: LoadedLibrary) -> Result<Functions, String> {
    macro_rules! symbol {
        ($name:literal) => {{
            // SAFETY: the field has the type of NCCL's header.
            unsafe { library.function($name) }?
        }};
    }
    Ok(Functions {
        get_version: symbol!(c"ncclGetVersion"),
        get_unique_id: symbol!(c"ncclGetUniqueId"),
        comm_init_rank: symbol!(c"ncclCommInitRank"),
        // SAFETY: the field has the type of NCCL's header.
        comm_init_rank_config: unsafe { library.function(c"ncclCommInitRankConfig") }.ok(),
        comm_abort: symbol!(c"ncclCommAbort"),
        comm_destroy: symbol!(c"ncclCommDestroy"),
        comm_get_async_error: symbol!(c"ncclCommGetAsyncError"),
        get_error_string: symbol!(c"ncclGetErrorString"),
        all_reduce: symbol!(c"ncclAllReduce"),
        reduce_scatter: symbol!(c"ncclReduceScatter"),
        all_gather: symbol!(c"ncclAllGather"),
        broadcast: symbol!(c"ncclBroadcast"),
        loaded: library,
    })
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {{
        let functions = functions()?;
        // SAFETY: communicators are made below and used until they are aborted; out-pointers are to
        // locals; buffers lie in arenas that live as long as the streams.
        check(functions, stringify!($f), unsafe { (functions.$f)($($arg),*) })
    }};
}

fn check(functions: &Functions, call: &str, code: Code) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the function accepts any number.
    let text = unsafe { (functions.get_error_string)(code) };
    if text.is_null() {
        return Err(format!("NCCL {call}: code {code}"));
    }
    // SAFETY: a static string.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    Err(format!("NCCL {call}: {}", text.to_string_lossy()))
}

/// The library's version, such as 22403 for 2.24.3.
///
/// # Errors
/// The library is missing.
pub(super) fn version() -> Result<i32, String> {
    let mut version = 0;
    call!(get_version(&raw mut version))?;
    Ok(version)
}

/// The file of the library.
pub(super) fn file() -> Result<LibraryFile, String> {
    Ok(functions().map(|functions| functions.loaded.file.clone())?)
}

/// The id that the ranks of a group share to find each other.
pub(super) type Id = ncclUniqueId;

pub(super) fn new_id() -> Result<Id, String> {
    let mut id = ncclUniqueId { internal: [0; 128] };
    call!(get_unique_id(&raw mut id))?;
    Ok(id)
}

/// The bytes of an id, for ranks of other processes.
pub(super) fn id_bytes(id: &Id) -> Vec<u8> {
    id.internal.iter().map(|byte| *byte as u8).collect()
}

/// The id with these bytes. `None` if their number is wrong.
pub(super) fn id_from(bytes: &[u8]) -> Option<Id> {
    let internal: Vec<c_char> = bytes.iter().map(|byte| *byte as c_char).collect();
    internal.try_into().ok().map(|internal| Id { internal })
}

fn data_type(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        // U16 halves are only moved, never summed.
        Dtype::F16 | Dtype::U16 => ncclDataType_t::ncclFloat16,
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F32 => ncclDataType_t::ncclFloat32,
        Dtype::F64 => ncclDataType_t::ncclFloat64,
        Dtype::I32 => ncclDataType_t::ncclInt32,
        // Ranks exchange no fp8: it would be moved as bytes.
        Dtype::E4m3 | Dtype::E5m2 => ncclDataType_t::ncclUint8,
    }
}

/// First version of the library whose communicators have a bound of blocks.
const BOUNDED_SINCE: i32 = 21_700;

/// Settings of a communicator with at most `ctas` blocks. `NCCL_MAX_CTAS` precedes them.
const fn bounded(ctas: u32) -> ncclConfig_t {
    // The header's value of settings that the library chooses.
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: BOUNDED_SINCE.cast_unsigned(),
        blocking: UNDEFINED,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: ctas as c_int,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
    }
}

/// One rank's end of a group. The rank's thread enqueues, and a watchdog may abort.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    /// Null after an abort.
    raw: AtomicPtr<c_void>,
    /// Locked while the rank's thread is inside a call.
    busy: Mutex<()>,
    pub(super) me: usize,
    pub(super) size: usize,
}

/// A member of a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Number of the member in its group.
    pub(super) me: usize,
    /// Number of members.
    pub(super) size: usize,
}

impl NcclCommunicator {
    /// Creates the communicator of a member, with at most `ctas` blocks on the GPU (0: no bound).
    /// Blocks until all ranks of the group have called it. A library before 2.17 knows no bound.
    pub(super) fn new(id: Id, Member { me, size }: Member, ctas: u32) -> Result<Self, String> {
        let mut raw: ncclComm_t = std::ptr::null_mut();
        let (ranks, rank) = (size as c_int, me as c_int);
        let is_bounded = ctas > 0 && version()? >= BOUNDED_SINCE;
        match functions()?.comm_init_rank_config.filter(|_| is_bounded) {
            Some(init) => {
                let mut config = bounded(ctas);
                // SAFETY: out-pointers are to locals; the library copies the settings.
                let code = unsafe { init(&raw mut raw, ranks, id, rank, &raw mut config) };
                check(functions()?, "comm_init_rank_config", code)?;
            }
            None => call!(comm_init_rank(&raw mut raw, ranks, id, rank))?,
        }
        Ok(Self { raw: AtomicPtr::new(raw.cast()), busy: Mutex::new(()), me, size })
    }

    fn raw(&self) -> Result<ncclComm_t, String> {
        let raw = self.raw.load(Ordering::Acquire);
        if raw.is_null() { Err("the communicator was aborted".into()) } else { Ok(raw.cast()) }
    }

    /// Returns an error if the communicator has failed. If the rank's thread is inside a call,
    /// returns `Ok` without a check.
    pub(super) fn check(&self) -> Result<(), String> {
        let Ok(_inside) = self.busy.try_lock() else { return Ok(()) };
        let (mut state, comm) = (0, self.raw()?);
        call!(comm_get_async_error(comm, &raw mut state))?;
        check(functions()?, "asynchronous error", state)
    }

    fn enter(&self) -> MutexGuard<'_, ()> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the collectives in progress; afterwards nothing can be enqueued. Waits at most two
    /// seconds for a running call of the rank's thread, since that call may be the one that hangs.
    pub(super) fn abort(&self) {
        let started = Instant::now();
        let mut inside = self.busy.try_lock();
        while inside.is_err() && started.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(10));
            inside = self.busy.try_lock();
        }
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            let abort = || call!(comm_abort(raw.cast()));
            let _: Result<(), String> = abort();
        }
    }

    /// Enqueues a collective on `stream`. It works in place. If each rank has a part of the buffer,
    /// the buffer's length must be a multiple of the number of ranks.
    pub(super) fn run(
        &self,
        kind: CollectiveKind,
        buffer: DeviceElements,
        stream: &Stream,
    ) -> Result<(), String> {
        let _inside = self.enter();
        let DeviceElements { at, len: count, dtype } = buffer;
        let part = count / self.size;
        let own = at + (self.me * part) as u64 * dtype.bytes();
        let (whole, own) = (at as BufferMut, own as BufferMut);
        let (dtype, comm, stream) = (data_type(dtype), self.raw()?, stream.raw().cast());
        match kind {
            CollectiveKind::AllReduce(reduce) => {
                let op = match reduce {
                    Reduction::Sum => ncclRedOp_t::ncclSum,
                    Reduction::Max => ncclRedOp_t::ncclMax,
                };
                call!(all_reduce(whole, whole, count, dtype, op, comm, stream))
            }
            CollectiveKind::ReduceScatter => {
                call!(reduce_scatter(whole, own, part, dtype, ncclRedOp_t::ncclSum, comm, stream))
            }
            CollectiveKind::AllGather => call!(all_gather(own, whole, part, dtype, comm, stream)),
            CollectiveKind::Broadcast { root } => {
                call!(broadcast(whole, whole, count, dtype, root as c_int, comm, stream))
            }
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let raw = self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !raw.is_null() {
            let destroy = || call!(comm_destroy(raw.cast()));
            let _: Result<(), String> = destroy();
        }
    }
}
