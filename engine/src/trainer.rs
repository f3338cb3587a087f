//! Makes the trainer of a rank from the config and the layout.

use crate::step::Trainer;
use crate::train::batch::{BatchSplit, Loader, Samples};
use crate::train::learning_rate::LearningRateSchedule;
use checkpoint::rollback::RollbackHistory;
use config::{Config, Packing, ParameterPlace};
use data::Dataset;
use device::Rank;
use layout::build::RankLayout;
use offload::{Optimizer, StepSchedule};
use std::sync::Arc;

/// Inputs of the optimizer for each step: the learning rate and the weight of the loss.
#[derive(Debug)]
struct StepInputs {
    schedule: LearningRateSchedule,
    samples: Samples,
}

impl StepSchedule for StepInputs {
    fn learning_rate(&self, step: u64) -> f64 {
        self.schedule.lr(step)
    }
    fn weight(&self, step: u64) -> f64 {
        self.samples.weight(step)
    }
}

/// Makes the trainer of `rank`.
pub(crate) fn trainer(
    config: &Config,
    layout: &RankLayout,
    data: &Arc<Dataset>,
    rollback_history: &Arc<RollbackHistory>,
    rank: Rank,
) -> Trainer {
    let packs = config.data.packing == Packing::Documents;
    assert!(packs || !data.is_packed(), "batches say where packed documents start");
    let split = BatchSplit {
        seed: config.train.seed,
        order: config.data.order,
        micro_batch: config.batch.micro,
        micro_batches: layout.micro_batches,
        rank,
        seq_len: config.model.seq_len,
    };
    let counted: Vec<_> = layout.decoder.segments().iter().map(|s| s.counted(rank.tp)).collect();
    let samples =
        Samples { data: Arc::clone(data), rollback_history: Arc::clone(rollback_history), split };
    let schedule = LearningRateSchedule::new(&config.schedule, config.optimizer.lr);
    let given = Arc::new(StepInputs { schedule, samples: samples.clone() });
    let noise = crate::train::initial_states::noise(config, &layout.decoder, rank);
    let optimizer = Optimizer::new(&layout.optimizer, rank, &counted, &noise, given);
    let vertical_backward = config.offload.parameters == ParameterPlace::Host;
    let loader = Loader::new(&layout.batches, &samples, config.train.steps, vertical_backward);
    let schedule = crate::step::group::ExecutionSchedule {
        update: layout::build::update_mode(config),
        lookahead: config.offload.lookahead,
        vertical_width: layout::build::vertical_width(config),
        vertical_backward,
    };
    Trainer::new(layout, optimizer, loader, samples, schedule)
}
