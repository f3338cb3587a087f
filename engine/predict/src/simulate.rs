//! A step of a config on a described box: the very step, on the simulator's clock.

use crate::boxes::{self, BoxError};
use crate::plan::Report;
use crate::sim::{self, Hardware, Program, SimulatedOp, Timeline, WorkKind};
use config::{BoxConfig, Config, DeviceConfig, UpdateMode};
use device::Lane;
use engine::dry_run::{first_rank, play_steps};
use layout::build::{RankLayout, shape, update_mode};
use offload::SpeculationOutcome;
use serde::Serialize;
use topology::{HostBytes, counted};

/// Steps that are played; the last is looked at.
pub(crate) const RECORDED_STEPS: u64 = 3;

/// Why there is no simulation.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The config names no box.
    #[error(
        "the config runs on {0}, and only a described box can be simulated: say --box h100-128gib (`onebox boxes` lists them), or \
         measure this machine with `onebox bench --save-box FILE` and say --box FILE"
    )]
    NoBox(&'static str),
    /// The box.
    #[error(transparent)]
    Box(#[from] BoxError),
    /// More GPUs are asked for than the box has.
    #[error("--gpus {asked}: the box `{box_name}` has {}", counted(.has, "GPU"))]
    TooFewGpus {
        /// That were asked for.
        asked: usize,
        /// Of the box.
        has: usize,
        /// Of the box.
        box_name: String,
    },
    /// A share that is less than the last segment.
    #[error(
        "offload.speculated_fraction: a share of {share} takes no whole segment, so `Speculative` would update nothing ahead: \
         set it to {least} or more, leave it out, or set offload.update to Overlapped"
    )]
    NothingAhead {
        /// That was asked for.
        share: f32,
        /// That takes a segment.
        least: f32,
    },
    /// The step's own checks.
    #[error("the step does not pass its own checks: {0}")]
    Step(#[from] device::Error),
}

/// All that `onebox simulate` says. Times are simulated seconds.
#[derive(Clone, Debug, Serialize)]
pub struct SimulationReport {
    /// Always true: none of this was measured.
    pub simulated: bool,
    /// Of the run.
    pub name: String,
    /// Of the box.
    pub box_name: String,
    /// TP degree.
    pub tensor: usize,
    /// DP degree.
    pub data: usize,
    /// One optimizer step.
    pub step_seconds: f64,
    /// Share of the steps that are clipped or skipped, which `step_seconds`, the rates and `schedules` take the mean of; the rest
    /// tells of a step that is not.
    pub clipped: f64,
    /// A step that is neither clipped nor skipped.
    pub unclipped_seconds: f64,
    /// Over all ranks.
    pub tokens_per_second: f64,
    /// Operations as run, recomputation included, per second and GPU, in 10^12.
    pub hardware_tflops_per_gpu: f64,
    /// Operations of the model alone.
    pub model_tflops_per_gpu: f64,
    /// Those against the rate of large matrix products.
    pub share_of_gemm_rate: f64,
    /// By lane of rank 0.
    pub lanes: Vec<LaneUse>,
    /// Share of the host's work and copies beside which Compute worked.
    pub overlap: f64,
    /// In which a rank's thread submits, meetings with its peers included.
    pub submitting_seconds: f64,
    /// Calls of the driver in a step.
    pub driver_calls: u64,
    /// Collectives of both groups stand in one queue, in the order of the program.
    pub one_communication_queue: bool,
    /// What the step waited for, longest first; adds up to the step.
    pub critical_path: Vec<CriticalPathPart>,
    /// Ranks that behave differently.
    pub kinds_of_ranks: usize,
    /// Bytes of each GPU, of each rank's host memory.
    pub gpu_bytes: u64,
    /// Of each rank.
    pub host_bytes_per_rank: u64,
    /// Whether it fits the box.
    pub fits: bool,
    /// The same step under each update mode, its own first.
    pub schedules: Vec<Schedule>,
    /// What stands for `Auto` of `offload.update`, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// Of a real run: the median of its steps, in seconds.
    pub measured: Option<f64>,
}

/// The step under one update mode.
#[derive(Clone, Debug, Serialize)]
pub struct Schedule {
    /// As `offload.update` has it.
    pub schedule: String,
    /// Share of the parameters that are updated ahead of the decision, where any are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f32>,
    /// The results are those of `Serial`.
    pub exact: bool,
    /// One optimizer step, simulated.
    pub step_seconds: f64,
    /// Of the config's own step.
    pub ratio: f64,
    /// What the host must hold.
    pub host_bytes_per_rank: u64,
    /// Whether that fits the box.
    pub fits: bool,
}

/// A lane's share of the step.
#[derive(Clone, Debug, Serialize)]
pub struct LaneUse {
    /// `Compute`, ...
    pub lane: String,
    /// In which it worked.
    pub seconds: f64,
    /// Of the step.
    pub share: f64,
    /// Copies' and collectives' payload, everything else's accesses.
    pub bytes: u64,
    /// Ops.
    pub ops: u64,
}

/// A part of the critical path.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalPathPart {
    /// `Compute`, ...; `Thread`: the rank's own, which submits.
    pub lane: String,
    /// `gemm`, ...
    pub op: &'static str,
    /// Of the step.
    pub seconds: f64,
}

/// The critical path by what is waited for, in seconds: always the same groups, in the same order.
pub fn groups(parts: &[CriticalPathPart]) -> Vec<(&'static str, f64)> {
    let group = |part: &CriticalPathPart| match (part.lane.as_str(), part.op) {
        ("Compute", "gemm" | "scaled_gemm") => 0,
        ("Compute", op) if op.starts_with("attention") => 1,
        ("TpComm", _) => 3,
        ("DpComm", "all_reduce" | "reduce_scatter" | "all_gather" | "broadcast") => 4,
        ("Compute" | "DpComm", _) => 2,
        ("H2d" | "D2h", _) => 5,
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

/// Plays a step of `config` on its box, whose updates ahead of the decision, if there are any, stand.
///
/// # Errors
/// No box, or one that says too little.
pub fn simulate(config: &Config, built: &RankLayout) -> Result<Timeline, SimulateError> {
    play(config, built, true, SpeculationOutcome::Committed)
}

/// [`simulate`] without the checks of the step's ops: for layouts that compete, of which `simulate` and `train` check the one that is taken.
///
/// # Errors
/// As [`simulate`].
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
    ahead: SpeculationOutcome,
) -> Result<Timeline, SimulateError> {
    // First: where there is no box, a step may be too long to record.
    let hardware = hardware(config, built.host_bytes(config))?;
    let mut program = record(config, built, checked)?;
    match ahead {
        SpeculationOutcome::None => program.leave_out("ahead_tile"),
        SpeculationOutcome::Committed => program.leave_out("settle_tile"),
        SpeculationOutcome::Redone => {}
    }
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    Ok(sim::simulate(program, &hardware, tp, dp, true))
}

/// Seconds of a mean step of which the share `clipped` is clipped or skipped; `committed` is the time of one that is not.
/// Where too many are, no update runs ahead of the decision.
///
/// # Errors
/// As [`simulate`].
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

/// What `config` would run on, each rank with (staging, states) of host memory.
///
/// # Errors
/// No box, or one that says too little.
pub fn hardware(config: &Config, host: HostBytes) -> Result<Hardware, SimulateError> {
    Ok(boxes::hardware(config, described(config)?, host)?)
}

/// The box of `config`, whatever ranks it has.
///
/// # Errors
/// No box, or one that says too little.
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

/// What every rank submits in a few steps; with the checks of its ops or without.
///
/// # Errors
/// The step's own checks.
pub fn record(
    config: &Config,
    built: &RankLayout,
    checked: bool,
) -> Result<Program, device::Error> {
    sim::record(first_rank(config), &built.plan, checked, |dev| {
        play_steps(config, built, dev, RECORDED_STEPS, &mut || ())
    })
}

/// The timeline in figures; `memory` is the plan's.
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
    let (box_name, rate) = match &config.device {
        DeviceConfig::Sim { box_, .. } => (box_.name.clone(), f64::from(box_.gpu.gemm_tflops)),
        DeviceConfig::Cpu { .. } | DeviceConfig::Cuda => Default::default(),
    };
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
        box_name,
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        step_seconds: seconds,
        clipped: 0.0,
        unclipped_seconds: timeline.step_seconds(),
        tokens_per_second: tokens / seconds,
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
        chosen: None,
        measured: None,
    }
}

impl SimulationReport {
    /// Takes the mean over steps of which the share `clipped` is clipped or skipped: `seconds` long.
    pub fn clip(&mut self, clipped: f64, seconds: f64) {
        let times = self.step_seconds / seconds;
        for rate in [
            &mut self.tokens_per_second,
            &mut self.hardware_tflops_per_gpu,
            &mut self.model_tflops_per_gpu,
            &mut self.share_of_gemm_rate,
        ] {
            *rate *= times;
        }
        (self.clipped, self.step_seconds) = (clipped, seconds);
    }
}

/// Work of the host and its links: with the reduction and gathering over the data-parallel ranks.
const fn is_offload(p: &SimulatedOp<'_>) -> bool {
    matches!(p.lane, Lane::Host | Lane::H2d | Lane::D2h | Lane::DpComm)
}

/// Share of the offload's time in which Compute or a tensor-parallel collective worked too.
fn overlap(timeline: &Timeline) -> f64 {
    let alone = timeline.together(0, is_offload, is_offload);
    let hidden = timeline.together(0, is_offload, |p| !is_offload(p));
    if alone > 0.0 { hidden / alone } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_step_is_told_in_its_group() {
        for (lane, op, of) in [
            ("Compute", "gemm", "matrix products"),
            ("Compute", "scaled_gemm", "matrix products"),
            ("Compute", "attention_backward", "attention"),
            ("Compute", "quantize", "small kernels"),
            ("DpComm", "add", "small kernels"),
            ("DpComm", "all_gather", "data-parallel collectives"),
            ("TpComm", "all_gather", "tensor-parallel collectives"),
            ("D2h", "copy", "copies to and from the host"),
            ("Host", "adam_tile", "work of the host"),
            ("Thread", "gemm", "submission of kernels"),
        ] {
            let found = groups(&[CriticalPathPart { lane: lane.into(), op, seconds: 1.0 }]);
            let told: Vec<&str> =
                found.iter().filter(|(_, seconds)| *seconds > 0.0).map(|(name, _)| *name).collect();
            assert_eq!(told, [of], "{op} on {lane}");
        }
    }
}
