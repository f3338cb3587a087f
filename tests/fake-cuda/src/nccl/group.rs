//! `ncclGroupStart` and `ncclGroupEnd`: calls in between start together at the end.

use std::{cell::RefCell, ffi::c_int, sync::Arc};

use super::{
    collective::Collective,
    world::{Comm, Message},
};
use crate::stream::Stream;

/// A call that a group holds back.
pub(super) enum DeferredCall {
    /// Waits until all ranks of the communicator have come.
    Join(Arc<Comm>),
    Collective(Arc<Comm>, Arc<Stream>, Collective),
    Message(Arc<Comm>, Arc<Stream>, Message),
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

/// Runs the calls when the outermost group ends.
pub(super) fn end() -> Result<(), c_int> {
    let calls = GROUP.with_borrow_mut(|group| -> Result<Vec<DeferredCall>, c_int> {
        group.depth = group.depth.checked_sub(1).ok_or(super::INVALID_USAGE)?;
        Ok(if group.depth == 0 { std::mem::take(&mut group.calls) } else { Vec::new() })
    })?;
    run(calls)
}

/// Outside a group: runs at once.
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

/// The messages of one rank become one job, so that a send and a receive do not wait in line.
fn run(calls: Vec<DeferredCall>) -> Result<(), c_int> {
    let mut messages: Vec<(Arc<Comm>, Arc<Stream>, Vec<Message>)> = Vec::new();
    for call in calls {
        match call {
            DeferredCall::Join(comm) => comm.wait_for_ranks(),
            DeferredCall::Collective(comm, stream, collective) => comm.start(&stream, collective),
            DeferredCall::Message(comm, stream, message) => {
                let found = messages
                    .iter_mut()
                    .find(|(c, s, _)| Arc::ptr_eq(c, &comm) && Arc::ptr_eq(s, &stream));
                match found {
                    Some((_, _, list)) => list.push(message),
                    None => messages.push((comm, stream, vec![message])),
                }
            }
        }
    }
    for (comm, stream, list) in messages {
        comm.exchange(&stream, list);
    }
    Ok(())
}
