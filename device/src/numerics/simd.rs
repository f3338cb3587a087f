//! Operations that need unsafe code: stores that bypass the caches, prefetches, and a thread's
//! floating-point control.
#![expect(unsafe_code, reason = "streaming stores and the floating-point control register")]

use super::lanes::Lanes;
use super::path::SimdPath;
use pulp::bytemuck;
use std::cell::Cell;
use std::ops::Range;

/// Elements of 16 bits in a cache line.
#[cfg(target_arch = "x86_64")]
pub(super) const LINE: usize = 32;

/// Copies whole cache lines past the caches if the architecture supports it and `to` is aligned to
/// 16 bytes; copies the rest as usual. [`lanes::run`](super::lanes::run) ends with the fence that
/// other threads need to see the data.
#[inline(always)]
pub fn stream(from: &[u16], to: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().addr().is_multiple_of(16) && to.len() == from.len() {
        let whole = from.len() / LINE * LINE;
        for at in (0..whole).step_by(8) {
            stream_8(&from[at..at + 8], &mut to[at..at + 8]);
        }
        to[whole..].copy_from_slice(&from[whole..]);
        return;
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stream_8(from: &[u16], to: &mut [u16]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    debug_assert!(from.len() == 8 && to.len() == 8 && to.as_ptr().addr().is_multiple_of(16));
    // SAFETY: 16 bytes, by the only caller's slices; SSE2 is part of the architecture.
    let eight = unsafe { _mm_loadu_si128(from.as_ptr().cast::<__m128i>()) };
    // SAFETY: 16 bytes, aligned to 16 since `stream` checked the start and takes steps of 16 bytes.
    unsafe { _mm_stream_si128(to.as_mut_ptr().cast::<__m128i>(), eight) };
}

/// Distance of prefetching, in elements.
const AHEAD: usize = 768;

/// Prefetches the memory `AHEAD` elements after `x`, which holds `elements` elements. The hardware
/// alone prefetches too little.
#[inline(always)]
pub fn prefetch<T>(x: &T, elements: usize) {
    prefetch_ahead(x, elements, AHEAD);
}

/// Prefetches the memory `ahead` elements after `x`, which holds `elements` elements; nothing if `ahead` is 0.
#[inline(always)]
pub fn prefetch_ahead<T>(x: &T, elements: usize, ahead: usize) {
    if size_of::<T>() >= 32 && ahead > 0 {
        let distance = ahead / elements;
        ask(std::slice::from_ref(x), distance..distance + 1);
    }
}

/// Prefetches elements `range` of `x`; the range may exceed the end. It is only a hint.
#[inline(always)]
pub(crate) fn ask<T>(x: &[T], range: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = x.as_ptr().wrapping_add(range.start).cast::<i8>();
        for line in (0..range.len() * size_of::<T>()).step_by(64) {
            // SAFETY: an instruction that reads nothing; an unmapped address is no error. SSE is
            // part of the architecture.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line)) };
        }
    }
    let _ = (x, range);
}

/// Copies a vector as [`stream`] does.
#[inline(always)]
pub fn stream_vector<L: Lanes>(_: L, from: L::u32s, to: &mut L::u32s) {
    #[cfg(target_arch = "x86_64")]
    if let Ok(line) = bytemuck::try_cast::<L::u32s, [i32; 16]>(from)
        && (&raw const *to).addr().is_multiple_of(64)
    {
        use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
        // SAFETY: 64 bytes; only AVX-512 has vectors of that width, and its `L` exists only if the
        // machine has AVX-512.
        let line = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
        // SAFETY: 64 bytes, aligned to 64 (checked above).
        unsafe { _mm512_stream_si512((&raw mut *to).cast(), line) };
        return;
    }
    stream(bytemuck::cast_slice(&[from]), bytemuck::cast_slice_mut(std::slice::from_mut(to)));
}

/// Widens IEEE halves with the instructions of `path`. Returns the number of widened elements.
#[inline(always)]
pub(super) fn widen_f16(path: SimdPath, from: &[u16], to: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    match path {
        SimdPath::Avx512 => {
            let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
            for (from, to) in from.iter().zip(&mut *to) {
                widen_16(from, to);
            }
            return 16 * from.len().min(to.len());
        }
        SimdPath::Avx2 => {
            let (from, to) = (from.as_chunks::<8>().0, to.as_chunks_mut::<8>().0);
            for (from, to) in from.iter().zip(&mut *to) {
                widen_8(from, to);
            }
            return 8 * from.len().min(to.len());
        }
        SimdPath::Neon | SimdPath::Portable => {}
    }
    let _ = (path, from, to);
    0
}

/// Rounds to IEEE halves with the instructions of `path`. Returns the number of rounded elements.
#[inline(always)]
pub(super) fn round_f16(path: SimdPath, from: &[f32], to: &mut [u16]) -> usize {
    #[cfg(target_arch = "x86_64")]
    match path {
        SimdPath::Avx512 => {
            let (from, to) = (from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0);
            for (from, to) in from.iter().zip(&mut *to) {
                round_16(from, to);
            }
            return 16 * from.len().min(to.len());
        }
        SimdPath::Avx2 => {
            let (from, to) = (from.as_chunks::<8>().0, to.as_chunks_mut::<8>().0);
            for (from, to) in from.iter().zip(&mut *to) {
                round_8(from, to);
            }
            return 8 * from.len().min(to.len());
        }
        SimdPath::Neon | SimdPath::Portable => {}
    }
    let _ = (path, from, to);
    0
}

#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::*;

    /// Rounding mode: to nearest, ties to even.
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    #[inline(always)]
    pub(super) fn widen_16(from: &[u16; 16], to: &mut [f32; 16]) {
        // SAFETY: 32 bytes; only under `SimdPath::Avx512`, which `is_available` has found here.
        let halves = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        // SAFETY: as above.
        let wide = unsafe { _mm512_cvtph_ps(halves) };
        // SAFETY: 64 bytes; as above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), wide) };
    }

    #[inline(always)]
    pub(super) fn widen_8(from: &[u16; 8], to: &mut [f32; 8]) {
        // SAFETY: 16 bytes; only under `SimdPath::Avx2`, which `is_available` has found here.
        let halves = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        // SAFETY: as above.
        let wide = unsafe { _mm256_cvtph_ps(halves) };
        // SAFETY: 32 bytes; as above.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), wide) };
    }

    #[inline(always)]
    pub(super) fn round_16(from: &[f32; 16], to: &mut [u16; 16]) {
        // SAFETY: 64 bytes; only under `SimdPath::Avx512`, which `is_available` has found here.
        let wide = unsafe { _mm512_loadu_ps(from.as_ptr()) };
        // SAFETY: as above.
        let halves = unsafe { _mm512_cvtps_ph::<NEAREST>(wide) };
        // SAFETY: 32 bytes; as above.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), halves) };
    }

    #[inline(always)]
    pub(super) fn round_8(from: &[f32; 8], to: &mut [u16; 8]) {
        // SAFETY: 32 bytes; only under `SimdPath::Avx2`, which `is_available` has found here.
        let wide = unsafe { _mm256_loadu_ps(from.as_ptr()) };
        // SAFETY: as above.
        let halves = unsafe { _mm256_cvtps_ph::<NEAREST>(wide) };
        // SAFETY: 16 bytes; as above.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), halves) };
    }
}

#[cfg(target_arch = "x86_64")]
use f16c::{round_8, round_16, widen_8, widen_16};

/// Orders the stores of [`stream`] before later stores, as usual stores are.
#[inline(always)]
pub(super) fn streamed() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence; SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Control bits that flush results or operands below the normal range to zero.
#[cfg(target_arch = "x86_64")]
const FLUSH: u64 = 0x8040;
#[cfg(target_arch = "aarch64")]
const FLUSH: u64 = 1 << 24;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const FLUSH: u64 = 0;

#[cfg(target_arch = "x86_64")]
fn control_register() -> u64 {
    let mut word = 0u32;
    // SAFETY: stores four bytes, to `word`.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack)) };
    u64::from(word)
}

#[cfg(target_arch = "x86_64")]
fn set_control_register(word: u64) {
    let word = word as u32;
    // SAFETY: the old word without the bits that flush, which is the state that compiled code
    // assumes.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn control_register() -> u64 {
    let word: u64;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack)) };
    word
}

#[cfg(target_arch = "aarch64")]
fn set_control_register(word: u64) {
    // SAFETY: the old word without the bit that flushes, which is the state that compiled code
    // assumes.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) word, options(nomem, nostack)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const fn control_register() -> u64 {
    0
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const fn set_control_register(_: u64) {}

/// Makes this thread keep numbers below the normal range, as IEEE 754 requires and GPU kernels do.
/// A thread may start with another setting, from a library or its parent thread. It is corrected
/// once; if it is changed again, this function panics.
pub(super) fn keep_denormals() {
    thread_local!(static SET: Cell<bool> = const { Cell::new(false) });
    if !SET.replace(true) {
        set_control_register(control_register() & !FLUSH);
    }
    let flushes = control_register() & FLUSH != 0;
    assert!(!flushes, "something has set this thread to flush denormal numbers to zero");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_streamed_arrives_at_any_alignment_and_length() {
        let from: Vec<u16> = (0..1000).map(|i| i * 37).collect();
        for start in 0..17 {
            for len in [0, 1, 8, 31, 32, 33, 64, 500] {
                let mut to = vec![0u16; 1000];
                stream(&from[start..start + len], &mut to[start..start + len]);
                streamed();
                assert_eq!(to[start..start + len], from[start..start + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|x| *x == 0));
            }
        }
    }

    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    #[test]
    fn a_thread_that_flushes_is_set_right_once_and_then_found_out() {
        let flush = || set_control_register(control_register() | FLUSH);
        let one = std::thread::spawn(move || {
            flush();
            keep_denormals();
            std::hint::black_box(f32::MIN_POSITIVE) / 2.0 > 0.0
        });
        assert!(one.join().unwrap());
        let two = std::thread::spawn(move || {
            keep_denormals();
            flush();
            keep_denormals();
        });
        assert!(two.join().is_err());
    }
}
