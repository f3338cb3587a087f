//! The arrivals and the data of ranks in other processes. Both are messages, data first.
//!
//! A rank sends its data before it enters the rendezvous, and messages between two processes keep
//! their order. When a rendezvous is complete, the data of all its members has therefore arrived.

use super::processes::{MessageHandler, Processes};
use super::rendezvous::{ArrivalRecord, Rendezvous, lock};
use super::wire::{HEAD, Message};
use crate::Error;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};

/// The part of a world that belongs to ranks in other processes.
#[derive(Debug)]
pub(crate) struct RemoteRanks {
    pub(crate) processes: Arc<Processes>,
    /// Number of the world, the same in all processes.
    number: OnceLock<u64>,
    inbox: Mutex<HashMap<Route, VecDeque<Parcel>>>,
}

/// The rendezvous before which data is sent, its sender and its receiver.
pub(crate) type Route = (u64, usize, usize);

/// Data from a rank of another process.
#[derive(Debug)]
pub(crate) struct Parcel(Vec<u8>);

impl Parcel {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0[HEAD..]
    }
}

impl RemoteRanks {
    pub(crate) fn new(processes: &Arc<Processes>) -> Self {
        let (number, inbox) = (OnceLock::new(), Mutex::default());
        Self { processes: Arc::clone(processes), number, inbox }
    }

    /// Begins to receive messages, and passes them to `world`.
    pub(crate) fn enter(&self, world: &Arc<dyn MessageHandler>) {
        let number = self.processes.enter(world);
        self.number.get_or_init(|| number);
        self.processes.catch_up(&**world);
    }

    /// Stores data that has arrived from another process.
    pub(crate) fn take_in(&self, way: Route, message: Vec<u8>) {
        lock(&self.inbox).entry(way).or_default().push_back(Parcel(message));
    }

    /// Removes the oldest data that has arrived on this route.
    pub(crate) fn take_out(&self, way: Route) -> Parcel {
        let parcel = lock(&self.inbox).get_mut(&way).and_then(VecDeque::pop_front);
        let Some(parcel) = parcel else {
            unreachable!("a rank sends its data before it comes, and messages keep their order")
        };
        parcel
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.get().copied().unwrap_or_default()
    }

    /// The process of a rank.
    pub(crate) fn home(&self, rank: usize, world_size: usize) -> usize {
        rank / (world_size / self.processes.count())
    }

    /// Informs the other processes of a rendezvous that a member has entered.
    pub(crate) fn send_arrival(
        &self,
        rendezvous: &Rendezvous,
        member: usize,
        generation: u64,
        record: ArrivalRecord,
    ) {
        let world = self.number();
        let message =
            Message::Arrival { world, rendezvous: rendezvous.id, member, generation, record };
        rendezvous
            .remote_processes
            .iter()
            .for_each(|process| self.processes.send(*process, &message));
    }

    pub(crate) fn failed(&self, rank: usize, step: u64, error: &Error) {
        let (world, kind, cause) = (self.number(), error.kind(), error.to_string());
        self.processes.send_all(&Message::Failed { world, rank, step, kind, cause: &cause });
    }
}
