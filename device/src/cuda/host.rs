//! The Host lane of a rank on a GPU: one thread with a queue of two steps' work. It runs the work
//! of the cpu backend's Host lane on the pinned arena. Streams wait for the thread by a pinned
//! word, and the thread waits for streams by events.

use super::driver::{Context, Event, Word};
use super::history::{ErrorPlace, History};
use super::marks::STREAMS;
use super::progress::StreamProgress;
use crate::numerics::view::copy;
use crate::ranks::queue::Queue;
use crate::ranks::rank_state::RankState;
use crate::{AdmittedOp, Error, Lane, Op, ThreadTeam};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// An op, and for each lane the mark that the op waits for.
#[derive(Debug)]
pub(super) struct HostJob {
    pub(super) op: AdmittedOp,
    pub(super) after: [Option<(u64, Arc<Event>)>; STREAMS],
}

/// State of the Host lane's thread.
pub(super) struct HostLane {
    pub(super) shared: Arc<RankState>,
    pub(super) context: Arc<Context>,
    pub(super) history: Arc<History>,
    /// The low half of the number of finished ops.
    pub(super) done: Word,
    /// The progress of the Compute stream.
    pub(super) compute: StreamProgress,
}

impl HostLane {
    pub(super) fn spawn(self, jobs: &Arc<Queue<HostJob>>) -> std::io::Result<JoinHandle<()>> {
        let jobs = Arc::clone(jobs);
        let name = format!("host {}", self.shared.rank.index());
        std::thread::Builder::new().name(name).spawn(move || self.run(&jobs))
    }

    fn run(&self, jobs: &Queue<HostJob>) {
        crate::threads::panics::watch_this_thread();
        if let Err(failure) = self.context.bind() {
            self.shared.fail(&Error::GpuSetup {
                rank: self.shared.rank.index(),
                gpu: self.context.ordinal,
                problem: failure.to_string(),
            });
        }
        self.bind(self.shared.team());
        while let Some(HostJob { op, after }) = jobs.pop() {
            self.await_streams(&op, &after);
            let before = self.compute.look();
            self.shared.note_done(Lane::Compute, before.tick);
            let started = Instant::now();
            self.shared.run(&op, &|op| self.copy(op));
            let after = self.compute.look();
            if after.tick != before.tick || before.busy && after.busy {
                self.shared.meter.add_overlap(started.elapsed());
            }
            self.done.set(op.tick as u32);
        }
    }

    /// Copies inside the host's memory, on this thread alone. No step has these copies.
    fn copy(&self, op: &Op) -> Result<(), String> {
        let Op::Copy { src, dst } = *op else {
            return Err("the Host lane of a GPU has no such kernel".into());
        };
        copy(self.shared.memory.view(src), &mut self.shared.memory.view_mut(dst));
        Ok(())
    }

    /// Binds this thread to the cores of the host kernels. The rank's thread has a core of its own.
    fn bind(&self, team: Option<&ThreadTeam>) {
        if let Some(team) = team {
            team.bind_caller();
        } else if !self.shared.work.cpus.is_empty()
            && let Err(error) = topology::bind_current_thread(&self.shared.work.cpus)
        {
            tracing::warn!(
                "the Host lane of rank {} is not bound: {error}",
                self.shared.rank.index()
            );
        }
    }

    fn await_streams(&self, op: &AdmittedOp, after: &[Option<(u64, Arc<Event>)>; STREAMS]) {
        for (lane, mark) in Lane::ALL.into_iter().zip(after) {
            let Some((tick, event)) = mark else { continue };
            // Waits also after another rank's failure: unfinished work may still access this op's
            // memory.
            if let Err(failure) = event.synchronize() {
                let ErrorPlace { op: name, site, problem } =
                    self.history.place(lane, *tick, &failure);
                self.shared.fail(&Error::Gpu {
                    rank: self.shared.rank.index(),
                    gpu: self.context.ordinal,
                    op: name,
                    site: site.unwrap_or(op.site),
                    problem,
                });
            }
        }
    }
}
