//! Pairs of vectors: one vector of even elements and one of odd elements. A 32-bit word holds two
//! 16-bit elements, so pairs are widened and narrowed with a shift and a mask instead of shuffles.

use super::path::{InlinedClosure, SimdPath};
use super::{round, simd};
use pulp::Simd;

pub use super::simd::{prefetch, prefetch_ahead, stream, stream_vector};

const _: () =
    assert!(cfg!(target_endian = "little"), "the even element is the lower half of a word");

/// Largest number of elements in two vectors.
pub const WIDEST: usize = 32;

/// Operations of a path for loops over pairs of vectors, in addition to [`Simd`].
pub trait Lanes: Simd {
    /// Number of elements in two vectors.
    const PAIR: usize = 2 * Self::F32_LANES;
    /// Splits two vectors in memory order into vectors of even and of odd elements.
    fn unzip(self, pair: [Self::f32s; 2]) -> [Self::f32s; 2];
    /// Reverses [`unzip`](Self::unzip).
    fn zip(self, pair: [Self::f32s; 2]) -> [Self::f32s; 2];
    /// Combines the lower halves of `lower`'s words with the upper halves of `upper`'s words.
    #[inline(always)]
    fn halves(self, lower: Self::u32s, upper: Self::u32s) -> Self::u32s {
        let mask = self.splat_u32s(0xffff_0000);
        self.or_u32s(self.and_u32s(self.not_u32s(mask), lower), self.and_u32s(mask, upper))
    }
}

/// A path that this machine supports. Only [`run`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct SupportedPath(SimdPath);

impl SupportedPath {
    /// Widens fp16 to fp32. Both slices have the same length.
    #[inline(always)]
    pub fn widen_f16(self, halves: &[u16], out: &mut [f32]) {
        round::widen(self.0, halves, out);
    }

    /// Rounds fp32 to fp16, to nearest with ties to even. Both slices have the same length.
    #[inline(always)]
    pub fn round_f16(self, values: &[f32], out: &mut [u16]) {
        round::to_f16(self.0, values, out);
    }
}

/// A loop that is compiled for every path.
pub trait Kernel {
    /// Runs the loop. Mark it and the functions it calls `#[inline(always)]`, and use no closures:
    /// closures would be compiled for the oldest machine.
    fn run<L: Lanes>(&mut self, lanes: L, path: SupportedPath);
}

/// Runs `kernel` compiled for `path`, or for [`SimdPath::Portable`] if this machine lacks its
/// instructions. Denormal numbers are kept. A thread that synchronizes with the end of this call
/// sees all [`stream`]ed data.
pub fn run(path: SimdPath, kernel: &mut impl Kernel) {
    simd::keep_denormals();
    run_by(path, kernel);
    simd::streamed();
}

fn run_by(path: SimdPath, kernel: &mut impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    match path {
        SimdPath::Avx512 if let Some(simd) = pulp::x86::V4::try_new() => {
            return run_on(simd, SupportedPath(path), kernel);
        }
        SimdPath::Avx2
            if path.is_available()
                && let Some(simd) = pulp::x86::V3::try_new() =>
        {
            return run_on(simd, SupportedPath(path), kernel);
        }
        _ => {}
    }
    #[cfg(target_arch = "aarch64")]
    if let (SimdPath::Neon, Some(simd)) = (path, pulp::aarch64::Neon::try_new()) {
        return run_on(simd, SupportedPath(path), kernel);
    }
    run_on(pulp::Scalar::new(), SupportedPath(SimdPath::Portable), kernel);
}

fn run_on<L: Lanes>(lanes: L, path: SupportedPath, kernel: &mut impl Kernel) {
    lanes.vectorize(InlinedClosure(
        #[inline(always)]
        || kernel.run(lanes, path),
    ));
}

impl Lanes for pulp::Scalar {
    #[inline(always)]
    fn unzip(self, pair: [f32; 2]) -> [f32; 2] {
        pair
    }
    #[inline(always)]
    fn zip(self, pair: [f32; 2]) -> [f32; 2] {
        pair
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use pulp::x86::{V3, V4};
    use pulp::{Simd, cast, f32x8, f32x16, u32x16};

    const EVEN: [u32; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
    const ODD: [u32; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];
    const LOWER: [u32; 16] = [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23];
    const UPPER: [u32; 16] = [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31];

    #[inline(always)]
    fn pick(simd: V4, [a, b]: [f32x16; 2], places: [u32; 16]) -> f32x16 {
        cast(simd.avx512f._mm512_permutex2var_ps(cast(a), cast(places), cast(b)))
    }

    impl Lanes for V4 {
        #[inline(always)]
        fn unzip(self, pair: [f32x16; 2]) -> [f32x16; 2] {
            [pick(self, pair, EVEN), pick(self, pair, ODD)]
        }
        #[inline(always)]
        fn zip(self, pair: [f32x16; 2]) -> [f32x16; 2] {
            [pick(self, pair, LOWER), pick(self, pair, UPPER)]
        }
        // LLVM would compile the default into a permutation, which is slower.
        #[inline(always)]
        fn halves(self, lower: u32x16, upper: u32x16) -> u32x16 {
            const UPPER_OR_LOWER: i32 = 0b1101_1000;
            let mask = cast(self.splat_u32s(0xffff_0000));
            let (lower, upper) = (cast(lower), cast(upper));
            cast(self.avx512f._mm512_ternarylogic_epi32::<UPPER_OR_LOWER>(lower, upper, mask))
        }
    }

    impl Lanes for V3 {
        #[inline(always)]
        fn unzip(self, [a, b]: [f32x8; 2]) -> [f32x8; 2] {
            let (a, b) = (cast(a), cast(b));
            let even = self.avx._mm256_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = self.avx._mm256_shuffle_ps::<0b11_01_11_01>(a, b);
            let even = self.avx2._mm256_permute4x64_pd::<0b11_01_10_00>(cast(even));
            [cast(even), cast(self.avx2._mm256_permute4x64_pd::<0b11_01_10_00>(cast(odd)))]
        }
        #[inline(always)]
        fn zip(self, [a, b]: [f32x8; 2]) -> [f32x8; 2] {
            let (a, b) = (cast(a), cast(b));
            let low = self.avx._mm256_unpacklo_ps(a, b);
            let high = self.avx._mm256_unpackhi_ps(a, b);
            let first = self.avx._mm256_permute2f128_ps::<0x20>(low, high);
            [cast(first), cast(self.avx._mm256_permute2f128_ps::<0x31>(low, high))]
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::Lanes;
    use pulp::aarch64::Neon;
    use pulp::{cast, f32x4};

    impl Lanes for Neon {
        #[inline(always)]
        fn unzip(self, [a, b]: [f32x4; 2]) -> [f32x4; 2] {
            let (a, b) = (cast(a), cast(b));
            [cast(self.neon.vuzp1q_f32(a, b)), cast(self.neon.vuzp2q_f32(a, b))]
        }
        #[inline(always)]
        fn zip(self, [a, b]: [f32x4; 2]) -> [f32x4; 2] {
            let (a, b) = (cast(a), cast(b));
            [cast(self.neon.vzip1q_f32(a, b)), cast(self.neon.vzip2q_f32(a, b))]
        }
    }
}
