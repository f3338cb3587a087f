//! Elements as the update reads and writes them, one pair of vectors at a time: gradients, masters,
//! parameters, moments.

use device::View;
use device::numerics::lanes::{Lanes, SupportedPath, WIDEST, prefetch, stream, stream_vector};
use pulp::bytemuck::{cast_slice, cast_slice_mut};

/// The bits of an fp32 that bf16 keeps; also the odd element of a word.
const UPPER: u32 = 0xffff_0000;
/// Half a unit in the last place of a bf16, to round to nearest with ties away from zero.
const HALF: u32 = 0x8000;

/// Elements that are read: the even and the odd elements of the `i`-th pair of vectors.
pub(super) trait Source<L: Lanes> {
    fn get(&self, lanes: L, i: usize) -> [L::f32s; 2];
}

/// Elements that are read and written.
pub(super) trait Target<L: Lanes>: Source<L> {
    /// Whether the elements have 16 bits and stochastic rounding.
    const DRAWS: bool = false;
    /// Stores a pair. `random` has 16 bits for each element, for stochastic rounding.
    fn put(&mut self, lanes: L, i: usize, x: [L::f32s; 2], random: [L::u32s; 2]);
}

/// Parameters that are written, rounded to nearest.
pub(super) trait Sink<L: Lanes> {
    fn put(&mut self, lanes: L, i: usize, x: [L::f32s; 2]);
}

/// fp32 elements, read only.
pub(super) struct Floats<'a, L: Lanes>(pub(super) &'a [[L::f32s; 2]]);
/// fp32 elements, write only.
pub(super) struct FloatsMut<'a, L: Lanes>(pub(super) &'a mut [[L::f32s; 2]]);
/// bf16 elements, read only.
pub(super) struct Words<'a, L: Lanes>(pub(super) &'a [L::u32s]);
/// bf16 parameters, write only; the flag says whether stores bypass the caches.
pub(super) struct WordsMut<'a, L: Lanes>(pub(super) &'a mut [L::u32s], pub(super) bool);
/// fp16 elements, read only.
pub(super) struct F16<'a>(pub(super) SupportedPath, pub(super) &'a [u16]);
/// fp16 parameters, write only; the flag says whether stores bypass the caches.
pub(super) struct F16Mut<'a>(pub(super) SupportedPath, pub(super) &'a mut [u16], pub(super) bool);
/// A state in fp32. If the old state has its own array, it stays, and stores bypass the caches.
pub(super) struct FloatState<'a, L: Lanes> {
    old: Option<&'a [[L::u32s; 2]]>,
    new: &'a mut [[L::u32s; 2]],
}
/// A state in bf16 with stochastic rounding; the arrays are as in [`FloatState`].
pub(super) struct WordState<'a, L: Lanes> {
    pub(super) old: Option<&'a [L::u32s]>,
    pub(super) new: &'a mut [L::u32s],
}
/// fp32 masters and the parameters.
pub(super) struct Master<'a, L: Lanes, P>(pub(super) FloatState<'a, L>, pub(super) P);
/// The upper and lower halves of masters; see [`split`](super::halves::split).
pub(super) struct Halves<'a, L: Lanes> {
    pub(super) upper: &'a mut [L::u32s],
    /// Old lower halves, if they have their own array, as in a [`WordState`].
    pub(super) old_lower: Option<&'a [L::u32s]>,
    pub(super) lower: &'a mut [L::u32s],
}

/// `n` pairs of vectors of fp32.
#[inline(always)]
pub(super) fn wide<L: Lanes>(x: &[f32], n: usize) -> Floats<'_, L> {
    Floats(&L::as_simd_f32s(x).0.as_chunks().0[..n])
}

/// `n` pairs of vectors of fp32.
#[inline(always)]
pub(super) fn wide_mut<L: Lanes>(x: &mut [f32], n: usize) -> FloatsMut<'_, L> {
    FloatsMut(&mut L::as_mut_simd_f32s(x).0.as_chunks_mut().0[..n])
}

/// `n` pairs of vectors of an fp32 state; `old` is the old state's array, if it has its own.
#[inline(always)]
pub(super) fn wide_state<'a, L: Lanes>(
    old: Option<&'a [f32]>,
    new: &'a mut [f32],
    n: usize,
) -> FloatState<'a, L> {
    FloatState {
        old: old.map(|old| &L::as_simd_u32s(cast_slice(old)).0.as_chunks().0[..n]),
        new: &mut L::as_mut_simd_u32s(cast_slice_mut(new)).0.as_chunks_mut().0[..n],
    }
}

/// Stores a vector; `streams` bypasses the caches.
#[inline(always)]
fn store<L: Lanes>(l: L, x: L::u32s, to: &mut L::u32s, streams: bool) {
    if streams {
        stream_vector(l, x, to);
    } else {
        *to = x;
    }
}

/// `n` vectors of words, which must be aligned.
#[inline(always)]
pub(super) fn words<L: Lanes>(x: &[u16], n: usize) -> &[L::u32s] {
    &L::as_simd_u32s(cast_slice(&x[..n * L::PAIR])).0[..n]
}

/// `n` vectors of words, which must be aligned.
#[inline(always)]
pub(super) fn words_mut<L: Lanes>(x: &mut [u16], n: usize) -> &mut [L::u32s] {
    &mut L::as_mut_simd_u32s(cast_slice_mut(&mut x[..n * L::PAIR])).0[..n]
}

/// Whether 16-bit elements begin at a multiple of 4 bytes.
pub(super) fn aligned(view: View<'_>) -> bool {
    match view {
        View::F16(x) => x.as_ptr().addr().is_multiple_of(4),
        View::Bf16(x) => x.as_ptr().addr().is_multiple_of(4),
        View::U16(x) => x.as_ptr().addr().is_multiple_of(4),
        _ => true,
    }
}

#[inline(always)]
fn bits<L: Lanes>(l: L, [even, odd]: [L::f32s; 2]) -> [L::u32s; 2] {
    [l.transmute_u32s_f32s(even), l.transmute_u32s_f32s(odd)]
}

#[inline(always)]
fn up<L: Lanes>(l: L, word: L::u32s) -> L::u32s {
    l.wrapping_dyn_shl_u32s(word, l.splat_u32s(16))
}

#[inline(always)]
fn down<L: Lanes>(l: L, word: L::u32s) -> L::u32s {
    l.wrapping_dyn_shr_u32s(word, l.splat_u32s(16))
}

/// Both halves of each word, as 16-bit numbers.
#[inline(always)]
pub(super) fn parts<L: Lanes>(l: L, word: L::u32s) -> [L::u32s; 2] {
    [l.and_u32s(word, l.splat_u32s(!UPPER)), down(l, word)]
}

/// Both halves of each word as the upper halves of fp32.
#[inline(always)]
fn uppers<L: Lanes>(l: L, word: L::u32s) -> [L::u32s; 2] {
    [up(l, word), l.and_u32s(word, l.splat_u32s(UPPER))]
}

/// Packs the upper halves of fp32 bits into words, after the addition of `add`.
#[inline(always)]
fn pack<L: Lanes>(l: L, [even, odd]: [L::u32s; 2], add: [L::u32s; 2]) -> L::u32s {
    let (even, odd) = (l.add_u32s(even, add[0]), l.add_u32s(odd, add[1]));
    l.halves(down(l, even), odd)
}

/// Rounds to bf16 as [`split`](super::halves::split) does.
#[inline(always)]
fn nearest<L: Lanes>(l: L, x: [L::f32s; 2]) -> L::u32s {
    pack(l, bits(l, x), [half(l, x[0]), half(l, x[1])])
}

/// Addend before truncation to the nearest bf16: 0 for a NaN, whose upper half is a NaN too.
#[inline(always)]
fn half<L: Lanes>(l: L, x: L::f32s) -> L::u32s {
    l.select_u32s(l.equal_f32s(x, x), l.splat_u32s(HALF), l.splat_u32s(0))
}

#[inline(always)]
fn widened<L: Lanes>(l: L, word: L::u32s) -> [L::f32s; 2] {
    let [even, odd] = uppers(l, word);
    [l.transmute_f32s_u32s(even), l.transmute_f32s_u32s(odd)]
}

impl<L: Lanes> Source<L> for Words<'_, L> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        prefetch(&self.0[i], L::PAIR);
        widened(l, self.0[i])
    }
}

impl<L: Lanes> Source<L> for WordState<'_, L> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        Words::<L>(self.old.unwrap_or(self.new)).get(l, i)
    }
}

impl<L: Lanes> Target<L> for WordState<'_, L> {
    const DRAWS: bool = true;
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2], random: [L::u32s; 2]) {
        // An infinity or the NaN of arithmetic does not change, since its lower half is zero.
        store(l, pack(l, bits(l, x), random), &mut self.new[i], self.old.is_some());
    }
}

impl<L: Lanes> Sink<L> for WordsMut<'_, L> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2]) {
        let rounded = nearest(l, x);
        store(l, rounded, &mut self.0[i], self.1);
    }
}

impl<L: Lanes> Source<L> for Floats<'_, L> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        prefetch(&self.0[i], L::PAIR);
        l.unzip(self.0[i])
    }
}

impl<L: Lanes> Source<L> for FloatState<'_, L> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        let from = &self.old.unwrap_or(self.new)[i];
        prefetch(from, L::PAIR);
        let [first, second] = *from;
        l.unzip([l.transmute_f32s_u32s(first), l.transmute_f32s_u32s(second)])
    }
}

impl<L: Lanes> Target<L> for FloatState<'_, L> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2], _: [L::u32s; 2]) {
        let [first, second] = bits(l, l.zip(x));
        let [to_first, to_second] = &mut self.new[i];
        store(l, first, to_first, self.old.is_some());
        store(l, second, to_second, self.old.is_some());
    }
}

impl<L: Lanes> Sink<L> for FloatsMut<'_, L> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2]) {
        self.0[i] = l.zip(x);
    }
}

impl<L: Lanes> Source<L> for F16<'_> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        let mut wide = [0.0; WIDEST];
        let halves = &self.1[i * L::PAIR..(i + 1) * L::PAIR];
        if let Some(vector) = halves.as_array::<WIDEST>() {
            prefetch(vector, WIDEST);
        }
        self.0.widen_f16(halves, &mut wide[..L::PAIR]);
        let vectors = L::as_simd_f32s(&wide).0;
        l.unzip([vectors[0], vectors[1]])
    }
}

impl<L: Lanes> Sink<L> for F16Mut<'_> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2]) {
        let (mut wide, mut rounded) = ([0.0; WIDEST], [0; WIDEST]);
        let [first, second] = l.zip(x);
        let vectors = L::as_mut_simd_f32s(&mut wide).0;
        (vectors[0], vectors[1]) = (first, second);
        let rounded = &mut rounded[..L::PAIR];
        self.0.round_f16(&wide[..L::PAIR], rounded);
        let out = &mut self.1[i * L::PAIR..(i + 1) * L::PAIR];
        if self.2 {
            stream(rounded, out);
        } else {
            out.copy_from_slice(rounded);
        }
    }
}

impl<L: Lanes, P> Source<L> for Master<'_, L, P> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        self.0.get(l, i)
    }
}

impl<L: Lanes, P: Sink<L>> Target<L> for Master<'_, L, P> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2], random: [L::u32s; 2]) {
        Target::put(&mut self.0, l, i, x, random);
        self.1.put(l, i, x);
    }
}

impl<L: Lanes> Source<L> for Halves<'_, L> {
    #[inline(always)]
    fn get(&self, l: L, i: usize) -> [L::f32s; 2] {
        let (upper, lower) = (&self.upper[i], &self.old_lower.unwrap_or(self.lower)[i]);
        prefetch(upper, L::PAIR);
        prefetch(lower, L::PAIR);
        // bits + HALF has `upper` as upper half, and `lower` with the top bit flipped as lower
        // half.
        let half = l.splat_u32s(HALF);
        let lower = l.xor_u32s(*lower, l.splat_u32s(HALF << 16 | HALF));
        let even = l.sub_u32s(l.halves(lower, up(l, *upper)), half);
        let odd = l.sub_u32s(l.halves(down(l, lower), *upper), half);
        [l.transmute_f32s_u32s(even), l.transmute_f32s_u32s(odd)]
    }
}

impl<L: Lanes> Target<L> for Halves<'_, L> {
    #[inline(always)]
    fn put(&mut self, l: L, i: usize, x: [L::f32s; 2], _: [L::u32s; 2]) {
        self.upper[i] = nearest(l, x);
        let [even, odd] = bits(l, x);
        let lower = l.halves(even, up(l, odd));
        store(l, lower, &mut self.lower[i], self.old_lower.is_some());
    }
}
