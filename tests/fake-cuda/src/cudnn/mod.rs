//! `libcudnn.so.9`: the backend interface. Descriptors keep the attributes that are set on them
//! (`attributes`), a finalized descriptor is checked (`descriptor`), and a plan computes any graph
//! of the operations that `graph` knows, op by op (`interpreter`).
#![expect(unsafe_code, reason = "exported C functions; attributes are values of the caller")]

mod attributes;
mod descriptor;
mod execution;
mod graph;
mod interpreter;

use std::{
    cell::RefCell,
    ffi::{c_char, c_int, c_void},
    sync::{Arc, LazyLock, Mutex},
};

use crate::{
    call::{put, put_string},
    config::config,
    handles::Handles,
    machine::current_device,
    sync::lock,
};
use attributes::Values;
use descriptor::{Content, Descriptor};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1001;
const BAD_PARAM: c_int = 2000;
const NOT_SUPPORTED: c_int = 3000;
const EXECUTION_FAILED: c_int = 5000;

/// A refused call: its status and its explanation.
#[derive(Debug)]
struct Refusal {
    status: c_int,
    text: String,
}

type Answer<T = ()> = Result<T, Refusal>;

/// The refusal of an argument that breaks the interface's rules.
fn bad<T>(text: impl Into<String>) -> Answer<T> {
    Err(Refusal { status: BAD_PARAM, text: text.into() })
}

/// The refusal of an argument that keeps the rules and that this stand-in does not know.
fn unsupported<T>(text: impl Into<String>) -> Answer<T> {
    Err(Refusal { status: NOT_SUPPORTED, text: text.into() })
}

/// `bad(text)` unless `holds`.
fn demand(holds: bool, text: impl FnOnce() -> String) -> Answer {
    if holds { Ok(()) } else { bad(text()) }
}

/// A library handle: the raw handle of its stream.
type LibraryHandle = Mutex<usize>;

#[derive(Debug, Default)]
struct Tables {
    handles: Handles<LibraryHandle>,
    descriptors: Handles<Mutex<Descriptor>>,
}

fn tables() -> &'static Tables {
    static TABLES: LazyLock<Tables> = LazyLock::new(Tables::default);
    &TABLES
}

fn library_handle(raw: *mut c_void) -> Answer<Arc<LibraryHandle>> {
    tables().handles.get(raw).or_else(|_| bad("this is no live handle of the library"))
}

fn live_descriptor(raw: *mut c_void) -> Answer<Arc<Mutex<Descriptor>>> {
    tables().descriptors.get(raw).or_else(|_| bad("this is no live descriptor"))
}

/// The content of a finalized descriptor.
fn content(raw: *mut c_void) -> Answer<Content> {
    match &lock(&*live_descriptor(raw)?).content {
        Some(content) => Ok(content.clone()),
        None => bad("a descriptor is not finalized"),
    }
}

thread_local!(static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) });

/// Status of a call. The text of a refusal stays for `cudnnGetLastErrorString`.
fn status(answer: Answer) -> c_int {
    match answer {
        Ok(()) => SUCCESS,
        Err(refusal) => {
            LAST_ERROR.set(refusal.text);
            refusal.status
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetVersion() -> usize {
    config().cudnn_version
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetCudartVersion() -> usize {
    config().cudnn_cudart
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnGetLastErrorString(message: *mut c_char, size: usize) {
    let text = LAST_ERROR.take();
    let size = i32::try_from(size).unwrap_or(i32::MAX);
    // The function has no result: a buffer that takes no text stays as it is.
    let _ = put_string(message, size, &text);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnCreate(out: *mut *mut c_void) -> c_int {
    if current_device().is_err() {
        let text = "no context of a working GPU is bound".to_owned();
        return status(Err(Refusal { status: NOT_INITIALIZED, text }));
    }
    let raw = tables().handles.insert(Arc::new(Mutex::new(0)));
    status(put(out, raw).or_else(|_| bad("no place for the handle")))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnDestroy(raw: *mut c_void) -> c_int {
    let removed = tables().handles.remove(raw).map(drop);
    status(removed.or_else(|_| bad("this is no live handle of the library")))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnSetStream(raw: *mut c_void, stream: *mut c_void) -> c_int {
    status(library_handle(raw).map(|handle| *lock(&handle) = stream as usize))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: c_int, out: *mut *mut c_void) -> c_int {
    status(Descriptor::new(kind).and_then(|new| {
        let raw = tables().descriptors.insert(Arc::new(Mutex::new(new)));
        put(out, raw).or_else(|_| bad("no place for the descriptor"))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendDestroyDescriptor(raw: *mut c_void) -> c_int {
    let removed = tables().descriptors.remove(raw).map(drop);
    status(removed.or_else(|_| bad("this is no live descriptor")))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendFinalize(raw: *mut c_void) -> c_int {
    status(live_descriptor(raw).and_then(|descriptor| lock(&descriptor).finalize()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendSetAttribute(
    raw: *mut c_void,
    name: c_int,
    of: c_int,
    count: i64,
    values: *const c_void,
) -> c_int {
    status(live_descriptor(raw).and_then(|descriptor| {
        let values = Values::read(of, count, values)?;
        lock(&descriptor).set(name, values)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendGetAttribute(
    raw: *mut c_void,
    name: c_int,
    of: c_int,
    room: i64,
    count: *mut i64,
    values: *mut c_void,
) -> c_int {
    status(live_descriptor(raw).and_then(|descriptor| {
        // The lock ends here: the results may be written into other descriptors.
        let answer = lock(&descriptor).answer(name, of)?;
        let written = answer.write(room, values)?;
        put(count, written).or_else(|_| bad("no place for the count"))
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudnnBackendExecute(
    raw: *mut c_void,
    plan: *mut c_void,
    pack: *mut c_void,
) -> c_int {
    status(execution::enqueue(raw, plan, pack))
}
