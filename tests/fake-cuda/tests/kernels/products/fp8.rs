//! Conversions to fp8 and fp8 matmuls, on the device and on the cpu backend.

use crate::common::in_child;
use crate::rig::{self, Rig, normal, nvrtc_or_skip, take_ran};
use device::{Dtype, MAXIMA, Op};

/// Whole tiles, parts of tiles, and one of each side.
const SHAPES: [(usize, usize); 4] = [(128, 64), (144, 80), (16, 208), (272, 16)];

fn conversions(mut rig: Rig, of: Dtype, shape @ (rows, cols): (usize, usize)) {
    let mut values: Vec<f64> = normal(1, rows * cols).iter().map(|x| x * x * x * 3e-3).collect();
    values[7] = 0.0;
    let x = rig.put(of, shape, &values);
    let maxima = rig.out(Dtype::F32, (1, MAXIMA));
    let scale = rig.out(Dtype::F32, (1, 1));
    let formats = [Dtype::E4m3, Dtype::E5m2];
    let outputs = formats.map(|to| [rig.out(to, (rows, cols)), rig.out(to, (cols, rows))]);
    let mut pair = rig.open();
    pair.check_exact(&Op::Maxima { x, maxima });
    for [y, transposed] in outputs {
        pair.check_exact(&Op::Quantize { x, maxima, y: Some(y), transposed: None, scale });
        pair.check_exact(&Op::Quantize { x, maxima, y: None, transposed: Some(transposed), scale });
        pair.check_exact(&Op::Quantize {
            x,
            maxima,
            y: Some(y),
            transposed: Some(transposed),
            scale,
        });
    }
}

#[test]
fn conversions_to_fp8_are_the_same_bits() {
    for of in rig::VALUES {
        for shape in SHAPES {
            conversions(Rig::new(0), of, shape);
        }
    }
}

/// A block of 16 warps reads each run, and a thread of the first warp reads more than one piece.
#[test]
fn largest_magnitudes_are_those_of_all_warps_of_a_block() {
    for of in rig::VALUES {
        let (mut rig, shape) = (Rig::new(0), (1040, 1040));
        let x = rig.put(of, shape, &normal(1, shape.0 * shape.1));
        let maxima = rig.out(Dtype::F32, (1, MAXIMA));
        rig.open().check_exact(&Op::Maxima { x, maxima });
    }
}

/// Also the kernels that NVRTC compiles; from sm_89 on, they use a conversion of the hardware.
#[test]
fn compiled_conversions_to_fp8_are_the_same_bits() {
    if !nvrtc_or_skip() {
        return;
    }
    for sm in [80, 89, 90] {
        for of in rig::VALUES {
            conversions(Rig::compiled(0, sm, 0.0), of, (144, 80));
        }
    }
    let ran = take_ran();
    assert!(["maxima", "quantize"].iter().all(|kernel| ran.contains_key(*kernel)));
}

/// Checks matmuls bit for bit. Sums of few multiples of 1/8 are exact, so D is rounded once.
fn check_products() {
    let whole = |seed: u64, n: usize| -> Vec<f64> {
        rig::noise(seed, n).iter().map(|x| (x * 8.0).round() / 8.0).collect()
    };
    let kinds =
        [(Dtype::E4m3, Dtype::E4m3), (Dtype::E5m2, Dtype::E4m3), (Dtype::E4m3, Dtype::E5m2)];
    for ((of_a, of_b), to) in
        kinds.into_iter().flat_map(|kinds| [Dtype::Bf16, Dtype::F32].map(|to| (kinds, to)))
    {
        let (m, k, n) = (32, 64, 48);
        let mut rig = Rig::new(0);
        let a = rig.put(of_a, (m, k), &whole(1, m * k));
        let b = rig.put(of_b, (n, k), &whole(2, n * k)).t();
        let c = rig.put_noise(to, (m, n), 3);
        let bias = rig.put_noise(to, (1, n), 4);
        let scales = [0.25, 8.0].map(|scale| rig.put(Dtype::F32, (1, 1), &[scale]));
        let mut pair = rig.open();
        for bias in [None, Some(bias)] {
            pair.check_exact(&Op::ScaledGemm { a, b, c, bias, scales });
        }
    }
}

#[test]
fn scaled_products_are_those_of_the_cpu_backend() {
    if rig::real() && std::env::var_os("FAKECUDA_TEST").is_none() {
        return check_products();
    }
    let cache = tempfile::tempdir().expect("a folder");
    let cache = cache.path().to_str().expect("a path in UTF-8");
    let variables = [("ONEBOX_REAL_GPU", "1"), ("XDG_CACHE_HOME", cache), ("FAKECUDA_SM", "90")];
    let _ = in_child(
        "products::fp8::scaled_products_are_those_of_the_cpu_backend",
        &variables,
        check_products,
    );
}
