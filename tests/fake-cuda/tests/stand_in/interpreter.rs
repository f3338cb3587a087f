//! The interpreter of PTX on texts written by hand: results of lanes, reconvergence, and refused
//! texts. No compiler is needed.

#![expect(clippy::expect_used, reason = "a test")]

use fake_cuda::ptx::{FaultKind, Memory, Module, Run, Shape};

const X: u64 = 0x1000;

/// Runs a body on 32 threads. %rd1 is the address of the thread's word of x, %r1 is its number.
fn run_of(body: &str) -> (Run, Vec<u32>) {
    let text = text_of(body);
    let module = Module::parse(&text).expect("PTX");
    let mut memory = Memory::default();
    memory.add(X, vec![0; 128], true);
    let shape = Shape { grid: [1, 1, 1], block: 32, shared_bytes: 0 };
    let run = module.kernels[0].run(&shape, &[X], &mut memory).expect("one argument");
    let words = memory.bytes(X).expect("x").as_chunks::<4>().0;
    (run, words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

fn text_of(body: &str) -> String {
    format!(
        ".version 8.8\n.target sm_80\n.address_size 64\n.visible .entry k(\n\t.param .u64 k_param_0\n)\n{{\n\
         .reg .pred %p<9>;\n.shared .align 4 .b8 s[128];\n\
         ld.param.u64 %rd0, [k_param_0];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd1, %rd0, %rd2;\ncvt.u32.u64 %r9, %rd2;\n{body}\nret;\n}}\n"
    )
}

/// The word that each lane stores from %r2.
fn words_of(body: &str) -> Vec<u32> {
    let (run, words) = run_of(&format!("{body}\nst.global.u32 [%rd1], %r2;"));
    assert!(run.faults.is_empty(), "{:#?}", run.faults);
    words
}

#[test]
fn integers_wrap_shift_and_divide() {
    let of = |body: &str| words_of(body)[3];
    assert_eq!(of("mul.lo.s32 %r2, %r1, -1431655765;"), 1);
    assert_eq!(of("sub.s32 %r3, %r1, 10;\nshr.s32 %r2, %r3, 1;"), (-4_i32).cast_unsigned());
    assert_eq!(of("shl.b32 %r2, %r1, 32;"), 0);
    assert_eq!(of("sub.s32 %r3, %r1, 10;\ndiv.s32 %r2, %r3, 2;"), (-3_i32).cast_unsigned());
    assert_eq!(of("bfi.b32 %r2, %r1, -1, 3, 29;"), 0b11111);
    assert_eq!(of("setp.lt.s32 %p1, %r1, -1;\nselp.b32 %r2, 1, 2, %p1;"), 2);
    assert_eq!(of("setp.lt.u32 %p1, %r1, -1;\nselp.b32 %r2, 1, 2, %p1;"), 1);
}

#[test]
fn floats_round_once_in_fma_and_pass_nan_by() {
    let float = |body: &str| f32::from_bits(words_of(&format!("{body}\nmov.b32 %r2, %f9;"))[0]);
    // (1 + 2^-12)^2 - 1 needs more bits than a rounded product has.
    let a = 1.0 + 2.0_f32.powi(-12);
    let bits = format!("0f{:08X}", a.to_bits());
    assert_eq!(float(&format!("fma.rn.f32 %f9, {bits}, {bits}, 0fBF800000;")), a.mul_add(a, -1.0));
    assert_ne!(a * a - 1.0, a.mul_add(a, -1.0));
    assert_eq!(float("max.f32 %f9, 0f7FC00000, 0f3F800000;"), 1.0);
    assert!(float("max.f32 %f9, 0f80000000, 0f00000000;").is_sign_positive());
    assert_eq!(float("ex2.approx.ftz.f32 %f9, 0fC3020000;"), 0.0, "2^-130 is subnormal");
    assert_eq!(float("rcp.approx.ftz.f32 %f9, 0f40400000;").to_bits(), 0x3eaa_aaaa, "not nearest");
    assert_eq!(float("rcp.approx.ftz.f32 %f9, 0f40800000;"), 0.25);
    assert_eq!(float("cvt.rn.f16.f32 %rs1, 0f3F803000;\ncvt.f32.f16 %f9, %rs1;"), 1.001_953_1);
    assert_eq!(
        float("cvt.rn.bf16.f32 %rs1, 0f3F808000;\nmov.b32 %r3, {0, %rs1};\nmov.b32 %f9, %r3;"),
        1.0
    );
}

#[test]
fn lanes_meet_behind_a_branch_and_behind_a_loop() {
    // Lane i runs i times through the loop; then all lanes shuffle.
    let body = "mov.u32 %r2, 0;\nmov.u32 %r3, %r1;\nsetp.eq.s32 %p1, %r3, 0;\n@%p1 bra $L2;\n\
                $L1:\nadd.s32 %r2, %r2, 2;\nadd.s32 %r3, %r3, -1;\nsetp.ne.s32 %p2, %r3, 0;\n@%p2 bra $L1;\n\
                $L2:\nshfl.sync.bfly.b32 %r2|%p3, %r2, 1, 31, -1;";
    assert_eq!(words_of(body), (0..32).map(|lane| 2 * (lane ^ 1)).collect::<Vec<u32>>());
}

#[test]
fn guarded_instructions_and_ends_are_of_some_lanes() {
    let (run, words) = run_of(
        "setp.gt.u32 %p1, %r1, 3;\nst.global.u32 [%rd1], 7;\n@%p1 ret;\nst.global.u32 [%rd1], 9;\n\
         setp.eq.s32 %p2, %r1, 0;\n@!%p2 st.global.u32 [%rd1], 8;",
    );
    assert!(run.faults.is_empty(), "{:#?}", run.faults);
    assert_eq!(words[..5], [9, 8, 8, 8, 7]);
    assert!(run.counts.lanes() < 32.0);
}

#[test]
fn lanes_of_a_warp_are_not_in_step() {
    let body = |between| {
        format!(
            "mov.u32 %r5, s;\nadd.s32 %r5, %r5, %r9;\nst.shared.u32 [%r5], %r1;\n{between}\nxor.b32 %r6, %r9, 4;\n\
             ld.shared.u32 %r2, [%r6];"
        )
    };
    let kinds = |between| -> Vec<FaultKind> {
        run_of(&body(between)).0.faults.iter().map(|fault| fault.kind).collect()
    };
    assert_eq!(kinds(""), [FaultKind::Race]);
    assert_eq!(kinds("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"), [FaultKind::Race]);
    assert!(kinds("bar.warp.sync -1;").is_empty());
    assert!(kinds("bar.sync 0;").is_empty());
}

/// Each lane copies its word of x to its word of s, between `before` and `after`. Then it reads a
/// word of s and stores it.
fn copied(before: &str, after: &str, read: &str) -> (Vec<FaultKind>, Vec<u32>) {
    let (run, words) = run_of(&format!(
        "st.global.u32 [%rd1], %r1;\nmov.u32 %r5, s;\nadd.s32 %r5, %r5, %r9;\nxor.b32 %r6, %r5, 4;\n{before}\n\
         cp.async.ca.shared.global [%r5], [%rd1], 4;\n{after}\nld.shared.u32 %r2, [{read}];\n\
         bar.sync 0;\nst.global.u32 [%rd1], %r2;"
    ));
    (run.faults.iter().map(|fault| fault.kind).collect(), words)
}

const COMMIT: &str = "cp.async.commit_group;";
const WAIT: &str = "cp.async.wait_group 0;";
const BARRIER: &str = "bar.sync 0;";

#[test]
fn a_copy_is_there_once_its_thread_has_waited_and_for_others_after_a_barrier() {
    let own = |after: &[&str]| copied("", &after.join("\n"), "%r5");
    for good in
        [&[COMMIT, WAIT][..], &["cp.async.wait_all;"], &[COMMIT, COMMIT, "cp.async.wait_group 1;"]]
    {
        assert_eq!(own(good), (vec![], (0..32).collect()), "{good:?}");
    }
    // Without a wait, and after waits that end other groups.
    for bad in [
        &[][..],
        &[COMMIT],
        &[WAIT, COMMIT],
        &[COMMIT, "cp.async.wait_group 1;"],
        &[COMMIT, BARRIER],
    ] {
        let (faults, words) = own(bad);
        assert_eq!(faults[0], FaultKind::Race, "{bad:?}");
        assert_eq!(words[0], u32::MAX);
    }
    let others = |after: &[&str]| copied("", &after.join("\n"), "%r6");
    assert_eq!(others(&[COMMIT, WAIT, BARRIER]), (vec![], (0..32).map(|lane| lane ^ 1).collect()));
    assert_eq!(others(&[COMMIT, WAIT]).0, [FaultKind::Race]);
    // Another thread's wait may come later than this read.
    assert_eq!(others(&[COMMIT, BARRIER, WAIT]).0, [FaultKind::Race]);
}

#[test]
fn nothing_touches_the_two_ends_of_a_copy_under_way() {
    let faults = |before: &str, after: &[&str]| copied(before, &after.join("\n"), "%r5").0;
    let over = "st.global.u32 [%rd1], 7;";
    assert_eq!(faults("", &[over, "cp.async.wait_all;"]), [FaultKind::Race]);
    assert!(faults("", &["cp.async.wait_all;", over]).is_empty());
    let into = "st.shared.u32 [%r5], 7;";
    assert_eq!(faults("", &[into, "cp.async.wait_all;"]), [FaultKind::Race]);
    assert!(faults(into, &["cp.async.wait_all;"]).is_empty());
    let again = "cp.async.ca.shared.global [%r5], [%rd1], 4;";
    assert_eq!(faults("", &[again, "cp.async.wait_all;"]), [FaultKind::Race]);
    // A read that no barrier orders before the copy.
    let (write, read) = (format!("{into}\n{BARRIER}"), "ld.shared.u32 %r7, [%r6];");
    assert_eq!(faults(&format!("{write}\n{read}"), &["cp.async.wait_all;"]), [FaultKind::Race]);
    assert!(faults(&format!("{write}\n{read}\n{BARRIER}"), &["cp.async.wait_all;"]).is_empty());
}

#[test]
fn bytes_that_a_copy_does_not_take_become_0() {
    let body = "st.global.u32 [%rd1], 9;\nmov.u32 %r5, s;\nadd.s32 %r5, %r5, %r9;\nsetp.lt.u32 %p1, %r1, 5;\n\
                selp.b32 %r4, 2, 0, %p1;\nadd.s64 %rd3, %rd1, 4096;\n\
                @%p1 mov.u64 %rd3, %rd1;\ncp.async.ca.shared.global [%r5], [%rd3], 4, %r4;\n\
                cp.async.wait_all;\nld.shared.u32 %r2, [%r5];";
    assert_eq!(words_of(body)[3..7], [9, 9, 0, 0]);
}

#[test]
fn what_the_interpreter_does_not_know_is_refused_by_name() {
    for unknown in [
        "tex.1d.v4.f32.s32 {%f1}, [t, {%r1}];",
        "add.rz.f32 %f1, %f2, %f3;",
        "add.ftz.f32 %f1, %f2, %f3;",
        "atom.global.add.u32 %r2, [%rd1], 1;",
        "cvt.rn.f16.f64 %rs1, %fd1;",
        "bar.sync 1;",
        "sin.approx.f32 %f1, %f2;",
        "cp.async.cg.shared.global [%r9], [%rd1], 8;",
        "cp.async.ca.shared.global [%r9], [%rd1], 4, %p1;",
        "cp.async.mbarrier.arrive.b64 [%r9];",
    ] {
        let error = Module::parse(&text_of(unknown)).expect_err(unknown);
        let name = unknown.split(' ').next().unwrap_or_default();
        assert!(error.contains(name) && error.contains("PTX line"), "{error}");
    }
}
