//! Measures this machine's cores as virtual GPUs. It times real steps op by op and fits rates to
//! the times. The result is a box, on which `onebox simulate` predicts the `cpu` backend.

use crate::sim::Work;
use crate::sim::WorkKind;
use crate::simulate::{RECORDED_STEPS, record};
use config::{Config, Family, MeasuredConfig, load_str};
use data::{Corpus, Dataset};
use device::Trace;
use engine::metrics::median;
use engine::run::{RunOptions, train};
use files::output::Output;
use layout::LocalMachine;
use layout::build::lay_out;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Beginning of every measured box file.
const BEGINNING: &str =
    "// The cores of one machine as virtual GPUs, measured by `onebox bench --save-box`.";
/// The output kind of a box file.
pub const OUTPUT: Output = Output { what: "box", beginning: BEGINNING };

/// The model size and the ranks of a calibration run.
#[derive(Clone, Copy)]
struct CalibrationShape {
    hidden: usize,
    seq_len: usize,
    tp: usize,
    dp: usize,
}

/// Samples of each micro-batch of a calibration run.
const MICRO: usize = 4;

/// Calibration shapes of each model family.
const SHAPES: [(Family, &[CalibrationShape]); 2] = [
    (
        Family::Gpt2,
        &[
            CalibrationShape { hidden: 64, seq_len: 32, tp: 1, dp: 2 },
            SHORT,
            THREADED,
            CalibrationShape { hidden: 256, seq_len: 64, tp: 2, dp: 1 },
        ],
    ),
    (Family::Llama, &[SHORT, THREADED]),
];

/// The shape that both families use.
const SHORT: CalibrationShape = CalibrationShape { hidden: 128, seq_len: 128, tp: 1, dp: 2 };
/// The shape that is also timed with one rank on all cores.
const THREADED: CalibrationShape = CalibrationShape { hidden: 256, seq_len: 128, tp: 1, dp: 2 };

/// Error of a failed calibration run.
#[derive(Debug, thiserror::Error)]
#[error("a calibration run failed: {0}")]
pub struct CalibrateError(String);

/// An op with its typical measured seconds: the median, but the first quartile of a collective.
#[derive(Clone, Copy, Debug)]
struct OpTiming {
    work: Work,
    seconds: f64,
}

/// Times steps of several shapes in both storage widths, with two ranks of one thread each. Runs
/// for some seconds; `tell` receives the name of each run.
///
/// # Errors
/// Returns an error if a run fails.
pub fn measure(
    machine: &LocalMachine,
    tell: &mut dyn FnMut(&str),
) -> Result<MeasuredConfig, CalibrateError> {
    let mut timed = Vec::new();
    for precision in ["Bf16", "Fp32"] {
        for (family, shapes) in SHAPES {
            for shape in shapes {
                let config = calibration(family, *shape, precision, 1)?;
                let CalibrationShape { hidden, tp, dp, .. } = shape;
                tell(&format!("{family:?}, {precision}, hidden {hidden}, TP {tp} x DP {dp}"));
                timed.extend(time(&config, machine)?);
            }
        }
    }
    tell(&format!("hidden {}, one rank on all cores", THREADED.hidden));
    let shape = CalibrationShape { dp: 1, ..THREADED };
    let cores = machine.cores();
    let together = time(&calibration(Family::Gpt2, shape, "Bf16", cores)?, machine)?;
    let (thread_us, thread_share) = threads(&timed, &together, cores);
    Ok(MeasuredConfig { thread_us, thread_share, ..explain(&timed, cores) })
}

/// Microseconds until a rank's threads share an op, and the share of a core that each further
/// thread adds. Both come from the same ops on one core and on all cores.
fn threads(one: &[OpTiming], all: &[OpTiming], threads: usize) -> (f32, f32) {
    let same = |t: &OpTiming| {
        let alone = one.iter().find(|o| o.work == t.work && o.seconds > 1e-5)?;
        Some([1.0, alone.seconds, t.seconds])
    };
    let pairs: Vec<[f64; 3]> = all.iter().filter_map(same).collect();
    let [starts, speedup] = two_rates(&pairs);
    if threads < 2 || speedup <= 0.0 {
        return (0.0, 1.0);
    }
    let start = if starts > 0.0 { 1e6 / starts } else { 0.0 };
    (start as f32, ((speedup - 1.0) / (threads - 1) as f64).clamp(0.0, 1.0) as f32)
}

fn calibration(
    family: Family,
    CalibrationShape { hidden, seq_len, tp, dp }: CalibrationShape,
    precision: &str,
    threads: usize,
) -> Result<Config, CalibrateError> {
    let heads = hidden / 32;
    let parts = match family {
        Family::Gpt2 => "dropout: 0.1".to_owned(),
        // Several heads of queries share keys and values.
        Family::Llama => format!("family: Llama, kv_heads: {}, qk_norm: true", heads / 2),
    };
    let ron = format!(
        "(device: Cpu(count: {}, memory: \"4GiB\", threads: {threads}), \
         model: (layers: 1, hidden: {hidden}, heads: {heads}, seq_len: {seq_len}, {parts}), \
         parallel: (tensor: {tp}, data: {dp}), precision: {precision}, recompute: Block, \
         offload: (accumulate: Host), batch: (micro: {MICRO}, global: {}), \
         data: (train: \"unused\"), train: (steps: {}))",
        tp * dp,
        MICRO * dp * 2,
        RECORDED_STEPS + 1,
    );
    let loaded = load_str(&ron, "calibration", Path::new("."), &[]);
    loaded.map(|loaded| loaded.config).map_err(|e| CalibrateError(e.to_string()))
}

/// Runs `config` and matches the spans of each rank with its recorded ops, which run inline in this
/// order. Meetings between steps are not recorded, so their spans are dropped.
fn time(config: &Config, machine: &LocalMachine) -> Result<Vec<OpTiming>, CalibrateError> {
    let failed = |why: &dyn std::fmt::Display| CalibrateError(why.to_string());
    let built = lay_out(config, machine);
    let program = record(config, &built, true).map_err(|e| failed(&e))?;
    let trace = Arc::new(Trace::default());
    let options =
        RunOptions { trace: Some(Arc::clone(&trace)), bind: true, ..RunOptions::default() };
    let data = Arc::new(Dataset::from(Corpus::noise(config.model.seq_len)));
    train(config, &built, &data, &options, &mut |_| {}).map_err(|e| failed(&e))?;
    let mut spans = trace.spans();
    spans.retain(|span| span.wrote != built.plan.name(built.barrier));
    let mut times: BTreeMap<String, (Work, Vec<f64>)> = BTreeMap::new();
    for rank in 0..config.parallel.tensor * config.parallel.data {
        let of_rank = spans.iter().filter(|span| span.rank == rank);
        for (span, (_, work)) in of_rank.zip(program.ops()) {
            if span.name != work.name {
                let (ran, recorded) = (span.name, work.name);
                return Err(failed(&format!("`{ran}` ran where `{recorded}` was recorded")));
            }
            let seconds = (span.end - span.start).as_secs_f64();
            times.entry(format!("{work:?}")).or_insert((*work, Vec::new())).1.push(seconds);
        }
    }
    let typical = |(work, mut seconds): (Work, Vec<f64>)| {
        seconds.sort_by(f64::total_cmp);
        // The first rank at a meeting waits; the last rank does not.
        let at = if work.kind.is_collective() { seconds.len() / 4 } else { seconds.len() / 2 };
        OpTiming { work, seconds: seconds[at] }
    };
    Ok(times.into_values().map(typical).collect())
}

fn explain(timed: &[OpTiming], cores: usize) -> MeasuredConfig {
    let giga = |rate: f64| (rate / 1e9) as f32;
    let small = |t: &&OpTiming| t.work.bytes < 2048 && !t.work.kind.is_collective();
    let op = median(timed.iter().filter(small).map(|t| t.seconds)).unwrap_or(1e-6);
    let tiny = |t: &&OpTiming| t.work.bytes < 2048 && t.work.kind.is_collective();
    let meeting = median(timed.iter().filter(tiny).map(|t| t.seconds)).unwrap_or(1e-5);
    let fit = |of: &dyn Fn(&Work) -> bool| {
        let samples = timed.iter().filter(|t| of(&t.work) && t.work.bytes > 2048);
        let samples: Vec<[f64; 3]> =
            samples.map(|t| [t.work.flops, t.work.bytes as f64, left(t.seconds, op)]).collect();
        two_rates(&samples).map(giga)
    };
    let plain = |w: &Work| matches!(w.kind, WorkKind::Gemm { .. }) && w.separate_op.is_none();
    let gemm = [false, true].map(|wide| fit(&|w: &Work| plain(w) && w.wide == wide));
    let epilogues: Vec<OpTiming> = timed.iter().filter_map(|t| epilogue(t, &gemm)).collect();
    let rate = |of: &dyn Fn(&Work) -> bool, start: f64| {
        let seconds_per_byte = timed
            .iter()
            .chain(&epilogues)
            .filter(|t| of(&t.work) && t.work.bytes > 16384)
            .map(|t| left(t.seconds, start) / payload(&t.work));
        median(seconds_per_byte).map_or(0.0, |s| giga(1.0 / s))
    };
    let attention = |gradient: bool| {
        fit(
            &|w: &Work| matches!(w.kind, WorkKind::Attention { backward, .. } if backward == gradient),
        )
    };
    let by_name = |name: &'static str| {
        let of = |wide: bool| {
            let start = |w: &Work| if w.kind.is_collective() { meeting } else { op };
            let any = timed.iter().find(|t| t.work.name == name).map_or(op, |t| start(&t.work));
            rate(&|w: &Work| w.name == name && w.wide == wide, any)
        };
        (name, [of(false), of(true)])
    };
    let plain = |w: &Work| {
        let kernel = matches!(w.kind, WorkKind::Kernel | WorkKind::DeltaRule { .. });
        kernel || matches!(w.kind, WorkKind::Up | WorkKind::Down)
    };
    MeasuredConfig {
        cores,
        thread_us: 0.0,
        thread_share: 1.0,
        gemm,
        attention: [attention(false), attention(true)],
        ops_gb_per_s: config::MEASURED_OPS.into_iter().map(by_name).collect(),
        other_gb_per_s: rate(&plain, op),
        op_us: (1e6 * op) as f32,
        meeting_us: (1e6 * meeting) as f32,
    }
}

/// The time of a matmul's epilogue, under the name of the separate op: the time of the op minus
/// that of the matmul at `rates`.
fn epilogue(t: &OpTiming, rates: &[[f32; 2]; 2]) -> Option<OpTiming> {
    let (name, bytes) = t.work.separate_op?;
    let [flops, moved] = rates[usize::from(t.work.wide)].map(|rate| 1e9 * f64::from(rate));
    let part = |amount: f64, rate: f64| if rate > 0.0 { amount / rate } else { 0.0 };
    let product = part(t.work.flops, flops) + part(t.work.bytes as f64, moved);
    let work =
        Work { name, bytes, kind: WorkKind::Kernel, flops: 0.0, separate_op: None, ..t.work };
    Some(OpTiming { work, seconds: left(t.seconds, product) })
}

/// Seconds minus a part, at least 1 % of them: on a busy machine the part may be overestimated.
fn left(seconds: f64, part: f64) -> f64 {
    (seconds - part).max(0.01 * seconds)
}

/// Bytes as the simulator counts them for one of two parallel ranks.
fn payload(work: &Work) -> f64 {
    match work.kind {
        WorkKind::Collective { rounds, .. } => f64::from(rounds) * work.bytes as f64,
        _ => work.bytes as f64,
    }
}

/// Fits seconds = flops / a + bytes / b by least squares of the relative error. Samples are [flops,
/// bytes, seconds]. Returns [a, b], with 0 for a term that explains nothing.
fn two_rates(samples: &[[f64; 3]]) -> [f64; 2] {
    let (mut ff, mut fb, mut bb, mut f1, mut b1) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for [flops, bytes, seconds] in samples {
        let (f, b) = (flops / seconds, bytes / seconds);
        (ff, fb, bb, f1, b1) = (ff + f * f, fb + f * b, bb + b * b, f1 + f, b1 + b);
    }
    let determinant = ff * bb - fb * fb;
    let (per_flop, per_byte) =
        ((f1 * bb - b1 * fb) / determinant, (b1 * ff - f1 * fb) / determinant);
    let rate = |per: f64| if per > 0.0 && per.is_finite() { 1.0 / per } else { 0.0 };
    if rate(per_flop) == 0.0 {
        [0.0, rate(b1 / bb)]
    } else if rate(per_byte) == 0.0 {
        [rate(f1 / ff), 0.0]
    } else {
        [rate(per_flop), rate(per_byte)]
    }
}

/// The text of the box file.
pub fn to_ron(
    measured: &MeasuredConfig,
    gpus: usize,
    gpu_memory: &str,
    node_memory: &str,
) -> String {
    let mut rates = String::new();
    for (suffix, [flops, bytes]) in ["16", "32"].into_iter().zip(measured.gemm) {
        rates += &format!("        gemm_gflops_{suffix}: {flops:.4},\n");
        rates += &format!("        gemm_gb_per_s_{suffix}: {bytes:.4},\n");
    }
    let attention = ["attention", "attention_backward"].into_iter().zip(measured.attention);
    for (name, [flops, bytes]) in attention {
        rates += &format!("        {name}_gflops: {flops:.4},\n");
        rates += &format!("        {name}_gb_per_s: {bytes:.4},\n");
    }
    for (i, suffix) in ["16", "32"].into_iter().enumerate() {
        rates += &format!("        gb_per_s_{suffix}: (\n");
        for (name, of) in measured.ops_gb_per_s.iter().filter(|(_, of)| of[i] > 0.0) {
            rates += &format!("            {name}: {:.4},\n", of[i]);
        }
        rates += "        ),\n";
    }
    format!(
        "{BEGINNING} What is\n\
         // simulated on it predicts `onebox train` with `device: Cpu` on that machine.\n\
         (\n    gpus: {gpus},\n    gpu_memory: \"{gpu_memory}\",\n    node_memory: \"{node_memory}\",\n    \
         measured: (\n        cores: {},\n        thread_us: {:.4},\n        thread_share: {:.4},\n{rates}        other_gb_per_s: {:.4},\n        op_us: {:.4},\n        \
         meeting_us: {:.4},\n    ),\n)\n",
        measured.cores,
        measured.thread_us,
        measured.thread_share,
        measured.other_gb_per_s,
        measured.op_us,
        measured.meeting_us
    )
}

#[cfg(test)]
mod tests {
    use super::{left, two_rates};

    #[test]
    fn no_time_is_left_without_a_rate() {
        assert_eq!(left(3.0, 1.0), 2.0);
        assert_eq!([left(3.0, 3.0), left(3.0, 7.0)], [0.03; 2]);
    }

    #[test]
    fn rates_are_found_again() {
        let sample = |flops: f64, bytes: f64| [flops, bytes, flops / 2e9 + bytes / 5e8];
        let [a, b] = two_rates(&[sample(1e6, 1e3), sample(2e6, 1e5), sample(1e5, 3e4)]);
        assert!((a / 2e9 - 1.0).abs() < 1e-6 && (b / 5e8 - 1.0).abs() < 1e-6, "{a} {b}");
        // If bytes explain the whole time, there is no rate of arithmetic.
        let [a, b] = two_rates(&[[1e6, 1e6, 1e-3], [1e3, 2e6, 2e-3], [1e6, 3e6, 3e-3]]);
        assert!(a == 0.0 || a > 1e12, "{a}");
        assert!((b / 1e9 - 1.0).abs() < 1e-3, "{b}");
    }
}
