//! Rules between keys. Each error shows every value of the rule, and the arithmetic.

use super::reading::{ConfigReader, Violation, float_text};
use super::{
    Accumulate, Config, DeviceConfig, Placement, Recompute, ScheduleConfig, ScheduleKind, Transfer,
    UpdateMode, WeightsPolicy,
};
use topology::counted;

/// Largest number of samples of a step, whether one key gives it or it is a product of keys.
const MOST_SAMPLES: u64 = 1 << 31;

/// A rule between keys.
enum Rule<'a> {
    Computed(fn(&Checks<'a>) -> Option<Violation>),
    /// Combinations of values that are refused.
    Clashes(&'static [Clash]),
}

/// All rules between keys.
const fn rules<'a>() -> [Rule<'a>; 63] {
    use Rule::{Clashes, Computed};
    [
        Computed(Checks::heads_over_ranks),
        Computed(Checks::parts_of_gpt2),
        Computed(Checks::hidden_over_heads),
        Computed(Checks::heads_over_kv_heads),
        Computed(Checks::kv_heads_over_ranks),
        Computed(Checks::halves_of_heads),
        Computed(Checks::widest_head),
        Computed(Checks::rotated_halves),
        Computed(Checks::long_rope_factors),
        Computed(Checks::rope_factors),
        Computed(Checks::base_of_yarn),
        Computed(Checks::windows_of_layers),
        Computed(Checks::norm_of_queries),
        Computed(Checks::bias_before_norm),
        Computed(Checks::ffn_over_ranks),
        Computed(Checks::experts_of_token),
        Computed(Checks::layers_of_experts),
        Computed(Checks::experts_over_ranks),
        Computed(Checks::groups_of_experts),
        Clashes(Checks::OF_EXPERTS),
        Computed(Checks::delta_nets_of_layers),
        Computed(Checks::heads_of_delta_nets),
        Clashes(Checks::OF_DELTA_NETS),
        Clashes(Checks::ADAPTERS),
        Computed(Checks::linears_of_adapters),
        Computed(Checks::rank_of_adapters),
        Computed(Checks::tokens_over_ranks),
        Computed(Checks::world),
        Computed(Checks::memory),
        Computed(Checks::global_batch),
        Computed(Checks::schedule_length),
        Computed(Checks::stable_steps),
        Computed(Checks::least_rate),
        Computed(Checks::loss_scale),
        Clashes(TRANSFERS),
        Clashes(Checks::PRECISION),
        Computed(Checks::fp8_sizes),
        Clashes(Checks::PLACES),
        Computed(Checks::checkpoints),
        Computed(Checks::tiers_of_nothing),
        Computed(Checks::tiers_of_blocks),
        Clashes(Checks::MOVED_ACTIVATIONS),
        Clashes(Checks::LIBRARIES),
        Computed(Checks::shares_over_ranks),
        Clashes(SPLIT_TWICE),
        Computed(Checks::checkpoint_sets),
        Clashes(Checks::OF_NOTHING),
        Computed(Checks::blocks_of_model),
        Clashes(Checks::PARAMETERS),
        Computed(Checks::byte_tokens),
        Computed(Checks::rows_without_tokenizer),
        Computed(Checks::steps_and_epochs),
        Computed(Checks::packing_of_another_format),
        Computed(Checks::truncate_of_windows),
        Computed(Checks::system_of_no_chats),
        Computed(Checks::columns_of_no_chats),
        Computed(Checks::targets_of_no_chats),
        Computed(Checks::control_tokens_of_no_rows),
        Computed(Checks::parameters),
        Computed(Checks::activations),
        Computed(Checks::tokens_of_run),
        Clashes(NOTHING_LEFT),
        Clashes(EVALUATIONS),
    ]
}

/// Applies every rule whose values are valid, and the rules of the machine. A stored config was
/// trained and kept the rules of its GPUs, so these do not apply to it.
pub(super) fn all(reader: &mut ConfigReader, config: &Config, of_machine: &MachineRules<'_>) {
    let checks = Checks { config, searched: reader.searched };
    let of_gpus = match reader.stored {
        true => Vec::new(),
        false => checks.precision().into_iter().chain(of_machine(config)).collect(),
    };
    for broken in checks.broken().chain(of_gpus) {
        // The names of tensors are those of the whole model.
        let of_tensors = broken.values.iter().any(|(key, _)| *key == "optimizer.frozen");
        let is_known = broken.values.iter().all(|(key, _)| reader.ok(&[key]))
            && (!of_tensors || reader.section_is_ok("model"));
        if is_known {
            reader.refuse(broken);
        }
    }
}

impl Config {
    /// Whether the config breaks no rule that relates several keys. Use it for a config that was
    /// changed after it was loaded.
    pub fn is_sound(&self) -> bool {
        self.first_broken().is_none()
    }

    /// Message of the first rule that the config breaks.
    pub fn first_broken(&self) -> Option<String> {
        let checks = Checks { config: self, searched: false };
        checks.broken().next().or_else(|| checks.precision()).map(|broken| broken.message)
    }
}

/// Finds the rules that a config breaks on the machine that trains it.
pub type MachineRules<'a> = dyn Fn(&Config) -> Vec<Violation> + 'a;

/// A combination of values that is refused.
pub(super) struct Clash {
    /// Whether a config has this combination of values.
    pub(super) has: fn(&Config) -> bool,
    pub(super) message: &'static str,
    pub(super) help: &'static str,
    /// The keys, each with the meaning of its value here. The key to blame is first.
    pub(super) values: &'static [(&'static str, &'static str)],
}

impl Clash {
    fn of(&self, config: &Config) -> Option<Violation> {
        (self.has)(config).then(|| Violation {
            message: self.message.into(),
            help: self.help.into(),
            values: self.values.iter().map(|(key, meaning)| (*key, (*meaning).into())).collect(),
        })
    }
}

/// Keys that compare evaluations, in a run without evaluations or without checkpoints.
const EVALUATIONS: &[Clash] = &[
    Clash {
        has: |c| c.train.keep_best && c.train.eval_every == 0,
        message: "the best checkpoint is that with the least validation loss, and nothing is evaluated between steps",
        help: "set `train.eval_every`, for example to 100, or leave `train.keep_best` out",
        values: &[
            ("train.keep_best", "keeps the best"),
            ("train.eval_every", "no evaluations between steps"),
        ],
    },
    Clash {
        has: |c| c.train.patience.is_some() && c.train.eval_every == 0,
        message: "patience counts evaluations, and nothing is evaluated between steps",
        help: "set `train.eval_every`, for example to 100, or leave `train.patience` out",
        values: &[
            ("train.patience", "counts evaluations"),
            ("train.eval_every", "no evaluations between steps"),
        ],
    },
    Clash {
        has: |c| c.train.keep_best && !c.train.saves(),
        message: "a run without checkpoints keeps no best checkpoint",
        help: "set `train.checkpoint_every` or `train.checkpoint_overhead: 0.01`, or leave `train.keep_best` out",
        values: &[
            ("train.keep_best", "keeps the best"),
            ("train.checkpoint_overhead", "no checkpoints"),
        ],
    },
];

const BLOCKING: (&str, &str) = ("offload.transfer", "as DeepSpeed in 2020");

fn blocks(config: &Config) -> bool {
    config.offload.transfer == Transfer::Blocking
}

const TRANSFERS: &[Clash] = &[
    Clash {
        has: |c| {
            c.offload.optimizer == Placement::Device && c.offload.accumulate == Accumulate::Host
        },
        message: "gradients cannot be summed on the host for an optimizer on the device",
        help: "use `Auto` or `Device`, or put the optimizer on the `Host`",
        values: &[
            ("offload.accumulate", "sums on the host"),
            ("offload.optimizer", "the optimizer on the device"),
        ],
    },
    Clash {
        has: |c| blocks(c) && c.offload.update != UpdateMode::Serial,
        message: "`Blocking` overlaps nothing: its update is over before the next step begins",
        help: "set `offload.update` to `Serial`, or leave `offload.transfer` out",
        values: &[BLOCKING, ("offload.update", "runs under the next step")],
    },
    Clash {
        has: |c| blocks(c) && c.offload.accumulate == Accumulate::Device,
        message: "`Blocking` keeps the sum of micro-batches in host memory",
        help: "set `offload.accumulate` to `Auto` or `Host`, or leave `offload.transfer` out",
        values: &[BLOCKING, ("offload.accumulate", "sums stay on the device")],
    },
    Clash {
        has: |c| blocks(c) && c.offload.optimizer != Placement::Host,
        message: "`Blocking` is a way to the host, where not all updates are",
        help: "put the optimizer on the `Host`, or leave `offload.transfer` out",
        values: &[BLOCKING, ("offload.optimizer", "the optimizer on the device")],
    },
];

const SPLIT_TWICE: &[Clash] = &[Clash {
    has: |c| c.partition_checkpoints && c.parallel.sequence,
    message: "`parallel.sequence` splits the checkpoints over the tensor-parallel ranks already",
    help: "leave out one of the two: `parallel.sequence` saves more, `partition_checkpoints` changes no bit",
    values: &[
        ("partition_checkpoints", "shares of whole inputs"),
        ("parallel.sequence", "inputs are split by tokens"),
    ],
}];

const NOTHING_LEFT: &[Clash] = &[Clash {
    has: |c| c.train.weights == WeightsPolicy::Never && !c.train.saves(),
    message: "neither weights nor checkpoints are written, so nothing of the training would be left",
    help: "use `Complete`, or set `train.checkpoint_overhead` or `train.checkpoint_every`",
    values: &[("train.weights", "writes no weights")],
}];

/// Value of a key that is a count.
#[derive(Clone, Copy)]
pub(super) struct Count {
    pub(super) key: &'static str,
    pub(super) number: u64,
    /// Singular of the counted thing: `head`.
    pub(super) thing: &'static str,
}

impl Count {
    pub(super) const fn new(key: &'static str, number: usize, thing: &'static str) -> Self {
        Self { key, number: number as u64, thing }
    }

    /// Returns a violation unless `parts` divides this count.
    pub(super) fn split_over(self, parts: Self) -> Option<Violation> {
        let (total, part) = (self.number, parts.number);
        if part == 0 || total.is_multiple_of(part) {
            return None;
        }
        let [of_total, of_parts] = [self, parts].map(|count| counted(count.number, count.thing));
        let remainder = remainder(total, part);
        let message = format!("{of_total} cannot be split evenly over {of_parts}: {remainder}");
        let help = format!(
            "`{}` could be {}, or `{}` {}",
            self.key,
            nearest_multiples(total, part),
            parts.key,
            either(&nearest_divisors(total, part))
        );
        let values = vec![(self.key, of_total), (parts.key, of_parts)];
        Some(Violation { message, help, values })
    }
}

pub(super) struct Checks<'a> {
    pub(super) config: &'a Config,
    /// Whether a search of layouts finds other ranks for the box.
    pub(super) searched: bool,
}

impl<'a> Checks<'a> {
    /// The violations of all rules, in the order of the rules.
    fn broken(&self) -> impl Iterator<Item = Violation> {
        rules::<'a>().into_iter().flat_map(|rule| match rule {
            Rule::Computed(rule) => rule(self).into_iter().collect::<Vec<_>>(),
            Rule::Clashes(all) => all.iter().filter_map(|clash| clash.of(self.config)).collect(),
        })
    }

    fn checkpoints(&self) -> Option<Violation> {
        let Config { partition_checkpoints, host_checkpoints, recompute, .. } = *self.config;
        let (key, verb, asks) = match (partition_checkpoints, host_checkpoints) {
            (true, _) => ("partition_checkpoints", "partition", "shares of the blocks' inputs"),
            (_, true) => ("host_checkpoints", "keep on the host", "the blocks' inputs there"),
            (false, false) => return None,
        };
        (recompute != Recompute::Block).then(|| Violation {
            message: format!("there are no checkpoints to {verb}: no block is recomputed"),
            help: format!("set `recompute` to `Block`, or leave `{key}` out"),
            values: vec![(key, format!("asks for {asks}")), ("recompute", recompute.kept().into())],
        })
    }

    fn tokens_over_ranks(&self) -> Option<Violation> {
        let Config { parallel, model, batch, .. } = self.config;
        let (micro, seq_len) = (batch.micro as u64, model.seq_len as u64);
        let (tokens, ranks) = (micro * seq_len, parallel.tensor as u64);
        if !parallel.sequence || ranks == 0 || tokens.is_multiple_of(ranks) {
            return None;
        }
        Some(Violation {
            message: format!(
                "micro {micro} x seq_len {seq_len} = {tokens} tokens cannot be split evenly over \
                 {ranks} tensor-parallel ranks: {}",
                remainder(tokens, ranks)
            ),
            help: format!(
                "`model.seq_len` could be {}, or leave `parallel.sequence` out",
                nearest_multiples(seq_len, ranks)
            ),
            values: vec![
                ("model.seq_len", format!("{} each", counted(seq_len, "token"))),
                ("batch.micro", counted(micro, "sample")),
                ("parallel.tensor", counted(ranks, "rank")),
                ("parallel.sequence", "tokens are split over the ranks".into()),
            ],
        })
    }

    fn world(&self) -> Option<Violation> {
        let (tensor, data) = (self.config.parallel.tensor, self.config.parallel.data);
        let world = tensor * data;
        let grid = format!("tensor {tensor} x data {data} = {}", counted(world, "rank"));
        let (message, help, of_device) = match &self.config.device {
            DeviceConfig::Cpu { count, .. } if *count != world => {
                let devices = counted(count, "device");
                (
                    format!("{devices}, but {grid}: each rank has one device"),
                    format!("set `device.count` to {world}, or leave it out: it follows"),
                    ("device.count", devices),
                )
            }
            DeviceConfig::Sim { box_, .. }
                if self.searched && box_.gpus.is_multiple_of(box_.machines) =>
            {
                return None;
            }
            DeviceConfig::Sim { box_, .. } if world > box_.gpus => {
                let gpus = counted(box_.gpus, "GPU");
                (
                    format!("the box has {gpus}, but {grid}"),
                    format!("choose `tensor` x `data` of at most {}", box_.gpus),
                    ("device.box.gpus", gpus),
                )
            }
            DeviceConfig::Sim { box_, .. } => {
                let why = box_.ranks_per_machine(&self.config.parallel).err()?;
                let of_one = box_.gpus / box_.machines;
                let help = if box_.gpus.is_multiple_of(box_.machines) {
                    format!(
                        "use whole machines: `tensor` a divisor of {of_one}, `tensor` x `data` a multiple of it"
                    )
                } else {
                    "mend the box: its `gpus` are a multiple of its `machines`".into()
                };
                (why, help, ("device.box.machines", counted(box_.machines, "machine")))
            }
            _ => return None,
        };
        let tensor = ("parallel.tensor", format!("tensor {tensor}"));
        let data = ("parallel.data", format!("data {data}"));
        Some(Violation { message, help, values: vec![of_device, tensor, data] })
    }

    fn global_batch(&self) -> Option<Violation> {
        let (global, micro) = (self.config.batch.global as u64, self.config.batch.micro as u64);
        let data = self.config.parallel.data as u64;
        let pass = micro * data;
        if pass > MOST_SAMPLES {
            return Some(Violation {
                message: format!("micro {micro} x data {data} = {pass} samples, more than 2^31"),
                help: "use a smaller `batch.micro`".into(),
                values: vec![
                    ("batch.micro", counted(micro, "sample")),
                    ("parallel.data", counted(data, "replica")),
                ],
            });
        }
        if pass == 0 || global.is_multiple_of(pass) {
            return None;
        }
        Some(Violation {
            message: format!(
                "a global batch of {} is no multiple of micro {micro} x data {data} \
                 = {pass}: {}",
                counted(global, "sample"),
                remainder(global, pass)
            ),
            help: format!("use {}", nearest_multiples(global, pass)),
            values: vec![
                ("batch.global", counted(global, "sample")),
                ("batch.micro", counted(micro, "sample")),
                ("parallel.data", counted(data, "replica")),
            ],
        })
    }

    fn stable_steps(&self) -> Option<Violation> {
        let ScheduleConfig { kind, warmup_steps: first, decay_steps: last, .. } =
            self.config.schedule;
        let ScheduleKind::Wsd { stable_until: until } = kind else { return None };
        let outside = first <= last && !(first..=last).contains(&until);
        outside.then(|| Violation {
            message: format!("the last step at the peak, {until}, is not from {first} to {last}"),
            help: "choose a step from the end of the warm-up to `decay_steps`".into(),
            values: vec![
                ("schedule.kind.stable_until", "the last at the peak".into()),
                ("schedule.warmup_steps", "the end of the warm-up".into()),
                ("schedule.decay_steps", "the end of the decay".into()),
            ],
        })
    }

    fn schedule_length(&self) -> Option<Violation> {
        let (warmup, decay) = (self.config.schedule.warmup_steps, self.config.schedule.decay_steps);
        (warmup > decay).then(|| Violation {
            message: format!(
                "the warm-up of {warmup} steps is longer than the whole schedule of {decay}"
            ),
            help: format!("choose at most {decay} warm-up steps, or a later `decay_steps`"),
            values: vec![
                ("schedule.warmup_steps", counted(warmup, "step")),
                ("schedule.decay_steps", counted(decay, "step")),
            ],
        })
    }

    fn least_rate(&self) -> Option<Violation> {
        let (min_lr, lr) = (self.config.schedule.min_lr, self.config.optimizer.lr);
        (min_lr > lr).then(|| Violation {
            message: format!("the least rate {min_lr:?} is above the peak rate {lr:?}"),
            help: format!("choose at most {lr:?}, or leave it out for lr / 10"),
            values: vec![
                ("schedule.min_lr", "the least".into()),
                ("optimizer.lr", "the peak".into()),
            ],
        })
    }

    fn loss_scale(&self) -> Option<Violation> {
        let scale = &self.config.loss_scale;
        let (initial, floor) = (float_text(&scale.initial), float_text(&scale.floor));
        let at_start = ("loss_scale.initial", "at step 1".to_string());
        if !is_power_of_two(scale.initial) {
            let below = scale.initial.log2().floor().exp2();
            let message = format!("must be a power of two, found {initial}");
            let help = format!("use {below:?} or {:?}", 2.0 * below);
            return Some(Violation { message, help, values: vec![at_start] });
        }
        (scale.initial < scale.floor).then(|| Violation {
            message: format!("the initial scale {initial} is below the floor {floor}"),
            help: format!("start at {floor} or above, or lower the floor"),
            values: vec![at_start, ("loss_scale.floor", "the floor".into())],
        })
    }
}

/// Division with its remainder: `30 = 3 x 8 + 6`.
fn remainder(total: u64, part: u64) -> String {
    format!("{total} = {} x {part} + {}", total / part, total % part)
}

/// Text that names the nearest multiples of `part` below and above `total`.
fn nearest_multiples(total: u64, part: u64) -> String {
    let below = total / part * part;
    let both = [below, below + part];
    either(if below == 0 { &both[1..] } else { &both })
}

/// Divisors of `total` on both sides of `part`.
fn nearest_divisors(total: u64, part: u64) -> Vec<u64> {
    let divides = |n: &u64| total.is_multiple_of(*n);
    let below = (1..part.min(total + 1)).rev().find(divides);
    let above = (part..=total).find(divides);
    below.into_iter().chain(above).collect()
}

fn either(values: &[u64]) -> String {
    let words: Vec<String> = values.iter().map(u64::to_string).collect();
    words.join(" or ")
}

fn is_power_of_two(value: f32) -> bool {
    value.is_normal() && value.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_told_from_others() {
        for good in [1.0, 2.0, 0.5, 65536.0, 16_777_216.0, f32::MIN_POSITIVE] {
            assert!(is_power_of_two(good), "{good}");
        }
        for bad in [3.0, 65535.0, 65537.0, 1.5, 1e-40, 0.1] {
            assert!(!is_power_of_two(bad), "{bad}");
        }
    }

    #[test]
    fn the_nearest_values_on_both_sides_are_offered() {
        assert_eq!(nearest_multiples(30, 8), "24 or 32");
        assert_eq!(nearest_multiples(3, 8), "8");
        assert_eq!(nearest_divisors(12, 8), [6, 12]);
        assert_eq!(nearest_divisors(12, 100), [12]);
        assert_eq!(nearest_divisors(7, 4), [1, 7]);
    }
}
