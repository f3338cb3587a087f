//! The matmul on the kernel threads, and its epilogue.

use super::{Memory, elementwise, not_a_kernel, slice, values, values_mut};
use crate::Tensor;
use crate::cpu::gemm::{Gemm, Matrix, MatrixMut};
use crate::cpu::workers::Workers;
use crate::op::{Op, Product};

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
        c: MatrixMut { data: values_mut(m, c)?, row_stride: c.stride() },
        scale,
        beta: f32::from(u8::from(add)),
        bias: bias.map(|bias| values(m, bias)).transpose()?,
    };
    workers.multiply(product);
    epilogue.separate_op(a, c).map_or(Ok(()), |op| elementwise::run(&op, m, workers))
}

fn matrix(m: &impl Memory, t: Tensor) -> Result<Matrix<'_>, String> {
    if !t.dtype().is_value() && !t.dtype().is_fp8() {
        return Err("an operand that is no tensor of values".into());
    }
    let (data, stride) = (m.read(t), t.stride());
    Ok(match t.is_transposed() {
        true => Matrix::transposed(data, stride),
        false => Matrix::by_rows(data, stride),
    })
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
