//! [`Op::Gemm`](crate::Op::Gemm) by cuBLASLt: fp32 sums, no TF32; the algorithm for a shape is looked up once.

use super::blaslt::{Addresses, Handle, Operand, Product, Shape};
use super::driver::Stream;
use crate::Tensor;
use std::collections::HashMap;

/// Bytes that products may use besides their operands.
pub(super) const fn workspace_bytes(sm: u32) -> u64 {
    if sm >= 90 { 32 << 20 } else { 4 << 20 }
}

#[derive(Debug)]
pub(super) struct Blas {
    // Declared first: destroyed before the handle.
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
}

impl Gemm {
    /// The bias can be added by the product itself: the library adds one of the result's type only.
    pub(super) fn takes_bias(&self) -> bool {
        self.bias.is_some_and(|bias| bias.dtype() == self.c.dtype())
    }
}

impl Blas {
    /// On the bound context. `workspace`: address and bytes.
    pub(super) fn new(workspace: (u64, u64)) -> Result<Self, String> {
        Ok(Self { products: HashMap::with_capacity(256), handle: Handle::new()?, workspace })
    }

    /// Enqueues a product, without its bias unless it [takes](Gemm::takes_bias) one.
    pub(super) fn gemm(
        &mut self,
        stream: &Stream,
        gemm: &Gemm,
        at: &dyn Fn(Tensor) -> u64,
    ) -> Result<(), String> {
        // The library thinks in columns, so it is asked for the transposed product: c' = b' a'.
        let bias = gemm.bias.filter(|_| gemm.takes_bias());
        let addresses =
            Addresses { a: at(gemm.b), b: at(gemm.a), d: at(gemm.c), bias: bias.map(at) };
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
                let product = Product::new(&self.handle, &shape, addresses.bias, workspace)?;
                self.products.entry(shape).or_insert(product)
            }
        };
        product.run(&self.handle, stream, addresses, self.workspace.0)
    }
}

fn operand(t: Tensor, at: u64) -> Operand {
    let (rows, cols) = t.shape();
    // As stored: a transposed view is stored the other way round.
    let (rows, cols) = if t.is_transposed() { (cols, rows) } else { (rows, cols) };
    let align = 1 << at.trailing_zeros().min(8);
    Operand { dtype: t.dtype(), rows: cols, cols: rows, transposed: t.is_transposed(), align }
}
