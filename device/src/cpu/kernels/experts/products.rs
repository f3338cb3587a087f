//! The matmuls of all experts. A thread computes whole experts, and all threads share an expert that
//! has much of the work. Each matmul is [`Gemm`], whose bits depend on neither.

use super::super::{Memory, not_a_kernel, slice, values, values_mut};
use super::ExpertOffsets;
use crate::cpu::gemm::{Gemm, Matrix, MatrixMut};
use crate::cpu::workers::{Parts, Workers};
use crate::op::{GroupedForm, Op};
use crate::{View, ViewMut};

/// Number of parts of the rows for each thread. All threads share an expert that has more rows than
/// one part: one thread alone would still compute it while the others are idle.
const SHARES: usize = 4;

/// Operations of a matmul that take as long as an element of other kernels.
const FLOP_PER_ELEMENT: usize = 32;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    let Op::GroupedGemm { form, a, b, c, experts, offsets, add } = *op else {
        return not_a_kernel();
    };
    let rows = a.shape().0;
    let offsets = ExpertOffsets::new(slice(m, offsets)?, rows)?;
    let ((n, k), stride) = (experts.shape, experts.stride);
    let (a, all) = (values(m, a)?, experts.all);
    // The right operand, the result, and the elements of the result for each unit of it.
    let (b, view, each) = match (form, b, c) {
        (GroupedForm::Forward, None, Some(c)) => (values(m, all)?, values_mut(m, c)?, n),
        (GroupedForm::InputGradient, None, Some(c)) => (values(m, all)?, values_mut(m, c)?, k),
        (GroupedForm::WeightGradient, Some(b), None) => {
            (values(m, b)?, values_mut(m, all)?, stride)
        }
        _ => return not_a_kernel(),
    };
    let by_rows = form != GroupedForm::WeightGradient;
    let results = ExpertResults { view, offsets: by_rows.then_some(offsets.0), each };
    let products = ExpertProducts { form, offsets, a, b, shape: (n, k), stride, add };
    multiply(workers, products, rows, results);
    Ok(())
}

/// Computes the matmuls of all experts.
fn multiply(
    workers: &Workers,
    products: ExpertProducts<'_>,
    rows: usize,
    mut results: ExpertResults<'_>,
) {
    let (offsets, (n, k)) = (products.offsets, products.shape);
    let flop = 2usize.saturating_mul(rows).saturating_mul(n).saturating_mul(k);
    let is_shared = |expert: usize| offsets.rows(expert).len() * SHARES * workers.threads() > rows;
    let alone = results.reborrow();
    let work = flop / FLOP_PER_ELEMENT;
    workers.split(offsets.count(), work, alone, &|experts, mut some, scratch| {
        for expert in experts {
            let (result, others) = some.part(1);
            if !is_shared(expert) {
                products.of(expert, result.view).serial(&mut scratch.gemm);
            }
            some = others;
        }
    });
    for expert in 0..offsets.count() {
        let (result, others) = results.part(1);
        if is_shared(expert) {
            workers.multiply(products.of(expert, result.view));
        }
        results = others;
    }
}

/// The matmuls of all experts, without their results.
#[derive(Clone, Copy)]
struct ExpertProducts<'a> {
    form: GroupedForm,
    offsets: ExpertOffsets<'a>,
    /// Rows of all experts.
    a: View<'a>,
    /// Matrices of all experts, or rows of all experts for the gradients of matrices.
    b: View<'a>,
    /// Shape of a matrix.
    shape: (usize, usize),
    /// Distance of matrices.
    stride: usize,
    /// Whether products are added to the old results.
    add: bool,
}

impl<'a> ExpertProducts<'a> {
    /// The matmul of `expert`, with its result `c`.
    fn of<'c>(self, expert: usize, c: ViewMut<'c>) -> Gemm<'c>
    where
        'a: 'c,
    {
        let (rows, (n, k)) = (self.offsets.rows(expert), self.shape);
        let of_rows = |all: View<'a>, cols: usize| all.slice(rows.start * cols..rows.end * cols);
        let matrix = || self.b.slice(expert * self.stride..expert * self.stride + n * k);
        let ([m, n, k], a, b) = match self.form {
            GroupedForm::Forward => {
                let a = Matrix::by_rows(of_rows(self.a, k), k);
                ([rows.len(), n, k], a, Matrix::transposed(matrix(), k))
            }
            GroupedForm::InputGradient => {
                let a = Matrix::by_rows(of_rows(self.a, n), n);
                ([rows.len(), k, n], a, Matrix::by_rows(matrix(), k))
            }
            GroupedForm::WeightGradient => {
                let a = Matrix::transposed(of_rows(self.a, n), n);
                ([n, k, rows.len()], a, Matrix::by_rows(of_rows(self.b, k), k))
            }
        };
        let c = MatrixMut { data: c, row_stride: n };
        let beta = f32::from(u8::from(self.add));
        Gemm { m, n, k, a, b, c, scale: 1.0, beta, bias: None }
    }
}

/// Results of consecutive experts: their rows, or their matrices.
struct ExpertResults<'a> {
    view: ViewMut<'a>,
    /// First rows of these experts, and the row after the last one. `None`: one unit for each expert.
    offsets: Option<&'a [i32]>,
    /// Elements of a row or a matrix.
    each: usize,
}

impl ExpertResults<'_> {
    fn reborrow(&mut self) -> ExpertResults<'_> {
        ExpertResults { view: self.view.reborrow(), offsets: self.offsets, each: self.each }
    }
}

impl Parts for ExpertResults<'_> {
    fn part(self, experts: usize) -> (Self, Self) {
        let Self { view, offsets, each } = self;
        let units = offsets.map_or(experts, |at| (at[experts] - at[0]) as usize);
        let (first, rest) = view.split_at(units * each);
        let [of_first, of_rest] = match offsets {
            Some(at) => [Some(&at[..=experts]), Some(&at[experts..])],
            None => [None, None],
        };
        (Self { view: first, offsets: of_first, each }, Self { view: rest, offsets: of_rest, each })
    }
}
