//! Attention by cuDNN. The stand-in computes the graph that onebox builds, op by op, and knows no
//! attention, so a wrong graph has wrong results.

use super::{ALONE, in_process, on_a_real_gpu, on_cuda, try_run, under_fake};
use device::cuda::attention_workspace;
use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{Arena, Device, Dropout, Dtype, Heads, Lane, Op, Plan, Rank, Scores, Tensor, random};
use device::{Communicator, HostWork};
use engine::run::RunOptions;
use std::sync::Arc;
use std::time::Duration;
use tests::compare::with;
use tests::tiny;

/// Cases that a child process runs.
pub(super) const CASES: &[(&str, fn())] = &[
    ("attention_agrees", agrees),
    ("attention_leaves_the_rest", leaves_the_rest),
    ("attention_lacks", says_what_it_lacks),
    ("attention_takes_the_next_engine", takes_the_next_engine),
    ("attention_has_no_engine", || fails("the engine is not for this GPU")),
    ("attention_does_not_start", || fails("cudnnBackendExecute: status 5000")),
    ("attention_trains", trains),
    ("attention_too_old", || refused(&["cuDNN 9.5.0", "it is too old, 9.10"])),
    ("attention_of_ampere", || refused(&["this one is sm_80", "`attention: Own`"])),
    ("attention_missing", || refused(&["libcudnn.so.9", "install onebox's extra `cuda12`"])),
];

/// Samples, and heads with their elements.
#[derive(Clone, Copy, Debug)]
struct Shape {
    samples: usize,
    heads: Heads,
    dim: usize,
}

const fn shape(samples: usize, heads: [usize; 2], seq_len: usize, dim: usize) -> Shape {
    let [count, kv_count] = heads;
    let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
    Shape { samples, heads, dim }
}

/// Heads of their own and shared ones, and samples that end within a tile of every kernel.
const SHAPES: [Shape; 4] = [
    shape(2, [6, 2], 70, 24),
    shape(1, [4, 4], 130, 64),
    shape(1, [3, 1], 65, 128),
    shape(2, [2, 2], 64, 8),
];

/// The tensors of both passes on a GPU.
struct Bench {
    dev: Device,
    heads: Heads,
    dropout: Dropout,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_qkv: Tensor,
}

/// out, lse and d_qkv.
type Results = [Vec<f64>; 3];

impl Bench {
    /// Opens a GPU with `scratch` bytes of scratch. Tensors begin `skew` elements behind an aligned
    /// address.
    fn new(
        library: AttentionLibrary,
        dtype: Dtype,
        shape: Shape,
        scratch: u64,
        skew: usize,
    ) -> Self {
        let Shape { samples, heads, dim } = shape;
        let mut plan = Plan::default();
        let mut tensor = |dtype, rows: usize, cols: usize| {
            let n = rows * cols;
            let whole = plan.tensor((Arena::Device, "test"), "t", dtype, (1, n + skew));
            whole.slice(skew..skew + n).reshape(rows, cols)
        };
        let (rows, own) = (samples * heads.seq_len, heads.count * dim);
        let all = own + 2 * heads.kv_count * dim;
        let (qkv, out) = (tensor(dtype, rows, all), tensor(dtype, rows, own));
        let lse = tensor(Dtype::F32, samples * heads.count, heads.seq_len);
        let (d_out, d_qkv) = (tensor(dtype, rows, own), tensor(dtype, rows, all));
        let options = CudaOptions {
            gpu: None,
            host: device::HostPlace::default(),
            peers: Arc::new(Peers::new(1)),
            collectives: Collectives::InProcess,
            attention: library,
            matmuls: MatmulSelection::Heuristic,
            scratch,
            work: HostWork::default(),
            programs: &[],
            warm_up: Arc::default(),
        };
        let world = Communicator::new(1, 1, Duration::from_secs(60));
        let rank = Rank::all(1, 1).next().expect("one rank");
        let dev = cuda::open(rank, &Arc::new(plan), &world, &options);
        let dev = dev.unwrap_or_else(|e| panic!("{e}"));
        for (key, t) in [(7, qkv), (8, d_out)] {
            let value = |i| random::below(key, i as u64, 4001) as f64 / 1000.0 - 2.0;
            dev.write(t, &value).unwrap();
        }
        Self { dev, heads, dropout: Dropout::NONE, qkv, out, lse, d_out, d_qkv }
    }

    /// Runs both passes.
    fn results(&self) -> Result<Results, String> {
        let Self { dev, heads, dropout, qkv, out, lse, d_out, d_qkv } = self;
        let (heads, starts, dropout) = (*heads, None, *dropout);
        let (qkv, out, lse, d_out, d_qkv) = (*qkv, *out, *lse, *d_out, *d_qkv);
        let scores = Scores::of(heads.dim(qkv.shape().1));
        dev.submit(Lane::Compute, Op::Attention { qkv, out, lse, heads, starts, dropout, scores });
        let backward =
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores };
        dev.submit(Lane::Compute, backward);
        dev.sync_all().map_err(|e| e.to_string())?;
        Ok([out, lse, d_qkv].map(|t| {
            let mut read = vec![0.0; t.len()];
            dev.read(t, &mut read).unwrap();
            read
        }))
    }
}

/// A GPU with as much scratch as cuDNN needs.
fn bench(library: AttentionLibrary, dtype: Dtype, shape: Shape) -> Bench {
    let Shape { samples, heads, dim } = shape;
    // onebox's kernels need a number for each row and head at any size.
    let scratch = attention_workspace(samples, heads, dim).max(1 << 20);
    Bench::new(library, dtype, shape, scratch, 0)
}

/// The largest difference, as a share of the largest number.
fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    let largest = a.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let difference = |(a, b): (&f64, &f64)| {
        let distance = (a - b).abs();
        if distance.is_nan() { f64::INFINITY } else { distance }
    };
    a.iter().zip(b).map(difference).fold(0.0, f64::max) / largest
}

/// Graphs that cuDNN's stand-in has got.
fn graphs() -> u64 {
    fake_cuda::stats().expect("the fake driver").graphs
}

/// Compares both passes of cuDNN with those of onebox's kernels, in each 16-bit type. Both round
/// the weights to the type before they multiply them.
fn agrees() {
    for (dtype, unit) in [(Dtype::Bf16, 1.0 / 256.0), (Dtype::F16, 1.0 / 2048.0)] {
        for shape in SHAPES {
            let own = bench(AttentionLibrary::Own, dtype, shape).results().unwrap();
            let before = graphs();
            let library = bench(AttentionLibrary::Cudnn, dtype, shape);
            let (found, again) = (library.results().unwrap(), library.results().unwrap());
            assert_eq!(graphs() - before, 4, "{shape:?}");
            let same = found.iter().zip(&again).all(|(a, b)| a == b);
            assert!(same, "{dtype:?} {shape:?}: the bits depend on the run");
            let [out, lse, d_qkv] = [0, 1, 2].map(|i| largest_difference(&own[i], &found[i]));
            println!("{dtype:?} {shape:?}: {out:.1e} {lse:.1e} {d_qkv:.1e}");
            let near = out <= 4.0 * unit && lse <= 1e-5 && d_qkv <= 10.0 * unit;
            assert!(near, "{dtype:?} {shape:?}: {out:e}, {lse:e}, {d_qkv:e}");
        }
    }
}

/// onebox's kernels compute attention in 32 bits, with dropout, and on heads that cuDNN has not.
fn leaves_the_rest() {
    let dropout = Dropout { p: 0.1, key: 5, first_row: 0 };
    let [first, ..] = SHAPES;
    for (dtype, shape, dropout) in [
        (Dtype::F32, first, Dropout::NONE),
        (Dtype::Bf16, first, dropout),
        (Dtype::Bf16, shape(1, [2, 1], 70, 20), Dropout::NONE),
        (Dtype::Bf16, shape(1, [1, 1], 40, 136), Dropout::NONE),
    ] {
        let of = |library| Bench { dropout, ..bench(library, dtype, shape) }.results().unwrap();
        let own = of(AttentionLibrary::Own);
        assert!(own == of(AttentionLibrary::Cudnn), "{dtype:?} {shape:?} {dropout:?}");
    }
    assert_eq!(graphs(), 0);
}

/// Too little scratch, and an address that is not aligned, are errors that say so.
fn says_what_it_lacks() {
    let error = |scratch: u64, skew: usize| {
        let bench = Bench::new(AttentionLibrary::Cudnn, Dtype::Bf16, SHAPES[0], scratch, skew);
        bench.results().expect_err("it must fail")
    };
    let text = error(1024, 0);
    assert!(text.contains("bytes of workspace, 1024 are there"), "{text}");
    assert!(text.contains("set `attention: Own`"), "{text}");
    let text = error(1 << 24, 1);
    assert!(text.contains("no multiple of 16"), "{text}");
}

/// An engine that the library cannot use is passed over for the next one.
fn takes_the_next_engine() {
    let [first, ..] = SHAPES;
    let own = bench(AttentionLibrary::Own, Dtype::Bf16, first).results().unwrap();
    let found = bench(AttentionLibrary::Cudnn, Dtype::Bf16, first).results().unwrap();
    assert!(
        largest_difference(&own[0], &found[0]) < 0.02,
        "{}",
        largest_difference(&own[0], &found[0])
    );
}

/// A failed call of the library is an error with its reason.
fn fails(reason: &str) {
    let text = bench(AttentionLibrary::Cudnn, Dtype::Bf16, SHAPES[0]).results();
    let text = text.expect_err("it must fail");
    assert!(text.contains(reason) && text.contains("FAKECUDA_FAIL"), "{text}");
}

/// Trains with each library, alone and on two TP ranks: losses and norms agree within the rounding
/// of weights.
fn trains() {
    let sets = ["model.layers=2", "precision=Bf16", "train.steps=3", "train.eval_every=0"];
    for layout in [ALONE, &["parallel.tensor=2"]] {
        let run = |library: &str| {
            let config = on_cuda(tiny(&with(&with(&sets, layout), &[library])));
            try_run(&config, &in_process()).unwrap_or_else(|e| panic!("{layout:?}: {e}"))
        };
        let before = graphs();
        let own = run("attention=Own");
        assert_eq!(graphs(), before, "{layout:?}");
        let library = run("attention=Cudnn");
        // Three steps of four micro-batches, two blocks and two passes.
        assert!(graphs() - before >= 48, "{layout:?}: {}", graphs() - before);
        for (a, b) in own.steps.iter().zip(&library.steps) {
            let norms = (a.grad_norm - b.grad_norm).abs() / a.grad_norm;
            println!("{layout:?}: {} {}, {norms:e}", a.loss, b.loss);
            assert!((a.loss - b.loss).abs() < 3e-3 && norms < 1e-2, "{layout:?}: {a:?} {b:?}");
        }
    }
}

/// A run that asks for a cuDNN that is not there, too old or not for the GPU is refused.
fn refused(texts: &[&str]) {
    let sets = ["model.layers=2", "precision=Bf16", "attention=Cudnn"];
    let ran = try_run(&on_cuda(tiny(&sets)), &RunOptions::default());
    let text = ran.expect_err("it must fail").to_string();
    for expected in texts {
        assert!(text.contains(expected), "`{expected}` is not in:\n{text}");
    }
}

/// Runs a case on a Hopper GPU of the fake driver. On a real GPU, the probes compare the libraries.
fn on_hopper(case: &str, environment: &[(&str, &str)]) {
    if on_a_real_gpu() {
        return println!("{case}: skipped on a real GPU");
    }
    under_fake(case, &with_sm(environment));
}

/// `environment` with compute capability 90, unless it names another one.
fn with_sm<'a>(environment: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[("FAKECUDA_SM", "90")][..], environment].concat()
}

#[test]
fn attention_of_cudnn_agrees_with_that_of_onebox() {
    on_hopper("attention_agrees", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn attention_that_cudnn_has_not_is_that_of_onebox() {
    on_hopper("attention_leaves_the_rest", &[]);
}

#[test]
fn attention_of_cudnn_says_what_it_lacks() {
    on_hopper("attention_lacks", &[]);
}

#[test]
fn an_engine_of_cudnn_that_does_not_work_is_passed_over() {
    on_hopper("attention_takes_the_next_engine", &[("FAKECUDA_FAIL", "plan:1")]);
    on_hopper("attention_takes_the_next_engine", &[("FAKECUDA_FAIL", "heuristic:1")]);
}

#[test]
fn a_failure_of_cudnn_has_its_reason() {
    on_hopper("attention_has_no_engine", &[("FAKECUDA_FAIL", "plan:1,plan:2")]);
    on_hopper("attention_does_not_start", &[("FAKECUDA_FAIL", "graph:2")]);
}

#[test]
fn runs_with_attention_of_cudnn_train_as_those_of_onebox() {
    on_hopper("attention_trains", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn without_a_fitting_cudnn_a_run_is_refused_in_words() {
    on_hopper("attention_too_old", &[("FAKECUDA_CUDNN_VERSION", "90500")]);
    on_hopper("attention_of_ampere", &[("FAKECUDA_SM", "80")]);
    // The other libraries without cuDNN.
    let (all, folder) = (fake_cuda::library_folder(), tempfile::tempdir().unwrap());
    for name in std::fs::read_dir(&all).unwrap().map(|entry| entry.unwrap().file_name()) {
        if name != "libcudnn.so.9" {
            std::os::unix::fs::symlink(all.join(&name), folder.path().join(&name)).unwrap();
        }
    }
    let folder = folder.path().to_str().unwrap();
    on_hopper("attention_missing", &[("LD_LIBRARY_PATH", folder)]);
}
