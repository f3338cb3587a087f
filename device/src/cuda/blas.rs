//! [`Op::Gemm`](crate::Op::Gemm) by cuBLASLt: fp32 sums, no TF32. The algorithm for a shape is
//! looked up once: a stored choice, or the first of the library's heuristic.

use super::blaslt::{Addresses, Handle, MatmulShape, Operand, Product, Step};
use super::driver::{Context, DeviceMemory, Stream};
use super::matmul_choices::Choice;
use crate::op::Product as Gemm;
use crate::{Dtype, Epilogue, FP8_SINCE, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Bytes of workspace for matmuls, in addition to their operands, on any GPU. With less, the
/// library may be unable to split a long sum of a matmul with few blocks over the idle cores.
pub(super) const WORKSPACE: u64 = 32 << 20;

/// Rows and columns of the matmuls that load the library's code. `PART` is the size of an operand
/// in bytes.
const SIDE: usize = 64;
const PART: u64 = (SIDE * SIDE * 4) as u64;

const fn square(dtype: Dtype, transposed: bool) -> Operand {
    Operand { dtype, rows: SIDE, cols: SIDE, stride: SIDE, transposed, align: 256 }
}

/// A shape of each kind of matmul: by type, transposition, bias, fp32 output, and epilogue. bf16
/// exists from sm_80 on, fp8 from sm_89 on.
fn kinds(sm: u32) -> Vec<MatmulShape> {
    let types = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let (mut all, processors) = (Vec::new(), None);
    for dtype in types.into_iter().filter(|dtype| *dtype != Dtype::Bf16 || sm >= 80) {
        for transposed in [(false, false), (true, false), (false, true), (true, true)] {
            let (a, b) = (square(dtype, transposed.0), square(dtype, transposed.1));
            for (d, bias) in [(dtype, None), (dtype, Some(dtype)), (Dtype::F32, None)] {
                all.push(MatmulShape {
                    a,
                    b,
                    d: square(d, false),
                    bias,
                    step: Step::None,
                    processors,
                });
            }
            // Epilogues of the forward pass, the input's gradient and the weight's gradient.
            let step = match transposed {
                _ if dtype == Dtype::F32 => continue,
                (true, false) => Step::Gelu,
                (false, false) => Step::GeluBackward,
                (false, true) => Step::SumsOfB,
                (true, true) => continue,
            };
            let bias = (step != Step::GeluBackward).then_some(dtype);
            all.push(MatmulShape { a, b, d: square(dtype, false), bias, step, processors });
        }
    }
    if sm >= FP8_SINCE {
        all.extend(kinds_of_fp8());
    }
    all
}

/// A shape of each kind of fp8 matmul: forward, gradient of inputs, gradient of weights.
fn kinds_of_fp8() -> impl Iterator<Item = MatmulShape> {
    use Dtype::{Bf16, E4m3, E5m2, F32};
    let kinds = [
        (E4m3, E4m3, Bf16, None),
        (E4m3, E4m3, Bf16, Some(Bf16)),
        (E4m3, E4m3, F32, None),
        (E4m3, E5m2, Bf16, None),
        (E4m3, E5m2, F32, None),
    ];
    kinds.into_iter().map(move |(a, b, d, bias)| MatmulShape {
        a: square(a, true),
        b: square(b, false),
        d: square(d, false),
        bias,
        step: Step::None,
        processors: None,
    })
}

#[derive(Debug)]
pub(super) struct Blas {
    // Declared first, so that it is destroyed before the handle.
    /// Matmuls by shape. `None`: the library has no algorithm for the shape, or the epilogue runs
    /// apart.
    products: HashMap<MatmulShape, Option<Product>>,
    /// Choices by the text of a shape. Without one, the library's first algorithm counts.
    choices: BTreeMap<String, Choice>,
    /// Choices that the library has refused, each with its shape and the reason.
    refusals: Vec<String>,
    handle: Handle,
    workspace: Workspace,
}

/// A matmul as the library may run it: a shape with its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatmulForm {
    pub(super) shape: MatmulShape,
    pub(super) at: Addresses,
}

/// The forms of a matmul: alone, and with its epilogue if the library may have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatmulForms {
    pub(super) plain: MatmulForm,
    pub(super) fused: Option<MatmulForm>,
}

/// Memory of a GPU that matmuls use in addition to their operands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Workspace {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Gemm {
    /// Whether the library adds the bias: it adds only a bias of the result's type, and to fp8 matmuls only one of 16 bits.
    pub(super) fn takes_bias(&self) -> bool {
        let fits =
            |bias: Dtype| bias == self.c.dtype() && (self.scales.is_none() || bias.bytes() == 2);
        self.bias.is_some_and(|bias| fits(bias.dtype()))
    }

    /// The epilogue as a step of the library, and its tensor. NVIDIA's reference requires rows of
    /// whole 16 bytes in the auxiliary matrix, and describes the steps for results of 16 bits.
    fn step(&self, at: &dyn Fn(Tensor) -> u64) -> Option<(Step, Tensor)> {
        let (step, tensor) = match self.epilogue {
            Epilogue::None => return None,
            Epilogue::Gelu { y } => (Step::Gelu, y),
            Epilogue::GeluBackward { x } => (Step::GeluBackward, x),
            Epilogue::RowSums { sums } => (Step::SumsOfB, sums),
        };
        let whole = self.c.shape().1.is_multiple_of(8) && at(self.c).is_multiple_of(16);
        let fits = at(tensor).is_multiple_of(16) && (step == Step::SumsOfB || whole);
        let half = |t: Tensor| t.dtype() == self.c.dtype() && t.dtype().bytes() == 2;
        let alone = !self.add && (self.bias.is_none() || (self.takes_bias() && step == Step::Gelu));
        (fits && alone && half(self.a) && half(tensor)).then_some((step, tensor))
    }
}

impl MatmulForms {
    /// The plain form, then the one with an epilogue, which is compared with the choice of the first.
    pub(super) fn all(self) -> impl Iterator<Item = MatmulForm> {
        std::iter::once(self.plain).chain(self.fused)
    }

    /// The forms of `gemm`, for which the library chooses for `processors` multiprocessors, or for
    /// all.
    pub(super) fn of(gemm: &Gemm, at: &dyn Fn(Tensor) -> u64, processors: Option<u32>) -> Self {
        // The library stores matrices by columns, so it computes the transposed matmul: c' = b' a'.
        let bias = gemm.bias.filter(|_| gemm.takes_bias());
        let plain = Addresses {
            a: at(gemm.b),
            b: at(gemm.a),
            d: at(gemm.c),
            bias: bias.map(at),
            aux: None,
            scales: gemm.scales.map(|[a, b]| [at(b), at(a)]),
            add: gemm.add,
        };
        let shape = MatmulShape {
            a: operand(gemm.b, plain.a),
            b: operand(gemm.a, plain.b),
            d: operand_with(gemm.c, plain.d, plain.bias),
            bias: bias.map(Tensor::dtype),
            step: Step::None,
            processors,
        };
        let fused = gemm.step(at).map(|(step, tensor)| {
            let (bias, addresses) = match step {
                Step::None => (shape.bias, plain),
                // The library's result is gelu, and its auxiliary matrix is the matmul.
                Step::Gelu => {
                    (shape.bias, Addresses { d: at(tensor), aux: Some(plain.d), ..plain })
                }
                Step::GeluBackward => (None, Addresses { aux: Some(at(tensor)), ..plain }),
                Step::SumsOfB => {
                    (Some(tensor.dtype()), Addresses { bias: Some(at(tensor)), ..plain })
                }
            };
            let d = operand_with(gemm.c, addresses.d, bias.and(addresses.bias));
            MatmulForm { shape: MatmulShape { d, bias, step, ..shape }, at: addresses }
        });
        Self { plain: MatmulForm { shape, at: plain }, fused }
    }
}

impl Blas {
    /// Opens the library on the bound context, without a workspace.
    pub(super) fn new() -> Result<Self, String> {
        Ok(Self {
            products: HashMap::with_capacity(256),
            choices: BTreeMap::new(),
            refusals: Vec::new(),
            handle: Handle::new()?,
            workspace: Workspace::default(),
        })
    }

    /// Sets the workspace of later matmuls.
    pub(super) const fn use_workspace(&mut self, workspace: Workspace) {
        self.workspace = workspace;
    }

    /// Runs a small matmul of each kind once, so that the library loads its code. It makes code of
    /// its own for each larger shape.
    pub(super) fn load(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        sm: u32,
    ) -> Result<(), String> {
        let memory = DeviceMemory::new(context, 5 * PART)?;
        let at = |i: u64| memory.start + i * PART;
        for shape in kinds(sm) {
            let add = false;
            let bias = shape.bias.map(|_| at(3));
            let aux = shape.step.has_aux().then(|| at(4));
            let scales = shape.is_fp8().then(|| [at(3), at(3)]);
            let addresses = Addresses { a: at(0), b: at(1), d: at(2), bias, aux, scales, add };
            if let Some(product) = self.search(&MatmulForm { shape, at: addresses }, 0, 1)?.first()
            {
                product.run(&self.handle, stream, addresses, 0)?;
            }
        }
        Ok(stream.synchronize()?)
    }

    /// Enqueues a matmul, its bias if the library [adds it](Gemm::takes_bias), and its epilogue if
    /// the library has one for the shape and no choice is against it. The library chooses for
    /// `processors` multiprocessors, or for all. Returns whether the epilogue is done.
    pub(super) fn gemm(
        &mut self,
        stream: &Stream,
        gemm: &Gemm,
        at: &dyn Fn(Tensor) -> u64,
        processors: Option<u32>,
    ) -> Result<bool, String> {
        let MatmulForms { plain, fused } = MatmulForms::of(gemm, at, processors);
        if let Some(fused) = fused
            && self.run(stream, fused)?
        {
            return Ok(true);
        }
        if self.run(stream, plain)? {
            return Ok(false);
        }
        Err("cuBLASLt has no algorithm for this product".into())
    }

    /// Looks up the algorithm of a shape that has not run.
    pub(super) fn prepare(&mut self, form: &MatmulForm) -> Result<(), String> {
        if self.products.contains_key(&form.shape) {
            return Ok(());
        }
        let product = self.product(form)?;
        self.products.insert(form.shape, product);
        Ok(())
    }

    /// Enqueues a matmul and returns true, if there is an algorithm for its shape.
    pub(super) fn run(&mut self, stream: &Stream, form: MatmulForm) -> Result<bool, String> {
        self.prepare(&form)?;
        match &self.products[&form.shape] {
            Some(product) => self.run_product(stream, product, form.at).map(|()| true),
            None => Ok(false),
        }
    }

    /// Enqueues a matmul by a given algorithm.
    pub(super) fn run_product(
        &self,
        stream: &Stream,
        product: &Product,
        at: Addresses,
    ) -> Result<(), String> {
        product.run(&self.handle, stream, at, self.workspace.address)
    }

    /// The chosen algorithm for a shape, or the library's first. `None` if the library has none, or
    /// if the epilogue runs apart.
    fn product(&mut self, form: &MatmulForm) -> Result<Option<Product>, String> {
        let workspace = self.workspace.bytes as usize;
        let text = form.shape.to_string();
        let refusal = match self.choices.get(&text) {
            None => None,
            Some(Choice::Apart) if form.shape.step == Step::None => {
                Some("it has no epilogue that could run apart".to_owned())
            }
            Some(Choice::Apart) => return Ok(None),
            Some(Choice::Algorithm(words)) => {
                match Product::stored(&self.handle, &form.shape, form.at, workspace, *words) {
                    Ok(product) => return Ok(Some(product)),
                    Err(why) => Some(why),
                }
            }
        };
        if let Some(why) = refusal {
            self.choices.remove(&text);
            self.refusals.push(format!("{text}: {why}"));
        }
        Ok(self.search(form, workspace, 1)?.pop())
    }

    /// The library's first `most` algorithms with at most `workspace` bytes. A search with an
    /// epilogue that fails finds none, and the matmul runs without the epilogue: if the GPU itself
    /// fails, the search without it fails too.
    fn search(
        &self,
        form: &MatmulForm,
        workspace: usize,
        most: usize,
    ) -> Result<Vec<Product>, String> {
        let MatmulForm { shape, at } = form;
        match Product::search(&self.handle, shape, *at, workspace, most) {
            Err(why) if shape.step != Step::None => {
                tracing::info!("cuBLASLt has no epilogue for {shape}, a kernel computes it: {why}");
                Ok(Vec::new())
            }
            found => found,
        }
    }

    /// The library's first `most` algorithms for a matmul of the program.
    pub(super) fn candidates(
        &self,
        form: &MatmulForm,
        most: usize,
    ) -> Result<Vec<Product>, String> {
        self.search(form, self.workspace.bytes as usize, most)
    }

    /// Takes choices for shapes that have not run. They replace earlier ones for the same shapes.
    pub(super) fn choose(&mut self, choices: impl IntoIterator<Item = (String, Choice)>) {
        self.choices.extend(choices);
    }

    /// Sets the way to run a shape: an algorithm, or without the epilogue (`None`).
    pub(super) fn decide(&mut self, shape: MatmulShape, product: Option<Product>) -> Choice {
        let choice = choice_of(product.as_ref());
        self.choices.insert(shape.to_string(), choice);
        self.products.insert(shape, product);
        choice
    }

    /// The choice for a shape.
    pub(super) fn choice(&self, shape: &MatmulShape) -> Option<Choice> {
        self.choices.get(&shape.to_string()).copied()
    }

    /// Choices that the library has refused since the last call, each with its shape and the reason.
    pub(super) fn take_refusals(&mut self) -> Vec<String> {
        std::mem::take(&mut self.refusals)
    }
}

/// The choice of a shape with an algorithm, or without its epilogue (`None`).
fn choice_of(product: Option<&Product>) -> Choice {
    product.map_or(Choice::Apart, |product| Choice::Algorithm(product.words()))
}

/// The result of a matmul with a bias. cuBLASLt's search accepts alignments of matrices only, so a
/// lower alignment of the bias replaces that of the result.
fn operand_with(t: Tensor, at: u64, bias: Option<u64>) -> Operand {
    let whole = operand(t, at);
    // An algorithm loads 16 bytes at most.
    let low = bias.map(alignment).filter(|align| *align < 16);
    Operand { align: low.map_or(whole.align, |align| whole.align.min(align)), ..whole }
}

/// Alignment of an address in bytes, at most 256.
const fn alignment(at: u64) -> u32 {
    let zeros = at.trailing_zeros();
    1 << if zeros < 8 { zeros } else { 8 }
}

fn operand(t: Tensor, at: u64) -> Operand {
    let (rows, cols) = t.shape();
    // The stored shape: a transposed view is stored the other way round.
    let (rows, cols) = if t.is_transposed() { (cols, rows) } else { (rows, cols) };
    let (align, dtype, transposed) = (alignment(at), t.dtype(), t.is_transposed());
    Operand { dtype, rows: cols, cols: rows, stride: t.stride(), transposed, align }
}
