//! Collectives of four ranks in two processes.
#![expect(unsafe_code, reason = "raw NCCL calls")]
#![expect(clippy::unwrap_used, reason = "a test passes its own live buffers")]

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::common::in_child;
use crate::ranks::{as_rank, sums_and_gathers};
use cudarc::{
    driver::{CudaContext, CudaStream, DevicePtr},
    nccl::{Comm, Id, ReduceOp, sys},
};

const TWO: [(&str, &str); 2] = [("FAKECUDA_DEVICES", "2"), ("FAKECUDA_CHAOS_US", "500")];

/// Variable with the id for the second process, as numbers.
const ID: &str = "FAKECUDA_TEST_ID";

/// The id, and the second process if this is the first.
fn meet(name: &str) -> (Id, Option<Child>) {
    if let Ok(text) = std::env::var(ID) {
        let bytes: Vec<_> = text.split(' ').map(|byte| byte.parse().unwrap()).collect();
        return (Id::uninit(bytes.try_into().unwrap()), None);
    }
    let id = Id::new().unwrap();
    let text: Vec<String> = id.internal().iter().map(ToString::to_string).collect();
    let second = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ID, text.join(" "))
        .stdout(Stdio::null())
        .spawn();
    (id, Some(second.unwrap()))
}

/// Runs `body` on the two ranks of each of two processes.
fn on_ranks(name: &str, body: impl Fn(usize, Arc<CudaStream>, Comm) + Sync) {
    let (id, second) = meet(name);
    std::thread::scope(|scope| {
        for device in 0..2 {
            let (body, rank) = (&body, if second.is_some() { device } else { 2 + device });
            scope.spawn(move || as_rank(rank, device, id, body));
        }
    });
    if let Some(mut second) = second {
        assert!(second.wait().unwrap().success(), "the second process failed");
    }
}

#[test]
fn collectives_of_two_processes_do_what_their_names_say() {
    let name = "processes::collectives_of_two_processes_do_what_their_names_say";
    in_child(name, &TWO, || {
        on_ranks(name, |rank, stream, comm| {
            let r = rank as f32;
            sums_and_gathers(rank, &stream, &comm);
            for root in [1, 3] {
                let mut received = stream.clone_htod(&[r + 0.5]).unwrap();
                comm.broadcast_in_place(&mut received, root).unwrap();
                assert_eq!(stream.clone_dtoh(&received).unwrap(), [root as f32 + 0.5]);
                let mut sum = stream.alloc_zeros::<f32>(1).unwrap();
                comm.reduce(&received, Some(&mut sum), &ReduceOp::Sum, root).unwrap();
                let expected = if rank as i32 == root { 4.0 * (root as f32 + 0.5) } else { 0.0 };
                assert_eq!(stream.clone_dtoh(&sum).unwrap(), [expected]);
            }
        });
    });
}

/// Runs `body` with one rank's communicator; each process has one rank.
fn on_raw_rank(id: Id, rank: i32, body: impl FnOnce(Arc<CudaStream>, sys::ncclComm_t)) {
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let stream = context.new_stream().unwrap();
    let (mut comm, id) = (std::ptr::null_mut(), sys::ncclUniqueId { internal: *id.internal() });
    // SAFETY: `comm` is written before the call returns; the context is bound to this thread.
    let code = unsafe { sys::ncclCommInitRank(&raw mut comm, 2, id, rank) };
    assert_eq!(code, sys::ncclResult_t::ncclSuccess);
    body(stream, comm);
}

/// Waits for a collective with a process that is gone, and aborts it.
fn waits_in_vain(stream: &Arc<CudaStream>, comm: sys::ncclComm_t) {
    let x = stream.alloc_zeros::<f32>(8).unwrap();
    let address = x.device_ptr(stream).0 as *mut std::ffi::c_void;
    let (kind, op) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
    // SAFETY: `x` has room for 8 elements, and lives until the collective is aborted.
    let code = unsafe {
        sys::ncclAllReduce(address, address, 8, kind, op, comm, stream.cu_stream().cast())
    };
    assert_eq!(code, sys::ncclResult_t::ncclSuccess);
    let event = stream.record_event(None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut error = sys::ncclResult_t::ncclSuccess;
    while error == sys::ncclResult_t::ncclSuccess {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
        // SAFETY: the communicator is live, and `error` is written before the call returns.
        let code = unsafe { sys::ncclCommGetAsyncError(comm, &raw mut error) };
        assert_eq!(code, sys::ncclResult_t::ncclSuccess);
    }
    assert_eq!(error, sys::ncclResult_t::ncclRemoteError);
    assert!(!event.is_complete());
    // SAFETY: the communicator is live, and not used again.
    unsafe { sys::ncclCommAbort(comm) };
    event.synchronize().unwrap();
}

/// The process that did not create the id is gone.
#[test]
fn a_process_that_is_gone_is_an_error_that_the_other_can_ask_for() {
    let name = "processes::a_process_that_is_gone_is_an_error_that_the_other_can_ask_for";
    in_child(name, &TWO, || {
        let (id, second) = meet(name);
        match second {
            None => on_raw_rank(id, 1, |_, _| std::process::abort()),
            Some(mut second) => {
                on_raw_rank(id, 0, |stream, comm| waits_in_vain(&stream, comm));
                assert!(!second.wait().unwrap().success());
            }
        }
    });
}

#[test]
fn a_process_whose_id_it_was_is_missed_when_it_is_gone() {
    let name = "processes::a_process_whose_id_it_was_is_missed_when_it_is_gone";
    in_child(name, &TWO, || {
        // Two more processes; the first of them creates the id.
        if let Ok(folder) = std::env::var("FAKECUDA_TEST_FOLDER") {
            let [joined, done] = ["joined", "done"].map(|name| Path::new(&folder).join(name));
            let (id, second) = meet(name);
            match second {
                Some(_) => on_raw_rank(id, 0, |_, _| {
                    await_file(&joined);
                    std::process::abort();
                }),
                None => {
                    on_raw_rank(id, 1, |stream, comm| {
                        std::fs::write(joined, "").unwrap();
                        waits_in_vain(&stream, comm);
                    });
                    std::fs::write(done, "").unwrap();
                }
            }
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let first = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .env("FAKECUDA_TEST_FOLDER", folder.path())
            .stdout(Stdio::null())
            .status();
        assert!(!first.unwrap().success());
        await_file(&folder.path().join("done"));
    });
}

fn await_file(file: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !file.exists() {
        assert!(Instant::now() < deadline, "nobody writes {}", file.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}
