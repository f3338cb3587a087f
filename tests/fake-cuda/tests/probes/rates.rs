//! Speed of matmuls and ops at the shapes of a 1.3B model, measured over many of each in a queue.

use crate::{delta, experts, ops, small};
use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{Arena, Device, Dtype, Epilogue, FP8_SINCE, Lane, Op, Plan, Rank, Tensor, random};
use device::{Communicator, HostWork};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Opens the GPU of the only rank.
pub(crate) fn open(plan: Plan) -> Device {
    open_with(plan, AttentionLibrary::Own, 512 << 20 >> if small() { 8 } else { 0 })
}

/// Opens the GPU of the only rank with a library for attention and bytes of scratch.
pub(crate) fn open_with(plan: Plan, attention: AttentionLibrary, scratch: u64) -> Device {
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let world = Communicator::new(1, 1, Duration::from_secs(60));
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::InProcess,
        attention,
        matmuls: MatmulSelection::Heuristic,
        scratch,
        work: HostWork::default(),
        programs: offload::PROGRAMS,
        warm_up: Arc::default(),
    };
    cuda::open(rank, &Arc::new(plan), &world, &options).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn tensor(plan: &mut Plan, dtype: Dtype, shape: (usize, usize)) -> Tensor {
    plan.tensor((Arena::Device, "of the measurement"), "t", dtype, shape)
}

/// Fills a tensor with repeated numbers in -1..1: power, and with it clocks, follow the bits.
pub(crate) fn fill(dev: &Device, t: Tensor) {
    let (n, mut have) = (t.len(), t.len().min(1 << 16));
    let all = t.reshape(1, n);
    dev.write(all.slice(0..have), &|i| random::below(7, i as u64, 255) as f64 / 128.0 - 0.99)
        .unwrap();
    while have < n {
        let more = have.min(n - have);
        let (src, dst) = (all.slice(0..more), all.slice(have..have + more));
        dev.submit(Lane::Compute, Op::Copy { src, dst });
        have += more;
    }
    dev.sync_all().unwrap();
}

/// Seconds of one op: the best of three rounds of `runs`, after one run that is not counted.
pub(crate) fn seconds(dev: &Device, runs: usize, op: &dyn Fn(usize) -> Op) -> Result<f64, String> {
    let round = |runs: usize| {
        let started = Instant::now();
        (0..runs).for_each(|i| dev.submit(Lane::Compute, op(i)));
        dev.sync_all().map_err(|e| e.to_string().replace('\n', " "))?;
        Ok::<f64, String>(started.elapsed().as_secs_f64() / runs as f64)
    };
    round(1)?;
    let rounds = if small() { 1 } else { 3 };
    (0..rounds).try_fold(f64::INFINITY, |best: f64, _| Ok(best.min(round(runs)?)))
}

/// Number of runs of `work` FLOPs each that last about 30 ms.
fn runs_of(work: f64) -> usize {
    if small() { 1 } else { (1e13 / work).clamp(5.0, 100.0) as usize }
}

/// Matmuls of a block and the head: (name, m, k, n, a is transposed, b is transposed, has a bias).
/// Weights are stored as (outputs, inputs).
type Shape = (&'static str, usize, usize, usize, bool, bool, bool);

fn shapes() -> Vec<Shape> {
    let (tokens, hidden, vocab) = if small() { (8, 8, 16) } else { (8192, 2048, 50304) };
    let widths = [
        ("qkv", hidden, 3 * hidden),
        ("projection", hidden, hidden),
        ("up", hidden, 4 * hidden),
        ("down", 4 * hidden, hidden),
        ("head", hidden, vocab),
    ];
    let three = |(name, k, n): (&'static str, usize, usize)| {
        [
            (name, tokens, k, n, false, true, name != "head"),
            (name, tokens, n, k, false, false, false),
            (name, n, tokens, k, true, false, false),
        ]
    };
    widths.into_iter().flat_map(three).collect()
}

/// Memory for every matmul of a type.
struct Bench {
    dev: Device,
    /// Operands, result and bias, as one row each.
    room: [Tensor; 4],
}

impl Bench {
    fn new(dtype: Dtype, shapes: &[Shape]) -> Self {
        let most = |of: fn(&Shape) -> usize| shapes.iter().map(of).max().unwrap();
        let sizes = [most(|s| s.1 * s.2), most(|s| s.2 * s.3), most(|s| s.1 * s.3), most(|s| s.3)];
        let mut plan = Plan::default();
        let room = sizes.map(|n| tensor(&mut plan, dtype, (1, n)));
        let dev = open(plan);
        [room[0], room[1], room[3]].into_iter().for_each(|t| fill(&dev, t));
        Self { dev, room }
    }

    /// Speed of a matmul in 10^12 operations per second.
    fn rate(&self, &(_, m, k, n, a_t, b_t, _): &Shape, with_bias: bool) -> Result<f64, String> {
        let as_matrix =
            |t: Tensor, rows: usize, cols: usize| t.slice(0..rows * cols).reshape(rows, cols);
        let [a, b, c, bias] = self.room;
        let a = if a_t { as_matrix(a, k, m).t() } else { as_matrix(a, m, k) };
        let b = if b_t { as_matrix(b, n, k).t() } else { as_matrix(b, k, n) };
        let (c, bias) = (as_matrix(c, m, n), with_bias.then(|| bias.slice(0..n)));
        let flops = 2.0 * m as f64 * k as f64 * n as f64;
        let (add, epilogue) = (false, Epilogue::None);
        let op = Op::Gemm { a, b, c, bias, add, epilogue };
        let seconds = seconds(&self.dev, runs_of(flops), &|_| op.clone())?;
        Ok(flops / seconds / 1e12)
    }
}

/// A large square matmul, with which the others are compared.
fn square() -> Shape {
    let n = if small() { 16 } else { 8192 };
    ("square", n, n, n, false, true, false)
}

pub(crate) fn products() {
    let mut shapes = shapes();
    shapes.push(square());
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        let mut bench = Bench::new(dtype, &shapes);
        for shape in &shapes {
            let &(name, m, k, n, a_t, b_t, takes_bias) = shape;
            let kind = if a_t {
                "by-weight"
            } else if b_t {
                "forward"
            } else {
                "by-input"
            };
            for bias in [false, true].into_iter().filter(|bias| !bias || takes_bias) {
                let what = format!("name={name} kind={kind} type={dtype:?} bias={bias}");
                let figure = match bench.rate(shape, bias) {
                    Ok(tflops) => format!("tflops={tflops:.2}"),
                    Err(why) => {
                        // A rank that failed runs nothing more.
                        bench = Bench::new(dtype, &shapes);
                        format!("note={why}")
                    }
                };
                eprintln!("figure product {what} m={m} n={n} k={k} {figure}");
            }
        }
        let _ = bench.dev.finish();
    }
    if cuda::probe().gpus.iter().all(|gpu| gpu.sm >= FP8_SINCE) {
        products_of_fp8(&shapes);
    }
}

/// Measures the forward matmuls in fp8. All operands of an fp8 matmul lie along k, so the other
/// matmuls are of the same kind.
fn products_of_fp8(shapes: &[Shape]) {
    for &(name, m, k, n, ..) in shapes.iter().filter(|shape| shape.5) {
        let [m, k, n] = [m, k, n].map(|size| size.next_multiple_of(16));
        let mut plan = Plan::default();
        let a = tensor(&mut plan, Dtype::E4m3, (m, k));
        let b = tensor(&mut plan, Dtype::E4m3, (n, k));
        let c = tensor(&mut plan, Dtype::Bf16, (m, n));
        let scale = tensor(&mut plan, Dtype::F32, (1, 1));
        let dev = open(plan);
        [a, b, scale].into_iter().for_each(|t| fill(&dev, t));
        let op = Op::ScaledGemm { a, b: b.t(), c, bias: None, scales: [scale; 2] };
        let flops = op.flops();
        let figure = match seconds(&dev, runs_of(flops), &|_| op.clone()) {
            Ok(seconds) => format!("tflops={:.2}", flops / seconds / 1e12),
            Err(why) => format!("note={why}"),
        };
        eprintln!(
            "figure product name={name} kind=forward type=E4m3 bias=false m={m} n={n} k={k} {figure}"
        );
        let _ = dev.finish();
    }
}

/// Prints, in microseconds, the time that a submission needs on its thread, and the time of a small
/// kernel with the gap after it. The small kernels follow long kernels, so that all are submitted
/// before the first one begins.
fn launches() {
    // Fewer than the capacity of a queue, so the thread is never blocked.
    let (long, count) = if small() { (1, 10) } else { (8, 400) };
    let mut plan = Plan::default();
    let mut pair = |n| [(); 2].map(|()| tensor(&mut plan, Dtype::F32, (1, n)));
    let ([x, into], large) = (pair(256), pair(if small() { 256 } else { 256 << 20 }));
    let dev = open(plan);
    for x in [x, into, large[0], large[1]] {
        dev.submit(Lane::Compute, Op::Zero { x });
    }
    let add = |x, into| dev.submit(Lane::Compute, Op::Add { x, into });
    let run = |count: usize| {
        let started = Instant::now();
        (0..long).for_each(|_| add(large[0], large[1]));
        let behind = Instant::now();
        (0..count).for_each(|_| add(x, into));
        let thread = behind.elapsed().as_secs_f64();
        dev.sync_all().unwrap();
        [thread, started.elapsed().as_secs_f64()]
    };
    run(count);
    let least = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].min(b[1])];
    let most = [f64::INFINITY; 2];
    let [thread, all] = (0..5).map(|_| run(count)).fold(most, least);
    let [_, alone] = (0..5).map(|_| run(0)).fold(most, least);
    dev.finish().unwrap();
    let us = |seconds: f64| 1e6 * seconds / count as f64;
    eprintln!("figure launch thread={:.2} kernel={:.2}", us(thread), us(all - alone));
}

pub(crate) fn ops() {
    launches();
    let mut plan = Plan::default();
    let n = if small() { 1 << 10 } else { 512 << 20 };
    let [src, dst] = [(); 2].map(|()| tensor(&mut plan, Dtype::F16, (1, n)));
    let dev = open(plan);
    fill(&dev, src);
    let copy = 4.0 * n as f64 / seconds(&dev, 10, &|_| Op::Copy { src, dst }).unwrap() / 1e9;
    dev.finish().unwrap();
    let bench = Bench::new(Dtype::Bf16, &[square()]);
    let tflops = bench.rate(&square(), false).unwrap();
    bench.dev.finish().unwrap();
    eprintln!("figure ceiling name=copy gb={copy:.1}");
    eprintln!("figure ceiling name=product tflops={tflops:.1}");
    for case in ops::cases().into_iter().chain(experts::cases()).chain(delta::cases()) {
        let mut plan = Plan::default();
        let made = (case.make)(&mut plan);
        let dev = open(plan);
        made.fill.iter().for_each(|t| fill(&dev, *t));
        made.zero.iter().for_each(|t| dev.submit(Lane::Compute, Op::Zero { x: *t }));
        dev.sync_all().unwrap();
        for (t, values) in &made.write {
            dev.write(*t, &|i| values(i)).unwrap();
        }
        let (bytes, flops) = (made.ops[0].bytes() as f64, made.ops[0].flops());
        let runs = if small() { 1 } else { 40 };
        let figure = match seconds(&dev, runs, &|i| made.ops[i % made.ops.len()].clone()) {
            Ok(seconds) => {
                let (rate, ceiling) = match flops > 0.0 {
                    true => (
                        format!("tflops={:.2}", flops / seconds / 1e12),
                        flops / seconds / 1e12 / tflops,
                    ),
                    false => {
                        (format!("gb={:.1}", bytes / seconds / 1e9), bytes / seconds / 1e9 / copy)
                    }
                };
                format!("us={:.2} {rate} share={ceiling:.4}", seconds * 1e6)
            }
            Err(why) => format!("note={why}"),
        };
        eprintln!("figure op name={} kind={} {figure}", case.name, case.kind);
        let _ = dev.finish();
    }
}
