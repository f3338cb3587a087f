//! Communication with the ranks of a world that are in other processes.

use super::{Communicator, CompletedRendezvous};
use crate::error::RemoteFailure;
use crate::ranks::processes::MessageHandler;
use crate::ranks::remote::Parcel;
use crate::ranks::wire::Message;
use crate::submit::device::Rank;
use crate::{Error, Group, Lane};
use topology::counted;

impl Communicator {
    /// Whether a member of this rank's group is in another process.
    pub(crate) fn is_remote_group(&self, rank: Rank, group: Group) -> bool {
        self.remote.is_some()
            && !self.rendezvous(rank, Lane::Compute, group).remote_processes.is_empty()
    }

    /// Sends `bytes` to member `to`, a rank of another process, which reads them after the next
    /// rendezvous.
    pub(crate) fn send(&self, rank: Rank, lane: Lane, group: Group, to: usize, bytes: &[u8]) {
        let Some(remote) = &self.remote else { unreachable!("all ranks are in this process") };
        let (rendezvous, to) = (self.rendezvous(rank, lane, group).id, rank.member(group, to));
        let (world, from) = (remote.number(), rank.index());
        let home = remote.home(to, self.num_ranks());
        remote.processes.send(home, &Message::Data { world, rendezvous, from, to, bytes });
    }

    /// Collects on rank 0 the `bytes` of all ranks outside rank 0's process. All ranks call it on
    /// their own threads and in the same order. Rank 0 gets the bytes with the rank's index; the
    /// other ranks get an empty list.
    ///
    /// # Errors
    /// A rank has failed, or does not enter before the timeout.
    #[track_caller]
    pub fn gather_remote(
        &self,
        rank: Rank,
        what: &'static str,
        bytes: &[u8],
    ) -> Result<Vec<(usize, Vec<u8>)>, Error> {
        let Some(remote) = &self.remote else {
            return self.agree(rank, what, 0).map(|_| Vec::new());
        };
        let (world, rendezvous, from) = (remote.number(), self.own.id, rank.index());
        let first = remote.home(0, self.num_ranks());
        if remote.processes.me() != first {
            remote.processes.send(first, &Message::Data { world, rendezvous, from, to: 0, bytes });
        }
        self.agree(rank, what, 0)?;
        let all = (0..self.num_ranks()).filter(|other| from == 0 && self.is_remote_rank(*other));
        let take = |from| (from, remote.take_out((rendezvous, from, 0)).bytes().to_owned());
        Ok(all.map(take).collect())
    }
}

impl MessageHandler for Communicator {
    /// Handles a message to this world from process `from`.
    fn hear(&self, from: usize, bytes: Vec<u8>) {
        let Some(remote) = &self.remote else { return };
        match Message::decode(&bytes) {
            Some(Message::Arrival { rendezvous, member, generation, record, .. }) => {
                let Some(rendezvous) = self.all_rendezvous().find(|known| known.id == rendezvous)
                else {
                    unreachable!("all processes make the same rendezvous")
                };
                rendezvous.hear(member, generation, record);
            }
            Some(Message::Data { rendezvous, from, to, .. }) => {
                remote.take_in((rendezvous, from, to), bytes);
            }
            Some(Message::Failed { rank, step, kind, cause, .. }) => {
                let node = remote.processes.node(from).to_owned();
                let cause = cause.to_owned();
                let error =
                    Error::Remote(Box::new(RemoteFailure { process: from, node, kind, cause }));
                self.note_failure(rank, step, &error);
            }
            _ => unreachable!("such a message is to the processes, not to a world"),
        }
    }

    /// Ends the run since `process` is lost: silent for `silent` seconds, or ended (`None`).
    fn lose(&self, process: usize, silent: Option<u64>) {
        let Some(remote) = &self.remote else { return };
        let all = remote.processes.ranks(process, self.num_ranks());
        let (first, last) = (all.start, all.end.saturating_sub(1));
        let ranks = if first == last {
            format!("rank {first}")
        } else {
            format!("{} ({first} to {last})", counted(all.len(), "rank"))
        };
        let node = remote.processes.node(process).to_owned();
        let error = match silent {
            Some(seconds) => Error::Silent { process, node, ranks, seconds },
            None => Error::Gone { process, node, ranks },
        };
        let step = self.step.load(std::sync::atomic::Ordering::Relaxed);
        if self.note_failure(first, step, &error) {
            remote.failed(first, step, &error);
        }
    }

    fn is_held_up(&self) -> bool {
        self.is_held_up_here()
    }

    fn gpus_held_up(&self) -> Vec<u64> {
        let here = |rank: &usize| !self.is_remote_rank(*rank) && self.is_gpu_held_up(*rank);
        (0..self.num_ranks()).filter(here).map(|rank| rank as u64).collect()
    }

    fn hold_gpus_up(&self, from: usize, gpus: &[u64]) {
        let Some(remote) = &self.remote else { return };
        for rank in remote.processes.ranks(from, self.num_ranks()) {
            self.hold_gpu_up(rank, gpus.contains(&(rank as u64)));
        }
    }
}

impl CompletedRendezvous<'_> {
    /// The data that member `i`, a rank of another process, sent before this rendezvous.
    pub(crate) fn parcel(&self, i: usize) -> Parcel {
        let members = &self.rendezvous.members;
        let way = (self.rendezvous.id, members[i], members[self.me]);
        let Some(remote) = &self.world.remote else {
            unreachable!("all ranks are in this process")
        };
        remote.take_out(way)
    }
}
