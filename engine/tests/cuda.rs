//! The command line on GPUs, under a stand-in for the driver: what it says and what it ends with.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod common;

use common::{Done, Folder};

/// Runs `onebox` where the driver's stand-in is found, with four GPUs and `variables`.
fn onebox(folder: &Folder, args: &[&str], variables: &[(&str, &str)]) -> Done {
    let mut command = folder.command(args);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache")).env("FAKECUDA_DEVICES", "4");
    command.envs(variables.iter().copied());
    Folder::done(command)
}

const TRAIN: [&str; 6] = ["train", "tiny.ron", "--run-dir", "run", "--set", "device=Cuda"];

fn train(variables: &[(&str, &str)]) -> Done {
    onebox(&Folder::new(), &TRAIN, variables)
}

#[test]
fn doctor_lists_gpus_and_libraries() {
    let folder = Folder::new();
    let said = onebox(&folder, &["doctor"], &[("FAKECUDA_SM", "90")]).ok().stdout;
    for text in ["driver", "for CUDA 13.0", "3: ", "sm_90", "NVRTC", "cuBLASLt", "NCCL"] {
        assert!(said.contains(text), "`{text}` is not in:\n{said}");
    }
    assert!(said.contains("this machine trains on its GPUs"), "{said}");
    let none = onebox(&folder, &["doctor"], &[("FAKECUDA_DEVICES", "0")]).ok().stdout;
    assert!(none.contains("fail") && none.contains("`device: Cuda` is refused"), "{none}");
}

#[test]
fn a_run_on_gpus_writes_what_one_on_virtual_gpus_writes() {
    let folder = Folder::new();
    onebox(&folder, &TRAIN, &[]).ok();
    folder.train("cpu", &[]).ok();
    let (gpu, cpu) = (folder.metrics("run"), folder.metrics("cpu"));
    assert_eq!(gpu.len(), cpu.len());
    for (gpu, cpu) in gpu.iter().zip(&cpu).filter(|(_, cpu)| cpu["loss"].is_number()) {
        let apart = gpu["loss"].as_f64().unwrap() - cpu["loss"].as_f64().unwrap();
        // Bf16: see the limits of the equivalence matrix.
        assert!(apart.abs() < 3e-3, "{gpu} {cpu}");
    }
    assert!(folder.path("run/weights.safetensors").exists());
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_step() {
    let done = train(&[("FAKECUDA_MEMORY", "150000")]);
    done.refused(81, &["out of GPU memory before the first step: nothing was written"]);
    // Tensors alone would fit; kernels and products are in the plan as well.
    let done = train(&[("FAKECUDA_MEMORY", "300000")]);
    done.refused(81, &["nothing was written", "4.00 MiB  kernels and products"]);
    // Free when asked for, taken when allocated.
    train(&[("FAKECUDA_FAIL", "alloc:1@2")])
        .refused(81, &["out of device memory on rank 2", "by pool"]);
}

#[test]
fn a_failing_gpu_ends_the_run_with_its_name() {
    let lost = train(&[("FAKECUDA_FAIL", "lost:900@3")]);
    lost.refused(76, &["rank 3", "GPU 3", "ILLEGAL_ADDRESS"]);
    train(&[("FAKECUDA_FAIL", "gemm:40@1")]).refused(76, &["rank 1, GPU 1: gemm at "]);
    train(&[("FAKECUDA_FAIL", "kernel:60@2")]).refused(76, &["rank 2", "LAUNCH_FAILED"]);
    train(&[("FAKECUDA_FAIL", "launch:60@0")]).refused(76, &["rank 0, GPU 0", "OUT_OF_RESOURCES"]);
    train(&[("FAKECUDA_FAIL", "memcpy:70@1")]).refused(76, &["rank 1, GPU 1"]);
}

#[test]
fn a_failing_collective_ends_the_run() {
    for (fault, texts) in [("nccl-error:9", &["GPU", "NCCL"][..]), ("nccl-init:3", &["NCCL"])] {
        let done = train(&[("FAKECUDA_FAIL", fault)]).refused(76, texts);
        assert!(
            !done.stderr.contains("is stuck"),
            "a rank did not end by itself:\n{}",
            done.stderr
        );
    }
}

#[test]
fn what_a_gpu_needs_and_has_not_is_named() {
    train(&[("FAKECUDA_DEVICES", "0")]).refused(78, &["Cuda", "GPU"]);
    train(&[("FAKECUDA_FAIL", "compile:2")]).refused(76, &["kernels"]);
    train(&[("FAKECUDA_FAIL", "hostalloc:1@1")]).refused(76, &["rank 1", "pinning host memory"]);
    let apart = train(&[("FAKECUDA_PEER", "0"), ("FAKECUDA_DEVICES", "3")]);
    apart.refused(76, &["cannot read the memory of GPU", "without NCCL"]);
}

#[test]
fn bench_measures_gpus() {
    let folder = Folder::new();
    let args = ["bench", "step", "tiny.ron", "--set", "device=Cuda", "--steps", "2", "--json"];
    let said = onebox(&folder, &args, &[]).ok().stdout;
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert!(said["steps"] == 2 && said["exposed_seconds"].is_number(), "{said}");
    let said = onebox(&folder, &["bench", "copy", "--mib", "1", "--json"], &[]).ok().stdout;
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["device"], &said["bytes"]), (&"Cuda".into(), &(1 << 20).into()), "{said}");
}
