//! Kernels with one planted fault each: the interpreter names the kind, the line and the thread.
//! The same kernel without the fault has no report.

use crate::rig::{compile, nvrtc_or_skip};
use fake_cuda::ptx::{Fault, FaultKind, Memory, Run, Shape};

const PRELUDE: &str = "extern \"C\" __global__ void";
const X: u64 = 0x1_0000;

/// Runs a kernel with the body `body` on 64 threads; x has 64 floats, `written` or not.
fn run_of(body: &str, written: bool) -> Run {
    let source = format!("{PRELUDE} planted(float* x) {{\n  int i = threadIdx.x;\n{body}\n}}\n");
    let module = compile("planted.cu", &source, 80);
    let kernel = module.kernel("planted").expect("the kernel");
    let mut memory = Memory::default();
    memory.add(X, vec![0; 256], written);
    let shape = Shape { grid: [1, 1, 1], block: 64, shared_bytes: 0 };
    kernel.run(&shape, &[X], &mut memory).expect("arguments")
}

/// Checks that a fault of this kind is reported at this line of the body, counted from 1, and that
/// `good` has no fault. A race may also show as a read of bytes that are not written yet.
fn plant(kind: FaultKind, line: usize, bad: &str, good: &str) -> Option<Fault> {
    if !nvrtc_or_skip() {
        return None;
    }
    let faults = run_of(good, true).faults;
    assert!(faults.is_empty(), "{faults:#?}");
    let faults = run_of(bad, true).faults;
    // The body starts at the third line.
    let place = format!(":{}", line + 2);
    let found = faults.iter().find(|fault| fault.kind == kind && fault.source.ends_with(&place));
    assert!(found.is_some(), "{faults:#?}");
    let fault = found?.clone();
    assert!(fault.line > 0 && fault.kernel == "planted");
    Some(fault)
}

const SHARED: &str = "__shared__ volatile float s[64];\n";

#[test]
fn a_race_of_two_warps() {
    let body = |between| format!("{SHARED}s[i] = i;\n{between}\nx[i] = s[63 - i];");
    let fault = plant(FaultKind::Race, 4, &body(""), &body("__syncthreads();"));
    assert!(fault.is_none_or(|fault| fault.about.contains("after thread")));
}

/// Since Volta the threads of a warp run independently; a barrier of the warp orders them, and a
/// shuffle does not.
#[test]
fn a_race_within_a_warp() {
    let body = |between| format!("{SHARED}s[i] = i;\n{between}\nx[i] = s[i ^ 1];");
    plant(FaultKind::Race, 4, &body(""), &body("__syncwarp();"));
    let shuffle = body("if (__shfl_xor_sync(0xffffffffu, i, 1) > 64) x[0] = 0;");
    plant(FaultKind::Race, 4, &shuffle, &body("__syncwarp();"));
}

/// Warps that read bytes that another warp overwrites before the next barrier.
#[test]
fn a_race_of_a_reader_and_a_later_writer() {
    let body = |between| {
        format!(
            "{SHARED}s[i] = i;\n__syncthreads();\nfloat y = s[63 - i];\n{between}\ns[i] = y;\nx[i] = y;"
        )
    };
    plant(FaultKind::Race, 6, &body(""), &body("__syncthreads();"));
}

#[test]
fn a_race_in_global_memory() {
    plant(FaultKind::Race, 1, "x[i / 2] = i;", "x[i] = i;");
}

#[test]
fn a_read_of_shared_memory_that_nothing_wrote() {
    let body =
        |most: usize| format!("{SHARED}if (i < {most}) s[i] = i;\n__syncthreads();\nx[i] = s[i];");
    let fault = plant(FaultKind::Uninitialised, 4, &body(63), &body(64));
    assert!(fault.is_none_or(|fault| fault.thread == 63));
}

#[test]
fn a_read_of_global_memory_that_nothing_wrote() {
    if !nvrtc_or_skip() {
        return;
    }
    let faults = run_of("x[i] = x[i] + 1;", false).faults;
    assert!(faults.iter().any(|fault| fault.kind == FaultKind::Uninitialised), "{faults:#?}");
    assert!(run_of("x[i] = 1;", false).faults.is_empty());
}

#[test]
fn an_address_out_of_range() {
    let fault = plant(FaultKind::OutOfRange, 1, "x[i + 1] = i;", "x[i] = i;");
    assert!(fault.is_none_or(|fault| fault.thread == 63));
    let body = |at| format!("{SHARED}s[{at}] = i;\n__syncthreads();\nx[i] = s[i];");
    plant(
        FaultKind::OutOfRange,
        2,
        &body("i == 63 ? 64 * (int)gridDim.x : i").replace("= s[i]", "= i"),
        &body("i"),
    );
}

#[test]
fn a_misaligned_address() {
    let body =
        |bytes| format!("if (i < 8) *(float4*)((char*)x + {bytes} * i) = make_float4(1, 2, 3, 4);");
    let fault = plant(FaultKind::Misaligned, 1, &body("24"), &body("16"));
    assert!(fault.is_none_or(|fault| fault.thread == 1));
}

#[test]
fn a_barrier_that_some_threads_do_not_reach() {
    plant(
        FaultKind::Parted,
        1,
        "if (i < 40) __syncthreads();\nx[i] = i;",
        "__syncthreads();\nx[i] = i;",
    );
    plant(
        FaultKind::Parted,
        2,
        "if (i < 32) return;\n__syncthreads();\nx[i] = i;",
        "__syncthreads();\nx[i] = i;",
    );
}

#[test]
fn a_shuffle_that_some_lanes_do_not_reach() {
    let body = |lanes| format!("if (i % 32 < {lanes}) x[i] = __shfl_xor_sync(0xffffffffu, i, 1);");
    plant(FaultKind::Parted, 1, &body(16), &body(32));
}

/// Copies a word of x to s by `cp.async`; `after` decides whether there is a race.
fn copied(after: &str) -> String {
    format!(
        "__shared__ float s[64];\n\
         asm volatile(\"cp.async.ca.shared.global [%0], [%1], 4;\" :: \"r\"((unsigned)__cvta_generic_to_shared(s + i)), \"l\"(x + i) : \"memory\");\n\
         {after}"
    )
}
const WAIT: &str = "asm volatile(\"cp.async.wait_all;\" ::: \"memory\");";

#[test]
fn a_read_of_a_copy_that_is_under_way() {
    let body = |wait| copied(&format!("{wait}\n__syncthreads();\nfloat y = s[i];\nx[i] = y + 1;"));
    plant(FaultKind::Race, 5, &body(""), &body(WAIT));
}

/// The barrier must follow the wait.
#[test]
fn a_read_of_a_copy_for_which_only_its_own_thread_has_waited() {
    let body = |first, second| {
        copied(&format!("{first}\n{second}\nfloat y = s[63 - i];\n__syncthreads();\nx[i] = y;"))
    };
    let barrier = "__syncthreads();";
    plant(FaultKind::Race, 5, &body(barrier, WAIT), &body(WAIT, barrier));
    plant(FaultKind::Race, 5, &body(WAIT, ""), &body(WAIT, barrier));
}

#[test]
fn a_source_that_is_overwritten_while_its_copy_is_under_way() {
    let body = |first, second| copied(&format!("{first}\nx[i] = 5;\n{second}"));
    plant(FaultKind::Race, 4, &body("", WAIT), &body(WAIT, ""));
}

/// Two tiles in turn, as in kernels: a copy into a tile starts after all warps have read the tile.
#[test]
fn a_copy_into_a_tile_that_others_still_read() {
    let body = |before, after| {
        copied(&format!(
            "for (int k = 0; k < 3; k++) {{\n{WAIT}\n__syncthreads();\nx[i] = s[63 - i];\n{before}\ns[i] = k;\n{after}\n}}"
        ))
    };
    let barrier = "__syncthreads();";
    plant(FaultKind::Race, 8, &body("", barrier), &body(barrier, ""));
}

/// A column of a tile of 32 x 32 words is in one bank, unless rows are one word longer.
#[test]
fn conflicts_and_sectors_are_counted() {
    if !nvrtc_or_skip() {
        return;
    }
    let tile = |width: usize| {
        let body = format!(
            "__shared__ volatile float s[32 * {width}];\ns[i % 32 * {width}] = i / 32;\nx[i] = i;"
        );
        // Both warps write the same words.
        run_of(&body, true).counts
    };
    let (bad, good) = (tile(32), tile(33));
    assert_eq!((bad.passes, bad.least_passes), (64, 2));
    assert_eq!((good.passes, good.least_passes), (2, 2));
    assert_eq!((good.requests, good.sectors, good.least_sectors), (2, 8, 8));
    assert_eq!((good.touched, good.written), (256, 256));
    let spread = run_of("x[i * 8 & 63 | i >> 3] = i;", true).counts;
    assert_eq!((spread.sectors, spread.least_sectors), (16, 8));
}
