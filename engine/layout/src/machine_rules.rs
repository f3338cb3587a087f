//! Rules that need more than the keys of a config. This machine's GPUs compute in the precision of the
//! config, and their hardware queues order the streams of all ranks. Frozen tensors are tensors of the
//! model.

use crate::LocalMachine;
use crate::frozen_rules;
use crate::hardware_queues::{connections, queues, streams_of_rank};
use config::{Config, DeviceConfig, Violation};

impl LocalMachine {
    /// The rules that `config` breaks on the GPUs of this machine, and those of frozen tensors.
    pub fn broken(&self, config: &Config) -> Vec<Violation> {
        let of_frozen = frozen_rules::broken(config);
        of_frozen.into_iter().chain(self.broken_by_gpus(config)).collect()
    }

    /// The rules that `config` breaks on the GPUs of this machine.
    fn broken_by_gpus(&self, config: &Config) -> Vec<Violation> {
        if config.device != DeviceConfig::Cuda {
            return Vec::new();
        }
        let all = &self.cuda().gpus;
        let taken = self.rank_gpus((config.parallel.tensor, config.parallel.data));
        let oldest = taken.into_iter().filter_map(|gpu| all.get(gpu)).min_by_key(|gpu| gpu.sm);
        let refusal = oldest.and_then(|gpu| {
            config.precision.refusal(&format!("GPU {}, {},", gpu.ordinal, gpu.name), gpu.sm)
        });
        let values = vec![("parallel.data", "ranks of the run".into()), ("device", "GPUs".into())];
        let crowded = (!all.is_empty()).then(|| {
            let ranks = self.ranks(config).div_ceil(all.len());
            queues(ranks, streams_of_rank(config), all.len(), connections())
        });
        let crowded = crowded.flatten();
        let crowded = crowded.map(|(message, help)| Violation { message, help, values });
        refusal.into_iter().chain(crowded).collect()
    }

    /// Whether `config` keeps every rule, including the rules of this machine's GPUs.
    pub fn is_sound(&self, config: &Config) -> bool {
        self.first_broken(config).is_none()
    }

    /// Message of the first rule that `config` breaks, including the rules of this machine's GPUs. A
    /// search of layouts keeps the layers, and so the frozen tensors.
    pub fn first_broken(&self, config: &Config) -> Option<String> {
        let of_machine = || self.broken_by_gpus(config).into_iter().next().map(|one| one.message);
        config.first_broken().or_else(of_machine)
    }
}
