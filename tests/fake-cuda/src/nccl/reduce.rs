//! Element types and reductions. Sums run in rank order; 16-bit types are added in fp32 and rounded
//! once. With `FAKECUDA_NCCL_HOPS`, sums of 16-bit types go around a ring.
#![expect(unsafe_code, reason = "reads and writes elements by address")]

use half::{bf16, f16};

use crate::wrong::is_wrong;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Element {
    /// The type of a number of `ncclDataType_t`.
    pub(super) fn new(data_type: i32) -> Option<Self> {
        use Element::{Bf16, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        let all = [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16];
        all.get(usize::try_from(data_type).ok()?).copied()
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Reduction {
    /// The reduction of a number of `ncclRedOp_t`.
    pub(super) fn new(op: i32) -> Option<Self> {
        let all = [Self::Sum, Self::Product, Self::Max, Self::Min, Self::Average];
        all.get(usize::try_from(op).ok()?).copied()
    }
}

/// An element type, and the type `Wide` in which it is reduced.
trait Number: Copy {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn combine(a: Self::Wide, b: Self::Wide, op: Reduction) -> Self::Wide;
    fn divide(sum: Self::Wide, count: usize) -> Self::Wide;
}

macro_rules! floats {
    ($($type:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {
        $(impl Number for $type {
            type Wide = $wide;
            fn widen(self) -> $wide {
                $widen(self)
            }
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            fn combine(a: $wide, b: $wide, op: Reduction) -> $wide {
                match op {
                    Reduction::Sum | Reduction::Average => a + b,
                    Reduction::Product => a * b,
                    Reduction::Max => if a.is_nan() || a > b { a } else { b },
                    Reduction::Min => if a.is_nan() || a < b { a } else { b },
                }
            }
            fn divide(sum: $wide, count: usize) -> $wide {
                sum / count as $wide
            }
        })*
    };
}

macro_rules! integers {
    ($($type:ty;)*) => {
        $(impl Number for $type {
            type Wide = $type;
            fn widen(self) -> $type {
                self
            }
            fn narrow(wide: $type) -> Self {
                wide
            }
            fn combine(a: $type, b: $type, op: Reduction) -> $type {
                match op {
                    Reduction::Sum | Reduction::Average => a.wrapping_add(b),
                    Reduction::Product => a.wrapping_mul(b),
                    Reduction::Max => a.max(b),
                    Reduction::Min => a.min(b),
                }
            }
            fn divide(sum: $type, count: usize) -> $type {
                sum / count as $type
            }
        })*
    };
}

floats! {
    f16, f32, Self::to_f32, Self::from_f32;
    bf16, f32, Self::to_f32, Self::from_f32;
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
}

integers! { i8; u8; i32; u32; i64; u64; }

/// Order in which the ranks' values are added.
#[derive(Debug, Clone, Copy)]
pub(super) enum Order {
    /// In rank order, rounded once.
    Ranks,
    /// Around a ring that begins with this rank; 16-bit types are rounded at each hop.
    Ring(usize),
}

/// Reduces `count` elements at each of `sources` into new bytes.
///
/// # Safety
/// Every source has `count` readable elements.
pub(super) unsafe fn reduce(
    element: Element,
    op: Reduction,
    order: Order,
    sources: &[usize],
    count: usize,
) -> Vec<u8> {
    let forgets = op == Reduction::Sum && is_wrong("nccl");
    let sources = &sources[..sources.len() - usize::from(forgets)];
    let mut out = vec![0; count * element.bytes()];
    let to = out.as_mut_ptr();
    let sources = &rotated(sources, order);
    let hops = matches!(order, Order::Ring(_));
    // SAFETY: as demanded above; `out` has room for `count` elements.
    unsafe {
        match element {
            Element::I8 => reduce_as::<i8>(op, false, sources, count, to),
            Element::U8 => reduce_as::<u8>(op, false, sources, count, to),
            Element::I32 => reduce_as::<i32>(op, false, sources, count, to),
            Element::U32 => reduce_as::<u32>(op, false, sources, count, to),
            Element::I64 => reduce_as::<i64>(op, false, sources, count, to),
            Element::U64 => reduce_as::<u64>(op, false, sources, count, to),
            Element::F16 => reduce_as::<f16>(op, hops, sources, count, to),
            Element::F32 => reduce_as::<f32>(op, false, sources, count, to),
            Element::F64 => reduce_as::<f64>(op, false, sources, count, to),
            Element::Bf16 => reduce_as::<bf16>(op, hops, sources, count, to),
        }
    }
    out
}

/// The sources in the order in which they are added.
fn rotated(sources: &[usize], order: Order) -> Vec<usize> {
    let mut sources = sources.to_vec();
    if let Order::Ring(first) = order {
        sources.rotate_left(first);
    }
    sources
}

/// # Safety
/// Every source has `count` readable elements, and `to` has room for `count` elements.
unsafe fn reduce_as<T: Number>(
    op: Reduction,
    hops: bool,
    sources: &[usize],
    count: usize,
    to: *mut u8,
) {
    for index in 0..count {
        // SAFETY: as demanded above.
        let load = |base: usize| unsafe { (base as *const T).add(index).read_unaligned() };
        let mut wide = load(sources[0]).widen();
        for &source in &sources[1..] {
            wide = T::combine(wide, load(source).widen(), op);
            if hops {
                wide = T::narrow(wide).widen();
            }
        }
        if op == Reduction::Average {
            wide = T::divide(wide, sources.len());
        }
        // SAFETY: as demanded above.
        unsafe { to.cast::<T>().add(index).write_unaligned(T::narrow(wide)) };
    }
}
