//! A simple memory for the kernels' tests, with inputs and results in f64.

use super::{Memory, run};
use crate::cpu::workers::{ScratchFloats, Workers};
use crate::numerics::{E4m3, E5m2};
use crate::op::Op;
use crate::{Arena, Dropout, Dtype, Mode, Plan, Tensor, View, ViewMut, random};
use half::{bf16, f16};
use std::cell::RefCell;
use std::sync::Arc;

/// The storage types of values, with the relative error of one rounding.
pub(super) const TYPES: [(Dtype, f64); 3] =
    [(Dtype::F32, 6e-8), (Dtype::Bf16, 4e-3), (Dtype::F16, 5e-4)];

pub(super) const NO_DROPOUT: Dropout = Dropout { p: 0.0, key: 0, first_row: 0 };

enum Data {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    I32(Vec<i32>),
    U16(Vec<u16>),
    E4m3(Vec<E4m3>),
    E5m2(Vec<E5m2>),
}

macro_rules! each {
    ($data:expr, $v:ident => $body:expr, $kind:ident) => {
        match $data {
            Data::F16($v) => $kind::F16($body),
            Data::Bf16($v) => $kind::Bf16($body),
            Data::F32($v) => $kind::F32($body),
            Data::F64($v) => $kind::F64($body),
            Data::I32($v) => $kind::I32($body),
            Data::U16($v) => $kind::U16($body),
            Data::E4m3($v) => $kind::E4m3($body),
            Data::E5m2($v) => $kind::E5m2($body),
        }
    };
}

enum Place<'a> {
    Read(View<'a>),
    Write(RefCell<Option<ViewMut<'a>>>),
}

/// The memory ranges of one op. Each written range occurs once.
struct Places<'a>(Vec<Place<'a>>);

impl Memory for Places<'_> {
    fn read(&self, t: Tensor) -> View<'_> {
        let Place::Read(view) = &self.0[t.entry as usize] else {
            panic!("read of what is written")
        };
        *view
    }
    fn write(&self, t: Tensor) -> ViewMut<'_> {
        let Place::Write(view) = &self.0[t.entry as usize] else { panic!("write of what is read") };
        view.borrow_mut().take().expect("formed once")
    }
}

/// Tensors and the kernel threads for their ops.
pub(super) struct Rig {
    plan: Plan,
    data: Vec<Data>,
    workers: Workers,
}

impl Rig {
    pub(super) fn new(threads: usize) -> Self {
        let team = (threads > 1)
            .then(|| Arc::new(crate::ThreadTeam::new(threads, || ()).expect("threads")));
        let workers = Workers::new(team, ScratchFloats::new(300, 80, 4000, 0));
        Self { plan: Plan::default(), data: Vec::new(), workers }
    }

    /// A tensor of `values`, rounded to `dtype`.
    pub(super) fn put(&mut self, dtype: Dtype, shape: (usize, usize), values: &[f64]) -> Tensor {
        assert_eq!(values.len(), shape.0 * shape.1);
        let each = values.iter().copied();
        self.data.push(match dtype {
            Dtype::F16 => Data::F16(each.map(f16::from_f64).collect()),
            Dtype::Bf16 => Data::Bf16(each.map(bf16::from_f64).collect()),
            Dtype::F32 => Data::F32(each.map(|x| x as f32).collect()),
            Dtype::F64 => Data::F64(each.collect()),
            Dtype::I32 => Data::I32(each.map(|x| x as i32).collect()),
            Dtype::U16 => Data::U16(each.map(|x| x as u16).collect()),
            Dtype::E4m3 => Data::E4m3(each.map(|x| E4m3::from_f32(x as f32)).collect()),
            Dtype::E5m2 => Data::E5m2(each.map(|x| E5m2::from_f32(x as f32)).collect()),
        });
        self.plan.tensor((Arena::Device, "test"), "t", dtype, shape)
    }

    /// A tensor for an op to write, filled with arbitrary values.
    pub(super) fn out(&mut self, dtype: Dtype, shape: (usize, usize)) -> Tensor {
        self.put(dtype, shape, &vec![77.0; shape.0 * shape.1])
    }

    pub(super) fn put_ints(&mut self, values: &[i32]) -> Tensor {
        let values: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
        self.put(Dtype::I32, (1, values.len()), &values)
    }

    pub(super) fn get(&self, t: Tensor) -> Vec<f64> {
        match &self.data[t.entry as usize] {
            Data::F16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Data::Bf16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Data::F32(v) => v.iter().map(|x| f64::from(*x)).collect(),
            Data::F64(v) => v.clone(),
            Data::I32(v) => v.iter().map(|x| f64::from(*x)).collect(),
            Data::U16(v) => v.iter().map(|x| f64::from(*x)).collect(),
            Data::E4m3(v) => v.iter().map(|x| f64::from(x.to_f32())).collect(),
            Data::E5m2(v) => v.iter().map(|x| f64::from(x.to_f32())).collect(),
        }
    }

    /// Runs an op. Each of its tensors is a whole, reshaped or transposed tensor.
    pub(super) fn try_run(&mut self, op: &Op) -> Result<(), String> {
        let mut written = vec![false; self.data.len()];
        op.accesses(&mut |mode, t| written[t.entry as usize] |= mode != Mode::Read);
        let places = self.data.iter_mut().zip(written).map(|(data, written)| {
            if written {
                Place::Write(RefCell::new(Some(each!(data, v => v.as_mut_slice(), ViewMut))))
            } else {
                Place::Read(each!(data, v => v.as_slice(), View))
            }
        });
        run(op, &Places(places.collect()), &self.workers)
    }

    pub(super) fn run(&mut self, op: &Op) {
        self.try_run(op).expect("the op runs");
    }
}

/// Numbers in -1..1 that every type holds exactly.
pub(super) fn noise(seed: u64, n: usize) -> Vec<f64> {
    (0..n as u64).map(|i| random::below(seed, i, 255) as f64 / 128.0 - 0.992_187_5).collect()
}

/// Asserts that |got - want| <= absolute + relative |want| for each element.
#[track_caller]
pub(super) fn assert_close(got: &[f64], want: &[f64], absolute: f64, relative: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= absolute + relative * w.abs(), "element {i}: {g} is not {w}");
    }
}

/// Dropout's factor of element `index`.
pub(super) fn dropout_factor(dropout: Dropout, index: usize) -> f64 {
    let p = f64::from(dropout.p);
    let keeps = random::keeps(dropout.key, index as u64, random::keep_threshold(dropout.p));
    if keeps || p == 0.0 { 1.0 / (1.0 - p) } else { 0.0 }
}

/// The gradient of `f` at `x` by central differences.
pub(super) fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let shifted = |i: usize, by: f64| {
        let mut x = x.to_vec();
        x[i] += by;
        f(&x)
    };
    (0..x.len()).map(|i| (shifted(i, STEP) - shifted(i, -STEP)) / (2.0 * STEP)).collect()
}

/// Sum of the products of x and y.
pub(super) fn inner(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// The start of each row's document in its sample. `lengths`: number of rows of each document.
pub(super) fn starts(seq_len: usize, lengths: &[usize]) -> Vec<i32> {
    let mut all: Vec<i32> = Vec::new();
    for length in lengths {
        let start = (all.len() % seq_len) as i32;
        all.extend(std::iter::repeat_n(start, *length));
    }
    all
}
