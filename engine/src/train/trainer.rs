//! A rank's part of a run, put together from the config and the plan.

use crate::config::Config;
use crate::data::Dataset;
use crate::step::Trainer;
use crate::train::batch::{Deal, Loader};
use crate::train::build::Built;
use crate::train::detours::Detours;
use crate::train::schedule::Schedule;
use device::Rank;
use offload::{LearningRate, Optimizer};
use std::sync::Arc;

#[derive(Debug)]
struct Lr(Schedule);

impl LearningRate for Lr {
    fn at(&self, step: u64) -> f64 {
        self.0.lr(step)
    }
}

/// Everything that `rank` trains with.
pub(crate) fn trainer(
    config: &Config,
    built: &Built,
    data: (&Arc<Dataset>, &Arc<Detours>),
    rank: Rank,
) -> Trainer {
    let deal = Deal {
        seed: config.train.seed,
        order: config.data.order,
        micro_batch: config.batch.micro,
        micro_batches: built.micro_batches,
        rank,
        seq_len: config.model.seq_len,
    };
    let counted: Vec<_> = built.gpt.segments().iter().map(|s| s.counted(rank.tp)).collect();
    let lr = Arc::new(Lr(Schedule::new(&config.schedule, config.optimizer.lr)));
    let noise = crate::train::init::noise(config, &built.gpt, rank);
    let optimizer = Optimizer::new(&built.layout, rank, (&counted, &noise), lr);
    let loader = Loader::new(&built.batches, data, deal, config.train.steps);
    let schedule = crate::step::Schedule {
        update: crate::train::build::update_mode(config),
        lookahead: config.offload.lookahead,
        first_forward: crate::train::build::first_forward(config),
    };
    Trainer::new(built, optimizer, loader, deal, schedule)
}
