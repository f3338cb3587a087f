//! The data loader. A host task fills a pinned micro-batch, and a copy sends it to the device one
//! micro-batch before its use. A sample depends only on the seed, the step and its number.

use checkpoint::rollback::RollbackHistory;
use config::DataOrder;
use data::{Dataset, ReadError, Sample};
use device::{
    Device, Event, HostContext, HostOp, HostTask,
    Lane::{Compute, H2d, Host},
    Mode, Op, Rank, Tensor,
};
use layout::batches::BatchLayout;
use std::sync::Arc;
use tensor_parallel::BatchTensors;

/// The data loader of one rank.
#[derive(Debug)]
pub(crate) struct Loader {
    layout: BatchLayout,
    tasks: Vec<Arc<HostOp>>,
    /// Numbers of the next training micro-batches to send, to take, and to release.
    next: u64,
    taken: u64,
    released: u64,
    /// Number of training micro-batches of the run.
    end: u64,
    /// Number of micro-batches in a step.
    micro_batches: u64,
    by_group: bool,
    on_device: Vec<Event>,
    consumed: Vec<Event>,
}

/// A micro-batch on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub(crate) tensors: BatchTensors,
    /// Position at which the document of each token starts, if samples hold several documents.
    pub(crate) starts: Option<Tensor>,
    slot: usize,
}

/// A micro-batch of an evaluation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvalBatch {
    /// Number of the validation corpus.
    pub(crate) corpus: usize,
    /// Number of the micro-batch within the corpus.
    pub(crate) index: u64,
}

/// Split of the samples of a step over ranks and micro-batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchSplit {
    pub(crate) seed: u64,
    pub(crate) order: DataOrder,
    pub(crate) micro_batch: usize,
    pub(crate) micro_batches: usize,
    pub(crate) rank: Rank,
    pub(crate) seq_len: usize,
}

impl BatchSplit {
    /// Number within the step of the first sample of micro-batch `micro`.
    pub(crate) const fn first_sample(&self, micro: usize) -> usize {
        (micro * self.rank.dp_size + self.rank.dp) * self.micro_batch
    }

    /// Number of samples in a step, over all ranks.
    const fn samples(&self) -> usize {
        self.micro_batches * self.rank.dp_size * self.micro_batch
    }
}

/// Documents and padding in the samples of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepContents {
    /// Number of documents over all ranks.
    pub documents: u64,
    /// Share of the tokens that are padding, 0 to 1.
    pub padding: f64,
}

/// The samples of a run. A sample is named by its step (from 1) and its number in the step.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) data: Arc<Dataset>,
    pub(crate) rollback_history: Arc<RollbackHistory>,
    pub(crate) split: BatchSplit,
}

impl Samples {
    /// Sample number `sample` of `step`.
    fn sample(&self, step: u64, sample: usize) -> Sample<'_> {
        let seed = self.rollback_history.seed(self.split.seed, step);
        let samples = self.split.samples() as u64;
        let number = (step - 1) * samples + sample as u64;
        self.data.sample(self.split.order, seed, number, samples)
    }

    /// Number of trained targets in a step, over all ranks.
    pub(crate) fn targets(&self, step: u64) -> u64 {
        let samples = self.split.samples();
        match self.data.is_uneven() {
            false => (samples * self.split.seq_len) as u64,
            true => {
                let of = |Sample { corpus, place, .. }| corpus.targets(place);
                (0..samples).map(|i| of(self.sample(step, i))).sum()
            }
        }
    }

    /// Number of documents in the samples of a step over all ranks, and share of padding tokens.
    /// `None` if samples are windows of a text.
    pub(crate) fn contents(&self, step: u64) -> Option<StepContents> {
        let all = (0..self.split.samples()).filter(|_| self.data.is_uneven());
        let each = all.filter_map(|i| {
            let Sample { corpus, place, .. } = self.sample(step, i);
            corpus.held(place)
        });
        let (documents, filled) = each.fold((0, 0), |(n, all), (one, some)| (n + one, all + some));
        let tokens = (self.split.samples() * self.split.seq_len) as f64;
        (documents > 0).then(|| StepContents { documents, padding: 1.0 - filled as f64 / tokens })
    }

    /// Tokens of a step divided by its trained targets: the factor that turns a mean over all
    /// tokens into the mean over the trained targets. 1 if every token is trained.
    pub(crate) fn weight(&self, step: u64) -> f64 {
        let (tokens, targets) = (self.split.samples() * self.split.seq_len, self.targets(step));
        assert!(targets > 0, "every sample of a file has a target");
        tokens as f64 / targets as f64
    }
}

impl Loader {
    /// Makes a loader for the training steps `1..=steps`. `by_group`: a step uses groups of batches
    /// that fill all slots.
    pub(crate) fn new(layout: &BatchLayout, samples: &Samples, steps: u64, by_group: bool) -> Self {
        let slots = layout.host.len();
        let task = |slot| {
            let training = slot + 1 < slots;
            HostOp::new(BatchFiller {
                target: layout.host[slot],
                samples: samples.clone(),
                training,
            })
        };
        let micro_batches = samples.split.micro_batches as u64;
        Self {
            layout: layout.clone(),
            tasks: (0..slots).map(task).collect(),
            next: 0,
            taken: 0,
            released: 0,
            end: steps * micro_batches,
            micro_batches,
            by_group,
            on_device: vec![Event::default(); slots],
            consumed: vec![Event::default(); slots],
        }
    }

    /// Makes the first batch after `done` steps the next training batch.
    pub(crate) const fn skip_to(&mut self, done: u64) {
        self.next = done * self.micro_batches;
        (self.taken, self.released) = (self.next, self.next);
    }

    /// Sends the next training batches to the device: one batch, or a batch for each free slot at
    /// the start of a step and with `by_group`. The copies still run on return;
    /// [`take`](Self::take) waits for each copy.
    pub(crate) fn prefetch(&mut self, dev: &Device) {
        let room = self.slots() - 1;
        let many = self.by_group || self.taken.is_multiple_of(self.micro_batches);
        let lookahead = if many { room } else { 1 };
        let until = (self.taken + lookahead).min(self.released + room + 1).min(self.end);
        while self.next < until {
            self.send(dev, self.slot(self.next), self.next);
            self.next += 1;
        }
    }

    /// Number of slots for training.
    const fn slots(&self) -> u64 {
        self.tasks.len() as u64 - 1
    }

    const fn slot(&self, batch: u64) -> usize {
        (batch % self.slots()) as usize
    }

    /// Fills the pinned batch of `slot` (Host), and copies it to the device (H2d) after Compute has
    /// released the slot. Both ops still run on return; wait for `on_device` of the slot.
    fn send(&mut self, dev: &Device, slot: usize, index: u64) {
        dev.wait(Host, self.on_device[slot]); // the last copy has read the pinned batch
        dev.submit_host(&self.tasks[slot], index);
        dev.follow(H2d, Host);
        dev.wait(H2d, self.consumed[slot]);
        let (src, dst) = (self.layout.host[slot], self.layout.device[slot]);
        dev.submit(H2d, Op::Copy { src, dst });
        self.on_device[slot] = dev.record(H2d);
    }

    /// Returns the next training batch. Compute waits for its copy.
    pub(crate) fn take(&mut self, dev: &Device) -> Batch {
        let batch = self.await_slot(dev, self.slot(self.taken));
        self.taken += 1;
        batch
    }

    /// Sends a micro-batch of an evaluation to the device. Compute waits for the copy.
    pub(crate) fn take_evaluation(&mut self, dev: &Device, batch: EvalBatch) -> Batch {
        let EvalBatch { corpus, index } = batch;
        let last = self.tasks.len() - 1;
        assert!(index >> CORPUS_SHIFT == 0, "{index} batches of an evaluation");
        self.send(dev, last, (corpus as u64) << CORPUS_SHIFT | index);
        self.await_slot(dev, last)
    }

    /// Returns the batch of a slot. Compute waits for its copy.
    fn await_slot(&self, dev: &Device, slot: usize) -> Batch {
        dev.wait(Compute, self.on_device[slot]);
        let row = |i: usize| {
            let t = self.layout.device[slot].rows(i..i + 1);
            t.reshape(1, t.len())
        };
        let tensors = BatchTensors { tokens: row(0), targets: row(1), order: row(2) };
        let starts = (self.layout.device[slot].shape().0 == 4).then(|| row(3));
        Batch { tensors, starts, slot }
    }

    /// Frees the slot of `batch` after all ops that are queued on Compute now.
    pub(crate) fn release(&mut self, dev: &Device, batch: &Batch) {
        self.consumed[batch.slot] = dev.record(Compute);
        self.released += u64::from(batch.slot + 1 < self.tasks.len());
    }
}

/// Name of the host task that fills a micro-batch.
pub const FILL: &str = "fill_batch";

/// Bit of an evaluation's argument at which the number of the corpus begins. The lower bits are the
/// number of the micro-batch within the corpus.
const CORPUS_SHIFT: u32 = 48;

/// Host task that fills one micro-batch. Its argument is the number of the micro-batch.
#[derive(Debug)]
struct BatchFiller {
    target: Tensor,
    samples: Samples,
    training: bool,
}

impl HostTask for BatchFiller {
    fn name(&self) -> &'static str {
        FILL
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Write, self.target);
    }
    fn run(&self, index: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let all = host.write_as::<i32>(self.target)?;
        let n = all.len() / self.target.shape().0;
        let (tokens, rest) = all.split_at_mut(n);
        let (targets, rest) = rest.split_at_mut(n);
        let (order, starts) = rest.split_at_mut(n);
        let Samples { data, split, .. } = &self.samples;
        let t = split.seq_len;
        let mut starts = starts.chunks_mut(t);
        let (step, micro) =
            (index / split.micro_batches as u64, index % split.micro_batches as u64);
        let samples = tokens.chunks_mut(t).zip(targets.chunks_mut(t)).enumerate();
        let unread = |unread: ReadError| unread.to_string();
        for (b, (inputs, targets)) in samples {
            if self.training {
                let sample = split.first_sample(micro as usize) + b;
                let Sample { corpus, place, .. } = self.samples.sample(step + 1, sample);
                corpus.fill_train(place, inputs, targets).map_err(unread)?;
                starts.next().into_iter().for_each(|starts| corpus.fill_starts(place, starts));
            } else {
                let corpus = data.evaluation((index >> CORPUS_SHIFT) as usize);
                let batch = (index & ((1 << CORPUS_SHIFT) - 1)) as usize;
                let first = (batch * split.rank.dp_size + split.rank.dp) * split.micro_batch;
                corpus.fill_eval(first + b, inputs, targets).map_err(unread)?;
                let starts = starts.next();
                starts.into_iter().for_each(|starts| corpus.fill_eval_starts(first + b, starts));
            }
        }
        order.iter_mut().enumerate().for_each(|(i, o)| *o = i as i32);
        // Sorted by token, then by position: the order of a stable sort, without its buffer.
        order.sort_unstable_by_key(|&i| (tokens[i as usize], i));
        Ok(())
    }
}
