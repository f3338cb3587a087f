//! The update against plain formulas, and every SIMD path against the portable one.

use super::halves::{join, lower_half, split};
use super::*;
use device::random;
use half::{bf16, f16};

fn control(lr: f64, factor: f64, t: i32) -> [f64; control::WORDS] {
    let mut words = [0.0; control::WORDS];
    words[control::LR] = lr;
    words[control::FACTOR] = factor;
    words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - 0.9f64.powi(t));
    words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - 0.95f64.powi(t));
    words
}

const NO_NOISE: Noise<'_> = Noise { runs: &[], start: 0 };

fn fp32(
    rule: Rule,
    control: &[f64],
    grad: View<'_>,
    [master, momentum, variance]: [&mut [f32]; 3],
    param: ViewMut<'_>,
    decayed: usize,
) {
    let states = [ViewMut::F32(master), ViewMut::F32(momentum), ViewMut::F32(variance)];
    let streams = true;
    update(Update {
        rule,
        control,
        grad,
        states,
        old: None,
        param,
        decayed,
        noise: NO_NOISE,
        streams,
    })
    .unwrap();
}

#[test]
fn adamw_follows_the_formula_in_f64() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let n = 700;
    let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    let (mut m, mut v, mut out) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
    let mut q: Vec<f64> = p.iter().map(|&x| f64::from(x)).collect();
    let (mut qm, mut qv) = (vec![0.0; n], vec![0.0; n]);
    for t in 1..=20 {
        let g: Vec<f32> = (0..n).map(|i| ((i * t as usize) as f32 * 0.11).cos()).collect();
        let words = control(1e-3, 0.5, t);
        fp32(rule, &words, View::F32(&g), [&mut p, &mut m, &mut v], ViewMut::F32(&mut out), 300);
        for i in 0..n {
            let g = f64::from(g[i]) * 0.5;
            qm[i] = 0.9 * qm[i] + 0.1 * g;
            qv[i] = 0.95 * qv[i] + 0.05 * g * g;
            let decay = if i < 300 { 0.1 } else { 0.0 };
            let (mh, vh) = (qm[i] / (1.0 - 0.9f64.powi(t)), qv[i] / (1.0 - 0.95f64.powi(t)));
            q[i] -= 1e-3 * (mh / (f64::sqrt(vh) + 1e-8) + decay * q[i]);
        }
    }
    let worst = p.iter().zip(&q).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(worst < 2e-6, "{worst}");
    assert_eq!(p, out);
}

#[test]
fn where_a_tile_is_cut_never_changes_a_bit() {
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let n = 1000;
    let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |cuts: &[usize]| {
        let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut m, mut v, mut out) = (vec![0.1; n], vec![0.2; n], vec![0.0; n]);
        let mut start = 0;
        for &end in cuts {
            let states = [&mut p[start..end], &mut m[start..end], &mut v[start..end]];
            let (grad, param) = (View::F32(&g[start..end]), ViewMut::F32(&mut out[start..end]));
            let decayed = 513usize.saturating_sub(start).min(end - start);
            fp32(rule, &control(1e-2, 1.0, 3), grad, states, param, decayed);
            start = end;
        }
        out
    };
    assert_eq!(run(&[1000]), run(&[1, 17, 300, 512, 700, 1000]));
}

#[test]
fn a_skipped_update_leaves_the_states_and_writes_the_parameter() {
    let rule = Rule::Sgd { weight_decay: 0.0 };
    let mut words = control(1.0, 1.0, 1);
    words[control::SKIP] = 1.0;
    let (mut p, mut m, mut v, mut out) = ([1.5f32], [0.0f32], [0.0f32], [0.0f32]);
    let states = [&mut p[..], &mut m, &mut v];
    fp32(rule, &words, View::F32(&[f32::NAN]), states, ViewMut::F32(&mut out), 0);
    assert_eq!((p, m, v, out), ([1.5], [0.0], [0.0], [1.5]));
}

/// Numbers of every kind: ordinary, tiny, huge, denormal, zero, infinite, NaN.
fn awkward(seed: u64, n: usize, nonsense: bool) -> Vec<f32> {
    let one = |i: u64| {
        let bits = random::bits(seed, i);
        let x = (bits as u32 as f32 / 4e9 - 0.5) * 10f32.powi((bits >> 32) as i32 % 8 - 6);
        match (bits >> 48) % 16 {
            0 => f32::from_bits(bits as u32 & 0x807f_ffff),
            1 => 0.0,
            2 => -0.0,
            3 => x * 1e30,
            4 => x * 1e-30,
            5 if nonsense => f32::INFINITY,
            6 if nonsense => f32::NAN,
            7 if nonsense => f32::NEG_INFINITY,
            _ => x,
        }
    };
    (0..n as u64).map(one).collect()
}

/// Results of an update: master, momentum, variance, parameter. All NaNs become one, since paths
/// may differ in their NaN.
fn updated(path: SimdPath, case: &Case) -> [Vec<u32>; 4] {
    let n = case.n;
    let [mut p, mut m, mut v] = [1, 2, 3].map(|seed| awkward(seed, n, case.nonsense));
    v.iter_mut().for_each(|x| *x = x.abs());
    let g = awkward(4, n, case.nonsense);
    let (g16, gb): (Vec<f16>, Vec<bf16>) =
        g.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
    let grad = [View::F16(&g16), View::Bf16(&gb), View::F32(&g)][case.grad];
    let mut low: Vec<u16> = p.iter().map(|x| split(*x).1).collect();
    let mut high: Vec<bf16> = p.iter().map(|x| bf16::from_bits(split(*x).0)).collect();
    let [mut mb, mut vb] =
        [&m, &v].map(|s| s.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
    let (mut out16, mut out32) = (vec![f16::ONE; n], vec![1.0f32; n]);
    let runs = [NoiseRun { flat: 3..700, stream: 8, global: u64::from(u32::MAX) - 100 }];
    let update = Update {
        rule: case.rule,
        control: &control(1e-3, 0.25, 3),
        grad,
        old: None,
        states: [
            if case.split { ViewMut::U16(&mut low) } else { ViewMut::F32(&mut p) },
            if case.short { ViewMut::Bf16(&mut mb) } else { ViewMut::F32(&mut m) },
            if case.short { ViewMut::Bf16(&mut vb) } else { ViewMut::F32(&mut v) },
        ],
        param: match case.param {
            0 => ViewMut::F16(&mut out16),
            1 => ViewMut::Bf16(&mut high),
            _ => ViewMut::F32(&mut out32),
        },
        decayed: n / 3,
        noise: Noise { runs: &runs, start: 0 },
        streams: case.streams,
    };
    update_on(path, update).unwrap();
    if case.split {
        p = high.iter().zip(&low).map(|(h, l)| join(h.to_bits(), *l)).collect();
    }
    if case.short {
        m = mb.iter().map(|x| x.to_f32()).collect();
        v = vb.iter().map(|x| x.to_f32()).collect();
    }
    let param = match case.param {
        0 => out16.iter().map(|x| x.to_f32()).collect(),
        1 => high.iter().map(|x| x.to_f32()).collect(),
        _ => out32,
    };
    [p, m, v, param]
        .map(|all| all.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect())
}

#[derive(Clone, Copy, Debug)]
struct Case {
    n: usize,
    rule: Rule,
    grad: usize,
    param: usize,
    split: bool,
    short: bool,
    streams: bool,
    nonsense: bool,
}

fn cases() -> Vec<Case> {
    let adamw = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut cases = Vec::new();
    for n in [0, 1, 7, 31, 33, 255, 256, 257, 1029] {
        for kind in 0..36 {
            let (grad, param) = (kind % 3, kind / 3 % 3);
            let (split, short) = (kind / 9 % 2 == 1, kind / 18 == 1);
            let rule = if kind % 5 == 4 { Rule::Sgd { weight_decay: 0.1 } } else { adamw };
            for nonsense in [false, true] {
                let streams = (n + kind) % 2 == 0;
                cases.push(Case { n, rule, grad, param, split, short, streams, nonsense });
            }
        }
    }
    cases.retain(|case| !case.split || case.param == 1);
    cases
}

#[test]
fn every_simd_path_leaves_the_bits_of_the_portable_one() {
    for case in cases() {
        let portable = updated(SimdPath::Portable, &case);
        for path in SimdPath::available() {
            assert!(updated(path, &case) == portable, "{path} {case:?}");
        }
    }
}

/// Rounds `x` to the bf16 below or above in magnitude, by 16 random bits. The mean is `x`.
fn stochastic(x: f32, random: u16) -> bf16 {
    bf16::from_bits((x.to_bits().wrapping_add(u32::from(random)) >> 16) as u16)
}

/// Random bits of an element, by the specification of [`NoiseRun`].
fn promised(runs: &[NoiseRun], step: u64, at: usize) -> Option<u16> {
    let run = runs.iter().find(|run| run.flat.contains(&at))?;
    let global = run.global + (at - run.flat.start) as u64;
    let stream = random::key(random::key(run.stream, step), global >> 33);
    let both = random::halves(stream, (global / 2) as u32);
    Some((both >> (16 * (global % 2))) as u16)
}

#[test]
fn bf16_moments_are_those_of_the_formula_with_the_random_bits_of_their_elements() {
    let n = 1500;
    let run = |flat, stream, global| NoiseRun { flat, stream, global };
    // Odd and even ends and starts, a gap, and an index whose upper half changes inside a run.
    let runs = [run(0..301, 1, 6), run(301..640, 2, 9), run(700..1500, 3, (1 << 33) - 201)];
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut words = control(1e-3, 0.25, 3);
    words[control::STEP] = 7.0;
    for (path, start) in SimdPath::available().into_iter().flat_map(|path| [(path, 0), (path, 45)])
    {
        let (g, mut p) = (awkward(1, n, false), awkward(2, n, false));
        let moment = |seed| awkward(seed, n, false).into_iter().map(bf16::from_f32);
        let mut m: Vec<bf16> = moment(3).collect();
        let mut v: Vec<bf16> = moment(4).map(|x| bf16::from_bits(x.to_bits() & 0x7fff)).collect();
        let (before, mut out) = ((m.clone(), v.clone()), vec![0.0f32; n - start]);
        let states = [
            ViewMut::F32(&mut p[start..]),
            ViewMut::Bf16(&mut m[start..]),
            ViewMut::Bf16(&mut v[start..]),
        ];
        let (grad, param) = (View::F32(&g[start..]), ViewMut::F32(&mut out));
        let noise = Noise { runs: &runs, start };
        let (control, decayed, streams) = (&words[..], 100, false);
        let update =
            Update { rule, control, grad, states, old: None, param, decayed, noise, streams };
        update_on(path, update).unwrap();
        for i in start..n {
            let Some(random) = promised(&runs, 7, i) else { continue };
            let momentum = before.0[i].to_f32().mul_add(0.9, 0.25 * (1.0 - 0.9f32) * g[i]);
            let scaled = 0.25 * (1.0 - 0.95f32).sqrt() * g[i];
            let variance = before.1[i].to_f32().mul_add(0.95, scaled * scaled);
            assert_eq!(m[i], stochastic(momentum, random), "{path} {start} {i}");
            assert_eq!(v[i], stochastic(variance, random), "{path} {start} {i}");
        }
    }
}

#[test]
fn a_stochastic_bf16_is_a_neighbour_and_right_on_average() {
    let x = f32::from_bits(0x3f80_4000); // a quarter of the way up
    let up =
        (0..100_000).filter(|&i| stochastic(x, random::halves(9, i) as u16).to_bits() == 0x3f81);
    let up = up.count();
    assert!((up as f64 / 1e5 - 0.25).abs() < 0.01, "{up}");
    assert_eq!(stochastic(1.5, 0xffff).to_bits(), 0x3fc0);
}

#[test]
fn what_is_not_a_number_stays_so_in_masters_parameters_and_moments() {
    for (path, nan) in SimdPath::available().into_iter().flat_map(|path| {
        [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0x7f80_0001]
            .map(|bits| (path, f32::from_bits(bits)))
    }) {
        for split in [false, true] {
            let (mut p, mut m, mut v) = ([nan; 40], [bf16::ZERO; 40], [bf16::ONE; 40]);
            let (mut low, mut high) =
                ([lower_half(nan); 40], [bf16::from_bits(halves::split(nan).0); 40]);
            for moment in [&mut m, &mut v] {
                moment[0] = bf16::NAN;
                moment[1] = bf16::INFINITY;
            }
            let states = [
                if split { ViewMut::U16(&mut low) } else { ViewMut::F32(&mut p) },
                ViewMut::Bf16(&mut m),
                ViewMut::Bf16(&mut v),
            ];
            let runs = [NoiseRun { flat: 0..40, stream: 8, global: 0 }];
            let update = Update {
                rule: Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
                control: &control(1e-3, 0.25, 3),
                grad: View::F32(&[1.0; 40]),
                states,
                old: None,
                param: ViewMut::Bf16(&mut high),
                decayed: 40,
                noise: Noise { runs: &runs, start: 0 },
                streams: false,
            };
            update_on(path, update).unwrap();
            assert!(high.iter().all(|x| x.is_nan()), "{path} {split} {nan:?}");
            assert!(split || p.iter().all(|x| x.is_nan()));
            assert!(m[0].is_nan() && v[0].is_nan() && m[1] == bf16::INFINITY && v[1] == m[1]);
        }
    }
}

#[test]
fn split_masters_are_the_fp32_ones_bit_for_bit() {
    for case in cases().into_iter().filter(|case| case.split) {
        let whole = Case { split: false, ..case };
        assert!(updated(SimdPath::current(), &case) == updated(SimdPath::current(), &whole));
    }
}

#[test]
fn storage_that_does_not_go_together_is_refused() {
    let (mut low, mut m, mut v, mut out) = ([0u16; 2], [0.0f32; 2], [bf16::ZERO; 2], [0.0; 2]);
    let update = |update: Update<'_>| super::update(update).unwrap_err();
    let states = [ViewMut::U16(&mut low), ViewMut::F32(&mut m), ViewMut::Bf16(&mut v)];
    let words = control(1.0, 1.0, 1);
    let why = update(Update {
        rule: Rule::Sgd { weight_decay: 0.0 },
        control: &words,
        grad: View::F32(&[0.0; 2]),
        states,
        old: None,
        param: ViewMut::F32(&mut out),
        decayed: 0,
        noise: NO_NOISE,
        streams: false,
    });
    assert!(why.contains("moments"), "{why}");
}
