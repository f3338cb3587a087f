use super::element::Element;
use super::pack::chunks;
use super::task::{Panel, grid};
use super::*;
use core::ops::Range;
use half::{bf16, f16};
use pulp::Simd;
use std::sync::Mutex;

/// Random numbers by splitmix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn data(&mut self, kind: usize, len: usize) -> Data {
        let values = (0..len).map(|_| self.value());
        match kind {
            0 => Data::F32(values.collect()),
            1 => Data::F16(values.map(f16::from_f32).collect()),
            _ => Data::Bf16(values.map(bf16::from_f32).collect()),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Data {
    fn src(&self, from: usize) -> View<'_> {
        match self {
            Self::F32(data) => View::F32(&data[from..]),
            Self::F16(data) => View::F16(&data[from..]),
            Self::Bf16(data) => View::Bf16(&data[from..]),
        }
    }

    fn dst(&mut self, from: usize) -> ViewMut<'_> {
        match self {
            Self::F32(data) => ViewMut::F32(&mut data[from..]),
            Self::F16(data) => ViewMut::F16(&mut data[from..]),
            Self::Bf16(data) => ViewMut::Bf16(&mut data[from..]),
        }
    }

    fn get(&self, i: usize) -> f64 {
        match self {
            Self::F32(data) => f64::from(data[i]),
            Self::F16(data) => f64::from(data[i]),
            Self::Bf16(data) => f64::from(data[i]),
        }
    }

    /// Half a unit in the last place of 1.
    fn half_ulp(&self) -> f64 {
        match self {
            Self::F32(_) => 2f64.powi(-24),
            Self::F16(_) => 2f64.powi(-11),
            Self::Bf16(_) => 2f64.powi(-8),
        }
    }
}

/// Elements, the stride of rows and the stride of columns.
type Operand = (Data, usize, usize);

/// A random matmul with its own data.
#[derive(Debug)]
struct Case {
    size: [usize; 3],
    a: Operand,
    b: Operand,
    c: (Data, usize),
    beta: f32,
    bias: Option<Data>,
}

fn operand(r: &mut Random, rows: usize, cols: usize) -> Operand {
    let gap = r.below(3) * r.below(9);
    let (row_stride, col_stride) = match r.below(5) {
        0 | 1 => (cols + gap, 1),
        2 | 3 => (1, rows + gap),
        _ => ((cols + gap) * 2, 2),
    };
    let kind = r.below(3);
    let len = reach(rows, row_stride, cols, col_stride).unwrap();
    (r.data(kind, len), row_stride, col_stride)
}

impl Case {
    fn new(r: &mut Random, m: usize, n: usize, k: usize) -> Self {
        let (a, b) = (operand(r, m, k), operand(r, k, n));
        let row_stride = n + r.below(2) * r.below(40);
        let kind = r.below(3);
        let c = (r.data(kind, reach(m, row_stride, n, 1).unwrap()), row_stride);
        let beta = [0.0, 1.0, -0.37][r.below(3)];
        let kind = r.below(4);
        let bias = (kind < 3).then(|| r.data(kind, n));
        Self { size: [m, n, k], a, b, c, beta, bias }
    }

    /// The part of the matmul that computes these rows and columns of c.
    fn part<'a>(&'a self, c: &'a mut Data, rows: Range<usize>, cols: Range<usize>) -> Gemm<'a> {
        let (a, b) = (&self.a, &self.b);
        let from = |at: usize, empty: bool| if empty { 0 } else { at };
        let k = self.size[2];
        Gemm {
            m: rows.len(),
            n: cols.len(),
            k,
            a: Matrix {
                data: a.0.src(from(rows.start * a.1, k == 0)),
                row_stride: a.1,
                col_stride: a.2,
            },
            b: Matrix {
                data: b.0.src(from(cols.start * b.2, k == 0)),
                row_stride: b.1,
                col_stride: b.2,
            },
            c: MatrixMut { data: c.dst(rows.start * self.c.1 + cols.start), row_stride: self.c.1 },
            scale: 1.0,
            beta: self.beta,
            bias: self.bias.as_ref().map(|bias| bias.src(cols.start)),
        }
    }

    fn whole<'a>(&'a self, c: &'a mut Data) -> Gemm<'a> {
        self.part(c, 0..self.size[0], 0..self.size[1])
    }

    fn run(&self, scratch: &mut Scratch) -> Data {
        let mut c = self.c.0.clone();
        self.whole(&mut c).serial(scratch);
        c
    }

    fn run_with<S: Simd>(&self, simd: S, scratch: &mut Scratch) -> Data {
        let mut c = self.c.0.clone();
        let (rows, cols) = (0..self.size[0], 0..self.size[1]);
        let task = self.whole(&mut c).check();
        simd.vectorize(Panel { task: &task, rows, cols, parts: scratch.parts() });
        c
    }

    fn assert_near_f64(&self, c: &Data) {
        let [m, n, k] = self.size;
        for i in 0..m {
            for j in 0..n {
                let (mut sum, mut size) = (0.0, 0.0);
                for p in 0..k {
                    let a = self.a.0.get(i * self.a.1 + p * self.a.2);
                    let term = a * self.b.0.get(p * self.b.1 + j * self.b.2);
                    sum += term;
                    size += term.abs();
                }
                let old = f64::from(self.beta) * self.c.0.get(i * self.c.1 + j);
                let bias = self.bias.as_ref().map_or(0.0, |bias| bias.get(j));
                sum += old + bias;
                size += old.abs() + bias.abs();
                let got = c.get(i * self.c.1 + j);
                // The result is rounded once to the type of c, and a few times in f32.
                let allowed = sum.abs() * c.half_ulp() + size * 2f64.powi(-20) + 1e-7;
                assert!((got - sum).abs() <= allowed, "({i}, {j}): {got}, not {sum}; {self:?}");
            }
        }
    }

    /// Asserts that the matmul leaves elements between the rows of c unchanged.
    fn assert_gaps_kept(&self, c: &Data) {
        for i in 0..self.size[0].saturating_sub(1) {
            for at in i * self.c.1 + self.size[1]..(i + 1) * self.c.1 {
                assert_eq!(c.get(at), self.c.0.get(at));
            }
        }
    }
}

#[test]
fn is_the_product_within_rounding() {
    let (mut r, mut scratch) = (Random(1), Scratch::new());
    for round in 0..600 {
        let most = [5, 20, 70, 140][round % 4];
        let (m, n) = (1 + r.below(most), 1 + r.below(most));
        let k = [r.below(most), r.below(most), KC, 2 * KC + r.below(500)][r.below(4)];
        let case = Case::new(&mut r, m, n, k);
        let c = case.run(&mut scratch);
        case.assert_near_f64(&c);
        case.assert_gaps_kept(&c);
    }
}

#[test]
fn blocks_meet_without_seams() {
    let (mut r, mut scratch) = (Random(2), Scratch::new());
    for [m, n, k] in [[MT + 13, 40, KC + 1], [21, NT + 33, KC + 7], [MC + 5, NT + 1, 9]] {
        for _ in 0..4 {
            let case = Case::new(&mut r, m, n, k);
            case.assert_near_f64(&case.run(&mut scratch));
        }
    }
}

#[test]
fn every_small_size_is_right() {
    let (mut r, mut scratch) = (Random(3), Scratch::new());
    for m in 0..26 {
        for n in [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48] {
            for k in [0, 1, 2, 15, 17, 33] {
                let case = Case::new(&mut r, m, n, k);
                case.assert_near_f64(&case.run(&mut scratch));
            }
        }
    }
}

#[test]
fn the_order_of_the_sum_is_the_documented_one() {
    let (mut r, mut scratch) = (Random(4), Scratch::new());
    let (m, n, k) = (19, 45, 2 * KC + 77);
    for _ in 0..6 {
        let case = Case::new(&mut r, m, n, k);
        let Data::F32(got) = case.run(&mut scratch) else { continue };
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let a = |p: usize| case.a.0.get(i * case.a.1 + p * case.a.2) as f32;
            let b = |p: usize| case.b.0.get(p * case.b.1 + j * case.b.2) as f32;
            let chain = |ks: Range<usize>| ks.fold(0f32, |sum, p| a(p).mul_add(b(p), sum));
            let mut sum = chain(0..KC);
            for ks in chunks(KC..k, KC) {
                sum += chain(ks);
            }
            if let Some(bias) = &case.bias {
                sum += bias.get(j) as f32;
            }
            if case.beta != 0.0 {
                sum = case.beta.mul_add(case.c.0.get(i * case.c.1 + j) as f32, sum);
            }
            assert_eq!(got[i * case.c.1 + j].to_bits(), sum.to_bits());
        }
    }
}

#[test]
fn what_is_read_in_place_or_packed_has_the_same_product() {
    let (mut r, mut scratch) = (Random(8), Scratch::new());
    let few = [[7, 31, KC + 1], [1, 50, 2 * KC + 13], [8, 64, 70], [3, 16, 5]];
    let many = [[29, 64, 2 * KC + 31], [64, 32, 70], [SAME_SET / 4, 48, 40]];
    for [m, n, k] in many.into_iter().chain(few) {
        let bias = (n % 32 != 0).then(|| r.data(1, n));
        let (a, b) = (r.data(0, m * k), r.data(0, k * n));
        let transposed = |x: &Data, rows: usize, cols: usize| {
            Data::F32((0..rows * cols).map(|i| x.get(i % rows * cols + i / rows) as f32).collect())
        };
        let (a_transposed, b_transposed) = (transposed(&a, m, k), transposed(&b, k, n));
        let mut product = |a: &Operand, b: &Operand| {
            let c = (Data::F32(vec![0.0; m * n]), n);
            let (a, b) = (a.clone(), b.clone());
            Case { size: [m, n, k], a, b, c, beta: 0.0, bias: bias.clone() }.run(&mut scratch)
        };
        let (a, b) = ([(a, k, 1), (a_transposed, 1, m)], [(b, n, 1), (b_transposed, 1, k)]);
        let want = product(&a[0], &b[0]);
        for (a, b) in [(&a[0], &b[1]), (&a[1], &b[0]), (&a[1], &b[1])] {
            assert_eq!(product(a, b), want, "{m} {n} {k}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let (mut r, mut scratch) = (Random(5), Scratch::new());
    for threads in 1..=5 {
        let team = crate::ThreadTeam::new(threads, || ()).unwrap();
        let scratches: Vec<_> = (0..threads).map(|_| Mutex::new(Scratch::new())).collect();
        let few_panels =
            [[210, 333, 400], [600, 1000, 90], [1, 90_000, 300], [90_000, 1, 300], [30, 31, 32]];
        // The panels share b: one block, two blocks, the b of another matmul, and other columns.
        let runs = [[900, 300, 100], [1100, 70, 500], [1100, 70, 500], [60, 900, 100]];
        for [m, n, k] in few_panels.into_iter().chain(runs) {
            let case = Case::new(&mut r, m, n, k);
            let mut c = case.c.0.clone();
            let mut panels = case.whole(&mut c).panels(threads);
            team.parallel_for(panels.all(), &|thread, some| {
                some.compute(&mut scratches[thread].lock().unwrap());
            });
            let want = case.run(&mut scratch);
            assert_eq!(c, want, "{threads} threads, {m} {n} {k}");
            // One thread computes all panels and goes from one part of b to the next.
            let mut c = case.c.0.clone();
            case.whole(&mut c).panels(threads).all().compute(&mut scratch);
            assert_eq!(c, want, "panels of {threads} threads, {m} {n} {k}");
        }
    }
}

#[test]
fn threads_have_about_the_same_to_do() {
    for threads in [2, 3, 8, 16, 64] {
        for packs_a in [false, true] {
            for size @ (m, n) in [256, 500, 1024, 2047, 4096]
                .iter()
                .flat_map(|m| [384, 768, 3072].map(|n| (*m, n)))
                .filter(|(m, n)| m * n >= threads * 64 * 64)
            {
                let (down, across) = grid(packs_a, size.0, size.1, threads);
                let rows = m.div_ceil(down).next_multiple_of(A_ROWS);
                let cols = n.div_ceil(across).next_multiple_of(NR_MAX);
                let share = (m * n) as f64 / (threads * rows * cols) as f64;
                assert!(down * across == threads && share > 0.7, "{threads} {size:?}: {share}");
            }
        }
    }
    assert_eq!(grid(false, 768, 384, 2), (2, 1), "by rows, like other kernels");
    assert_eq!(grid(false, 12, 4096, 2), (1, 2), "few rows are not worth packing all of b for");
}

#[test]
fn cuts_along_m_and_n_change_no_bit() {
    let (mut r, mut scratch) = (Random(6), Scratch::new());
    for _ in 0..40 {
        let (m, n) = (2 + r.below(150), 2 + r.below(150));
        let k = 1 + r.below(3 * KC);
        let case = Case::new(&mut r, m, n, k);
        let (i, j) = (1 + r.below(m - 1), 1 + r.below(n - 1));
        let mut c = case.c.0.clone();
        for rows in [0..i, i..m] {
            for cols in [0..j, j..n] {
                case.part(&mut c, rows.clone(), cols).serial(&mut scratch);
            }
        }
        assert_eq!(c, case.run(&mut scratch), "cut at {i}, {j} of {m}, {n}");
    }
}

#[test]
fn the_width_of_vectors_changes_no_bit() {
    let (mut r, mut scratch) = (Random(7), Scratch::new());
    for _ in 0..40 {
        let (m, n, k) = (1 + r.below(60), 1 + r.below(90), 1 + r.below(2 * KC));
        let case = Case::new(&mut r, m, n, k);
        let widest = case.run(&mut scratch);
        assert_eq!(case.run_with(pulp::Scalar::new(), &mut scratch), widest);
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V3::try_new() {
            assert_eq!(case.run_with(simd, &mut scratch), widest);
        }
    }
}

#[test]
fn beta_0_does_not_read_c() {
    let mut scratch = Scratch::new();
    let mut c = [f32::NAN; 4];
    let ones = [1.0; 4];
    let matrix = Matrix::by_rows(View::F32(&ones), 2);
    let c_matrix = MatrixMut { data: ViewMut::F32(&mut c), row_stride: 2 };
    Gemm { m: 2, n: 2, k: 2, a: matrix, b: matrix, c: c_matrix, scale: 1.0, beta: 0.0, bias: None }
        .serial(&mut scratch);
    assert_eq!(c, [2.0; 4]);
}

#[test]
#[should_panic(expected = "rows of c overlap")]
fn overlapping_rows_of_c_are_refused() {
    let ones = [1.0; 4];
    let matrix = Matrix::by_rows(View::F32(&ones), 2);
    let mut c = [0.0; 4];
    let c_matrix = MatrixMut { data: ViewMut::F32(&mut c), row_stride: 1 };
    Gemm { m: 2, n: 2, k: 2, a: matrix, b: matrix, c: c_matrix, scale: 1.0, beta: 0.0, bias: None }
        .serial(&mut Scratch::new());
}

#[test]
fn sixteen_bit_conversions_are_those_of_half() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        let mut wide = [0.0];
        f16::widen(&[half], &mut wide);
        assert!(wide[0].to_bits() == half.to_f32().to_bits() || half.is_nan() && wide[0].is_nan());
        bf16::widen(&[brain], &mut wide);
        assert!(
            wide[0].to_bits() == brain.to_f32().to_bits() || brain.is_nan() && wide[0].is_nan()
        );
        // Tests around every tie of both types, and at random.
        let lows = [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff];
        for low in lows.into_iter().chain([Random(bits.into()).bits() as u32 & 0xffff]) {
            for high in [u32::from(bits) << 16, (u32::from(bits) << 16) ^ 0x3000] {
                let value = f32::from_bits(high ^ low);
                let (mut half, mut brain) = ([f16::ZERO], [bf16::ZERO]);
                f16::narrow(&[value], &mut half);
                bf16::narrow(&[value], &mut brain);
                assert_eq!(half[0].to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
                assert_eq!(brain[0].to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
