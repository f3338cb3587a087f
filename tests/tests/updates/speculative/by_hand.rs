//! The optimizer alone, with gradients from the test: random layouts, storages and rules, gradients
//! that are not finite at random places, and clip limits that a norm hits exactly. Speculative
//! updates leave the same bits as updates after the decision.

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::numerics::CountedRange;
use device::{
    Arena, Communicator, Dtype, Group, HostPlace, HostWork, Lane, Op, Plan, Rank, Tensor,
};
use device::{Device, random};
use offload::{
    BucketSharing, GradAccumulation, LossScale, NoiseRun, Optimizer, OptimizerLayout,
    OptimizerSpec, OwnedRun, Rule, SegmentSpec, StatePosition, StepSchedule, Storage, Transfer,
    control,
};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use tests::compare::full;

const CHUNK: usize = 64;
const STEPS: u64 = 8;

/// Random numbers that depend only on a seed.
pub(super) struct SeededNumbers(u64, Cell<u64>);

impl SeededNumbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(random::key(0x6279_6861_6e64, seed), Cell::new(0))
    }
    pub(super) fn below(&self, bound: u64) -> usize {
        self.1.set(self.1.get() + 1);
        random::below(self.0, self.1.get(), bound) as usize
    }
    pub(super) fn one_in(&self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub(super) fn of<T: Copy>(&self, all: &[T]) -> T {
        all[self.below(all.len() as u64)]
    }
}

/// Seeds of a test: `few`, or `many` with ONEBOX_FULL=1. `ONEBOX_SEEDS` sets the number of seeds,
/// and `ONEBOX_SEED` sets the first.
pub(super) fn seeds(few: u64, many: u64) -> std::ops::Range<u64> {
    let given = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let first = given("ONEBOX_SEED").unwrap_or(0);
    first..first + given("ONEBOX_SEEDS").unwrap_or(if full() { many } else { few })
}

/// Learning rates, some of them 0, and gradient weights, some of them no powers of two.
#[derive(Debug)]
struct StepRates {
    rates: Vec<f64>,
    weights: Vec<f64>,
}

impl StepSchedule for StepRates {
    fn learning_rate(&self, step: u64) -> f64 {
        self.rates[step as usize % self.rates.len()]
    }
    fn weight(&self, step: u64) -> f64 {
        self.weights[step as usize % self.weights.len()]
    }
}

/// Gradients of a step.
#[derive(Clone, Copy, Debug)]
enum Gradients {
    /// Random normal numbers with this standard deviation.
    Normal(f64),
    /// Zeros, except for one element, so that the norm is exact.
    One(f64),
    /// Zeros.
    Zero,
}

/// Odd value of one element of a step's gradients.
#[derive(Clone, Copy, Debug)]
struct OddGradient {
    value: f64,
    micro: usize,
    segment: usize,
    rank: usize,
    element: usize,
}

/// Random run of the optimizer.
#[derive(Debug)]
struct Case {
    seed: u64,
    tp: usize,
    spec: OptimizerSpec,
    storage: Dtype,
    /// Elements of each segment, and its elements in use.
    segments: Vec<[usize; 2]>,
    gradients: Vec<(Gradients, Option<OddGradient>)>,
    given: Arc<StepRates>,
    /// Odd element of the states, for example a NaN: its value, state, segment and index.
    broken: Option<(f32, usize, usize, usize)>,
    /// Whether the pending update in the control block is skipped; `None` without a pending update.
    late: Option<bool>,
    until: u64,
}

impl Case {
    fn draw(seed: u64) -> Self {
        let d = SeededNumbers::new(seed);
        let (tp, dp) = (d.of(&[1, 1, 2]), d.of(&[1, 2, 2, 3]));
        let storage = d.of(&[Dtype::F32, Dtype::Bf16, Dtype::Bf16, Dtype::F16]);
        let bf16 = storage == Dtype::Bf16;
        let micro_batches = d.of(&[1, 1, 2, 3]);
        let sum = if micro_batches == 1 {
            GradAccumulation::None
        } else {
            d.of(&[GradAccumulation::Host, GradAccumulation::Device])
        };
        let adam = Rule::AdamW {
            beta1: d.of(&[0.0, 0.9]),
            beta2: d.of(&[0.0, 0.95, 0.999]),
            eps: d.of(&[1e-8, 1e-3]),
            weight_decay: d.of(&[0.0, 0.1]),
        };
        let sgd = Rule::Sgd { weight_decay: d.of(&[0.0, 0.1]) };
        let scaled = storage == Dtype::F16 || d.one_in(4);
        let initial: f64 = d.of(&[1.0, 1024.0, 65536.0]);
        let scale = LossScale {
            initial,
            window: d.of(&[1, 2, 3]),
            hysteresis: d.of(&[1, 2]),
            floor: initial.min(d.of(&[1.0, 256.0])),
        };
        let spec = OptimizerSpec {
            rule: if d.one_in(4) { sgd } else { adam },
            device_fraction: d.of(&[0.0, 0.0, 0.0, 0.3, 0.6, 0.9]),
            delayed: false,
            speculative_fraction: d.of(&[1.0, 1.0, 0.5, 0.2]),
            accumulation: sum,
            transfer: Transfer::Streamed,
            storage: Storage {
                moments: if bf16 && d.one_in(2) { Dtype::Bf16 } else { Dtype::F32 },
                split_master: bf16 && d.one_in(2),
            },
            micro_batches,
            dp_size: dp,
            reduce_fp32: bf16 && d.one_in(3),
            norm_group: Group::Tp,
            clip: None,
            loss_scale: scaled.then_some(scale),
            bucket_elements: d.of(&[64, 256, 1000, 100_000]),
            tile_elements: d.of(&[64, 100, 256, 100_000]),
        };
        let unit = dp * CHUNK;
        let segment = |_| {
            let len = unit * (1 + d.below(6));
            [len, len - d.of(&[0, 0, 1, 17, 70]).min(len - 1)]
        };
        let segments: Vec<[usize; 2]> = (0..2 + d.below(5)).map(segment).collect();
        let ranks = (tp * dp) as u64;
        let gradients = |_| {
            let gradients = match d.below(8) {
                0 => Gradients::Zero,
                1 | 2 => Gradients::One(d.of(&[1.0, 3.0, -0.75, 1e-30])),
                _ => Gradients::Normal(d.of(&[1e-3, 1.0, 1.0, 1.0, 100.0])),
            };
            let odd = d.one_in(3).then(|| {
                let segment = d.of(&[0, segments.len() - 1, d.below(segments.len() as u64)]);
                let [_, used] = segments[segment];
                OddGradient {
                    value: d.of(&[f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 6e4, 3e38, 1e-40]),
                    micro: d.below(micro_batches as u64),
                    segment,
                    rank: d.below(ranks),
                    element: d.of(&[0, used - 1, d.below(used as u64)]),
                }
            });
            (gradients, odd)
        };
        let gradients = (0..STEPS).map(gradients).collect();
        let broken = d.one_in(6).then(|| {
            let segment = d.below(segments.len() as u64);
            let value = d.of(&[f32::NAN, f32::INFINITY, 1e-40, -0.0]);
            (value, d.below(3), segment, d.below(segments[segment][1] as u64))
        });
        let given = StepRates {
            rates: (0..3).map(|_| d.of(&[0.0, 1e-3, 0.1, 1.0])).collect(),
            weights: (0..5).map(|_| d.of(&[1.0, 1.7, 3.0, 1000.0 / 7.0])).collect(),
        };
        Self {
            seed,
            tp,
            spec,
            storage,
            segments,
            gradients,
            given: Arc::new(given),
            broken,
            late: d.one_in(5).then(|| d.one_in(3)),
            until: 1 + d.below(STEPS) as u64,
        }
    }

    /// Gradient of element `i` of a rank's bucket.
    fn gradient(&self, step: u64, (micro, segment, rank): (usize, usize, usize), i: usize) -> f64 {
        let (gradients, odd) = self.gradients[step as usize - 1];
        if let Some(odd) = odd
            && (odd.micro, odd.segment, odd.rank, odd.element) == (micro, segment, rank, i)
        {
            return odd.value;
        }
        match gradients {
            Gradients::Zero => 0.0,
            Gradients::One(value) => {
                let last = self.segments.len() - 1;
                if (micro, segment, rank, i) == (0, last, 0, 0) { value } else { 0.0 }
            }
            Gradients::Normal(size) => {
                let place = [step, micro as u64, segment as u64, rank as u64];
                let stream = place.into_iter().fold(self.seed, random::key);
                size * random::normal(stream, i as u64)
            }
        }
    }
}

/// Output of a rank: the control words of each step without the words of speculative updates, the
/// parameters in each forward pass, all states, and the outcomes of speculation.
#[derive(PartialEq, Debug, Default)]
struct RankOutput {
    words: Vec<Vec<u64>>,
    seen: Vec<u64>,
    states: Vec<Vec<u32>>,
    speculation: Vec<f64>,
}

/// Tensors of the test that the optimizer does not have.
struct ExtraTensors {
    params: Vec<Tensor>,
    /// Gradients by step, micro-batch and segment.
    gradients: Vec<Tensor>,
    /// Parameters in each forward pass, by step and segment.
    seen: Vec<Tensor>,
}

fn laid_out(case: &Case, spec: &OptimizerSpec) -> (Arc<Plan>, Arc<OptimizerLayout>, ExtraTensors) {
    let mut plan = Plan::default();
    let mut tensor =
        |name: String, len| plan.tensor((Arena::Device, "test"), name, case.storage, (1, len));
    let lens = || case.segments.iter().map(|[len, _]| *len).enumerate();
    let params: Vec<Tensor> = lens().map(|(s, len)| tensor(format!("p{s}"), len)).collect();
    let (mut gradients, mut seen) = (Vec::new(), Vec::new());
    for step in 0..=STEPS {
        seen.extend(lens().map(|(s, len)| tensor(format!("seen.{step}.{s}"), len)));
        for micro in 0..spec.micro_batches {
            gradients.extend(lens().map(|(s, len)| tensor(format!("g.{step}.{micro}.{s}"), len)));
        }
    }
    let last = case.segments.len() - 1;
    let segment = |(s, [_, used]): (usize, &[usize; 2])| SegmentSpec {
        name: format!("s{s}"),
        params: params[s],
        trained: params[s].len(),
        len: *used,
        decayed: used / 3,
        bucket: if s == 0 || s == last { BucketSharing::Own } else { BucketSharing::Alternating },
        param_buffer: None,
    };
    let segments: Vec<SegmentSpec> = case.segments.iter().enumerate().map(segment).collect();
    let layout = OptimizerLayout::plan(&mut plan, spec, CHUNK, &segments);
    (Arc::new(plan), Arc::new(layout), ExtraTensors { params, gradients, seen })
}

/// Runs `case` on all ranks, and returns the output of each rank.
fn ran(case: &Case, spec: &OptimizerSpec, lanes: Lanes) -> Vec<RankOutput> {
    let (plan, layout, extra) = laid_out(case, spec);
    let world = Communicator::new(case.tp, spec.dp_size, Duration::from_secs(60));
    let one = |rank: Rank| {
        let options = CpuOptions {
            lanes,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats { each: 1 << 12, sums: 1 << 12 },
            work: HostWork { jobs: 1 << 14, ..HostWork::default() },
        };
        let dev = cpu::open(rank, &plan, &world, &options).unwrap();
        let left = one_rank(case, spec, (&dev, &layout, &extra));
        dev.finish().unwrap();
        left
    };
    std::thread::scope(|scope| {
        let one = &one;
        let ranks = Rank::all(case.tp, spec.dp_size);
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn one_rank(
    case: &Case,
    spec: &OptimizerSpec,
    (dev, layout, extra): (&Device, &Arc<OptimizerLayout>, &ExtraTensors),
) -> RankOutput {
    let rank = dev.rank();
    let count = case.segments.len();
    // Elements that two tensor-parallel ranks hold count on the first rank.
    let counted = |[_, used]: &[usize; 2]| {
        let hole = if rank.tp == 0 { (0, 0) } else { (0, used / 4) };
        CountedRange { end: *used, hole }
    };
    let counted: Vec<CountedRange> = case.segments.iter().map(counted).collect();
    let noise = |(s, [_, used]): (usize, &[usize; 2])| {
        Arc::from([NoiseRun { flat: 0..*used, stream: s as u64, global: 5 }])
    };
    let noise: Vec<Arc<[NoiseRun]>> = case.segments.iter().enumerate().map(noise).collect();
    let given: Arc<dyn StepSchedule> = Arc::<StepRates>::clone(&case.given);
    let mut optimizer = Optimizer::new(layout, rank, &counted, &noise, given);
    for step in 0..STEPS as usize {
        for micro in 0..spec.micro_batches {
            for s in 0..count {
                let to = extra.gradients[(step * spec.micro_batches + micro) * count + s];
                let place = (micro, s, rank.index());
                dev.write(to, &|i| case.gradient(step as u64 + 1, place, i)).unwrap();
            }
        }
    }
    let fill = |StatePosition { segment, state, first }: StatePosition, values: &mut [f32]| {
        let stream = random::key(random::key(case.seed, segment as u64), 100 + state as u64);
        for (i, value) in values.iter_mut().enumerate() {
            let drawn = random::normal(stream, (first + i) as u64) as f32;
            let is_padding = first + i >= case.segments[segment][1];
            *value = match state {
                _ if is_padding => 0.0,
                1 => 0.1 * drawn,
                2 => drawn * drawn,
                _ => drawn,
            };
            if let Some((odd, at, of, element)) = case.broken
                && (at, of, element) == (state, segment, first + i)
            {
                *value = odd;
            }
            // A restore does not round moments, so their values must be exact in 16 bits.
            if state == 1 || state == 2 {
                *value = half::bf16::from_f32(*value).to_f32();
            }
        }
        Ok(())
    };
    let mut words = optimizer.initial_control();
    if let Some(skip) = case.late {
        words[control::STEP] = 1.0;
        words[control::SKIP] = f64::from(u8::from(skip));
        words[control::FACTOR] = if skip { 0.0 } else { 0.3 };
        words[control::LR] = 0.01;
        words[control::MOMENTUM_CORRECTION] = 2.0;
        words[control::VARIANCE_CORRECTION] = 3.0;
        words[control::APPLIED] = 1.0;
    }
    let late = case.late.is_some();
    assert!(optimizer.restore(dev, &words, late, &fill, &|| false).unwrap());
    if late {
        (0..count).for_each(|s| optimizer.update(dev, s));
    }
    let mut left = RankOutput::default();
    for step in 1..=case.until {
        dev.begin_step(step);
        forward(dev, &mut optimizer, extra, step - 1);
        for micro in 0..spec.micro_batches {
            let last = micro + 1 == spec.micro_batches;
            for s in (0..count).rev() {
                let bucket = optimizer.bucket(dev, s, 0);
                let at = ((step as usize - 1) * spec.micro_batches + micro) * count + s;
                dev.submit(
                    Lane::Compute,
                    Op::Copy { src: extra.gradients[at], dst: bucket.tensor },
                );
                optimizer.reduce(dev, s, bucket, micro);
                if last {
                    if s == count - 1 {
                        optimizer.predict_decision(dev, step);
                    }
                    optimizer.update_speculatively(dev, s);
                }
            }
        }
        let decided = optimizer.decide(dev, step);
        (0..count).for_each(|s| optimizer.update(dev, s));
        dev.sync(decided).unwrap();
        let mut words = [0.0; control::WORDS];
        dev.read(optimizer.control(), &mut words).unwrap();
        left.words.push(words[..control::STATE_BUFFER].iter().map(|word| word.to_bits()).collect());
        left.speculation.push(words[control::SPECULATION]);
    }
    forward(dev, &mut optimizer, extra, case.until);
    dev.sync_all().unwrap();
    for t in &extra.seen[..(case.until as usize + 1) * count] {
        let mut values = vec![0.0; t.len()];
        dev.read(*t, &mut values).unwrap();
        left.seen.extend(values.into_iter().map(f64::to_bits));
    }
    let side = optimizer.state_buffer(dev).unwrap();
    for s in 0..count {
        for OwnedRun { states, .. } in optimizer.owned(s, side) {
            for state in states {
                let mut values = vec![0.0; state.len()];
                state.read(dev, &mut values).unwrap();
                left.states.push(values.into_iter().map(f32::to_bits).collect());
            }
        }
    }
    left
}

/// Publishes the parameters, and copies them when they are ready, as a forward pass does.
fn forward(dev: &Device, optimizer: &mut Optimizer, extra: &ExtraTensors, step: u64) {
    let count = extra.params.len();
    for (s, src) in extra.params.iter().enumerate() {
        optimizer.publish(dev, s);
        dev.wait(Lane::Compute, optimizer.params_ready(s));
        let dst = extra.seen[step as usize * count + s];
        dev.submit(Lane::Compute, Op::Copy { src: *src, dst });
    }
}

/// Clip limit: none, 1, or a limit at which a norm of the run is just clipped or just not clipped.
fn thresholds(d: &SeededNumbers, norms: &[f64]) -> Option<f64> {
    let finite: Vec<f64> = norms.iter().copied().filter(|x| x.is_finite() && *x > 0.0).collect();
    if finite.is_empty() || d.one_in(8) {
        return d.of(&[None, Some(1.0)]);
    }
    let norm = finite[d.below(finite.len() as u64)];
    // Clipping begins when the norm plus 1e-6 exceeds the limit.
    let edge = if d.one_in(3) { norm } else { norm + 1e-6 };
    let by = d.below(7) as i64 - 3;
    Some(f64::from_bits((edge.to_bits() as i64 + by) as u64))
}

#[test]
fn whatever_the_gradients_are_the_states_are_those_of_updates_behind_the_decision() {
    let mut became = [0; 3];
    let mut skipped = 0;
    for seed in seeds(60, 2_000) {
        let mut case = Case::draw(seed);
        let d = SeededNumbers::new(random::key(seed, 1));
        let ahead_fraction = std::mem::take(&mut case.spec.speculative_fraction);
        let open = ran(&case, &case.spec, Lanes::Inline);
        let norms: Vec<f64> =
            open[0].words.iter().map(|words| f64::from_bits(words[control::NORM])).collect();
        let spec = OptimizerSpec { clip: thresholds(&d, &norms), ..case.spec.clone() };
        let serial = ran(&case, &spec, Lanes::Inline);
        let speculative = OptimizerSpec { speculative_fraction: ahead_fraction, ..spec };
        let lanes = d.of(&[Lanes::Inline, Lanes::Inline, Lanes::Threads { chaos_us: 60 }]);
        let got = ran(&case, &speculative, lanes);
        for (rank, (want, got)) in serial.iter().zip(&got).enumerate() {
            let what = || format!("seed {seed}, rank {rank}, {lanes:?}, {speculative:?}: {case:?}");
            assert!(want.words == got.words, "words of {}", what());
            assert!(want.seen == got.seen, "parameters of {}", what());
            assert!(want.states == got.states, "states of {}", what());
            got.speculation.iter().for_each(|outcome| became[*outcome as usize] += 1);
            skipped += want.words.iter().filter(|words| words[control::SKIP] != 0).count();
        }
    }
    let each = became.iter().all(|count| *count > 0) && skipped > 0;
    assert!(each || seeds(60, 2_000).count() < 60, "{became:?}, {skipped} skipped");
}
