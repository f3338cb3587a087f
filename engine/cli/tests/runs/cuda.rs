//! The command line on GPUs, with a stand-in for the driver: its output and its exit codes.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{self, CommandOutput, Folder};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs `onebox` with the stand-in driver, four GPUs and `variables`.
pub(super) fn onebox(folder: &Folder, args: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    let mut command = folder.command(args);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache")).env("FAKECUDA_DEVICES", "4");
    command.env("FAKECUDA_QUEUE", "1000").env("FAKECUDA_CONNECTIONS", "1");
    command.env("FAKECUDA_BLOCKING", "1").env("FAKECUDA_NCCL_HOPS", "1");
    command.envs(variables.iter().copied());
    Folder::done(command)
}

const TRAIN: [&str; 6] = ["train", "tiny.ron", "--run-dir", "run", "--set", "device=Cuda"];

/// Trains without the start-up proof, whose calls would count among those that fail.
fn train(variables: &[(&str, &str)]) -> CommandOutput {
    let args = [&TRAIN[..], &["--set", "train.proof=false"]].concat();
    onebox(&Folder::new(), &args, variables)
}

#[test]
fn doctor_lists_gpus_and_libraries() {
    let folder = Folder::new();
    let output = onebox(&folder, &["doctor"], &[("FAKECUDA_SM", "90")]).ok().stdout;
    let libraries = ["NVRTC", "cuBLASLt", "NCCL", "cuDNN", "9.19.0"];
    for text in ["driver", "for CUDA 13.0", "3: ", "sm_90"].into_iter().chain(libraries) {
        assert!(output.contains(text), "`{text}` is not in:\n{output}");
    }
    assert!(output.contains("this machine trains on its GPUs"), "{output}");
    // A driver without a GPU is a failure. A machine without a driver is not expected to have GPUs.
    let none = onebox(&folder, &["doctor"], &[("FAKECUDA_DEVICES", "0")]).refused(1, &[]).stdout;
    assert!(none.contains("fail") && none.contains("`device: Cuda` is refused"), "{none}");
}

/// A folder with links of these names to the library that stands in for all of CUDA.
fn libraries(folder: &Folder, at: &str, names: &[&str]) -> PathBuf {
    let at = folder.path(at);
    fs::create_dir_all(&at).unwrap();
    let library = fs::canonicalize(fake_cuda::library_folder().join("libcuda.so")).unwrap();
    for name in names {
        symlink(&library, at.join(name)).unwrap();
    }
    at
}

#[test]
fn libraries_are_found_without_the_library_path() {
    let folder = Folder::new();
    let driver = libraries(&folder, "driver", &["libcuda.so.1"]);
    let packages = "env/lib/python3.12/site-packages/nvidia";
    let wheel = |name: &str, files: &[&str]| {
        libraries(&folder, &format!("{packages}/{name}/lib"), files).join(files[0])
    };
    let compiler = wheel("cuda_nvrtc", &["libnvrtc.so.12", "libnvrtc-builtins.so.12.9"]);
    let products = wheel("cublas", &["libcublasLt.so.12"]);
    let collectives = wheel("nccl", &["libnccl.so.2"]);
    let of_cuda = "env/lib/python3.12/site-packages/nvidia_nccl_cu13-2.27.5.dist-info";
    fs::create_dir(folder.path(of_cuda)).unwrap();
    // The environment sees the packages of its parent.
    let at = "base/lib/python3.12/site-packages/nvidia/cudnn/lib";
    let attention = libraries(&folder, at, &["libcudnn.so.9"]).join("libcudnn.so.9");
    let home = folder.path("base/bin");
    let config = format!("home = {}\ninclude-system-site-packages = true\n", home.display());
    fs::write(folder.path("env/pyvenv.cfg"), config).unwrap();
    let toolkit = libraries(&folder, "cuda/lib64", &["libnvrtc.so.12", "libcublasLt.so.12"]);
    let program = folder.path("env/bin/onebox");
    fs::create_dir_all(folder.path("env/bin")).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_onebox"));
    if fs::hard_link(built, &program).is_err() {
        fs::copy(built, &program).unwrap();
    }
    let doctor_of = |program: &Path, path: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new(program);
        command.arg("doctor").current_dir(folder.path("")).env("XDG_CACHE_HOME", folder.path("c"));
        command.env("LD_LIBRARY_PATH", path).env("CUDA_HOME", folder.path("cuda"));
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_PATH"] {
            command.env_remove(name);
        }
        command.env("FAKECUDA_DEVICES", "1").envs(variables.iter().copied());
        Folder::done(command).ok().stdout
    };
    let doctor = |program: &Path, path: &str| doctor_of(program, path, &[]);
    let says = |message: &str, texts: &[String]| {
        for text in texts {
            assert!(message.contains(text), "`{text}` is not in:\n{message}");
        }
    };
    let from = |file: &Path, place: &str| format!(", {} ({place})", file.display());
    let own = "the Python environment of onebox";
    let driver = driver.to_str().unwrap();
    let builtins = compiler.with_file_name("libnvrtc-builtins.so.12.9");
    let texts = [
        format!("for CUDA 13.0, {driver}/libcuda.so.1"),
        format!("NVRTC         12.9{}, with {}", from(&compiler, own), builtins.display()),
        from(&products, own),
        from(&collectives, own),
        from(&attention, "the parent of onebox's Python environment"),
    ];
    let said = doctor(&program, driver);
    says(&said, &texts);
    // The name of a wheel's package has the CUDA version.
    assert!(!said.contains("of a wheel for CUDA"), "{said}");
    let remedy = "pip uninstall nvidia-nccl-cu13, then pip install nvidia-nccl-cu12".to_owned();
    let late = "is of a wheel for CUDA 13, and the driver is for CUDA 12".to_owned();
    let said = doctor_of(&program, driver, &[("FAKECUDA_DRIVER", "12040")]);
    says(&said, &[late, remedy.clone()]);
    let volta = "is of a wheel for CUDA 13, which has no code for GPU 0".to_owned();
    let said = doctor_of(&program, driver, &[("FAKECUDA_SM", "70")]);
    says(&said, &[volta, remedy]);
    // Without an environment around the program, the toolkit has the libraries.
    let [first, second] =
        ["libnvrtc.so.12", "libcublasLt.so.12"].map(|name| from(&toolkit.join(name), "CUDA_HOME"));
    says(&doctor(built, driver), &[first, second.clone()]);
    // Libraries of no wheel say for which CUDA they were built: NCCL in its file.
    let library = fs::read(fake_cuda::library_folder().join("libnccl.so.2")).unwrap();
    let text = b"NCCL version 2.24.3+cuda12.9";
    let at = library.windows(text.len()).position(|bytes| bytes == text).unwrap();
    let later = [&library[..at], b"NCCL version 2.24.3+cuda13.0", &library[at + text.len()..]];
    fs::write(toolkit.join("libnccl.so.2"), later.concat()).unwrap();
    libraries(&folder, "cuda/lib64", &["libcudnn.so.9"]);
    let said = doctor_of(built, driver, &[("FAKECUDA_CUDNN_CUDART", "13010")]);
    let of_toolkit = |version: &str, name: &str| {
        format!("{version} for CUDA 13{}", from(&toolkit.join(name), "CUDA_HOME"))
    };
    let fitting = [of_toolkit("2.24.3", "libnccl.so.2"), of_toolkit("9.19.0", "libcudnn.so.9")];
    says(&said, &fitting);
    assert!(!said.contains("built for"), "{said}");
    let variables = [("FAKECUDA_CUDNN_CUDART", "13010"), ("FAKECUDA_DRIVER", "12040")];
    let said = doctor_of(built, driver, &variables);
    let unfit = ["2.24.3", "9.19.0"]
        .map(|version| format!("{version} is built for CUDA 13, and the driver is for CUDA 12"));
    says(&said, &unfit);
    says(&said, &["NCCL", "cuDNN"].map(|name| format!("put {name} for CUDA 12 in its place")));
    // The user's own path precedes both. A file that does not load is passed over.
    let own_path = libraries(&folder, "own", &["libnvrtc.so.12"]);
    fs::write(own_path.join("libcublasLt.so.12"), "no library").unwrap();
    let path = format!("{driver}:{}", own_path.display());
    let first = from(&own_path.join("libnvrtc.so.12"), "LD_LIBRARY_PATH");
    says(&doctor(built, &path), &[first, second]);
}

#[test]
fn doctor_and_plan_tell_what_lies_beside_a_plan() {
    let folder = Folder::new();
    let output = onebox(&folder, &["doctor"], &[("FAKECUDA_SM", "90")]).ok().stdout;
    // 357 MiB of code, and 43 kinds of matmuls.
    assert!(output.contains("beside a plan: cuBLASLt 400.00 MiB"), "{output}");
    let plan = ["plan", "tiny.ron", "--set", "device=Cuda"];
    let output = onebox(&folder, &plan, &[("FAKECUDA_SM", "90")]).ok().stdout;
    for part in [
        "400.00 MiB  beside the plan: cuBLASLt's products",
        "1.00 GiB  beside the plan: NCCL, at most",
    ] {
        assert!(output.contains(part), "`{part}` is not in:\n{output}");
    }
    onebox(&folder, &TRAIN, &[("FAKECUDA_SM", "90")]).ok();
    let output = onebox(&folder, &plan, &[("FAKECUDA_SM", "90")]).ok().stdout;
    assert!(output.contains("beside the plan: NCCL, the most that a run has measured"), "{output}");
    // Another driver may need another amount.
    let other = [("FAKECUDA_SM", "90"), ("FAKECUDA_DRIVER", "12080")];
    let output = onebox(&folder, &plan, &other).ok().stdout;
    assert!(output.contains("NCCL, at most"), "{output}");
}

/// Another process allocates memory of the GPU during the first measurement.
#[test]
fn what_lies_beside_a_plan_is_measured_until_two_looks_agree() {
    let folder = Folder::new();
    let look = |percent| {
        let variables = [("FAKECUDA_DEVICES", "1"), ("FAKECUDA_BESIDE", percent)];
        let done = onebox(&folder, &["doctor"], &variables).ok();
        let products =
            |bytes: &str| done.stdout.contains(&format!("beside a plan: cuBLASLt {bytes} MiB"));
        assert!(products("454.00") != products("227.00"), "{}", done.stdout);
        (products("454.00"), done.stderr.contains("until two looks agree"))
    };
    assert_eq!(look("200"), (true, false));
    assert_eq!(look("100"), (true, true), "the most of two that differ, and a warning");
    assert_eq!(look("100"), (false, false), "two in a row agree");
    assert_eq!(look("200"), (false, false), "and nobody looks any more");
}

#[test]
fn what_these_gpus_cannot_do_is_refused_before_anything_starts() {
    let folder = Folder::new();
    let (volta, fp16) = (("FAKECUDA_SM", "70"), ["--set", "precision=Fp16"]);
    for verb in [&["config", "check"][..], &["plan"], &["train"]] {
        let args = [verb, &["tiny.ron", "--set", "device=Cuda"]].concat();
        let texts =
            ["`Bf16` needs sm_80 or newer: GPU 0, Fake GPU (sm_70), is sm_70", "precision: Fp16"];
        onebox(&folder, &args, &[volta]).refused(78, &texts);
        let more = [&args[..], &["--set", "parallel.data=12", "--set", "batch.global=24"]].concat();
        let text = "6 ranks on a GPU have 36 streams; its 32 hardware queues order those of 5";
        onebox(&folder, &more, &[]).refused(78, &[text, "use at most 20 ranks on 4 GPUs"]);
        let shared = [("FAKECUDA_DEVICES", "2"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8")];
        let text = "CUDA_DEVICE_MAX_CONNECTIONS=8 grants them 8 hardware queues";
        onebox(&folder, &args, &shared).refused(78, &[text, "unset CUDA_DEVICE_MAX_CONNECTIONS"]);
    }
    let train = [&TRAIN[..], &fp16].concat();
    let old = [("FAKECUDA_DRIVER", "12040"), ("FAKECUDA_NVRTC", "13.0")];
    let text = "NVRTC: 13.0 is of CUDA 13, and the driver is for CUDA 12";
    onebox(&folder, &train, &old).refused(78, &[text, "install that of CUDA 12"]);
    let text = "cuBLASLt: 13.0.0 has no code for GPU 0, Fake GPU (sm_70), sm_70";
    let new = [volta, ("FAKECUDA_CUBLASLT", "130000")];
    onebox(&folder, &train, &new).refused(78, &[text, "CUDA 12.9"]);
    let blackwell = [("FAKECUDA_SM", "120"), ("FAKECUDA_NVRTC", "12.6")];
    let text = "NVRTC: 12.6 does not compile for GPU 0, Fake GPU (sm_120), sm_120";
    onebox(&folder, &train, &blackwell).refused(78, &[text, "install NVRTC 12.8 or newer"]);
    let doctor = onebox(&folder, &["doctor"], &blackwell).refused(1, &[]).stdout;
    assert!(doctor.contains("12.6 does not compile for GPU 0"), "{doctor}");
    assert!(doctor.contains("install NVRTC 12.8 or newer"), "{doctor}");
    let unheard = [("FAKECUDA_SM", "90"), ("FAKECUDA_NVRTC_ARCHS", "70,80")];
    onebox(&folder, &train, &unheard).refused(78, &["sm_90", "install NVRTC 11.8 or newer"]);
    assert!(!folder.path("run").exists());
    onebox(&folder, &train, &[volta]).ok();
}

#[test]
fn a_run_on_gpus_writes_what_one_on_virtual_gpus_writes() {
    let folder = Folder::new();
    onebox(&folder, &TRAIN, &[]).ok();
    folder.train("cpu", &[]).ok();
    let (gpu, cpu) = (folder.metrics("run"), folder.metrics("cpu"));
    assert_eq!(gpu.len(), cpu.len());
    for (gpu, cpu) in gpu.iter().zip(&cpu).filter(|(_, cpu)| cpu["loss"].is_number()) {
        let difference = gpu["loss"].as_f64().unwrap() - cpu["loss"].as_f64().unwrap();
        // The limit for bf16 is that of the equivalence matrix.
        assert!(difference.abs() < 3e-3, "{gpu} {cpu}");
    }
    assert!(folder.path("run/weights.safetensors").exists());
    // A run from other GPUs than those of this machine can still be read.
    let old = [("FAKECUDA_SM", "70")];
    onebox(&folder, &["generate", "run", "--tokens", "4"], &old).ok();
    onebox(&folder, &["checkpoint", "show", "run"], &old).ok();
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_step() {
    let small = |bytes| train(&[("FAKECUDA_BESIDE", "0"), ("FAKECUDA_MEMORY", bytes)]);
    let done = small("150000");
    done.refused(81, &["out of GPU memory before the first step: nothing was written"]);
    // The tensors alone would fit; kernels and matmuls are in the plan as well.
    let done = small("300000");
    done.refused(81, &["nothing was written", "32.01 MiB  kernels and products"]);
    // The memory is free at the check, but not at the allocation.
    train(&[("FAKECUDA_FAIL", "alloc:1@2")])
        .refused(81, &["out of device memory on rank 2", "by pool"]);
}

#[test]
fn a_failing_gpu_ends_the_run_with_its_name() {
    let lost = train(&[("FAKECUDA_FAIL", "lost:720@3")]);
    lost.refused(76, &["rank 3", "GPU 3", "ILLEGAL_ADDRESS"]);
    // The check and the rank's start make fewer than 100 matmuls.
    train(&[("FAKECUDA_FAIL", "gemm:110@1")]).refused(76, &["rank 1, GPU 1: gemm at "]);
    train(&[("FAKECUDA_FAIL", "kernel:60@2")]).refused(76, &["rank 2", "LAUNCH_FAILED"]);
    train(&[("FAKECUDA_FAIL", "launch:60@0")]).refused(76, &["rank 0, GPU 0", "OUT_OF_RESOURCES"]);
    train(&[("FAKECUDA_FAIL", "memcpy:50@1")]).refused(76, &["rank 1, GPU 1"]);
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
    let without_nccl = train(&[("FAKECUDA_PEER", "0"), ("FAKECUDA_DEVICES", "3")]);
    without_nccl.refused(76, &["cannot read the memory of GPU", "without NCCL"]);
}

#[test]
fn bench_measures_gpus() {
    let folder = Folder::new();
    // On a GPU with more memory the matmuls are large, and the emulator is slow.
    let small = [("FAKECUDA_MEMORY", "1073741824"), ("FAKECUDA_BESIDE", "1")];
    let args = ["bench", "step", "tiny.ron", "--set", "device=Cuda", "--steps", "2", "--json"];
    let output = onebox(&folder, &args, &small).ok().stdout;
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert!(output["steps"] == 2 && output["exposed_seconds"].is_number(), "{output}");
    let output = onebox(&folder, &["bench", "copy", "--mib", "1", "--json"], &small).ok().stdout;
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        (&output["device"], &output["bytes"]),
        (&"Cuda".into(), &(1 << 20).into()),
        "{output}"
    );
    assert!(output["parts"]["both_share"].as_f64().is_some_and(|share| share > 0.0), "{output}");
}

/// Two small GPUs, with little memory outside of the plan.
const SMALL: [(&str, &str); 3] =
    [("FAKECUDA_MEMORY", "1073741824"), ("FAKECUDA_BESIDE", "1"), ("FAKECUDA_DEVICES", "2")];
const SAVE_BOX: [&str; 3] = ["bench", "--save-box", "here.ron"];

#[test]
fn the_gpus_and_the_host_are_measured_as_a_box_that_all_predictions_take() {
    let folder = Folder::new();
    let output = onebox(&folder, &SAVE_BOX, &SMALL).ok().stderr;
    assert!(output.contains("the driver is a stand-in without a GPU"), "{output}");
    let text = folder.read("here.ron");
    assert!(text.contains("THE DRIVER IS A STAND-IN WITHOUT A GPU"), "{text}");
    // Each rate is below the comment about its measurement.
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let rates = ["gemm_tflops", "fp32_tflops", "memory_gb_per_s", "link_gb_per_s"];
    for key in rates.iter().chain(&["node_gb_per_s", "core_gb_per_s"]) {
        let at = lines.iter().position(|line| line.starts_with(&format!("{key}: ")));
        let at = at.unwrap_or_else(|| panic!("no {key} in\n{text}"));
        let comment: Vec<&str> =
            lines[..at].iter().rev().take_while(|line| line.starts_with("//")).copied().collect();
        assert!(comment.iter().any(|line| line.contains("Measured")), "{key}: {comment:?}");
    }
    for part in
        ["AdamW of 262144 parameters", "up, ", "both ways at once", "sums of 1.00 MiB over 2 GPUs"]
    {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }
    // A plan reserves more memory for CUDA than such a GPU has.
    let larger = text.replace("gpu_memory: \"1.00GiB\"", "gpu_memory: \"8GiB\"");
    assert_ne!(larger, text);
    fs::write(folder.path("larger.ron"), larger).unwrap();
    let config = ["tiny.ron", "--box", "larger.ron", "--set", "batch.global=8"];
    let alone = ["--set", "parallel.data=1"];
    folder.onebox(&[&["plan"], &config[..], &alone].concat()).ok();
    folder.onebox(&[&["plan", "--search"], &config[..]].concat()).ok();
    let output = folder.onebox(&[&["simulate"], &config[..], &alone, &["--json"]].concat()).ok();
    let output: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    assert!(output["step_seconds"].as_f64().unwrap() > 0.0, "{output}");
    // Boxes of GPUs and boxes of cores may replace each other.
    let cores = onebox(&folder, &[&SAVE_BOX[..], &["--cores"]].concat(), &SMALL).ok();
    assert!(!cores.stderr.contains("stand-in") && folder.read("here.ron").contains("gelu: "));
    onebox(&folder, &SAVE_BOX, &SMALL).ok();
    assert!(folder.read("here.ron").contains("gemm_tflops: "));
}

#[test]
fn what_a_box_of_gpus_lacks_is_said() {
    let folder = Folder::new();
    let failing = [&SMALL[..], &[("FAKECUDA_FAIL", "nccl-init:1")]].concat();
    let output = onebox(&folder, &SAVE_BOX, &failing).ok().stderr;
    assert!(output.contains("sums of all GPUs at once are not measured"), "{output}");
    let text = folder.read("here.ron");
    assert!(
        !text.contains("peer_gb_per_s: ") && text.contains("`peer_gb_per_s` is left out"),
        "{text}"
    );
    fs::remove_file(folder.path("here.ron")).unwrap();
    let none = ["cannot be used", "--cores"];
    onebox(&folder, &SAVE_BOX, &[("FAKECUDA_DEVICES", "0")]).refused(78, &none);
    // A GPU that fails leaves no file.
    let lost = [&SMALL[..], &[("FAKECUDA_FAIL", "gemm:3@0")]].concat();
    onebox(&folder, &SAVE_BOX, &lost).refused(76, &["16-bit products", "GPU 0"]);
    assert!(!folder.path("here.ron").exists());
}

/// A GPU is lost in step 3, while the checkpoint of step 2 is being written with slow fsyncs.
#[test]
fn a_gpu_that_is_lost_beside_a_save_costs_no_checkpoint() {
    if !common::has_strace() {
        return;
    }
    // If there is time, the delay is longer than the wait for a failed run.
    let full = std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1");
    let delay = if full { 4_000_000 } else { 400_000 };
    let folder = Folder::new();
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e"]);
    command.arg(format!("inject=fsync:delay_enter={delay}:when=1+"));
    command.arg(env!("CARGO_BIN_EXE_onebox")).args(TRAIN).args([
        "--set",
        "train.checkpoint_every=2",
        "--set",
        "train.proof=false",
    ]);
    command.current_dir(folder.path("")).env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache")).env("FAKECUDA_DEVICES", "4");
    command.env("FAKECUDA_FAIL", "lost:720@3");
    let done = Folder::done(command);
    done.refused(76, &["rank 3, step 3", "GPU 3", "ILLEGAL", "checkpoint of step 2 saved"]);
    folder.onebox(&["checkpoint", "verify", "run"]).ok();
}
