//! Micro-batches on their way to the device: a host task fills a pinned one, a copy brings it up, one ahead of
//! the step. Which samples a batch holds is a function of the seed, the step and the sample's number alone.

use crate::config::DataOrder;
use crate::data::{Dataset, ReadError, Sample};
use crate::train::detours::Detours;
use device::{
    Arena, Device, Dtype, Event, HostContext, HostOp, HostTask,
    Lane::{Compute, H2d, Host},
    Mode, Op, Plan, Rank, Tensor,
};
use std::sync::Arc;
use tensor_parallel::BatchTensors;

/// Handles of the batches, the same on every rank: (3, B T) I32 each: tokens, targets, order; and a fourth row where samples hold several
/// documents: their starts. Those for training take turns,
/// the last is an evaluation's.
#[derive(Clone, Debug)]
pub struct BatchLayout {
    host: Vec<Tensor>,
    device: Vec<Tensor>,
}

impl BatchLayout {
    /// With room for `at_once` training batches and the next one.
    pub(crate) fn plan(plan: &mut Plan, tokens: usize, packs: bool, at_once: usize) -> Self {
        let rows = if packs { 4 } else { 3 };
        let mut slots = |arena, name: &str| {
            let at = (arena, "batches and losses");
            let slot = |i| plan.tensor(at, format!("{name}.{i}"), Dtype::I32, (rows, tokens));
            (0..at_once + 2).map(slot).collect()
        };
        Self { host: slots(Arena::Pinned, "batch_host"), device: slots(Arena::Device, "batch") }
    }
}

/// The data loader of one rank.
#[derive(Debug)]
pub(crate) struct Loader {
    layout: BatchLayout,
    tasks: Vec<Arc<HostOp>>,
    /// Training micro-batches that were fetched, taken, and given back: the numbers of the next ones.
    next: u64,
    taken: u64,
    released: u64,
    /// Training micro-batches there are.
    end: u64,
    /// Of a step.
    micro_batches: u64,
    in_groups: bool,
    on_device: Vec<Event>,
    consumed: Vec<Event>,
}

/// A micro-batch on the device, and where its samples stand in the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub(crate) tensors: BatchTensors,
    pub(crate) starts: Option<Tensor>,
    slot: usize,
}

/// How a step's samples are dealt out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deal {
    pub(crate) seed: u64,
    pub(crate) order: DataOrder,
    pub(crate) micro_batch: usize,
    pub(crate) micro_batches: usize,
    pub(crate) rank: Rank,
    pub(crate) seq_len: usize,
}

impl Deal {
    /// Number within the step of the first sample of micro-batch `micro`.
    pub(crate) const fn first_sample(&self, micro: usize) -> usize {
        (micro * self.rank.dp_size + self.rank.dp) * self.micro_batch
    }

    /// Samples of a step over all ranks.
    const fn samples(&self) -> usize {
        self.micro_batches * self.rank.dp_size * self.micro_batch
    }
}

/// What the samples of a step hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Held {
    /// Number of documents.
    pub documents: u64,
    /// Share of the tokens that are padding, 0 to 1.
    pub padding: f64,
}

/// The samples of a run, by step (from 1) and number within it.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    pub(crate) data: Arc<Dataset>,
    pub(crate) detours: Arc<Detours>,
    pub(crate) deal: Deal,
}

impl Samples {
    /// A sample of a step.
    fn sample(&self, step: u64, sample: usize) -> Sample<'_> {
        let seed = self.detours.seed(self.deal.seed, step);
        let samples = self.deal.samples() as u64;
        let number = (step - 1) * samples + sample as u64;
        self.data.sample(self.deal.order, seed, number, samples)
    }

    /// How many targets of a step count, over all ranks.
    pub(crate) fn targets(&self, step: u64) -> u64 {
        let samples = self.deal.samples();
        match self.data.is_uneven() {
            false => (samples * self.deal.seq_len) as u64,
            true => {
                let of = |Sample { corpus, place, .. }| corpus.targets(place);
                (0..samples).map(|i| of(self.sample(step, i))).sum()
            }
        }
    }

    /// How many documents the samples of a step hold over all ranks, and which share of its tokens is padding; of windows nothing.
    pub(crate) fn held(&self, step: u64) -> Option<Held> {
        let all = (0..self.deal.samples()).filter(|_| self.data.is_uneven());
        let each = all.filter_map(|i| {
            let Sample { corpus, place, .. } = self.sample(step, i);
            corpus.held(place)
        });
        let (documents, filled) = each.fold((0, 0), |(n, all), (one, some)| (n + one, all + some));
        let tokens = (self.deal.samples() * self.deal.seq_len) as f64;
        (documents > 0).then(|| Held { documents, padding: 1.0 - filled as f64 / tokens })
    }

    /// Tokens of a step over its targets: the factor from a sum over all tokens as if each counted to the mean over the
    /// targets that do. 1 where every token counts.
    pub(crate) fn weight(&self, step: u64) -> f64 {
        let (tokens, targets) = (self.deal.samples() * self.deal.seq_len, self.targets(step));
        assert!(targets > 0, "every sample of a file has a target");
        tokens as f64 / targets as f64
    }
}

impl Loader {
    /// For training steps `1..=steps`. `in_groups`: all batches are taken as many at a time as there is room for.
    pub(crate) fn new(
        layout: &BatchLayout,
        samples: &Samples,
        (steps, in_groups): (u64, bool),
    ) -> Self {
        let slots = layout.host.len();
        let task = |slot| {
            let training = slot + 1 < slots;
            HostOp::new(Fill { to: layout.host[slot], samples: samples.clone(), training })
        };
        let micro_batches = samples.deal.micro_batches as u64;
        Self {
            layout: layout.clone(),
            tasks: (0..slots).map(task).collect(),
            next: 0,
            taken: 0,
            released: 0,
            end: steps * micro_batches,
            micro_batches,
            in_groups,
            on_device: vec![Event::default(); slots],
            consumed: vec![Event::default(); slots],
        }
    }

    /// The next training batch is the first after `done` steps.
    pub(crate) const fn skip_to(&mut self, done: u64) {
        self.next = done * self.micro_batches;
        (self.taken, self.released) = (self.next, self.next);
    }

    /// Starts the batches on their way that are needed after those that were taken: the next one, or all that the next step
    /// begins with, as far as there is room; nothing after the last.
    pub(crate) fn prefetch(&mut self, dev: &Device) {
        let room = self.slots() - 1;
        let many = self.in_groups || self.taken.is_multiple_of(self.micro_batches);
        let ahead = if many { room } else { 1 };
        let until = (self.taken + ahead).min(self.released + room + 1).min(self.end);
        while self.next < until {
            self.send(dev, self.slot(self.next), self.next);
            self.next += 1;
        }
    }

    /// For training.
    const fn slots(&self) -> u64 {
        self.tasks.len() as u64 - 1
    }

    const fn slot(&self, batch: u64) -> usize {
        (batch % self.slots()) as usize
    }

    /// Fill (Host), then up (H2d) once the slot's former batch is consumed.
    fn send(&mut self, dev: &Device, slot: usize, index: u64) {
        dev.wait(Host, self.on_device[slot]); // the former copy has read the pinned side
        dev.submit_host(&self.tasks[slot], index);
        dev.follow(H2d, Host);
        dev.wait(H2d, self.consumed[slot]);
        let (src, dst) = (self.layout.host[slot], self.layout.device[slot]);
        dev.submit(H2d, Op::Copy { src, dst });
        self.on_device[slot] = dev.record(H2d);
    }

    /// The next training batch. Compute waits for it.
    pub(crate) fn take(&mut self, dev: &Device) -> Batch {
        let batch = self.arrived(dev, self.slot(self.taken));
        self.taken += 1;
        batch
    }

    /// Micro-batch `index` of the evaluation of a corpus. Compute waits for it.
    pub(crate) fn evaluation(&mut self, dev: &Device, (corpus, index): (usize, u64)) -> Batch {
        let last = self.tasks.len() - 1;
        assert!(index >> OF_CORPUS == 0, "{index} batches of an evaluation");
        self.send(dev, last, (corpus as u64) << OF_CORPUS | index);
        self.arrived(dev, last)
    }

    fn arrived(&self, dev: &Device, slot: usize) -> Batch {
        dev.wait(Compute, self.on_device[slot]);
        let row = |i: usize| {
            let t = self.layout.device[slot].rows(i..i + 1);
            t.reshape(1, t.len())
        };
        let tensors = BatchTensors { tokens: row(0), targets: row(1), order: row(2) };
        let starts = (self.layout.device[slot].shape().0 == 4).then(|| row(3));
        Batch { tensors, starts, slot }
    }

    /// Compute is done with `batch` where it stands now.
    pub(crate) fn release(&mut self, dev: &Device, batch: &Batch) {
        self.consumed[batch.slot] = dev.record(Compute);
        self.released += u64::from(batch.slot + 1 < self.tasks.len());
    }
}

/// The task that reads data.
pub(crate) const FILL: &str = "fill_batch";

/// Bits of the number of an evaluation's micro-batch that count it within its corpus. Those above are the number of the corpus.
const OF_CORPUS: u32 = 48;

/// Writes one micro-batch. `arg` is its number.
#[derive(Debug)]
struct Fill {
    to: Tensor,
    samples: Samples,
    training: bool,
}

impl HostTask for Fill {
    fn name(&self) -> &'static str {
        FILL
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Write, self.to);
    }
    fn run(&self, index: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let all = host.write_as::<i32>(self.to)?;
        let n = all.len() / self.to.shape().0;
        let (tokens, rest) = all.split_at_mut(n);
        let (targets, rest) = rest.split_at_mut(n);
        let (order, starts) = rest.split_at_mut(n);
        let Samples { data, deal, .. } = &self.samples;
        let t = deal.seq_len;
        let mut starts = starts.chunks_mut(t);
        let (step, micro) = (index / deal.micro_batches as u64, index % deal.micro_batches as u64);
        let samples = tokens.chunks_mut(t).zip(targets.chunks_mut(t)).enumerate();
        let unread = |unread: ReadError| unread.to_string();
        for (b, (inputs, targets)) in samples {
            if self.training {
                let sample = deal.first_sample(micro as usize) + b;
                let Sample { corpus, place, .. } = self.samples.sample(step + 1, sample);
                corpus.fill_train(place, inputs, targets).map_err(unread)?;
                starts.next().into_iter().for_each(|starts| corpus.fill_starts(place, starts));
            } else {
                let corpus = data.evaluation((index >> OF_CORPUS) as usize);
                let batch = (index & ((1 << OF_CORPUS) - 1)) as usize;
                let first = (batch * deal.rank.dp_size + deal.rank.dp) * deal.micro_batch;
                corpus.fill_eval(first + b, inputs, targets).map_err(unread)?;
                let starts = starts.next();
                starts.into_iter().for_each(|starts| corpus.fill_eval_starts(first + b, starts));
            }
        }
        order.iter_mut().enumerate().for_each(|(i, o)| *o = i as i32);
        // By token, then by position: the order of a stable sort, without its buffer.
        order.sort_unstable_by_key(|&i| (tokens[i as usize], i));
        Ok(())
    }
}
