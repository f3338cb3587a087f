//! Typed views of untyped storage. Only this file connects storage types with arithmetic: kernels
//! are written once, on f32 blocks.

use super::{E4m3, E5m2, ask};
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Elements that a kernel widens, computes and rounds at a time. They fit the first-level cache.
pub const BLOCK: usize = 256;

/// A storage type that a host task can request by name.
pub trait Element: Copy + Send + Sync + 'static {
    /// The view as a slice, if it holds this type.
    fn of<'a>(view: View<'a>) -> Option<&'a [Self]>;
    /// The writable view as a slice, if it holds this type.
    fn of_mut<'a>(view: ViewMut<'a>) -> Option<&'a mut [Self]>;
}

macro_rules! element {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            fn of<'a>(view: View<'a>) -> Option<&'a [Self]> {
                if let View::$variant(s) = view { Some(s) } else { None }
            }
            fn of_mut<'a>(view: ViewMut<'a>) -> Option<&'a mut [Self]> {
                if let ViewMut::$variant(s) = view { Some(s) } else { None }
            }
        }
    };
}
element!(f16, F16);
element!(bf16, Bf16);
element!(f32, F32);
element!(f64, F64);
element!(i32, I32);
element!(u16, U16);
element!(E4m3, E4m3);
element!(E5m2, E5m2);

/// Elements to read, by storage type.
#[derive(Clone, Copy, Debug)]
pub enum View<'a> {
    /// IEEE half.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE single.
    F32(&'a [f32]),
    /// IEEE double.
    F64(&'a [f64]),
    /// Tokens.
    I32(&'a [i32]),
    /// Lower halves of fp32 values.
    U16(&'a [u16]),
    /// fp8 with 3 bits of mantissa.
    E4m3(&'a [E4m3]),
    /// fp8 with 2 bits of mantissa.
    E5m2(&'a [E5m2]),
}

/// Elements to write, by storage type.
#[derive(Debug)]
pub enum ViewMut<'a> {
    /// IEEE half.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// IEEE single.
    F32(&'a mut [f32]),
    /// IEEE double.
    F64(&'a mut [f64]),
    /// Tokens.
    I32(&'a mut [i32]),
    /// Lower halves of fp32 values.
    U16(&'a mut [u16]),
    /// fp8 with 3 bits of mantissa.
    E4m3(&'a mut [E4m3]),
    /// fp8 with 2 bits of mantissa.
    E5m2(&'a mut [E5m2]),
}

macro_rules! for_each_type {
    ($self:expr, $kind:ident, $s:ident => $body:expr) => {
        match $self {
            $kind::F16($s) => $body,
            $kind::Bf16($s) => $body,
            $kind::F32($s) => $body,
            $kind::F64($s) => $body,
            $kind::I32($s) => $body,
            $kind::U16($s) => $body,
            $kind::E4m3($s) => $body,
            $kind::E5m2($s) => $body,
        }
    };
}

macro_rules! rewrap {
    ($self:expr, $from:ident => $to:ident, $s:ident => $body:expr) => {
        match $self {
            $from::F16($s) => $to::F16($body),
            $from::Bf16($s) => $to::Bf16($body),
            $from::F32($s) => $to::F32($body),
            $from::F64($s) => $to::F64($body),
            $from::I32($s) => $to::I32($body),
            $from::U16($s) => $to::U16($body),
            $from::E4m3($s) => $to::E4m3($body),
            $from::E5m2($s) => $to::E5m2($body),
        }
    };
}

impl<'a> View<'a> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        for_each_type!(self, Self, s => s.len())
    }

    /// Whether the view has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The view as a slice, if it holds `T`.
    pub fn as_slice<T: Element>(self) -> Option<&'a [T]> {
        T::of(self)
    }

    /// Elements `range`.
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        rewrap!(self, View => View, s => &s[range])
    }

    /// Prefetches elements `range`. The range may exceed the end.
    #[inline(always)]
    pub(crate) fn ask(&self, range: std::ops::Range<usize>) {
        match self {
            View::F16(s) => ask(s, range),
            View::Bf16(s) => ask(s, range),
            View::F32(s) => ask(s, range),
            _ => {}
        }
    }

    /// Widens elements `at..at + out.len()` to f32 (F64 is rounded, I32 converted).
    #[inline(always)]
    pub fn load(&self, at: usize, out: &mut [f32]) {
        let range = at..at + out.len();
        match self {
            View::F16(s) => s[range].convert_to_f32_slice(out),
            View::Bf16(s) => {
                out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = widen_bf16(*x));
            }
            View::F32(s) => out.copy_from_slice(&s[range]),
            View::F64(s) => out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = *x as f32),
            View::I32(s) => out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = *x as f32),
            View::U16(s) => out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = f32::from(*x)),
            View::E4m3(s) => out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = x.to_f32()),
            View::E5m2(s) => out.iter_mut().zip(&s[range]).for_each(|(o, x)| *o = x.to_f32()),
        }
    }

    /// Widens all elements to fp64, which is exact.
    pub(crate) fn widen(&self, out: &mut [f64]) {
        match self {
            View::F64(exact) => out.copy_from_slice(exact),
            View::I32(tokens) => out.iter_mut().zip(*tokens).for_each(|(o, x)| *o = f64::from(*x)),
            _ => {
                let mut block = [0.0f32; BLOCK];
                for (i, out) in out.chunks_mut(BLOCK).enumerate() {
                    self.load(i * BLOCK, &mut block[..out.len()]);
                    out.iter_mut().zip(&block).for_each(|(o, x)| *o = f64::from(*x));
                }
            }
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Sets elements by index, rounded (through f32 unless they are F64).
    pub(crate) fn fill(&mut self, value: &dyn Fn(usize) -> f64) {
        if let ViewMut::F64(exact) = self {
            exact.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
            return;
        }
        let mut block = [0.0f32; BLOCK];
        for at in (0..self.len()).step_by(BLOCK) {
            let n = BLOCK.min(self.len() - at);
            block[..n].iter_mut().enumerate().for_each(|(i, x)| *x = value(at + i) as f32);
            self.store(at, &block[..n]);
        }
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        for_each_type!(self, Self, s => s.len())
    }

    /// Whether the view has no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The view as a slice, if it holds `T`.
    pub fn into_slice<T: Element>(self) -> Option<&'a mut [T]> {
        T::of_mut(self)
    }

    /// Turns the view into a view for reading.
    pub const fn into_view(self) -> View<'a> {
        rewrap!(self, ViewMut => View, s => s)
    }

    /// A view for reading the elements.
    pub const fn as_view(&self) -> View<'_> {
        rewrap!(self, ViewMut => View, s => s)
    }

    /// A shorter-lived view of the same elements.
    pub const fn reborrow(&mut self) -> ViewMut<'_> {
        rewrap!(self, ViewMut => ViewMut, s => s)
    }

    /// Elements `range`.
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        rewrap!(self, ViewMut => ViewMut, s => &mut s[range])
    }

    /// Rounds `values` to the storage type (nearest, ties to even) and stores them at `at..at +
    /// values.len()`.
    #[inline(always)]
    pub fn store(&mut self, at: usize, values: &[f32]) {
        let range = at..at + values.len();
        match self {
            ViewMut::F16(s) => s[range].convert_from_f32_slice(values),
            ViewMut::Bf16(s) => {
                s[range].iter_mut().zip(values).for_each(|(o, x)| *o = round_bf16(*x));
            }
            ViewMut::F32(s) => s[range].copy_from_slice(values),
            ViewMut::F64(s) => {
                s[range].iter_mut().zip(values).for_each(|(o, x)| *o = f64::from(*x));
            }
            ViewMut::I32(s) => s[range].iter_mut().zip(values).for_each(|(o, x)| *o = *x as i32),
            ViewMut::U16(s) => s[range].iter_mut().zip(values).for_each(|(o, x)| *o = *x as u16),
            ViewMut::E4m3(s) => {
                s[range].iter_mut().zip(values).for_each(|(o, x)| *o = E4m3::from_f32(*x));
            }
            ViewMut::E5m2(s) => {
                s[range].iter_mut().zip(values).for_each(|(o, x)| *o = E5m2::from_f32(*x));
            }
        }
    }

    /// Two views, split at element `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        macro_rules! part {
            ($s:ident, $variant:ident) => {{
                let (a, b) = $s.split_at_mut(mid);
                (Self::$variant(a), Self::$variant(b))
            }};
        }
        match self {
            Self::F16(s) => part!(s, F16),
            Self::Bf16(s) => part!(s, Bf16),
            Self::F32(s) => part!(s, F32),
            Self::F64(s) => part!(s, F64),
            Self::I32(s) => part!(s, I32),
            Self::U16(s) => part!(s, U16),
            Self::E4m3(s) => part!(s, E4m3),
            Self::E5m2(s) => part!(s, E5m2),
        }
    }

    /// Sets every element to zero.
    pub fn zero(&mut self) {
        for_each_type!(self, Self, s => s.fill(Default::default()));
    }
}

/// Widens bf16, which is the upper half of an f32.
#[inline(always)]
pub(crate) const fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// Rounds to nearest, ties to even; NaN stays NaN. It has no branches, so that it vectorises.
#[inline(always)]
pub(crate) const fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = ((bits >> 16) as u16) | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded })
}

/// Copies elements of one storage type bit for bit.
pub(crate) fn copy(src: View<'_>, dst: &mut ViewMut<'_>) {
    match (src, dst) {
        (View::F16(s), ViewMut::F16(d)) => d.copy_from_slice(s),
        (View::Bf16(s), ViewMut::Bf16(d)) => d.copy_from_slice(s),
        (View::F32(s), ViewMut::F32(d)) => d.copy_from_slice(s),
        (View::F64(s), ViewMut::F64(d)) => d.copy_from_slice(s),
        (View::I32(s), ViewMut::I32(d)) => d.copy_from_slice(s),
        (View::U16(s), ViewMut::U16(d)) => d.copy_from_slice(s),
        (View::E4m3(s), ViewMut::E4m3(d)) => d.copy_from_slice(s),
        (View::E5m2(s), ViewMut::E5m2(d)) => d.copy_from_slice(s),
        (s, d) => cast(s, d),
    }
}

/// Copies values to another storage type through f32.
pub(crate) fn cast(src: View<'_>, dst: &mut ViewMut<'_>) {
    let mut block = [0.0; BLOCK];
    for at in (0..src.len()).step_by(BLOCK) {
        let n = BLOCK.min(src.len() - at);
        src.load(at, &mut block[..n]);
        dst.store(at, &block[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_agrees_with_the_library_on_every_upper_half() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits((u32::from(high) << 16) | low);
                let (ours, theirs) = (round_bf16(x), bf16::from_f32(x));
                assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x:?}");
            }
        }
    }
}
