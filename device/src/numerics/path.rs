//! The SIMD path of vector loops. It is chosen at run time, and every path gives the same bits.

use pulp::{Simd, WithSimd};
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// A set of SIMD instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SimdPath {
    /// AVX-512 F, BW, CD, DQ and VL.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Instructions of every 64-bit ARM.
    Neon,
    /// Instructions of every machine of the target. Without an fma instruction, the C library
    /// computes fma.
    Portable,
}

/// The chosen path: 0 before a choice, otherwise 1 + its index in `ALL`.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// A closure that pulp compiles for its vectors. It is `FnMut`, since rustc wraps an `FnOnce` in a
/// shim that is not inlined.
pub(crate) struct InlinedClosure<F>(pub(crate) F);

impl<R, F: FnMut() -> R> WithSimd for InlinedClosure<F> {
    type Output = R;
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) -> R {
        (self.0)()
    }
}

impl SimdPath {
    /// All paths, the best one first.
    pub const ALL: [Self; 4] = [Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    /// The path's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// Whether this machine has the path's instructions.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::try_new().is_some() && Self::Avx2.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                pulp::x86::V3::try_new().is_some() && std::arch::is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => pulp::aarch64::Neon::try_new().is_some(),
            Self::Portable => true,
            _ => false,
        }
    }

    /// The paths of this machine, the best one first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|path| path.is_available()).collect()
    }

    /// The path of all kernels: the one set by [`choose`](Self::choose), otherwise the best.
    pub fn current() -> Self {
        let chosen = CHOSEN.load(Ordering::Relaxed);
        match chosen.checked_sub(1).and_then(|i| Self::ALL.get(usize::from(i))) {
            Some(path) => *path,
            None => Self::best(),
        }
    }

    fn best() -> Self {
        let best = Self::available().first().copied().unwrap_or(Self::Portable);
        best.store();
        best
    }

    fn store(self) {
        let place = Self::ALL.iter().position(|path| *path == self);
        let place = place.unwrap_or_else(|| unreachable!("{self:?} is not among all paths"));
        CHOSEN.store(place as u8 + 1, Ordering::Relaxed);
    }

    /// Makes this path the path of all threads. No result depends on it.
    ///
    /// # Errors
    /// This machine lacks the path's instructions.
    pub fn choose(self) -> Result<(), String> {
        if self.is_available() {
            self.store();
            return Ok(());
        }
        let have: Vec<_> = Self::available().into_iter().map(Self::name).collect();
        Err(format!("this machine has no `{self}` instructions; it has: {}", have.join(", ")))
    }

    /// Runs `f` compiled for this path. Mark the closure and the functions it calls
    /// `#[inline(always)]`: other functions are compiled for the oldest machine.
    pub(crate) fn run<R>(self, f: impl FnMut() -> R) -> R {
        let f = InlinedClosure(f);
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Avx512 if let Some(simd) = pulp::x86::V4::try_new() => {
                return Simd::vectorize(simd, f);
            }
            Self::Avx2 if let Some(simd) = pulp::x86::V3::try_new() => {
                return Simd::vectorize(simd, f);
            }
            _ => {}
        }
        #[cfg(target_arch = "aarch64")]
        if let (Self::Neon, Some(simd)) = (self, pulp::aarch64::Neon::try_new()) {
            return Simd::vectorize(simd, f);
        }
        Simd::vectorize(pulp::Scalar::new(), f)
    }
}

impl fmt::Display for SimdPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SimdPath {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|path| path.name() == name);
        let names = Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("`{name}` is none of {names}"))
    }
}
