//! Matmuls by cuBLASLt, through the driver: the library's stand-in in a child, or a real GPU.

#[path = "products/fp8.rs"]
mod fp8;

use super::common::in_child;
use super::rig::{self, Rig, VALUES};
use device::{Dtype, Epilogue, Op, Tensor};

/// (m, k, n), and whether a and b are stored transposed.
const SHAPES: [((usize, usize, usize), [bool; 2]); 4] = [
    ((1, 3, 2), [false, false]),
    ((37, 70, 9), [true, false]),
    ((8, 64, 130), [false, true]),
    ((65, 24, 33), [true, true]),
];

/// Where rows are not whole runs of 16 bytes, NVIDIA's library rounds the sum before it adds the
/// bias. Sums of up to 8 need this; one ulp of the result covers larger ones.
fn rounding_before_bias(bias: Tensor) -> f64 {
    let whole = bias.bytes().is_multiple_of(16);
    if rig::real() && !whole { 8.0 * rig::ulp(bias.dtype()) } else { 0.0 }
}

/// Checks matmuls bit for bit. Sums of few multiples of 1/128 are exact, so D is rounded once.
fn check_products() {
    let of_types = VALUES.iter().flat_map(|of| [(*of, *of), (*of, Dtype::F32)]);
    for ((of, to), ((m, k, n), [a_transposed, b_transposed])) in
        of_types.flat_map(|types| SHAPES.map(|shape| (types, shape)))
    {
        let mut rig = Rig::new(usize::from(m % 2 == 1));
        let mut operand = |(rows, cols), transposed: bool, seed| match transposed {
            true => rig.put_noise(of, (cols, rows), seed).t(),
            false => rig.put_noise(of, (rows, cols), seed),
        };
        let (a, b) = (operand((m, k), a_transposed, 1), operand((k, n), b_transposed, 2));
        let (c, bias) = (rig.put_noise(to, (m, n), 3), rig.put_noise(to, (1, n), 4));
        let mut pair = rig.open();
        for add in [false, true] {
            // The library adds only a bias of the result's type.
            for bias in [None, (of == to).then_some(bias)] {
                let rounding = bias.map_or(0.0, rounding_before_bias);
                let ulps = if rounding > 0.0 { 1.0 } else { 0.0 };
                let epilogue = Epilogue::None;
                pair.check(&Op::Gemm { a, b, c, bias, add, epilogue }, rounding, ulps);
            }
        }
    }
}

/// Checks epilogues of the library (16 bits, whole runs of 8 columns) and by kernels afterwards.
fn check_epilogues() {
    for (dtype, (m, k, n)) in VALUES
        .iter()
        .flat_map(|of| [(8, 24, 40), (16, 70, 64), (24, 9, 13)].map(|shape| (*of, shape)))
    {
        let mut rig = Rig::new(0);
        let (a, b) = (rig.put_noise(dtype, (k, m), 1).t(), rig.put_noise(dtype, (k, n), 2));
        let (c, bias) = (rig.put_noise(dtype, (m, n), 3), rig.put_noise(dtype, (1, n), 4));
        let (x, y) = (rig.put_noise(dtype, (m, n), 5), rig.out(dtype, (m, n)));
        let sums = rig.out(dtype, (1, m));
        let mut pair = rig.open();
        for (epilogue, bias) in [
            (Epilogue::Gelu { y }, Some(bias)),
            (Epilogue::Gelu { y }, None),
            (Epilogue::GeluBackward { x }, None),
            (Epilogue::RowSums { sums }, None),
        ] {
            // NVIDIA's library takes GELU of the sum before it rounds the sum.
            let unrounded = rig::real() && matches!(epilogue, Epilogue::Gelu { .. });
            let rounding = if unrounded { 0.1 * rig::ulp(dtype) } else { 2e-6 };
            let absolute = bias.map_or(rounding, |bias| rounding.max(rounding_before_bias(bias)));
            pair.check(&Op::Gemm { a, b, c, bias, add: false, epilogue }, absolute, 1.0);
        }
    }
}

#[test]
fn products_have_epilogues() {
    if rig::real() && std::env::var_os("FAKECUDA_TEST").is_none() {
        return check_epilogues();
    }
    let cache = tempfile::tempdir().expect("a folder");
    let cache = cache.path().to_str().expect("a path in UTF-8");
    let variables = [("ONEBOX_REAL_GPU", "1"), ("XDG_CACHE_HOME", cache)];
    let _ = in_child("products::products_have_epilogues", &variables, check_epilogues);
}

#[test]
fn products_replace_what_is_there_or_add_to_it() {
    if rig::real() && std::env::var_os("FAKECUDA_TEST").is_none() {
        return check_products();
    }
    let cache = tempfile::tempdir().expect("a folder");
    let cache = cache.path().to_str().expect("a path in UTF-8");
    // The rig opens the first GPU that the driver has: here the stand-in's.
    let variables = [("ONEBOX_REAL_GPU", "1"), ("XDG_CACHE_HOME", cache)];
    let _ = in_child(
        "products::products_replace_what_is_there_or_add_to_it",
        &variables,
        check_products,
    );
}
