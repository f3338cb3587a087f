//! The matrix product on the kernel threads, and its epilogue.

use super::{Memory, elementwise, not_a_kernel, slice, values, values_mut};
use crate::cpu::gemm::{Dst, Gemm, Matrix, MatrixMut, Src};
use crate::cpu::workers::Workers;
use crate::op::{Op, Product};
use crate::{Tensor, View, ViewMut};

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    let Some(Product { a, b, c, bias, scales, add, epilogue }) = Product::of(op) else {
        return not_a_kernel();
    };
    let mut scale = 1.0;
    for factor in scales.into_iter().flatten() {
        scale *= slice::<f32>(m, factor)?[0];
    }
    let ((rows, k), (_, n)) = (a.shape(), b.shape());
    let product = Gemm {
        m: rows,
        n,
        k,
        a: matrix(m, a)?,
        b: matrix(m, b)?,
        c: MatrixMut { data: dst(values_mut(m, c)?)?, row_stride: n },
        scale,
        beta: f32::from(u8::from(add)),
        bias: bias.map(|bias| values(m, bias).and_then(src)).transpose()?,
    };
    workers.multiply(product);
    epilogue.apart(a, c).map_or(Ok(()), |op| elementwise::run(&op, m, workers))
}

fn matrix(m: &impl Memory, t: Tensor) -> Result<Matrix<'_>, String> {
    let data = src(m.read(t))?;
    let (rows, cols) = t.shape();
    Ok(if t.is_transposed() { Matrix::transposed(data, rows) } else { Matrix::by_rows(data, cols) })
}

/// A view as an operand of a product.
pub(super) fn src(view: View<'_>) -> Result<Src<'_>, String> {
    match view {
        View::F16(x) => Ok(Src::F16(x)),
        View::Bf16(x) => Ok(Src::Bf16(x)),
        View::F32(x) => Ok(Src::F32(x)),
        View::E4m3(x) => Ok(Src::E4m3(x)),
        View::E5m2(x) => Ok(Src::E5m2(x)),
        View::F64(_) | View::I32(_) | View::U16(_) => {
            Err("an operand that is no tensor of values".into())
        }
    }
}

/// The same operand without its first `at` elements.
pub(super) fn tail(src: Src<'_>, at: usize) -> Src<'_> {
    match src {
        Src::F16(x) => Src::F16(&x[at..]),
        Src::Bf16(x) => Src::Bf16(&x[at..]),
        Src::F32(x) => Src::F32(&x[at..]),
        Src::E4m3(x) => Src::E4m3(&x[at..]),
        Src::E5m2(x) => Src::E5m2(&x[at..]),
    }
}

fn dst(view: ViewMut<'_>) -> Result<Dst<'_>, String> {
    match view {
        ViewMut::F16(x) => Ok(Dst::F16(x)),
        ViewMut::Bf16(x) => Ok(Dst::Bf16(x)),
        ViewMut::F32(x) => Ok(Dst::F32(x)),
        _ => Err("a product that is no tensor of values".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, noise};
    use crate::Dtype;
    use crate::op::{Epilogue, Op};

    fn transposed(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
        (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
    }

    #[test]
    fn a_product_is_the_formula_for_every_layout_and_type() {
        let (m, n, k) = (37, 45, 51);
        let (a, b, c, bias) = (noise(1, m * k), noise(2, k * n), noise(3, m * n), noise(4, n));
        for ((dtype, ulp), variant) in TYPES.iter().flat_map(|t| (0..8).map(move |v| (*t, v))) {
            let (flip_a, flip_b) = (variant & 1 != 0, variant & 2 != 0);
            let mut rig = Rig::new(1);
            let mut put = |x: &[f64], shape: (usize, usize), flip| match flip {
                false => rig.put(dtype, shape, x),
                true => rig.put(dtype, (shape.1, shape.0), &transposed(x, shape.0, shape.1)).t(),
            };
            let (ta, tb) = (put(&a, (m, k), flip_a), put(&b, (k, n), flip_b));
            let (tc, t_bias) = (rig.put(dtype, (m, n), &c), rig.put(Dtype::F32, (1, n), &bias));
            let (with_bias, add) = ((variant < 4).then_some(t_bias), variant % 3 == 0);
            rig.run(&Op::Gemm {
                a: ta,
                b: tb,
                c: tc,
                bias: with_bias,
                add,
                epilogue: Epilogue::None,
            });
            let want: Vec<f64> = (0..m * n)
                .map(|i| {
                    let sum: f64 = (0..k).map(|p| a[i / n * k + p] * b[p * n + i % n]).sum();
                    sum + with_bias.map_or(0.0, |_| bias[i % n]) + if add { c[i] } else { 0.0 }
                })
                .collect();
            assert_close(&rig.get(tc), &want, 1e-5, ulp);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (m, n, k) = (300, 260, 400);
        let run = |threads| {
            let mut rig = Rig::new(threads);
            let a = rig.put(Dtype::Bf16, (m, k), &noise(1, m * k));
            let b = rig.put(Dtype::Bf16, (k, n), &noise(2, k * n));
            let c = rig.out(Dtype::F32, (m, n));
            rig.run(&Op::product(a, b, c));
            rig.get(c)
        };
        assert_eq!(run(1), run(3));
    }
}
