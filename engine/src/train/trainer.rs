//! A rank's part of a run, put together from the config and the plan.

use crate::checkpoint::detours::Detours;
use crate::config::{Config, Packing, ParameterPlace};
use crate::data::Dataset;
use crate::layout::build::Built;
use crate::step::Trainer;
use crate::train::batch::{Deal, Loader, Samples};
use crate::train::schedule::Schedule;
use device::Rank;
use offload::{Optimizer, PerStep};
use std::sync::Arc;

/// What the loop gives each step.
#[derive(Debug)]
struct Given {
    schedule: Schedule,
    samples: Samples,
}

impl PerStep for Given {
    fn learning_rate(&self, step: u64) -> f64 {
        self.schedule.lr(step)
    }
    fn weight(&self, step: u64) -> f64 {
        self.samples.weight(step)
    }
}

/// Everything that `rank` trains with.
pub(crate) fn trainer(
    config: &Config,
    built: &Built,
    (data, detours): (&Arc<Dataset>, &Arc<Detours>),
    rank: Rank,
) -> Trainer {
    let packs = config.data.packing == Packing::Documents;
    assert!(packs || !data.is_packed(), "batches say where packed documents start");
    let deal = Deal {
        seed: config.train.seed,
        order: config.data.order,
        micro_batch: config.batch.micro,
        micro_batches: built.micro_batches,
        rank,
        seq_len: config.model.seq_len,
    };
    let counted: Vec<_> = built.gpt.segments().iter().map(|s| s.counted(rank.tp)).collect();
    let samples = Samples { data: Arc::clone(data), detours: Arc::clone(detours), deal };
    let schedule = Schedule::new(&config.schedule, config.optimizer.lr);
    let given = Arc::new(Given { schedule, samples: samples.clone() });
    let noise = crate::train::init::noise(config, &built.gpt, rank);
    let optimizer = Optimizer::new(&built.layout, rank, (&counted, &noise), given);
    let together_back = config.offload.parameters == ParameterPlace::Host;
    let loader = Loader::new(&built.batches, &samples, (config.train.steps, together_back));
    let schedule = crate::step::Schedule {
        update: crate::layout::build::update_mode(config),
        lookahead: config.offload.lookahead,
        first_forward: crate::layout::build::first_forward(config),
        together_back,
    };
    Trainer::new(built, optimizer, loader, samples, schedule)
}
