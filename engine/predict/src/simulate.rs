//! Simulates a step of a config on a described box: the real step, on the simulator's clock.

use crate::boxes::{self, BoxError};
use crate::plan::Report;
use crate::range::{KeyInfluence, RateRange};
use crate::sim::{self, Hardware, Program, SimulatedOp, Timeline, WorkKind};
use config::{BoxConfig, Config, DeviceConfig, UpdateMode};
use device::Lane;
use engine::dry_run::{first_rank, play_steps};
use layout::build::{RankLayout, shape, update_mode};
use offload::SpeculationOutcome;
use serde::Serialize;
use topology::{HostBytes, counted};

/// Number of simulated steps. Reports use the last one.
pub(crate) const RECORDED_STEPS: u64 = 3;

/// Reason why a config cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The config names no box.
    #[error(
        "the config runs on {0}, and only a described box can be simulated: say --box h100-128gib (`onebox boxes` lists them), or \
         measure this machine with `onebox bench --save-box FILE` and say --box FILE"
    )]
    NoBox(&'static str),
    /// The box cannot be simulated.
    #[error(transparent)]
    Box(#[from] BoxError),
    /// The requested number of GPUs is larger than that of the box.
    #[error("--gpus {requested}: the box `{box_name}` has {}", counted(.has, "GPU"))]
    TooFewGpus {
        /// Requested number of GPUs.
        requested: usize,
        /// Number of GPUs of the box.
        has: usize,
        /// Name of the box.
        box_name: String,
    },
    /// The speculated share is smaller than the last segment.
    #[error(
        "offload.speculated_fraction: a share of {share} takes no whole segment, so `Speculative` would update nothing ahead: \
         set it to {least} or more, leave it out, or set offload.update to Overlapped"
    )]
    NothingAhead {
        /// Share in the config.
        share: f32,
        /// Smallest share that covers a segment.
        least: f32,
    },
    /// The step failed its own checks.
    #[error("the step does not pass its own checks: {0}")]
    Step(#[from] device::Error),
}

/// Report of `onebox simulate`. Times are simulated seconds.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationReport {
    /// Always true: nothing in the report was measured.
    pub simulated: bool,
    /// Name of the run.
    pub name: String,
    /// Name of the box.
    pub box_name: String,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// Seconds of one optimizer step.
    pub step_seconds: f64,
    /// Fraction of clipped or skipped steps. `step_seconds`, the rates and `schedules` are means
    /// over all steps; other fields describe a normal step.
    pub clipped: f64,
    /// Seconds of a step that is neither clipped nor skipped.
    pub unclipped_seconds: f64,
    /// Trained tokens per second over all ranks.
    pub tokens_per_second: f64,
    /// Low end of the range of `tokens_per_second`.
    pub tokens_per_second_low: f64,
    /// High end of the range of `tokens_per_second`.
    pub tokens_per_second_high: f64,
    /// The range relative to a rate, and its reason.
    pub range: RateRange,
    /// Key of the box with the most influence on the step; `None` if the key was not searched for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hangs_on: Option<KeyInfluence>,
    /// Executed operations, including recomputation, per second and GPU, in 10^12.
    pub hardware_tflops_per_gpu: f64,
    /// Operations of the model alone, per second and GPU, in 10^12.
    pub model_tflops_per_gpu: f64,
    /// `model_tflops_per_gpu` relative to the rate of large matmuls.
    pub share_of_gemm_rate: f64,
    /// Use of each lane of rank 0.
    pub lanes: Vec<LaneUse>,
    /// Fraction of the offload's time in which Compute or a tensor-parallel collective runs too.
    pub overlap: f64,
    /// Seconds in which the thread of rank 0 submits ops, including meetings with its peers.
    pub submitting_seconds: f64,
    /// Number of driver calls in a step.
    pub driver_calls: u64,
    /// Whether the collectives of both groups share one queue, in program order.
    pub one_communication_queue: bool,
    /// Seconds of the step by the op that it waited for, longest first. The sum is the step time.
    pub critical_path: Vec<CriticalPathPart>,
    /// Number of kinds of ranks that behave differently.
    pub kinds_of_ranks: usize,
    /// Planned bytes of each GPU.
    pub gpu_bytes: u64,
    /// Planned bytes of host memory of each rank.
    pub host_bytes_per_rank: u64,
    /// Whether the plan fits the box.
    pub fits: bool,
    /// The same step under each update mode, its own mode first.
    pub schedules: Vec<Schedule>,
    /// Sentences about rates that the box does not say and that are assumed.
    pub assumed: Vec<String>,
    /// Value of `offload.update: Auto`, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// Measured median of the steps of a real run, in seconds.
    pub measured: Option<f64>,
    /// Line about the run and the simulation: program, box, model, layout, both times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<String>,
}

/// The step under one update mode.
#[derive(Clone, Debug, Serialize)]
pub struct Schedule {
    /// Update mode as in `offload.update`.
    pub schedule: String,
    /// Fraction of the parameters that are updated speculatively, if it is not 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f32>,
    /// Whether the results equal those of `Serial`.
    pub exact: bool,
    /// Simulated seconds of one optimizer step.
    pub step_seconds: f64,
    /// Step time relative to the config's own step.
    pub ratio: f64,
    /// Planned bytes of host memory of each rank.
    pub host_bytes_per_rank: u64,
    /// Whether the plan fits the box.
    pub fits: bool,
}

/// Use of a lane in the step.
#[derive(Clone, Debug, Serialize)]
pub struct LaneUse {
    /// Name of the lane: `Compute`, ...
    pub lane: String,
    /// Seconds in which the lane works.
    pub seconds: f64,
    /// Fraction of the step in which the lane works.
    pub share: f64,
    /// Bytes of payload of copies and collectives; bytes that other ops read and write.
    pub bytes: u64,
    /// Number of ops.
    pub ops: u64,
}

/// A part of the critical path.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalPathPart {
    /// Lane of the op: `Compute`, ...; `Thread` is the submitting thread of the rank.
    pub lane: String,
    /// Name of the op: `gemm`, ...
    pub op: &'static str,
    /// Seconds of the step.
    pub seconds: f64,
}

/// Seconds of the critical path by group of ops. The groups and their order are fixed.
pub fn groups(parts: &[CriticalPathPart]) -> Vec<(&'static str, f64)> {
    let group = |part: &CriticalPathPart| match (part.lane.as_str(), part.op) {
        ("Compute", "gemm" | "scaled_gemm" | "grouped_gemm") => 0,
        ("Compute", op) if op.starts_with("attention") => 1,
        ("TpComm", _) => 3,
        ("DpComm", "all_reduce" | "reduce_scatter" | "all_gather" | "broadcast") => 4,
        ("Compute" | "DpComm", _) => 2,
        ("H2d" | "D2h" | "ActivationsUp" | "ActivationsDown", _) => 5,
        ("Host", _) => 6,
        _ => 7,
    };
    let mut groups: Vec<(&'static str, f64)> = [
        "matrix products",
        "attention",
        "small kernels",
        "tensor-parallel collectives",
        "data-parallel collectives",
        "copies to and from the host",
        "work of the host",
        "submission of kernels",
    ]
    .map(|name| (name, 0.0))
    .into();
    parts.iter().for_each(|part| groups[group(part)].1 += part.seconds);
    groups
}

/// Simulates a step of `config` on its box. Its speculative updates are all committed.
///
/// # Errors
/// Returns an error if the config has no box or the box lacks a rate.
pub fn simulate(config: &Config, built: &RankLayout) -> Result<Timeline, SimulateError> {
    play(config, built, true, SpeculationOutcome::Committed)
}

/// [`simulate`] without checks of the ops, for candidates; the chosen one is checked later.
///
/// # Errors
/// Returns the errors of [`simulate`].
pub(crate) fn simulate_unchecked(
    config: &Config,
    built: &RankLayout,
) -> Result<Timeline, SimulateError> {
    play(config, built, false, SpeculationOutcome::Committed)
}

fn play(
    config: &Config,
    built: &RankLayout,
    checked: bool,
    speculation: SpeculationOutcome,
) -> Result<Timeline, SimulateError> {
    // Fails early without a box, because the step may be too long to record.
    let hardware = hardware(config, built.host_bytes(config))?;
    let mut program = record(config, built, checked)?;
    match speculation {
        SpeculationOutcome::None => program.leave_out("ahead_tile"),
        SpeculationOutcome::Committed => program.leave_out("settle_tile"),
        SpeculationOutcome::Redone => {}
    }
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    Ok(sim::simulate(program, &hardware, tp, dp, true))
}

/// Mean seconds of a step if the fraction `clipped` of the steps is clipped or skipped. `committed`
/// is the time of a normal step. If the fraction is too large, no update is speculative.
///
/// # Errors
/// Returns the errors of [`simulate`].
pub fn mean_step(
    config: &Config,
    built: &RankLayout,
    committed: f64,
    clipped: f64,
) -> Result<f64, SimulateError> {
    if clipped == 0.0 || update_mode(config) != UpdateMode::Speculative {
        return Ok(committed);
    }
    if clipped >= offload::MAX_CLIP_RATE {
        return Ok(play(config, built, true, SpeculationOutcome::None)?.step_seconds());
    }
    let redone = play(config, built, true, SpeculationOutcome::Redone)?.step_seconds();
    Ok((1.0 - clipped) * committed + clipped * redone)
}

/// Simulated hardware of `config`. `host` has the bytes of host memory of a rank.
///
/// # Errors
/// Returns an error if the config has no box or the box lacks a rate.
pub fn hardware(config: &Config, host: HostBytes) -> Result<Hardware, SimulateError> {
    Ok(boxes::hardware(config, described(config)?, host)?)
}

/// The box of `config`. The number of ranks is not checked.
///
/// # Errors
/// Returns an error if the config has no box or the box lacks a rate.
pub fn described(config: &Config) -> Result<&BoxConfig, SimulateError> {
    match &config.device {
        DeviceConfig::Sim { box_, .. } => {
            boxes::check_rates(box_)?;
            Ok(box_)
        }
        DeviceConfig::Cpu { .. } => Err(SimulateError::NoBox("virtual GPUs of this machine")),
        DeviceConfig::Cuda => Err(SimulateError::NoBox("GPUs of this machine")),
    }
}

/// The box of a config whose step was simulated.
pub(crate) fn described_box(config: &Config) -> &BoxConfig {
    match &config.device {
        DeviceConfig::Sim { box_, .. } => box_,
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => {
            unreachable!("a step is simulated on a described box")
        }
    }
}

/// Records the ops of a rank in a few steps, with or without the checks of its ops.
///
/// # Errors
/// Returns an error if the step fails its own checks.
pub fn record(
    config: &Config,
    built: &RankLayout,
    checked: bool,
) -> Result<Program, device::Error> {
    sim::record(first_rank(config), &built.plan, checked, |dev| {
        play_steps(config, built, dev, RECORDED_STEPS, &mut || ())
    })
}

/// Summarizes the timeline. `memory` is the plan's report.
pub fn summary(config: &Config, memory: &Report, timeline: &Timeline) -> SimulationReport {
    let (begin, end) = timeline.window();
    let seconds = timeline.step_seconds();
    let inside = |p: &SimulatedOp<'_>| p.start >= begin && p.start < end;
    let flops: f64 = timeline
        .played(0)
        .filter(|p| inside(p) && !matches!(p.work.kind, WorkKind::Host))
        .map(|p| p.work.flops)
        .sum();
    let tokens = (config.batch.global * config.model.seq_len) as f64;
    let model_flops = tokens * shape(config).model_flops_per_token() / config.world_size() as f64;
    let model = model_flops / seconds / 1e12;
    let box_ = described_box(config);
    let rate = f64::from(box_.gpu.gemm_tflops * box_.gpu.clock_share);
    let range = RateRange::new(config, box_);
    let [low, high] = range.of_rate(tokens / seconds);
    let lane = |lane: Lane| {
        let ops = || timeline.played(0).filter(|p| p.lane == lane && inside(p));
        let busy = timeline.busy(0, lane);
        let bytes = ops().map(|p| p.work.bytes).sum();
        let ops = ops().count() as u64;
        LaneUse { lane: format!("{lane:?}"), seconds: busy, share: busy / seconds, bytes, ops }
    };
    let part = |(lane, op, seconds): (Option<Lane>, &'static str, f64)| {
        let lane = lane.map_or_else(|| "Thread".into(), |lane| format!("{lane:?}"));
        CriticalPathPart { lane, op, seconds }
    };
    let (submitting_seconds, driver_calls) = timeline.submitting(0);
    SimulationReport {
        simulated: true,
        name: config.name.clone(),
        box_name: box_.name.clone(),
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        step_seconds: seconds,
        clipped: 0.0,
        unclipped_seconds: timeline.step_seconds(),
        tokens_per_second: tokens / seconds,
        tokens_per_second_low: low,
        tokens_per_second_high: high,
        range,
        hangs_on: None,
        hardware_tflops_per_gpu: flops / seconds / 1e12,
        model_tflops_per_gpu: model,
        share_of_gemm_rate: if rate > 0.0 { model / rate } else { 0.0 },
        lanes: Lane::ALL.into_iter().map(lane).collect(),
        overlap: overlap(timeline),
        submitting_seconds,
        driver_calls,
        one_communication_queue: timeline.shares_communication(),
        critical_path: timeline.critical_path().into_iter().map(part).collect(),
        kinds_of_ranks: timeline.classes(),
        gpu_bytes: memory.gpu.bytes,
        host_bytes_per_rank: memory.host_per_rank.bytes,
        fits: memory.fits,
        schedules: Vec::new(),
        assumed: assumed(config),
        chosen: None,
        measured: None,
        compared: None,
    }
}

impl SimulationReport {
    /// Sets the fraction `clipped` of clipped or skipped steps, and the mean step time `seconds`.
    pub fn clip(&mut self, clipped: f64, seconds: f64) {
        let times = self.step_seconds / seconds;
        for rate in [
            &mut self.tokens_per_second,
            &mut self.tokens_per_second_low,
            &mut self.tokens_per_second_high,
            &mut self.hardware_tflops_per_gpu,
            &mut self.model_tflops_per_gpu,
            &mut self.share_of_gemm_rate,
        ] {
            *rate *= times;
        }
        (self.clipped, self.step_seconds) = (clipped, seconds);
    }
}

/// Sentences about rates that the box of `config` does not say and that a simulation assumes.
pub(crate) fn assumed(config: &Config) -> Vec<String> {
    // A config that cannot be simulated has been refused before.
    let Ok(hardware) = hardware(config, HostBytes::default()) else { return Vec::new() };
    if hardware.measured.is_some() || hardware.pcie_sums > 0.0 {
        return Vec::new();
    }
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    let sums = sim::sums_over_pcie(&hardware, tp, dp);
    let words = |(ranks, rate): (usize, f64)| {
        format!(
            "sums of {} cross PCIe, and the host decides how fast: {:.1} GB/s are assumed, and with the same cards one host \
             reached 15 times as much as another; `onebox bench --save-box FILE` measures it for `gpu.peer_gb_per_s`",
            counted(ranks, "GPU"),
            rate / 1e9
        )
    };
    sums.map(words).into_iter().collect()
}

/// Whether the op runs on the host, its links, or the data-parallel links.
const fn is_offload(p: &SimulatedOp<'_>) -> bool {
    !matches!(p.lane, Lane::Compute | Lane::TpComm)
}

/// Fraction of the offload's time in which Compute or a tensor-parallel collective runs too.
fn overlap(timeline: &Timeline) -> f64 {
    let alone = timeline.together(0, is_offload, is_offload);
    let hidden = timeline.together(0, is_offload, |p| !is_offload(p));
    if alone > 0.0 { hidden / alone } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use layout::LocalMachine;
    use layout::build::lay_out;
    use std::path::Path;

    #[test]
    fn a_skewed_load_of_experts_takes_longer() {
        let seconds = |load: &str| {
            let name = "../../configs/qwen3-30b-a3b-one-gpu.ron";
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
            let load = format!("device.expert_load={load}");
            let sets = ["model.layers=4".to_owned(), "batch.global=1".to_owned(), load];
            let config = config::load(&path, &sets).unwrap_or_else(|e| panic!("{e}")).config;
            let built = lay_out(&config, &LocalMachine::default());
            let timeline = simulate(&config, &built).unwrap_or_else(|e| panic!("{e}"));
            let grouped = timeline.played(0).filter(|op| op.work.name == "grouped_gemm");
            grouped.map(|op| op.end - op.start).sum::<f64>()
        };
        let (even, skewed) = (seconds("Even"), seconds("Skewed"));
        assert!(skewed > 1.05 * even && skewed < 2.0 * even, "{even} and {skewed}");
    }

    #[test]
    fn each_part_of_a_step_is_told_in_its_group() {
        for (lane, op, of) in [
            ("Compute", "gemm", "matrix products"),
            ("Compute", "scaled_gemm", "matrix products"),
            ("Compute", "grouped_gemm", "matrix products"),
            ("Compute", "attention_backward", "attention"),
            ("Compute", "quantize", "small kernels"),
            ("DpComm", "add", "small kernels"),
            ("DpComm", "all_gather", "data-parallel collectives"),
            ("TpComm", "all_gather", "tensor-parallel collectives"),
            ("D2h", "copy", "copies to and from the host"),
            ("ActivationsUp", "copy", "copies to and from the host"),
            ("Host", "adam_tile", "work of the host"),
            ("Thread", "gemm", "submission of kernels"),
        ] {
            let found = groups(&[CriticalPathPart { lane: lane.into(), op, seconds: 1.0 }]);
            let found_groups: Vec<&str> =
                found.iter().filter(|(_, seconds)| *seconds > 0.0).map(|(name, _)| *name).collect();
            assert_eq!(found_groups, [of], "{op} on {lane}");
        }
    }
}
