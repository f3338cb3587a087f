//! The messages of a run, and their channel to the calling thread.

use crate::train::batch::StepContents;
use device::{Activity, Communicator};
use offload::SpeculationOutcome;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The results of a step, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// Mean over the targets of the global batch that count, nats per token.
    pub loss: f64,
    /// Number of these targets.
    pub targets: u64,
    /// Documents and padding of the samples; `None` if samples are windows of a text.
    pub contents: Option<StepContents>,
    /// Norm of the unscaled mean gradient, before clipping.
    pub grad_norm: f64,
    /// The loss scale that the backward pass used; 1 without scaling.
    pub loss_scale: f64,
    /// Learning rate.
    pub lr: f64,
    /// A gradient was not finite; nothing was updated.
    pub skipped: bool,
    /// Skipped steps since the first step.
    pub skipped_total: u64,
    /// What became of the speculative updates, under `offload.update: Speculative`.
    pub ahead: SpeculationOutcome,
    /// Whether two runs of the step gave the same bits; `None` if `train.verify_every` did not ask for two.
    pub verified: Option<bool>,
    /// Wall time in seconds since the step before ended.
    pub seconds: f64,
    /// Work of rank 0's lanes since the start.
    pub activity: Activity,
}

/// A difference between two runs of a step, as one rank saw it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Difference {
    /// The rank's number.
    pub rank: usize,
    /// The tensors of the gradient to which the backward pass came first, or the loss.
    pub place: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on rank {}", self.place, self.rank)
    }
}

impl Difference {
    /// All of them in a sentence.
    pub fn all(places: &[Self]) -> String {
        places.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// A message of rank 0.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// A step is decided.
    Step(StepReport),
    /// Two runs of a step gave different bits; training goes on with the second.
    Differs {
        /// The step. Its report follows.
        step: u64,
        /// One entry for each rank that saw a difference.
        places: Vec<Difference>,
    },
    /// The next batch of an evaluation is about to begin.
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
        /// Whether the loss is that of the whole held-out part.
        whole: bool,
        /// Name and loss of each data set, if there are several.
        sets: Vec<(String, f64)>,
    },
    /// The files of a checkpoint are on the disk. It gets its name when the metrics of all earlier messages are on the disk too.
    Saving {
        /// Steps that the checkpoint holds.
        step: u64,
    },
    /// A checkpoint is on the disk, and has its name.
    Saved {
        /// Steps that it holds.
        step: u64,
        /// Seconds that training waited.
        waited: f64,
        /// Seconds from the beginning of the save.
        seconds: f64,
        /// Seconds of these that the slowest rank spent on checksums.
        hashing: f64,
        /// Bytes of states.
        bytes: u64,
    },
    /// A checkpoint could not be saved; earlier ones exist, and training goes on.
    NotSaved {
        /// Steps that it should have held.
        step: u64,
        /// What went wrong, and where.
        why: String,
    },
}

/// An item of the channel to the calling thread.
pub(crate) enum ChannelItem {
    Message(Message),
    /// Asks for an answer once all earlier messages are handled.
    Flush(crossbeam_channel::Sender<()>),
}

/// A rank's access to the calling thread; only rank 0 has a sender.
#[derive(Clone, Copy)]
pub(crate) struct Listener<'a> {
    pub(crate) sender: Option<&'a crossbeam_channel::Sender<ChannelItem>>,
    pub(crate) world: &'a Communicator,
}

impl Listener<'_> {
    /// Sends a message. A run does not end because nobody receives it, nor because the receiver is slow: a terminal may be
    /// held for hours.
    pub(crate) fn tell(&self, message: Message) {
        if let Some(sender) = self.sender
            && let Err(crossbeam_channel::TrySendError::Full(post)) =
                sender.try_send(ChannelItem::Message(message))
        {
            let _ = self.world.held_up(|| sender.send(post));
        }
    }
}

/// Returns when all earlier messages are handled, or nobody receives them.
pub(crate) fn flush(sender: &crossbeam_channel::Sender<ChannelItem>) {
    let (answer, answered) = crossbeam_channel::bounded(0);
    let _ = sender.send(ChannelItem::Flush(answer));
    let _ = answered.recv();
}
