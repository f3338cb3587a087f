//! The messages of a run, and their channel to the calling thread.

use crate::run::expert_load::ExpertLoad;
use crate::train::batch::StepContents;
use device::{Activity, Communicator};
use offload::SpeculationOutcome;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Results of a step, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the trained targets of the global batch, in nats per token.
    pub loss: f64,
    /// Number of trained targets in the global batch.
    pub targets: u64,
    /// Documents and padding of the samples; `None` if samples are windows of a text.
    pub contents: Option<StepContents>,
    /// Load of the experts, if the model has experts.
    pub expert_load: Option<ExpertLoad>,
    /// Norm of the unscaled mean gradient, before clipping.
    pub grad_norm: f64,
    /// Loss scale that the backward pass used; 1 without scaling.
    pub loss_scale: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Whether the update was skipped because a gradient was not finite.
    pub skipped: bool,
    /// Number of skipped steps since the first step.
    pub skipped_total: u64,
    /// Outcome of the speculative updates, with `offload.update: Speculative`.
    pub speculation: SpeculationOutcome,
    /// Whether two runs of the step gave the same bits; `None` if the step ran once.
    pub verified: Option<bool>,
    /// Wall time in seconds since the end of the previous step.
    pub seconds: f64,
    /// Work of rank 0's lanes since the start.
    pub activity: Activity,
}

/// A difference between two runs of a step, as one rank saw it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Difference {
    /// Number of the rank.
    pub rank: usize,
    /// Tensors of the gradient that differ first in the backward pass, or the loss.
    pub place: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on rank {}", self.place, self.rank)
    }
}

impl Difference {
    /// Lists all `places`, separated by commas.
    pub fn all(places: &[Self]) -> String {
        places.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// How an evaluation compares with those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvaluationRank {
    /// Whether its loss is the least so far. An evaluation that a resumed run repeats is not.
    pub improves: bool,
    /// Number of evaluations in a row without a new least loss, with this one.
    pub without_improvement: u64,
}

/// A message of rank 0.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "the report of a step has no memory of its own")]
pub enum Message {
    /// A step is decided.
    Step(StepReport),
    /// Two runs of a step gave different bits; training continues with the second run.
    Differs {
        /// Number of the step. The report of the step follows.
        step: u64,
        /// One entry for each rank that saw a difference.
        places: Vec<Difference>,
    },
    /// The next batch of an evaluation is about to begin.
    Evaluating {
        /// Step before the evaluation.
        step: u64,
        /// Number of finished batches.
        done: u64,
        /// Number of all batches; a batch covers all data-parallel ranks.
        batches: u64,
    },
    /// An evaluation after a step.
    Eval {
        /// Step before the evaluation.
        step: u64,
        /// Mean validation loss, in nats per token.
        loss: f64,
        /// Whether the loss covers the whole validation set.
        whole: bool,
        /// Name and loss of each data set, if there are several.
        sets: Vec<(String, f64)>,
        /// Comparison with earlier evaluations, if the run compares them.
        standing: Option<EvaluationRank>,
    },
    /// The files of a checkpoint are on the disk. The checkpoint gets its name when the metrics of
    /// all earlier messages are on the disk too.
    Saving {
        /// Number of steps in the checkpoint.
        step: u64,
    },
    /// A checkpoint is on the disk, and has its name.
    Saved {
        /// Number of steps in the checkpoint.
        step: u64,
        /// Seconds that training waited.
        waited: f64,
        /// Seconds from the beginning of the save.
        seconds: f64,
        /// Seconds of the save that the slowest rank spent on checksums.
        hashing: f64,
        /// Bytes of the saved states.
        bytes: u64,
    },
    /// A checkpoint could not be saved. Earlier checkpoints stay, and training continues.
    NotSaved {
        /// Number of steps in the missing checkpoint.
        step: u64,
        /// Cause and place of the failure.
        why: String,
    },
}

/// An item of the channel to the calling thread.
#[expect(clippy::large_enum_variant, reason = "the report of a step has no memory of its own")]
pub(crate) enum ChannelItem {
    Message(Message),
    /// Request for an answer after all earlier messages are handled.
    Flush(crossbeam_channel::Sender<()>),
}

/// A rank's access to the calling thread; only rank 0 has a sender.
#[derive(Clone, Copy)]
pub(crate) struct Listener<'a> {
    pub(crate) sender: Option<&'a crossbeam_channel::Sender<ChannelItem>>,
    pub(crate) world: &'a Communicator,
}

impl Listener<'_> {
    /// Sends a message. The run continues if the receiver is gone or slow: a terminal may be paused
    /// for hours.
    pub(crate) fn tell(&self, message: Message) {
        if let Some(sender) = self.sender
            && let Err(crossbeam_channel::TrySendError::Full(post)) =
                sender.try_send(ChannelItem::Message(message))
        {
            self.world.held_up(|| sender.send(post).ok());
        }
    }
}

/// Returns when all earlier messages are handled, or when the receiver is gone.
pub(crate) fn flush(sender: &crossbeam_channel::Sender<ChannelItem>) {
    let (answer, answered) = crossbeam_channel::bounded(0);
    let _ = sender.send(ChannelItem::Flush(answer));
    let _ = answered.recv();
}
