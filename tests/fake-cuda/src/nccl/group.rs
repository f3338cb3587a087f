//! `ncclGroupStart` and `ncclGroupEnd`: calls in between start together at the end.

use std::{cell::RefCell, ffi::c_int, sync::Arc};

use super::{collective::Collective, world::Comm};
use crate::stream::Stream;

/// A call that waits for the end of its group.
pub(super) enum DeferredCall {
    /// Waits until all ranks of the communicator have joined.
    Join(Arc<Comm>),
    Collective(Arc<Comm>, Arc<Stream>, Collective),
}

#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<DeferredCall>,
}

thread_local!(static GROUP: RefCell<Group> = RefCell::default());

pub(super) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Ends a group; the end of the outermost group runs the calls.
pub(super) fn end() -> Result<(), c_int> {
    let calls = GROUP.with_borrow_mut(|group| -> Result<Vec<DeferredCall>, c_int> {
        group.depth = group.depth.checked_sub(1).ok_or(super::INVALID_USAGE)?;
        Ok(if group.depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
    })?;
    run(calls)
}

/// Adds the call to the current group, or runs it immediately outside of a group.
pub(super) fn defer_or_run(call: DeferredCall) -> Result<(), c_int> {
    let call = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(call);
        }
        group.calls.push(call);
        None
    });
    call.map_or(Ok(()), |call| run(vec![call]))
}

fn run(calls: Vec<DeferredCall>) -> Result<(), c_int> {
    for call in calls {
        match call {
            DeferredCall::Join(comm) => comm.wait_for_ranks(),
            DeferredCall::Collective(comm, stream, collective) => comm.start(&stream, collective),
        }
    }
    Ok(())
}
