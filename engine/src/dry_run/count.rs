//! Counts the ops of training steps without data, on a device that executes no op. A short run with
//! few micro-batches stands for a long run.

use crate::step::Trainer;
use crate::trainer::trainer;
use config::{Accumulate, Config, UpdateMode};
use data::{Corpus, Dataset};
use device::recorder::{self, Totals};
use device::{Device, Error, Rank};
use layout::build::{RankLayout, update_mode, vertical_width};
use std::sync::Arc;
use tensor_parallel::Ring;

/// Name of the host task that is idle if a speculative update stands, as in most steps.
pub const IDLE: &str = "settle_tile";

/// Counts the ops of the second of two steps. The first step has no update to publish.
pub fn count(config: &Config, built: &RankLayout) -> Result<Totals, Error> {
    let (dev, totals) = recorder::open(first_rank(config), &built.plan, IDLE);
    let mut before = Totals::default();
    play(config, built, &dev, 2, &mut || before.clone_from(&totals.borrow()))?;
    let after = totals.borrow();
    Ok(Totals {
        ops: std::array::from_fn(|i| after.ops[i] - before.ops[i]),
        bytes: std::array::from_fn(|i| after.bytes[i] - before.bytes[i]),
        flops: after.flops - before.flops,
    })
}

/// Rank that has the first part of each tensor and of each batch.
pub fn first_rank(config: &Config) -> Rank {
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    Rank { tp: 0, tp_size: tensor, dp: 0, dp_size: data }
}

/// Makes a trainer without data, with blank states. The copy of its first batch is queued.
pub(super) fn blank_trainer(
    config: &Config,
    built: &RankLayout,
    dev: &Device,
) -> Result<Trainer, Error> {
    let no_tokens = Arc::new(Dataset::from(Corpus::none(config.model.seq_len)));
    let mut trainer = trainer(config, built, &no_tokens, &Arc::default(), dev.rank());
    built.decoder.write_constants(dev)?;
    trainer.optimizer.init_blank(dev)?;
    trainer.loader.prefetch(dev);
    Ok(trainer)
}

/// Runs `steps` typical steps without data, on a device that executes no op. Calls `begins` before
/// every step but the first.
pub fn play(
    config: &Config,
    built: &RankLayout,
    dev: &Device,
    steps: u64,
    begins: &mut dyn FnMut(),
) -> Result<(), Error> {
    let config = &with_steps(config, steps);
    let mut trainer = blank_trainer(config, built, dev)?;
    let first = typical_step(config);
    for step in first..first + steps {
        if step > first {
            begins();
        }
        dev.begin_step(step);
        let decided = trainer.train_step(dev, step);
        dev.sync(decided)?;
    }
    Ok(())
}

/// Number of micro-batches after which the ops of a step repeat: a whole group if each group
/// streams parameters to the device, otherwise 1.
pub fn alike(config: &Config, built: &RankLayout) -> usize {
    let group = vertical_width(config);
    let in_groups = built.decoder.shape().ring != Ring::NONE && group < built.micro_batches;
    if in_groups { group } else { 1 }
}

/// Returns `config`, laid out as `built`, with another number of micro-batches, more than one.
/// Gradients are summed at the same place, and the same parameters are on the GPU.
pub fn with_micro_batches(config: &Config, built: &RankLayout, micro_batches: usize) -> Config {
    let mut config = config.clone();
    config.batch.global = micro_batches * config.batch.micro * config.parallel.data;
    let Ring { buffers: slots, resident } = built.decoder.shape().ring;
    if slots > 0 {
        (config.offload.ring, config.offload.resident_blocks) = (Some(slots), Some(resident));
    }
    config.offload.accumulate = match built.accumulation {
        offload::GradAccumulation::Host => Accumulate::Host,
        offload::GradAccumulation::Device
        | offload::GradAccumulation::Shared
        | offload::GradAccumulation::None => Accumulate::Device,
    };
    config
}

/// Returns `config` with at least `steps` + 1 training steps. The last step of the dry run fetches
/// the batch of one more step, so a shorter run would have no batch for it.
pub fn with_steps(config: &Config, steps: u64) -> Config {
    let mut config = config.clone();
    config.train.steps = config.train.steps.max(steps + 1);
    config
}

/// First step that treats its update as most steps of the run do: `after_step` of a delayed update.
pub fn typical_step(config: &Config) -> u64 {
    match update_mode(config) {
        UpdateMode::Delayed { after_step } => after_step.max(1),
        _ => 1,
    }
}
