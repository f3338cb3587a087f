//! [`Op::Gemm`](crate::Op::Gemm) by cuBLASLt: fp32 sums, no TF32. The algorithm of a shape is
//! looked up once.

use super::blaslt::{Addresses, Handle, Operand, Product, Shape};
use super::driver::{Context, DeviceMemory, Failure, Stream};
use crate::{Dtype, FP8_SINCE, Op, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of workspace of products, besides their operands, on any GPU. With less, the library may
/// not split a long sum over the cores that a product of few blocks leaves idle.
pub(super) const WORKSPACE: u64 = 32 << 20;

/// Rows and columns of the products that load the library's code; `PART` is the size of an operand
/// in bytes.
const SIDE: usize = 64;
const PART: u64 = (SIDE * SIDE * 4) as u64;

/// A shape of each kind of product: by type, transposition, bias, and sums that stay in fp32. bf16
/// exists from sm_80 on, fp8 from sm_89 on.
fn kinds(sm: u32) -> Vec<Shape> {
    let types = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let mut all = Vec::new();
    for dtype in types.into_iter().filter(|dtype| *dtype != Dtype::Bf16 || sm >= 80) {
        for turned in [(false, false), (true, false), (false, true), (true, true)] {
            let operand = |dtype, transposed| Operand {
                dtype,
                rows: SIDE,
                cols: SIDE,
                transposed,
                align: 256,
            };
            let (a, b) = (operand(dtype, turned.0), operand(dtype, turned.1));
            for (d, bias) in [(dtype, None), (dtype, Some(dtype)), (Dtype::F32, None)] {
                all.push(Shape { a, b, d: operand(d, false), bias });
            }
        }
    }
    if sm >= FP8_SINCE {
        all.extend(kinds_of_fp8());
    }
    all
}

/// Those of fp8: forward, and of gradients with respect to inputs and to weights.
fn kinds_of_fp8() -> impl Iterator<Item = Shape> {
    use Dtype::{Bf16, E4m3, E5m2, F32};
    let operand =
        |dtype, transposed| Operand { dtype, rows: SIDE, cols: SIDE, transposed, align: 256 };
    let kinds = [
        (E4m3, E4m3, Bf16, None),
        (E4m3, E4m3, Bf16, Some(Bf16)),
        (E4m3, E4m3, F32, None),
        (E4m3, E5m2, Bf16, None),
        (E4m3, E5m2, F32, None),
    ];
    kinds.into_iter().map(move |(a, b, d, bias)| Shape {
        a: operand(a, true),
        b: operand(b, false),
        d: operand(d, false),
        bias,
    })
}

#[derive(Debug)]
pub(super) struct Blas {
    // Declared first, so that it is destroyed before the handle.
    products: HashMap<Shape, Product>,
    handle: Handle,
    workspace: (u64, u64),
}

/// The tensors of a product, as in the op.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) a: Tensor,
    pub(super) b: Tensor,
    pub(super) c: Tensor,
    pub(super) bias: Option<Tensor>,
    /// Scales of a and b.
    pub(super) scales: Option<[Tensor; 2]>,
    /// Whether the product is added to the old c.
    pub(super) add: bool,
}

impl Gemm {
    /// The product of an op, if it is one.
    pub(super) const fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::Gemm { a, b, c, bias, add } => Some(Self { a, b, c, bias, scales: None, add }),
            Op::ScaledGemm { a, b, c, bias, scales } => {
                Some(Self { a, b, c, bias, scales: Some(scales), add: false })
            }
            _ => None,
        }
    }

    /// Whether the library adds the bias: it adds only a bias of the result's type.
    pub(super) fn takes_bias(&self) -> bool {
        self.bias.is_some_and(|bias| bias.dtype() == self.c.dtype())
    }
}

impl Blas {
    /// Makes it on the bound context, without a workspace.
    pub(super) fn new() -> Result<Self, String> {
        let (products, workspace) = (HashMap::with_capacity(256), (0, 0));
        Ok(Self { products, handle: Handle::new()?, workspace })
    }

    /// Gives products the workspace (address, bytes).
    pub(super) const fn use_workspace(&mut self, workspace: (u64, u64)) {
        self.workspace = workspace;
    }

    /// Runs a small product of each kind once, so that the library loads its code.
    pub(super) fn load(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        sm: u32,
    ) -> Result<(), String> {
        let text = |e: Failure| e.to_string();
        let memory = DeviceMemory::new(context, 4 * PART).map_err(text)?;
        let at = |i: u64| memory.start + i * PART;
        for shape in kinds(sm) {
            let bias = shape.bias.map(|_| at(3));
            let scales = shape.is_fp8().then(|| [at(3), at(3)]);
            let addresses = Addresses { a: at(0), b: at(1), d: at(2), bias, scales, add: false };
            let product = Product::new(&self.handle, &shape, addresses, 0)?;
            product.run(&self.handle, stream, addresses, 0)?;
        }
        stream.synchronize().map_err(text)
    }

    /// Enqueues a product, and its bias if it [takes](Gemm::takes_bias) one.
    pub(super) fn gemm(
        &mut self,
        stream: &Stream,
        gemm: &Gemm,
        at: &dyn Fn(Tensor) -> u64,
    ) -> Result<(), String> {
        // The library stores matrices by columns, so it computes the transposed product: c' = b'
        // a'.
        let bias = gemm.bias.filter(|_| gemm.takes_bias());
        let addresses = Addresses {
            a: at(gemm.b),
            b: at(gemm.a),
            d: at(gemm.c),
            bias: bias.map(at),
            scales: gemm.scales.map(|[a, b]| [at(b), at(a)]),
            add: gemm.add,
        };
        let shape = Shape {
            a: operand(gemm.b, addresses.a),
            b: operand(gemm.a, addresses.b),
            d: operand(gemm.c, addresses.d),
            bias: bias.map(Tensor::dtype),
        };
        let product = match self.products.get(&shape) {
            Some(product) => product,
            None => {
                let workspace = self.workspace.1 as usize;
                let product = Product::new(&self.handle, &shape, addresses, workspace)?;
                self.products.entry(shape).or_insert(product)
            }
        };
        product.run(&self.handle, stream, addresses, self.workspace.0)
    }
}

fn operand(t: Tensor, at: u64) -> Operand {
    let (rows, cols) = t.shape();
    // The stored shape: a transposed view is stored the other way round.
    let (rows, cols) = if t.is_transposed() { (cols, rows) } else { (rows, cols) };
    let align = 1 << at.trailing_zeros().min(8);
    Operand { dtype: t.dtype(), rows: cols, cols: rows, transposed: t.is_transposed(), align }
}
