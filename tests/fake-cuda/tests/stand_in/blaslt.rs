//! cuBLASLt matmuls against plain loops.
#![expect(unsafe_code, reason = "raw cuBLASLt calls")]
#![expect(
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    reason = "a test passes its own live buffers"
)]

use std::{ffi::c_void, sync::Arc};

use crate::common::in_child;
use cudarc::{
    cublaslt::{result, sys},
    driver::{CudaContext, CudaSlice, CudaStream, DevicePtr},
};
use half::{bf16, f16};
use sys::{
    cublasLtEpilogue_t as Epilogue, cublasLtMatmulDescAttributes_t as Attribute,
    cudaDataType_t as Type,
};

/// Bits of a value in a storage type.
fn encode(kind: Type, value: f32) -> Vec<u8> {
    match kind {
        Type::CUDA_R_16F => f16::from_f32(value).to_ne_bytes().to_vec(),
        Type::CUDA_R_16BF => bf16::from_f32(value).to_ne_bytes().to_vec(),
        _ => value.to_ne_bytes().to_vec(),
    }
}

fn decode(kind: Type, bytes: &[u8]) -> f32 {
    match kind {
        Type::CUDA_R_16F => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
        Type::CUDA_R_16BF => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// Values that every type holds exactly, and whose sums are exact in fp32.
fn value(seed: usize) -> f32 {
    ((seed * 7919 + 13) % 17) as f32 * 0.25 - 2.0
}

struct Case {
    input: Type,
    output: Type,
    transposes: [bool; 2],
    shape: [usize; 3],
    epilogue: Epilogue,
    beta: f32,
    batches: usize,
}

struct Outcome {
    d: Vec<f32>,
    bias: Vec<f32>,
    aux: Vec<f32>,
}

fn upload(stream: &Arc<CudaStream>, kind: Type, count: usize, seed: usize) -> CudaSlice<u8> {
    let bytes: Vec<u8> = (0..count).flat_map(|i| encode(kind, value(i + seed))).collect();
    stream.clone_htod(&bytes).unwrap()
}

fn download(stream: &Arc<CudaStream>, kind: Type, slice: &CudaSlice<u8>) -> Vec<f32> {
    let bytes = stream.clone_dtoh(slice).unwrap();
    bytes.chunks(encode(kind, 0.0).len()).map(|bytes| decode(kind, bytes)).collect()
}

fn set<T>(desc: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) {
    let pointer = std::ptr::from_ref(value).cast();
    // SAFETY: the descriptor is live, and the attribute has the size of the value, which is read
    // before the call returns.
    unsafe { result::set_matmul_desc_attribute(desc, attribute, pointer, size_of::<T>()) }.unwrap();
}

fn layout(kind: Type, rows: usize, cols: usize, batches: usize) -> sys::cublasLtMatrixLayout_t {
    use sys::cublasLtMatrixLayoutAttribute_t as Layout;
    let layout = result::create_matrix_layout(kind, rows as u64, cols as u64, rows as i64).unwrap();
    let (count, stride) = (batches as i32, (rows * cols) as i64);
    // SAFETY: the layout is live; an i32 and an i64, as these attributes are, which are read before the calls return.
    unsafe {
        let count = std::ptr::from_ref(&count).cast();
        let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        result::set_matrix_layout_attribute(layout, attribute, count, 4).unwrap();
        let stride = std::ptr::from_ref(&stride).cast();
        let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        result::set_matrix_layout_attribute(layout, attribute, stride, 8).unwrap();
    }
    layout
}

/// The bit of epilogues with an auxiliary matrix.
const AUX: u32 = 128;

fn multiply(stream: &Arc<CudaStream>, case: &Case) -> Outcome {
    let ([m, n, k], [ta, tb]) = (case.shape, case.transposes);
    let a = upload(stream, case.input, m * k * case.batches, 1);
    let b = upload(stream, case.input, k * n * case.batches, 2);
    let d = upload(stream, case.output, m * n * case.batches, 3);
    let bias = upload(stream, case.output, m.max(n), 4);
    let aux_ld = m.next_multiple_of(8);
    let aux = upload(stream, case.output, aux_ld * n, 5);
    let address = |slice: &CudaSlice<u8>| slice.device_ptr(stream).0;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let desc = result::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
    set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(ta));
    set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(tb));
    set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &case.epilogue);
    set(desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address(&bias));
    if case.epilogue as u32 & AUX != 0 {
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &address(&aux));
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(aux_ld as i64));
    }
    let flip = |flip: bool, rows, cols| if flip { (cols, rows) } else { (rows, cols) };
    let (a_rows, a_cols) = flip(ta, m, k);
    let (b_rows, b_cols) = flip(tb, k, n);
    let a_layout = layout(case.input, a_rows, a_cols, case.batches);
    let b_layout = layout(case.input, b_rows, b_cols, case.batches);
    let d_layout = layout(case.output, m, n, case.batches);
    let handle = result::create_handle().unwrap();
    let preference = result::create_matmul_pref().unwrap();
    // SAFETY: every handle is live; the buffers hold what the layouts say, and live until the stream has been synchronized.
    unsafe {
        let found = result::get_matmul_algo_heuristic(
            handle, desc, a_layout, b_layout, d_layout, d_layout, preference,
        )
        .unwrap();
        result::matmul(
            handle,
            desc,
            std::ptr::from_ref(&0.5f32).cast(),
            std::ptr::from_ref(&case.beta).cast(),
            address(&a) as *const c_void,
            a_layout,
            address(&b) as *const c_void,
            b_layout,
            address(&d) as *const c_void,
            d_layout,
            address(&d) as *mut c_void,
            d_layout,
            &found.algo,
            std::ptr::null_mut(),
            0,
            stream.cu_stream().cast(),
        )
        .unwrap();
    }
    Outcome {
        d: download(stream, case.output, &d),
        bias: download(stream, case.output, &bias),
        aux: download(stream, case.output, &aux),
    }
}

/// op(A)(i, z) and op(B)(z, j) of a batch, column-major.
fn operands(
    case: &Case,
    batch: usize,
) -> (impl Fn(usize, usize) -> f32, impl Fn(usize, usize) -> f32) {
    let ([m, n, k], [ta, tb]) = (case.shape, case.transposes);
    let a =
        move |i: usize, z: usize| value(1 + batch * m * k + if ta { z + i * k } else { i + z * m });
    let b =
        move |z: usize, j: usize| value(2 + batch * k * n + if tb { j + z * n } else { z + j * k });
    (a, b)
}

/// 0.5 A B + beta C before the epilogue.
fn expected(case: &Case, batch: usize, i: usize, j: usize) -> f32 {
    let [m, n, k] = case.shape;
    let (a, b) = operands(case, batch);
    let sum: f32 = (0..k).map(|z| a(i, z) * b(z, j)).sum();
    0.5 * sum + case.beta * value(3 + batch * m * n + i + j * m)
}

fn rounded(kind: Type, value: f32) -> f32 {
    decode(kind, &encode(kind, value))
}

const PLAIN: Epilogue = Epilogue::CUBLASLT_EPILOGUE_DEFAULT;

#[test]
fn all_transposes_types_and_batches_agree_with_loops() {
    in_child("blaslt::all_transposes_types_and_batches_agree_with_loops", &[], || {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let types = [
            (Type::CUDA_R_32F, Type::CUDA_R_32F),
            (Type::CUDA_R_16F, Type::CUDA_R_16F),
            (Type::CUDA_R_16F, Type::CUDA_R_32F),
            (Type::CUDA_R_16BF, Type::CUDA_R_16BF),
            (Type::CUDA_R_16BF, Type::CUDA_R_32F),
        ];
        for (input, output) in types {
            for transposes in [[false, false], [true, false], [false, true], [true, true]] {
                for (shape, beta, batches) in [([5, 19, 7], 0.0, 1), ([18, 33, 40], 1.0, 3)] {
                    let epilogue = PLAIN;
                    let case = Case { input, output, transposes, shape, epilogue, beta, batches };
                    let found = multiply(&stream, &case).d;
                    let [m, n, _] = shape;
                    for (index, found) in found.into_iter().enumerate() {
                        let (batch, rest) = (index / (m * n), index % (m * n));
                        let sum = expected(&case, batch, rest % m, rest / m);
                        assert_eq!(found, rounded(output, sum), "{transposes:?} {input:?}");
                    }
                }
            }
        }
    });
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh())
}

#[test]
fn epilogues_agree_with_loops() {
    in_child("blaslt::epilogues_agree_with_loops", &[], || {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let (m, n, k) = (6, 5, 4);
        let run = |epilogue| {
            let (input, output) = (Type::CUDA_R_16F, Type::CUDA_R_32F);
            let transposes = [true, false];
            let case = Case {
                input,
                output,
                transposes,
                shape: [m, n, k],
                epilogue,
                beta: 0.0,
                batches: 1,
            };
            (multiply(&stream, &case), case)
        };
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-5, "{a} {b}");
        let bias = |i| value(4 + i);
        let (plain, case) = run(Epilogue::CUBLASLT_EPILOGUE_BIAS);
        let (with_aux, _) = run(Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let before = expected(&case, 0, i, j) + bias(i);
            near(plain.d[i + j * m], before);
            near(with_aux.d[i + j * m], gelu(before));
            near(with_aux.aux[i + j * 8], before);
        }
        let (by_a, case) = run(Epilogue::CUBLASLT_EPILOGUE_BGRADA);
        let (by_b, _) = run(Epilogue::CUBLASLT_EPILOGUE_BGRADB);
        let (by_d, _) = run(Epilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD);
        let (a, b) = operands(&case, 0);
        (0..m).for_each(|i| near(by_a.bias[i], (0..k).map(|z| a(i, z)).sum()));
        (0..n).for_each(|j| near(by_b.bias[j], (0..k).map(|z| b(z, j)).sum()));
        (0..m).for_each(|i| near(by_d.bias[i], (0..n).map(|j| by_d.d[i + j * m]).sum()));
    });
}

/// The library's manual gives the pointer a meaning only with these epilogues.
#[test]
fn a_matrix_beside_the_product_is_refused_where_the_epilogue_has_none() {
    let name = "blaslt::a_matrix_beside_the_product_is_refused_where_the_epilogue_has_none";
    in_child(name, &[], || {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        stream.context().bind_to_thread().unwrap();
        let handle = result::create_handle().unwrap();
        let preference = result::create_matmul_pref().unwrap();
        let layout = layout(Type::CUDA_R_16F, 8, 8, 1);
        let find = |epilogue: Epilogue, auxiliary: [u64; 2]| {
            let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            let desc = result::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue);
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &auxiliary[0]);
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &auxiliary[1]);
            // SAFETY: every handle is live, and nothing is computed.
            let found = unsafe {
                result::get_matmul_algo_heuristic(
                    handle, desc, layout, layout, layout, layout, preference,
                )
            };
            found.is_ok()
        };
        let address = 1 << 20;
        assert!(find(PLAIN, [0, 0]) && find(Epilogue::CUBLASLT_EPILOGUE_GELU_AUX, [address, 8]));
        assert!(!find(PLAIN, [address, 0]) && !find(PLAIN, [0, 8]));
        assert!(!find(Epilogue::CUBLASLT_EPILOGUE_GELU_AUX, [0, 8]));
    });
}

#[test]
fn bf16_needs_sm_80() {
    in_child("blaslt::bf16_needs_sm_80", &[("FAKECUDA_SM", "70")], || {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        stream.context().bind_to_thread().unwrap();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let desc = result::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
        let handle = result::create_handle().unwrap();
        let preference = result::create_matmul_pref().unwrap();
        let find = |kind| {
            let layout = layout(kind, 8, 8, 1);
            // SAFETY: every handle is live, and nothing is computed.
            unsafe {
                result::get_matmul_algo_heuristic(
                    handle, desc, layout, layout, layout, layout, preference,
                )
            }
        };
        find(Type::CUDA_R_16F).unwrap();
        find(Type::CUDA_R_16BF).unwrap_err();
    });
}
