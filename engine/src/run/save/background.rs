//! Saves in the background: for each rank, a thread writes the copy of its states. If the machine
//! refuses a thread, the thread that requested it writes the copy, which delays the threads that
//! wait.

use super::{SaveJob, Saver, lock, read};
use crate::run::FaultPoint;
use crate::run::messages::{ChannelItem, Message};
use checkpoint::write::{Pieces, in_order};
use crossbeam_channel::Sender;
use device::{Communicator, Device, Error};
use offload::State;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Copy of a rank's states after a step, in the order of its file.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) pieces: Pieces,
    pub(super) bytes: Vec<u8>,
}

impl Snapshot {
    /// Copies the current states: `pieces`, with or without the gradient of a delayed update.
    pub(super) fn take(&mut self, dev: &Device, pieces: Pieces) -> Result<(), Error> {
        self.pieces = pieces;
        let mut rest = &mut self.bytes[..];
        in_order(&self.pieces, &mut |state| {
            let (to, after) = std::mem::take(&mut rest).split_at_mut(4 * state.len());
            rest = after;
            read(dev, state, to)
        })
    }
}

impl Saver {
    /// Writes the copies on a thread. `waited`: time that training waited for the copies. If the
    /// thread cannot start, the ranks of `world` wait for the write.
    pub(super) fn start(
        self: &Arc<Self>,
        job: SaveJob,
        waited: Duration,
        sender: Sender<ChannelItem>,
        world: &Communicator,
    ) {
        let (saver, writing) = (Arc::clone(self), self.under_way.begin());
        let write = Arc::new(move |waited: Option<Duration>| {
            let _until_then = &writing;
            let message = saver.write_and_conclude(&job.after(waited), &sender);
            // The run continues if the receiver is gone.
            drop(sender.send(ChannelItem::Message(message)));
        });
        let write_in_thread = Arc::clone(&write);
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(move || {
            device::panics::watch_this_thread();
            write_in_thread(Some(waited));
        });
        match thread {
            Ok(thread) => *lock(&self.writing) = Some(thread),
            Err(error) => {
                tracing::warn!("training waits for the checkpoint: no thread to write it: {error}");
                world.held_up(|| write(None));
            }
        }
    }

    fn write_and_conclude(&self, job: &SaveJob, sender: &Sender<ChannelItem>) -> Message {
        let message = catch_unwind(AssertUnwindSafe(|| {
            self.write_copies(job);
            self.conclude(job, Some(sender))
        }));
        message.unwrap_or_else(|_| {
            let why = format!("the thread that wrote it: {}", panicked());
            Message::NotSaved { step: job.step, why }
        })
    }

    /// Writes each rank's file on a thread of its own.
    fn write_copies(&self, &SaveJob { step, is_delayed, skipped_in_a_row, .. }: &SaveJob) {
        self.begin(step, is_delayed, skipped_in_a_row);
        if !self.is_well() {
            return;
        }
        std::thread::scope(|scope| {
            for number in 0..self.copies.as_ref().map_or(0, Vec::len) {
                let write = move || {
                    device::panics::watch_this_thread();
                    self.bind(number);
                    self.write_copy(number, is_delayed, step);
                };
                if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, write) {
                    tracing::warn!("no thread to write the file of rank {number}: {error}");
                    self.write_copy(number, is_delayed, step);
                }
            }
        });
    }

    fn write_copy(&self, number: usize, is_delayed: bool, step: u64) {
        let Some(copy) = self.copies.as_ref().and_then(|copies| copies.get(number)) else { return };
        let write = || {
            self.passes(number, FaultPoint::Writing, step);
            let Snapshot { pieces, bytes } = &*lock(copy);
            let mut rest = &bytes[..];
            let mut fill = |_: State, to: &mut [u8]| io::Read::read_exact(&mut rest, to);
            self.write_file(number, pieces, is_delayed, step, &mut fill)
        };
        match catch_unwind(AssertUnwindSafe(write)) {
            Ok(written) => self.wrote(number, written),
            Err(_) => self.give_up(format!("the thread that wrote it: {}", panicked())),
        }
    }

    /// Binds the calling thread to the cores of a rank. It would otherwise share the cores of the
    /// thread that started it.
    fn bind(&self, rank: usize) {
        if let Some(cores) = self.cores.get(rank)
            && let Err(error) = topology::bind_current_thread(cores)
        {
            tracing::warn!("the thread that writes for rank {rank} is not bound: {error}");
        }
    }
}

fn panicked() -> String {
    device::panics::last().unwrap_or_else(|| "it panicked".to_owned())
}
