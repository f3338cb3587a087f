//! D = epilogue(alpha * op(A) * op(B) + beta * C), with sums in fp32 in the order of k.
#![expect(unsafe_code, reason = "matrices are given by address")]

use std::ffi::c_int;

use super::{
    ARCH_MISMATCH, Desc, EXECUTION_FAILED, INVALID_VALUE, Layout, NOT_SUPPORTED, float_of,
    tiles::{GatheredMatrix, multiply},
};
use crate::{
    call::CallResult, clock, config::config, counters::STATS, driver::memory::check_accessible,
    failure::fails, fp8::Fp8, machine::machine, number::Float, overhead::LoadedCode,
    stream::Stream, wrong::is_wrong,
};

const TF32: i32 = 77;

/// Addresses of a matmul's operands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    pub(super) alpha: usize,
    pub(super) beta: usize,
    pub(super) a: usize,
    pub(super) b: usize,
    pub(super) c: usize,
    pub(super) d: usize,
}

/// Addressing of a matrix: element (i, j) has the index `i * row_step + j * col_step`.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    float: Float,
    rows: usize,
    cols: usize,
    row_step: usize,
    col_step: usize,
    batch_stride: usize,
}

impl Matrix {
    fn new(layout: &Layout) -> Result<Self, c_int> {
        let positive = |value: i64| usize::try_from(value).map_err(|_| NOT_SUPPORTED);
        let (rows, cols) = (layout.rows as usize, layout.cols as usize);
        let ld = positive(layout.ld)?;
        let (row_step, col_step, shortest) = match layout.order {
            0 => (1, ld, rows),
            1 => (ld, 1, cols),
            _ => return Err(NOT_SUPPORTED),
        };
        if ld < shortest || rows == 0 || cols == 0 {
            return Err(INVALID_VALUE);
        }
        let (float, batch_stride) = (layout.float()?, positive(layout.batch_stride)?);
        Ok(Self { float, rows, cols, row_step, col_step, batch_stride })
    }

    fn transposed(self, transpose: i32) -> Result<Self, c_int> {
        match transpose {
            0 => Ok(self),
            1 | 2 => Ok(Self {
                rows: self.cols,
                cols: self.rows,
                row_step: self.col_step,
                col_step: self.row_step,
                ..self
            }),
            _ => Err(INVALID_VALUE),
        }
    }

    fn at(&self, i: usize, j: usize) -> usize {
        i * self.row_step + j * self.col_step
    }

    /// Address of the matrix of one batch.
    fn base(&self, address: usize, batch: usize) -> usize {
        address + batch * self.batch_stride * self.float.bytes()
    }

    fn check(&self, name: &str, address: usize, batches: usize) -> CallResult {
        let last = (batches - 1) * self.batch_stride + self.at(self.rows - 1, self.cols - 1);
        check_accessible(name, address, (last + 1) * self.float.bytes())
    }
}

/// A supported matmul with matching shapes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    desc: Desc,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    d: Matrix,
    bias: Float,
    aux: Float,
    batches: usize,
}

impl Product {
    pub(super) fn new(
        desc: Desc,
        a: Layout,
        b: Layout,
        c: Layout,
        d: Layout,
    ) -> Result<Self, c_int> {
        let batches = d.batch;
        if batches < 1 || [a.batch, b.batch, c.batch].iter().any(|&count| count != batches) {
            return Err(INVALID_VALUE);
        }
        let type_or = |named: i32| if named == -1 { d.float() } else { float_of(named) };
        let product = Self {
            a: Matrix::new(&a)?.transposed(desc.trans_a)?,
            b: Matrix::new(&b)?.transposed(desc.trans_b)?,
            c: Matrix::new(&c)?,
            d: Matrix::new(&d)?,
            bias: type_or(desc.bias_type)?,
            aux: type_or(desc.aux_type)?,
            batches: batches as usize,
            desc,
        };
        product.check_shapes()?;
        product.check_types()?;
        product.check_epilogue()?;
        Ok(product)
    }

    fn check_shapes(&self) -> CallResult {
        let fits = self.a.rows == self.d.rows
            && self.a.cols == self.b.rows
            && self.b.cols == self.d.cols
            && (self.c.rows, self.c.cols) == (self.d.rows, self.d.cols);
        if fits { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Checks that cuBLASLt supports this combination of types with fp32 sums.
    fn check_types(&self) -> CallResult {
        let computes_f32 = matches!(self.desc.compute_type, 68 | 69 | 74 | 75 | TF32);
        let (a, b) = (self.a.float, self.b.float);
        let operands = match (a, b) {
            (Float::Fp8(a), Float::Fp8(b)) => self.has_fp8(a, b)?,
            _ => a == b && (self.d.float == Float::F32 || self.d.float == a),
        };
        let supported = computes_f32
            && self.desc.scale_type == 0
            && self.desc.pointer_mode <= 1
            && operands
            && self.c.float == self.d.float;
        if !supported {
            return Err(NOT_SUPPORTED);
        }
        let config = config();
        let bf16_missing = self.a.float == Float::Bf16 && config.sm < 80;
        // CUDA 13 dropped all architectures before Turing.
        let dropped = config.cublaslt_version >= 130_000 && config.sm < 75;
        if bf16_missing || dropped { Err(ARCH_MISMATCH) } else { Ok(()) }
    }

    /// Whether cuBLASLt supports an fp8 matmul. Only A is transposed, sizes are multiples of 16, at
    /// most one of A and B is E5M2, the result has 16 bits or fp32, a bias has 16 bits, and both
    /// scales are given.
    /// Below sm_89: `ARCH_MISMATCH`.
    fn has_fp8(&self, a: Fp8, b: Fp8) -> Result<bool, c_int> {
        if config().sm < 89 {
            return Err(ARCH_MISMATCH);
        }
        let along = self.desc.trans_a == 1 && self.desc.trans_b == 0;
        let sizes = [self.d.rows, self.d.cols, self.a.cols];
        let sixteens = sizes.iter().all(|size| size.is_multiple_of(16));
        let to = matches!(self.d.float, Float::Bf16 | Float::F16 | Float::F32);
        let scaled = self.desc.scale_a != 0 && self.desc.scale_b != 0;
        let has_bias = Epilogue(self.desc.epilogue).uses_bias();
        let to = to && !(has_bias && self.bias == Float::F32);
        Ok(along && sixteens && to && scaled && (a, b) != (Fp8::E5m2, Fp8::E5m2))
    }

    fn check_epilogue(&self) -> CallResult {
        let epilogue = Epilogue(self.desc.epilogue);
        if !epilogue.is_known() {
            return Err(NOT_SUPPORTED);
        }
        if (epilogue.uses_bias() && self.desc.bias == 0)
            || (epilogue.uses_aux() && self.desc.aux == 0)
        {
            return Err(INVALID_VALUE);
        }
        // No manual says that the library ignores settings that the epilogue does not use.
        if !epilogue.uses_aux() && (self.desc.aux != 0 || self.desc.aux_ld != 0) {
            return Err(INVALID_VALUE);
        }
        let aux_ld = self.desc.aux_ld;
        let aux_fits = aux_ld % 8 == 0 && aux_ld >= self.d.rows as i64;
        if epilogue.uses_aux() && !aux_fits { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// Whether a step other than a bias follows the matmul.
    pub(super) fn has_step(&self) -> bool {
        Epilogue(self.desc.epilogue).has(Epilogue::STEPS)
    }

    /// Enqueues the matmul on a stream, by algorithm `algorithm` of the heuristic's list.
    pub(super) fn enqueue(
        self,
        stream: &Stream,
        operands: Operands,
        algorithm: usize,
    ) -> CallResult {
        if [operands.alpha, operands.beta, operands.a, operands.b, operands.d].contains(&0) {
            return Err(INVALID_VALUE);
        }
        if fails("gemm", stream.device) {
            return Err(EXECUTION_FAILED);
        }
        let device = &machine().devices[stream.device];
        device.load_once(self.code()).map_err(|_| EXECUTION_FAILED)?;
        // SAFETY: scalars on the host are read before the call returns, by the C interface.
        let read = |address: usize| unsafe { (address as *const f32).read_unaligned() };
        let on_host = self.desc.pointer_mode == 0;
        let scalars = on_host.then(|| (read(operands.alpha), read(operands.beta)));
        STATS.gemms.add(1);
        STATS.other_gemms.add(u64::from(algorithm > 0));
        STATS.fused_gemms.add(u64::from(self.has_step()));
        STATS.gemms_beside.add((self.desc.processors > 0).into());
        stream.push(move |_| {
            let (alpha, beta) = match scalars {
                Some(scalars) => scalars,
                None => (device_scalar(operands.alpha)?, device_scalar(operands.beta)?),
            };
            self.check_memory(&operands, beta)?;
            clock::pass_matmul(algorithm, self.has_step());
            if config().accounting {
                return Ok(());
            }
            let alpha = alpha * self.scale()?;
            let parts = algorithm + 1;
            (0..self.batches).for_each(|batch| self.run(batch, &operands, alpha, beta, parts));
            Ok(())
        });
        Ok(())
    }

    /// Code that is loaded at the first matmul of this kind.
    fn code(&self) -> LoadedCode {
        let types = [self.a.float, self.b.float, self.d.float, self.bias];
        let key = types.iter().fold(0, |key, float| 8 * key + float.number());
        let transposed = (self.desc.trans_a != 0, self.desc.trans_b != 0);
        let epilogue = u64::from(self.desc.epilogue) | u64::from(self.desc.processors > 0) << 15;
        LoadedCode::Product(
            (key * 4 + u64::from(transposed.0) * 2 + u64::from(transposed.1)) << 16 | epilogue,
        )
    }

    /// The product of the operands' scales.
    fn scale(&self) -> Result<f32, c_int> {
        let scales = [self.desc.scale_a, self.desc.scale_b].into_iter().filter(|at| *at != 0);
        scales.map(device_scalar).try_fold(1.0, |all, scale| scale.map(|scale| all * scale))
    }

    fn check_memory(&self, operands: &Operands, beta: f32) -> CallResult {
        self.a.check("matrix A", operands.a, self.batches)?;
        self.b.check("matrix B", operands.b, self.batches)?;
        if beta != 0.0 {
            self.c.check("matrix C", operands.c, self.batches)?;
        }
        self.d.check("matrix D", operands.d, self.batches)?;
        for scale in [self.desc.scale_a, self.desc.scale_b].into_iter().filter(|at| *at != 0) {
            check_accessible("scale", scale, 4)?;
        }
        let epilogue = Epilogue(self.desc.epilogue);
        if epilogue.uses_bias() {
            let count = if epilogue.has(Epilogue::BGRADB) { self.d.cols } else { self.d.rows };
            check_accessible("bias", self.desc.bias, count * self.bias.bytes())?;
        }
        if epilogue.uses_aux() {
            let count = (self.d.cols - 1) * self.desc.aux_ld as usize + self.d.rows;
            check_accessible("epilogue matrix", self.desc.aux, count * self.aux.bytes())?;
        }
        Ok(())
    }

    /// Runs the matmul of one batch, with sums over `parts` parts of k.
    fn run(&self, batch: usize, operands: &Operands, alpha: f32, beta: f32, parts: usize) {
        let (m, n) = (self.d.rows, self.d.cols);
        let a = self.gathered(&self.a, self.a.base(operands.a, batch), false);
        let b = self.gathered(&self.b, self.b.base(operands.b, batch), true);
        let mut sums = vec![0.0; m * n];
        multiply(&a, &b, &mut sums, m, n, parts);
        let c = self.c.base(operands.c, batch);
        if beta != 0.0 {
            for (index, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the whole matrix was checked before the batches run.
                let c = unsafe { self.c.float.load(c, self.c.at(index / n, index % n)) };
                *sum = alpha * *sum + beta * c;
            }
        } else {
            sums.iter_mut().for_each(|sum| *sum *= alpha);
        }
        self.finish(batch, &a, &b, &mut sums);
        let d = self.d.base(operands.d, batch);
        for (index, &sum) in sums.iter().enumerate() {
            // SAFETY: see above.
            unsafe { self.d.float.store(d, self.d.at(index / n, index % n), sum) };
        }
    }

    /// All elements in fp32, rounded to TF32 if the compute type is TF32.
    fn gathered(&self, matrix: &Matrix, base: usize, by_panels: bool) -> GatheredMatrix {
        let is_tf32 = self.desc.compute_type == TF32 || is_wrong("tf32");
        let tf32 = is_tf32 && matrix.float == Float::F32;
        let forgotten = (!by_panels && is_wrong("gemm")).then(|| matrix.cols - 1);
        let element = |i, j| {
            if forgotten == Some(j) {
                return 0.0;
            }
            // SAFETY: the whole matrix was checked before the batches run.
            let value = unsafe { matrix.float.load(base, matrix.at(i, j)) };
            if tf32 { round_to_tf32(value) } else { value }
        };
        GatheredMatrix::new(matrix.rows, matrix.cols, by_panels, element)
    }

    /// Applies the epilogue to the fp32 sums (m, n).
    fn finish(&self, batch: usize, a: &GatheredMatrix, b: &GatheredMatrix, sums: &mut [f32]) {
        let (m, n, k) = (self.d.rows, self.d.cols, self.a.cols);
        let epilogue = Epilogue(self.desc.epilogue);
        let bias =
            self.desc.bias + batch * self.desc.bias_batch_stride as usize * self.bias.bytes();
        let aux = self.desc.aux + batch * self.desc.aux_batch_stride as usize * self.aux.bytes();
        let aux_at = |i: usize, j: usize| i + j * self.desc.aux_ld as usize;
        // SAFETY: bias and epilogue matrix were checked before.
        let store_bias = |index: usize, value: f32| unsafe { self.bias.store(bias, index, value) };
        for (index, sum) in sums.iter_mut().enumerate() {
            let (i, j) = (index / n, index % n);
            if epilogue.has(Epilogue::GRADIENT) {
                // SAFETY: as above.
                let before = unsafe { self.aux.load(aux, aux_at(i, j)) };
                *sum = self.d.float.rounded(*sum) * gelu_gradient(before);
                continue;
            }
            if epilogue.has(Epilogue::BIAS) {
                // SAFETY: as above.
                *sum += unsafe { self.bias.load(bias, i) };
            }
            if epilogue.has(Epilogue::AUX) {
                // SAFETY: as above.
                unsafe { self.aux.store(aux, aux_at(i, j), *sum) };
                *sum = self.aux.rounded(*sum);
            }
            if epilogue.has(Epilogue::RELU) {
                *sum = sum.max(0.0);
            }
            if epilogue.has(Epilogue::GELU) {
                *sum = gelu(*sum);
            }
        }
        if epilogue.has(Epilogue::BGRAD) {
            (0..m).for_each(|i| store_bias(i, sums[i * n..(i + 1) * n].iter().sum()));
        }
        if epilogue.has(Epilogue::BGRADA) {
            (0..m).for_each(|i| store_bias(i, (0..k).map(|z| a.get(i, z)).sum()));
        }
        if epilogue.has(Epilogue::BGRADB) {
            (0..n).for_each(|j| store_bias(j, (0..k).map(|z| b.get(z, j)).sum()));
        }
    }
}

/// The bits of `cublasLtEpilogue_t`.
#[derive(Debug, Clone, Copy)]
struct Epilogue(u32);

impl Epilogue {
    const RELU: u32 = 2;
    const BIAS: u32 = 4;
    const BGRAD: u32 = 16;
    const GELU: u32 = 32;
    const GRADIENT: u32 = 64;
    const AUX: u32 = 128;
    const BGRADA: u32 = 256;
    const BGRADB: u32 = 512;
    /// All but a bias.
    const STEPS: u32 = Self::RELU
        | Self::BGRAD
        | Self::GELU
        | Self::GRADIENT
        | Self::AUX
        | Self::BGRADA
        | Self::BGRADB;

    fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }

    /// Whether the epilogue is supported: all but the epilogues with a ReLU mask.
    fn is_known(self) -> bool {
        matches!(self.0, 1 | 2 | 4 | 6 | 32 | 36 | 160 | 164 | 192 | 208 | 256 | 512)
    }

    fn uses_bias(self) -> bool {
        self.has(Self::BIAS | Self::BGRAD | Self::BGRADA | Self::BGRADB)
    }

    fn uses_aux(self) -> bool {
        self.has(Self::AUX)
    }
}

fn device_scalar(address: usize) -> Result<f32, c_int> {
    check_accessible("scalar", address, 4)?;
    // SAFETY: just checked.
    Ok(unsafe { (address as *const f32).read_unaligned() })
}

/// Rounds to the 10 stored bits of a TF32 mantissa, ties to even.
fn round_to_tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    let bits = value.to_bits();
    f32::from_bits(bits.wrapping_add(0xFFF + ((bits >> 13) & 1)) & !0x1FFF)
}

fn inner(x: f32) -> f32 {
    0.797_884_6 * (x + 0.044_715 * x * x * x)
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + inner(x).tanh())
}

fn gelu_gradient(x: f32) -> f32 {
    let tanh = inner(x).tanh();
    let slope = 0.797_884_6 * (1.0 + 3.0 * 0.044_715 * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
}
