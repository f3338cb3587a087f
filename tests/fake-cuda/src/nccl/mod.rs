//! `libnccl.so.2`: [`world`] runs the collectives, [`remote`] connects ranks of other processes.
#![expect(unsafe_code, reason = "exported C functions")]

mod collective;
mod group;
mod reduce;
mod remote;
mod server;
mod world;

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::{Arc, LazyLock},
};

use crate::{
    call::put,
    config::config,
    counters::STATS,
    failure::fails,
    handles::Handles,
    machine::{context_device, current_context, machine, stream},
    overhead::{self, LoadedCode},
};
use collective::{Collective, CollectiveKind};
use group::{DeferredCall, defer_or_run};
use reduce::{Element, Reduction};
use world::{Comm, World};

const SUCCESS: c_int = 0;
const UNHANDLED_CUDA_ERROR: c_int = 1;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UniqueId([u8; 128]);

/// The first members of `ncclConfig_t`, the same in all versions since 2.17.
#[repr(C)]
struct ConfigStart {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    _cluster: c_int,
    _min_ctas: c_int,
    max_ctas: c_int,
}

fn comms() -> &'static Handles<Comm> {
    static COMMS: LazyLock<Handles<Comm>> = LazyLock::new(Handles::default);
    &COMMS
}

fn comm(handle: *mut c_void) -> Result<Arc<Comm>, c_int> {
    comms().get(handle).map_err(|_| INVALID_ARGUMENT)
}

fn status(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(SUCCESS)
}

fn put_value<T>(out: *mut T, value: T) -> Result<(), c_int> {
    put(out, value).map_err(|_| INVALID_ARGUMENT)
}

/// The text in NCCL's file that has the CUDA version for which it was built. The version of NCCL in
/// the text is the default of `FAKECUDA_NCCL`.
static VERSION_TEXT: [u8; 29] = *b"NCCL version 2.24.3+cuda12.9\0";

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(out: *mut c_int) -> c_int {
    // A text that nothing reads would not be in the file.
    std::hint::black_box(&VERSION_TEXT);
    status(put_value(out, config().nccl_version))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(out: *mut UniqueId) -> c_int {
    status(server::new_id().and_then(|id| put_value(out, UniqueId(id))))
}

/// Adds a rank on `device` to its world; `IN_PROGRESS` if the call does not block.
fn join(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    device: usize,
    blocking: bool,
) -> Result<(), c_int> {
    if out.is_null() || !id.0.starts_with(remote::MARK) || !(0..ranks).contains(&rank) {
        return Err(INVALID_ARGUMENT);
    }
    if device >= machine().devices.len() {
        return Err(UNHANDLED_CUDA_ERROR);
    }
    if fails("nccl-init", device) {
        return Err(SYSTEM_ERROR);
    }
    let world = World::named(id.0, ranks as usize)?;
    let life = world.enter(rank as usize, device)?;
    let taken = {
        let device = &machine().devices[device];
        device.load_once(LoadedCode::Nccl).and_then(|()| device.take_overhead(overhead::JOINED))
    };
    taken.map_err(|_| UNHANDLED_CUDA_ERROR)?;
    let joined = Arc::new(Comm::new(world, rank as usize, device, life));
    put_value(out, comms().insert(joined.clone()))?;
    if !blocking {
        return Err(IN_PROGRESS);
    }
    defer_or_run(DeferredCall::Join(joined))
}

fn current_device_or_first() -> usize {
    context_device(current_context()).map_or(0, |device| device.ordinal)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRank(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    status(join(out, ranks, id, rank, current_device_or_first(), true))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const ConfigStart,
) -> c_int {
    const MAGIC: c_uint = 0xcafe_beef;
    // SAFETY: null, or a configuration by the C interface.
    let config = unsafe { config.as_ref() };
    if config.is_some_and(|config| config.magic != MAGIC || config.size < size_of::<ConfigStart>())
    {
        return INVALID_ARGUMENT;
    }
    if let Some(&ConfigStart { version, max_ctas, .. }) = config
        && version >= 21_700
        && max_ctas != c_int::MIN
    {
        if max_ctas < 1 {
            return INVALID_ARGUMENT;
        }
        STATS.bounded_communicators.add(1);
        STATS.communicator_ctas.add(max_ctas.cast_unsigned().into());
    }
    let blocking = config.is_none_or(|config| config.blocking != 0);
    status(join(out, ranks, id, rank, current_device_or_first(), blocking))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitAll(
    out: *mut *mut c_void,
    count: c_int,
    devices: *const c_int,
) -> c_int {
    let mut id = UniqueId([0; 128]);
    // SAFETY: a local variable to write to.
    unsafe { ncclGetUniqueId(&raw mut id) };
    let joined = (0..count.max(0)).try_for_each(|rank| {
        let index = rank as usize;
        // SAFETY: `devices` is null or holds `count` numbers, by the C interface.
        let device = if devices.is_null() { rank } else { unsafe { *devices.add(index) } };
        // SAFETY: `out` has room for `count` handles.
        let slot = unsafe { out.add(index) };
        match join(slot, count, id, rank, device as usize, false) {
            Err(IN_PROGRESS) => Ok(()),
            other => other,
        }
    });
    if count < 1 { INVALID_ARGUMENT } else { status(joined) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommFinalize(handle: *mut c_void) -> c_int {
    status(comm(handle).map(drop))
}

/// Waits for the rank's collectives, as NCCL does.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    let Ok(comm) = comms().remove(handle) else { return INVALID_ARGUMENT };
    comm.finish();
    SUCCESS
}

/// The rank's collectives end immediately, without results; its peers still wait for the rank.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    let Ok(comm) = comms().remove(handle) else { return INVALID_ARGUMENT };
    comm.abort();
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, out: *mut c_int) -> c_int {
    status(comm(handle).and_then(|comm| put_value(out, comm.async_error())))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCount(handle: *mut c_void, out: *mut c_int) -> c_int {
    status(comm(handle).and_then(|comm| put_value(out, comm.world.ranks as c_int)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommUserRank(handle: *mut c_void, out: *mut c_int) -> c_int {
    status(comm(handle).and_then(|comm| put_value(out, comm.rank as c_int)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommCuDevice(handle: *mut c_void, out: *mut c_int) -> c_int {
    status(comm(handle).and_then(|comm| put_value(out, comm.device as c_int)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGroupStart() -> c_int {
    group::start();
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGroupEnd() -> c_int {
    status(group::end())
}

/// Arguments of a collective's call.
struct Call {
    kind: CollectiveKind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    root: c_int,
}

fn collective(call: &Call, handle: *mut c_void, stream_handle: *mut c_void) -> Result<(), c_int> {
    let comm = comm(handle)?;
    let stream = stream(stream_handle).map_err(|_| UNHANDLED_CUDA_ERROR)?;
    let ranks = comm.world.ranks;
    let root = usize::try_from(call.root).ok().filter(|&root| root < ranks);
    let collective = Collective {
        kind: call.kind,
        send: call.send as usize,
        recv: call.recv as usize,
        count: call.count,
        element: Element::new(call.data_type).ok_or(INVALID_ARGUMENT)?,
        reduction: Reduction::new(call.op).ok_or(INVALID_ARGUMENT)?,
        root: root.ok_or(INVALID_ARGUMENT)?,
    };
    if stream.device != comm.device {
        return Err(INVALID_USAGE);
    }
    comm.connect(call.count * collective.element.bytes()).map_err(|_| UNHANDLED_CUDA_ERROR)?;
    STATS.collectives.add(1);
    STATS.collective_bytes.add((call.count * collective.element.bytes()) as u64);
    defer_or_run(DeferredCall::Collective(comm, stream, collective))
}

macro_rules! collectives {
    ($($name:ident($($parameter:ident: $type:ty),*) = $call:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(
                $($parameter: $type,)*
                comm: *mut c_void,
                stream: *mut c_void,
            ) -> c_int {
                status(collective(&$call, comm, stream))
            }
        )*
    };
}

collectives! {
    ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int) =
        Call { kind: CollectiveKind::AllReduce, send, recv, count, data_type, op, root: 0 };
    ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int) =
        Call { kind: CollectiveKind::ReduceScatter, send, recv, count, data_type, op, root: 0 };
    ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int, root: c_int) =
        Call { kind: CollectiveKind::Reduce, send, recv, count, data_type, op, root };
    ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int) =
        Call { kind: CollectiveKind::AllGather, send, recv, count, data_type, op: 0, root: 0 };
    ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, root: c_int) =
        Call { kind: CollectiveKind::Broadcast, send, recv, count, data_type, op: 0, root };
    ncclBcast(buffer: *mut c_void, count: usize, data_type: c_int, root: c_int) =
        Call { kind: CollectiveKind::Broadcast, send: buffer, recv: buffer, count, data_type, op: 0, root };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    c"see the lines of fake-cuda on stderr".as_ptr()
}
