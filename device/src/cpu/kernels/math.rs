//! Arithmetic that vectorises inside [`vectorised`]: no libm, no branches, explicit fused
//! multiply-adds, and sums in an order that depends on the length alone. The bits do not depend on
//! the width of SIMD registers.

use crate::numerics::InlinedClosure;
use crate::{Dropout, View, ViewMut, random};
use pulp::Arch;

/// Distance of prefetching, in elements. The hardware alone prefetches too little.
pub(super) const AHEAD: usize = 512;

/// Accumulators of a sum. Element i goes to accumulator i mod 32, and a binary tree adds them.
const LANES: usize = 32;

/// Runs `f` compiled for the widest vectors of this machine. Mark the closure `#[inline(always)]`:
/// functions that are not inlined are compiled for the oldest machine.
pub(super) fn vectorised<R>(f: impl FnMut() -> R) -> R {
    Arch::new().dispatch(InlinedClosure(f))
}

/// e^x within 2 ulp from x = -87.68 to 88.37; 0 below, +inf above, NaN for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes `expf`; times 2^n. Results
/// below the normal range become 0: a core would need a hundred times as long for them, and all
/// masked scores are in that range.
#[inline(always)]
pub(super) const fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: after its addition, the low bits are the nearest integer.
    const MAGIC: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = std::f32::consts::LN_2;
    const LN_2_LOW: f32 = -1.904_654_3e-9;
    // `min` and `max` would drop NaN. At the limits n is 128 (2^128 is +inf) or -127 (2^-127 counts
    // as 0).
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -88.0 { -88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    let p = 1.987_569_1e-4_f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    let n = shifted.to_bits().wrapping_sub(MAGIC.to_bits() - 127);
    p * f32::from_bits(n << 23)
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(super) const fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// tanh(x) with a relative error of at most 5e-7, NaN for NaN. Up to 0.625 by the polynomial of Cephes
/// `tanhf`, where the other formula cancels.
#[inline(always)]
pub(super) const fn tanh(x: f32) -> f32 {
    let square = x * x;
    let p = -5.704_988_7e-3_f32;
    let p = p.mul_add(square, 2.063_908_8e-2);
    let p = p.mul_add(square, -5.373_971_5e-2);
    let p = p.mul_add(square, 1.333_144_2e-1);
    let p = p.mul_add(square, -3.333_328e-1);
    let near = (p * square).mul_add(x, x);
    let far = 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    // The square of 0.625.
    if square < 0.390_625 { near } else { far }
}

/// A cap of numbers s = factor x: c tanh(s / c).
#[derive(Clone, Copy, Debug)]
pub(super) struct Cap {
    cap: f32,
    /// factor / c.
    inner: f32,
}

impl Cap {
    /// The cap `cap` of numbers `factor` x.
    pub(super) const fn new(cap: f32, factor: f32) -> Self {
        Self { cap, inner: factor / cap }
    }

    /// The capped number of x.
    #[inline(always)]
    pub(super) const fn of(self, x: f32) -> f32 {
        self.cap * tanh(x * self.inner)
    }

    /// The slope of the cap, 1 - (capped / c)^2, where it gave `capped`; at least 0, since `capped`
    /// may be rounded, or minus infinity for an unseen key.
    #[inline(always)]
    pub(super) const fn slope(self, capped: f32) -> f32 {
        let share = capped / self.cap;
        let slope = (-share).mul_add(share, 1.0);
        if slope < 0.0 { 0.0 } else { slope }
    }
}

/// 2 sqrt(2 / pi)
const GELU_1: f32 = 1.595_769;
/// 2 sqrt(2 / pi) 0.044715
const GELU_3: f32 = 0.071_354_814;

/// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as x sigmoid(2 ...), which avoids
/// cancellation.
#[inline(always)]
pub(super) const fn gelu(x: f32) -> f32 {
    let u = x * (x * x).mul_add(GELU_3, GELU_1);
    x / (1.0 + exp(-u))
}

/// The derivative of [`gelu`].
#[inline(always)]
pub(super) const fn gelu_slope(x: f32) -> f32 {
    // Beyond 10 the slope is 0 or 1 to the last bit, and e^-u would overflow.
    let x = if x > 10.0 { 10.0 } else { x };
    let x = if x < -10.0 { -10.0 } else { x };
    let u = x * (x * x).mul_add(GELU_3, GELU_1);
    let e = exp(-u);
    let s = 1.0 / (1.0 + e);
    let x_du = x * (x * x).mul_add(3.0 * GELU_3, GELU_1);
    // s + x u' s (1 - s)
    (x_du * (e * s)).mul_add(s, s)
}

/// Elements `at..at + n`: in place if they are f32, otherwise widened into `buffer`.
#[inline(always)]
pub(super) fn read<'a>(view: &View<'a>, at: usize, n: usize, buffer: &'a mut [f32]) -> &'a [f32] {
    if let View::F32(x) = view {
        &x[at..at + n]
    } else {
        let buffer = &mut buffer[..n];
        view.load(at, buffer);
        buffer
    }
}

/// Factors of a norm: `gain` (n) + offset. They are `gain` itself if the offset is 0.
#[inline(always)]
pub(super) fn factors<'a>(gain: &View<'a>, offset: f32, buffer: &'a mut [f32]) -> &'a [f32] {
    let n = gain.len();
    if offset == 0.0 {
        return read(gain, 0, n, buffer);
    }
    let buffer = &mut buffer[..n];
    gain.load(0, buffer);
    buffer.iter_mut().for_each(|x| *x += offset);
    buffer
}

/// Sets elements `at..at + n` with `f`. `f` writes f32 elements in place; other elements it writes
/// to `buffer`, and they are then rounded. With `old`, its argument holds the old values.
#[inline(always)]
pub(super) fn write(
    view: &mut ViewMut<'_>,
    at: usize,
    n: usize,
    buffer: &mut [f32],
    old: bool,
    f: impl FnOnce(&mut [f32]),
) {
    if let ViewMut::F32(x) = view {
        f(&mut x[at..at + n]);
    } else {
        let buffer = &mut buffer[..n];
        if old {
            view.as_view().load(at, buffer);
        }
        f(buffer);
        view.store(at, buffer);
    }
}

/// Combines f(x) over x, first lane by lane, then the lanes as a tree.
#[inline(always)]
fn reduce(
    x: &[f32],
    neutral: f32,
    f: impl Fn(f32) -> f32,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [neutral; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = combine(*lane, f(*x));
        }
    }
    if !rest.is_empty() {
        let mut last = [neutral; LANES];
        last.iter_mut().zip(rest).for_each(|(last, x)| *last = f(*x));
        lanes.iter_mut().zip(last).for_each(|(lane, x)| *lane = combine(*lane, x));
    }
    tree(lanes, combine)
}

#[inline(always)]
fn tree(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        let (left, right) = lanes.split_at_mut(width);
        left.iter_mut().zip(right).for_each(|(l, r)| *l = combine(*l, *r));
        width /= 2;
    }
    lanes[0]
}

/// Sum of f(x).
#[inline(always)]
pub(super) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    reduce(x, 0.0, f, |a, b| a + b)
}

/// Maximum of x; -inf if x is empty.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    reduce(x, f32::NEG_INFINITY, |x| x, |a, b| if a > b { a } else { b })
}

/// Sum of x y.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane = x.mul_add(*y, *lane);
        }
    }
    let mut last = [0.0; LANES];
    last.iter_mut().zip(x_rest).zip(y_rest).for_each(|((last, x), y)| *last = x * y);
    lanes.iter_mut().zip(last).for_each(|(lane, x)| *lane += x);
    tree(lanes, |a, b| a + b)
}

/// Factors of dropout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mask {
    key: u64,
    threshold: u32,
    scale: f32,
}

impl Mask {
    /// `None` if dropout keeps every element.
    pub(super) fn new(dropout: Dropout) -> Option<Self> {
        let Dropout { p, key, .. } = dropout;
        let threshold = random::keep_threshold(p);
        (p > 0.0).then(|| Self { key, threshold, scale: 1.0 / (1.0 - p) })
    }

    /// Sets `out` to the factors of elements `index..`: 1 / (1 - p) if kept, 0 if dropped.
    #[inline(always)]
    pub(super) fn fill(&self, index: u64, out: &mut [f32]) {
        // The indices of one run share their upper half, so the loop uses 32 bits.
        let until_carry = (1 << 32) - (index & 0xffff_ffff);
        let mid = until_carry.min(out.len() as u64) as usize;
        let (first, second) = out.split_at_mut(mid);
        self.fill_run(index, first);
        self.fill_run(index.wrapping_add(until_carry), second);
    }

    /// Factors of the elements that are `by` elements after each element of `first`.
    #[inline(always)]
    pub(super) fn across<const N: usize>(&self, first: &[u64; N], by: u32) -> [f32; N] {
        first.map(|first| {
            let low = (first as u32).wrapping_add(by);
            let high = ((first >> 32) as u32).wrapping_add(u32::from(low < by));
            self.factor(u64::from(high) << 32 | u64::from(low))
        })
    }

    #[inline(always)]
    const fn factor(&self, index: u64) -> f32 {
        if random::keeps(self.key, index, self.threshold) { self.scale } else { 0.0 }
    }

    #[inline(always)]
    fn fill_run(&self, index: u64, out: &mut [f32]) {
        let (high, low) = (index & !0xffff_ffff, index as u32);
        for (i, out) in out.iter_mut().enumerate() {
            *out = self.factor(high | u64::from(low.wrapping_add(i as u32)));
        }
    }
}

/// x times its factor in a mask. A dropped element is 0 even if x is not finite.
#[inline(always)]
pub(super) const fn masked(x: f32, mask: f32) -> f32 {
    if mask == 0.0 { 0.0 } else { x * mask }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_2_ulp_over_its_whole_range() {
        let mut x = -87.68f32;
        while x < 88.376 {
            let (ours, truth) = (f64::from(exp(x)), f64::from(x).exp());
            let ulp =
                f64::from(f32::from_bits((truth as f32).to_bits() + 1)) - f64::from(truth as f32);
            assert!((ours - truth).abs() <= 2.0 * ulp, "{x}: {ours:e} {truth:e}");
            x += 0.000_737;
        }
    }

    #[test]
    fn exp_is_right_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!([f32::NEG_INFINITY, f32::MIN, -1e4, -104.5, -87.69].map(exp), [0.0; 5]);
        assert_eq!([f32::INFINITY, f32::MAX, 1e4, 88.73, 88.38].map(exp), [f32::INFINITY; 5]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_5e_7_of_f64_and_right_far_out() {
        let near_zero = (-40..0).flat_map(|e| [2f32.powi(e), -2f32.powi(e)]);
        for x in (-120_000..120_000).map(|i| i as f32 * 1e-4).chain(near_zero) {
            let (got, want) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((got - want).abs() <= 5e-7 * want.abs(), "{x}: {got:e}, not {want:e}");
        }
        assert_eq!([f32::NEG_INFINITY, -1e30, -90.0].map(tanh), [-1.0; 3]);
        assert_eq!([0.0, -0.0].map(tanh), [0.0; 2]);
        assert_eq!([90.0, 1e30, f32::INFINITY].map(tanh), [1.0; 3]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn a_cap_and_its_slope_are_the_formula() {
        let (cap, factor) = (30.0, 0.125);
        let of = Cap::new(cap, factor);
        for x in (-4000..4000).map(|i| i as f32 * 0.25) {
            let t = (f64::from(x) * 0.125 / 30.0).tanh();
            assert!((f64::from(of.of(x)) - 30.0 * t).abs() <= 3e-5 * t.abs(), "{x}");
            let slope = f64::from(of.slope(of.of(x)));
            assert!((slope - (1.0 - t * t)).abs() <= 2e-6, "{x}: {slope}");
        }
        // A number that was rounded up beyond the cap, and an unseen key.
        assert_eq!([30.1, f32::NEG_INFINITY].map(|x| of.slope(x)), [0.0; 2]);
        assert!(of.of(f32::NAN).is_nan() && of.slope(f32::NAN).is_nan());
    }

    fn gelu_f64(x: f64) -> (f64, f64) {
        let k = (2.0 / std::f64::consts::PI).sqrt();
        let t = (k * (x + 0.044715 * x.powi(3))).tanh();
        let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * k * (1.0 + 3.0 * 0.044715 * x * x);
        (0.5 * x * (1.0 + t), slope)
    }

    #[test]
    fn gelu_and_its_slope_are_within_1e_6_of_f64() {
        let near_zero = (-40..0).flat_map(|e| [2f32.powi(e), -2f32.powi(e)]);
        for x in (-120_000..120_000).map(|i| i as f32 * 1e-4).chain(near_zero) {
            let (y, slope) = gelu_f64(f64::from(x));
            let (error, slope_error) = (f64::from(gelu(x)) - y, f64::from(gelu_slope(x)) - slope);
            let tolerance = if x > -1.0 { 1e-6 * y.abs() } else { 1e-7 };
            assert!(error.abs() <= tolerance, "{x}: {error:e} of {y:e}");
            assert!(slope_error.abs() < 1e-6 * slope.abs().max(0.5), "{x}: {slope_error:e}");
        }
    }

    #[test]
    fn gelu_is_right_far_out() {
        assert_eq!([-1e30, -1e10, -50.0, 0.0].map(gelu), [0.0; 4]);
        assert_eq!([50.0, 1e10, 1e30].map(gelu), [50.0, 1e10, 1e30]);
        assert!([-1e30, -1e10, -50.0].map(gelu_slope).iter().all(|d| d.abs() < 1e-30));
        assert_eq!([f32::INFINITY, 1e30, 1e10, 50.0].map(gelu_slope), [1.0; 4]);
        assert!(gelu(f32::NAN).is_nan() && gelu_slope(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_agree_with_f64_at_every_length() {
        for n in 0..140 {
            let x: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 8.0).collect();
            let y: Vec<f32> = (0..n).map(|i| (i * 17 % 11) as f32 - 5.0).collect();
            assert_eq!(sum(&x, |x| x * x), x.iter().map(|x| x * x).sum::<f32>());
            assert_eq!(dot(&x, &y), x.iter().zip(&y).map(|(x, y)| x * y).sum::<f32>());
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }

    #[test]
    fn a_mask_is_what_random_says_across_the_carry() {
        let dropout = Dropout { p: 0.3, key: random::key(5, 6), first_row: 0 };
        let mask = Mask::new(dropout).expect("p > 0");
        for start in [0, 77, (1u64 << 32) - 5, (3u64 << 32) - 100, (1u64 << 40) + 3] {
            let mut out = [7.0; 100];
            mask.fill(start, &mut out);
            for (i, out) in out.into_iter().enumerate() {
                let keeps =
                    random::keeps(dropout.key, start + i as u64, random::keep_threshold(0.3));
                assert_eq!(out, if keeps { 1.0 / (1.0 - 0.3) } else { 0.0 });
                assert_eq!(mask.across(&[7, start], i as u32)[1], out);
            }
        }
        assert!(Mask::new(Dropout { p: 0.0, ..dropout }).is_none());
    }
}
