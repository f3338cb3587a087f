//! What the ranks have to say, and its way to the calling thread.

use crate::train::batch::Held;
use device::Activity;
use device::Communicator;
use offload::SpeculationOutcome;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a step ended with, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// Mean over the targets of the global batch that count, nats per token.
    pub loss: f64,
    /// Number of these targets.
    pub targets: u64,
    /// Its documents and padding, where samples are no windows.
    pub held: Option<Held>,
    /// Of the unscaled mean gradient, before clipping.
    pub grad_norm: f64,
    /// That the step's backward pass used; 1 without scaling.
    pub loss_scale: f64,
    /// Learning rate.
    pub lr: f64,
    /// A gradient was not finite; nothing was updated.
    pub skipped: bool,
    /// Skipped steps since the first.
    pub skipped_total: u64,
    /// What became of the updates ahead of the decision, under `offload.update: Speculative`.
    pub ahead: SpeculationOutcome,
    /// Whether two runs of its passes have given the same bits, where `train.verify_every` asked for two.
    pub verified: Option<bool>,
    /// Wall time since the step before ended.
    pub seconds: f64,
    /// Rank 0's lanes since the start.
    pub activity: Activity,
}

/// Where a rank has seen that two runs of a step differ.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Differing {
    /// The rank's number.
    pub rank: usize,
    /// The tensors of the gradient to which the backward pass came first, or the loss.
    pub place: String,
}

impl fmt::Display for Differing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on rank {}", self.place, self.rank)
    }
}

impl Differing {
    /// All of them in a sentence.
    pub(crate) fn all(places: &[Self]) -> String {
        places.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// What rank 0 tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// A step is decided.
    Step(StepReport),
    /// Two runs of a step's passes have given other bits; training goes on with the second.
    Differs {
        /// The step. Its report follows.
        step: u64,
        /// One entry for each rank that has seen it.
        places: Vec<Differing>,
    },
    /// About to begin a batch of an evaluation.
    Evaluating {
        /// The step it follows.
        step: u64,
        /// Batches that are done.
        done: u64,
        /// Batches of all data-parallel ranks, in all.
        batches: u64,
    },
    /// An evaluation after a step.
    Eval {
        /// The step it follows.
        step: u64,
        /// Held-out loss, nats per token.
        loss: f64,
        /// Over all of the held-out part.
        whole: bool,
        /// By data set, where there are several: its name and its loss.
        sets: Vec<(String, f64)>,
    },
    /// The files of a checkpoint are on the disk. It gets its name when what was told before is there too.
    Saving {
        /// Steps that it holds.
        step: u64,
    },
    /// A checkpoint is on the disk, and has its name.
    Saved {
        /// Steps that it holds.
        step: u64,
        /// That training waited.
        waited: f64,
        /// From its beginning.
        seconds: f64,
        /// Of these, that the slowest rank spent on checksums.
        hashing: f64,
        /// Of states.
        bytes: u64,
    },
    /// A checkpoint is not there; those before it are, and training goes on.
    NotSaved {
        /// Steps that it should have held.
        step: u64,
        /// What went wrong, and where.
        why: String,
    },
}

/// On the way to the calling thread.
pub(crate) enum Post {
    Tell(Message),
    /// To be answered when all before it has been told.
    Flush(crossbeam_channel::Sender<()>),
}

/// Rank 0's way to the calling thread.
#[derive(Clone, Copy)]
pub(crate) struct Listener<'a> {
    pub(crate) sender: Option<&'a crossbeam_channel::Sender<Post>>,
    pub(crate) world: &'a Communicator,
}

impl Listener<'_> {
    /// To whoever listens; a run does not end because no one does, nor because the listener is slow: a
    /// terminal may be held for hours.
    pub(crate) fn tell(&self, message: Message) {
        if let Some(sender) = self.sender
            && let Err(crossbeam_channel::TrySendError::Full(post)) =
                sender.try_send(Post::Tell(message))
        {
            let _ = self.world.held_up(|| sender.send(post));
        }
    }
}

/// Returns when all that was told has been heard, or nobody listens.
pub(crate) fn flush(sender: &crossbeam_channel::Sender<Post>) {
    let (answer, answered) = crossbeam_channel::bounded(0);
    let _ = sender.send(Post::Flush(answer));
    let _ = answered.recv();
}
