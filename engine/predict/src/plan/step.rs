//! Counts the ops, bytes and FLOPs of a step by lane, on a device that runs nothing.

use config::Config;
use device::recorder::Totals;
use device::{Error, Lane};
use engine::dry_run::{alike, count, with_micro_batches};
use layout::build::{RankLayout, lay_out, shape};
use serde::Serialize;

/// Counts of one optimizer step of a rank.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// Trained tokens over all ranks.
    pub tokens: u64,
    /// FLOPs of the model over all ranks, without recomputation.
    pub model_flops: f64,
    /// FLOPs that this rank executes, including recomputation.
    pub hardware_flops: f64,
    /// Counts by lane.
    pub lanes: Vec<LaneTotals>,
}

/// Counts of a lane in one step.
#[derive(Clone, Debug, Serialize)]
pub struct LaneTotals {
    /// Name of the lane: `Compute`, ...
    pub lane: String,
    /// Number of ops.
    pub ops: u64,
    /// Bytes: the length of copies, and the bytes that other ops read and write.
    pub bytes: u64,
}

/// Counts of one step. Many micro-batches are extrapolated from 3 and 4: the middle ones are alike.
fn totals(config: &Config, built: &RankLayout) -> Result<Totals, Error> {
    let (unit, all) = (alike(config, built) as u64, built.micro_batches as u64);
    let few = 3 * unit;
    Ok(if all <= few + unit || !all.is_multiple_of(unit) {
        count(config, built)?
    } else {
        let of = |micro_batches: u64| {
            let config = with_micro_batches(config, built, micro_batches as usize);
            count(&config, &lay_out(&config, &built.machine))
        };
        let (less, more) = (of(few)?, of(few + unit)?);
        let further = (all - few) / unit;
        let line = |a: u64, b: u64| a + (b - a) * further;
        Totals {
            ops: std::array::from_fn(|i| line(less.ops[i], more.ops[i])),
            bytes: std::array::from_fn(|i| line(less.bytes[i], more.bytes[i])),
            flops: less.flops + (more.flops - less.flops) * further as f64,
        }
    })
}

/// Number of ops of one rank in a step.
pub fn ops_of_step(config: &Config, built: &RankLayout) -> Result<u64, Error> {
    Ok(totals(config, built)?.ops.iter().sum())
}

pub(super) fn step(config: &Config, built: &RankLayout) -> Result<Step, Error> {
    let totals = totals(config, built)?;
    let lane = |lane: Lane| LaneTotals {
        lane: format!("{lane:?}"),
        ops: totals.ops[lane as usize],
        bytes: totals.bytes[lane as usize],
    };
    let tokens = (config.batch.global * config.model.seq_len) as u64;
    Ok(Step {
        tokens,
        model_flops: tokens as f64 * shape(config).model_flops_per_token(),
        hardware_flops: totals.flops,
        lanes: Lane::ALL.into_iter().map(lane).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use layout::LocalMachine;

    #[test]
    fn a_run_of_one_step_is_counted_like_any_other() {
        let ron = r#"(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16), device: Cpu(count: 1),
            batch: (micro: 1), data: (train: "unused"), train: (steps: 1))"#;
        let totals = |sets: &[String]| {
            let loaded = config::load_str(ron, "a.ron", std::path::Path::new("."), sets);
            let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
            let totals = count(&config, &lay_out(&config, &LocalMachine::default())).unwrap();
            (totals.ops, totals.bytes)
        };
        assert_eq!(totals(&[]), totals(&["train.steps=9".into()]));
    }

    /// A tile is updated speculatively or after the decision.
    #[test]
    fn an_update_ahead_of_the_decision_moves_the_bytes_of_one_behind_it() {
        let ron = r#"(model: (layers: 4, hidden: 64, heads: 4, seq_len: 16), device: Cpu(count: 1),
            batch: (micro: 1), precision: Bf16, data: (train: "unused"), train: (steps: 1),
            offload: (speculated_fraction: 1))"#;
        for master in ["offload.master=Fp32", "offload.master=Split"] {
            let host = |update: &str| {
                let sets = [master.to_owned(), format!("offload.update={update}")];
                let loaded = config::load_str(ron, "a.ron", std::path::Path::new("."), &sets);
                let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
                count(&config, &lay_out(&config, &LocalMachine::default())).unwrap().bytes
                    [Lane::Host as usize] as f64
            };
            let ratio = host("Speculative") / host("Overlapped");
            // Split masters keep upper halves: 2 bytes more per 20, and 4 of a gradient for a few.
            assert!(ratio > 1.0 && ratio < 1.12, "{master}: {ratio}");
        }
    }

    #[test]
    fn many_micro_batches_are_counted_as_if_each_were() {
        let ron = r#"(
            device: Cpu(count: 2, memory: "64MiB", threads: 1),
            model: (layers: 2, hidden: 32, heads: 4, seq_len: 16),
            parallel: (data: 2), precision: Bf16, batch: (micro: 1, global: 18),
            data: (train: "unused"), train: (steps: 6),
        )"#;
        for sum in ["offload.accumulate=Host", "offload.accumulate=Device"] {
            let folder = std::path::Path::new(".");
            let loaded = config::load_str(ron, "test.ron", folder, &[sum.to_owned()]);
            let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
            let built = lay_out(&config, &LocalMachine::default());
            let (counted, step_report) =
                (count(&config, &built).unwrap(), step(&config, &built).unwrap());
            for lane in &step_report.lanes {
                let i = Lane::ALL.iter().position(|l| format!("{l:?}") == lane.lane).unwrap();
                assert_eq!(
                    (lane.ops, lane.bytes),
                    (counted.ops[i], counted.bytes[i]),
                    "{}",
                    lane.lane
                );
            }
            assert!((step_report.hardware_flops / counted.flops - 1.0).abs() < 1e-12);
        }
    }
}
