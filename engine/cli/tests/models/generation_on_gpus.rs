//! `onebox generate` on a GPU, with a stand-in for the driver, compared with the cores.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{CommandOutput, Folder};
use serde_json::Value;

const FOLDERS: [&str; 6] = ["gpt2", "llama3", "llama-linear", "mistral", "qwen2", "qwen3"];
const ON_GPU: [&str; 2] = ["--set", "device=Cuda"];

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/hf-{name}-tiny", env!("CARGO_MANIFEST_DIR"))
}

/// Runs `onebox` with the stand-in driver and `variables`.
fn onebox(folder: &Folder, args: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    let mut command = folder.command(args);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    command.env("FAKECUDA_QUEUE", "1000").env("FAKECUDA_CONNECTIONS", "1");
    command.env("FAKECUDA_BLOCKING", "1");
    command.envs(variables.iter().copied());
    Folder::done(command)
}

/// Outputs of `args` on the cores and on a GPU.
fn both(folder: &Folder, args: &[&str]) -> [String; 2] {
    let on_gpu = onebox(folder, &[&["generate"], args, &ON_GPU].concat(), &[]).ok().stdout;
    [folder.onebox(&[&["generate"], args].concat()).ok().stdout, on_gpu]
}

#[test]
fn a_text_from_a_gpu_has_the_tokens_of_the_cores() {
    let folder = Folder::new();
    for name in FOLDERS {
        let model = fixture(name);
        // The last prompt grows beyond the model's context, so its first tokens are dropped.
        let prompts = ["7", "1 2 3 4 5 6", "12 11 10 9 8 7 6 5 4 3 2 1"];
        let model: Vec<&str> =
            [&model[..]].into_iter().chain(prompts.iter().flat_map(|p| ["--prompt", *p])).collect();
        for how in [&["--temperature", "0"][..], &["--top-k", "20", "--seed", "3"]] {
            let args = [&model[..], &["--tokens", "9", "--json"], how].concat();
            let [cores, gpu] = both(&folder, &args);
            assert_eq!(cores.lines().count(), prompts.len());
            assert_eq!(cores, gpu, "{name} {how:?}");
        }
    }
    let chat = fixture("chat");
    let args = [&chat[..], "--chat", "--prompt", "what", "--tokens", "20", "--json"];
    let [cores, gpu] = both(&folder, &args);
    assert_eq!(cores, gpu);
}

/// Largest difference of two rows of logits, relative to the largest value of the first row.
fn largest_difference(folder: &Folder, model: &str, prompt: &str, sets: &[&str]) -> f64 {
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let of = |done: CommandOutput| -> Vec<f64> {
        let output: Value = serde_json::from_str(&done.ok().stdout).unwrap();
        output["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let args = ["generate", model, "--prompt", prompt, "--logits"];
    let cores = of(folder.onebox(&args));
    let gpu = of(onebox(folder, &[&args[..], &sets].concat(), &[]));
    let size = cores.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    assert_eq!(cores.len(), gpu.len());
    cores.iter().zip(gpu).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / size
}

#[test]
fn logits_from_a_gpu_differ_by_the_rounding_of_their_type() {
    let folder = Folder::new();
    for name in FOLDERS {
        let model = fixture(name);
        let of = |sets: &[&str]| largest_difference(&folder, &model, "5 4 3 2 1 0 9", sets);
        let (exact, half) = (of(&["device=Cuda"]), of(&["device=Cuda", "precision=Bf16"]));
        assert!(exact < 2e-6, "{name}: {exact:e}");
        assert!(half > 1e-5 && half < 5e-2, "{name}: {half:e}");
        let half = of(&["device=Cpu", "precision=Bf16"]);
        assert!(half > 1e-5 && half < 5e-2, "{name}, on the cores: {half:e}");
        let half = of(&["precision=Fp16", "device=Cuda"]);
        assert!(half > 1e-6 && half < 1e-2, "{name}, fp16: {half:e}");
    }
}

#[test]
fn a_run_on_gpus_generates_there_unless_it_is_told_otherwise() {
    let folder = Folder::new();
    let args = ["train", "tiny.ron", "--run-dir", "run", "-q", "--set", "device=Cuda"];
    onebox(&folder, &args, &[("FAKECUDA_DEVICES", "4")]).ok();
    let args = ["generate", "run", "--tokens", "30", "--temperature", "0"];
    let on_cores = [&args[..], &["--set", "device=Cpu"]].concat();
    let lost = [("FAKECUDA_FAIL", "kernel:60@0")];
    onebox(&folder, &args, &lost).refused(76, &["GPU 0", "LAUNCH_FAILED"]);
    let cores = onebox(&folder, &on_cores, &lost).ok().stdout;
    assert_eq!(onebox(&folder, &args, &[]).ok().stdout, cores);
    // Without a GPU, no other device computes instead.
    let remedy = ["no GPU computes this here", "--set device=Cpu"];
    folder.onebox(&args).refused(78, &remedy);
    onebox(&folder, &args, &[("FAKECUDA_DEVICES", "0")]).refused(78, &remedy);
    assert_eq!(folder.onebox(&on_cores).ok().stdout, cores);
}

#[test]
fn what_a_gpu_has_no_room_for_is_refused_with_its_parts() {
    let (folder, model) = (Folder::new(), fixture("qwen3"));
    let args = ["generate", &model, "--prompt", "1 2 3", "--tokens", "5", "--set", "device=Cuda"];
    let small = |bytes| [("FAKECUDA_BESIDE", "0"), ("FAKECUDA_MEMORY", bytes)];
    let parts =
        ["out of GPU memory: 32", "GPU 0 has", "free beside", "parameters", "keys and values"];
    let helps = ["--tokens", "--set precision=Bf16", "--set device=Cpu", "32.00 MiB  workspace"];
    let texts = [&parts[..], &helps].concat();
    onebox(&folder, &args, &small("33554432")).refused(81, &texts);
    let half = [&args[..], &["--set", "precision=Bf16"]].concat();
    let refused = onebox(&folder, &half, &small("33554432")).refused(81, &parts[..1]);
    assert!(!refused.stderr.contains("precision=Bf16"), "{}", refused.stderr);
    // The memory is free at the check, but not at the allocation.
    let taken = [("FAKECUDA_FAIL", "alloc:3")];
    onebox(&folder, &args, &taken).refused(81, &["out of device memory", "keys and values"]);
}

#[test]
fn heads_that_no_kernel_takes_are_refused_before_anything_is_read() {
    let folder = Folder::new();
    let wide =
        ["--set", "model.hidden=264", "--set", "model.heads=1", "--set", "parallel.tensor=1"];
    let args =
        [&["train", "tiny.ron", "--run-dir", "run", "-q", "--set", "device.count=2"], &wide[..]];
    let args = [&args.concat()[..], &["--set", "train.steps=1"]].concat();
    folder.onebox(&args).ok();
    let args = ["generate", "run", "--tokens", "2", "--temperature", "0"];
    folder.onebox(&args).ok();
    let message = ["heads of 264 elements", "at most 256", "--set device=Cpu"];
    onebox(&folder, &[&args[..], &ON_GPU].concat(), &[]).refused(78, &message);
}

#[test]
fn what_generate_cannot_be_set_to_is_refused() {
    let (folder, model) = (Folder::new(), fixture("qwen3"));
    let set = |value| ["generate", &model, "--prompt", "1", "--set", value];
    for value in ["device=Sim", "device=Cpu(threads: 2)", "model.layers=1", "precision"] {
        let message = "generate takes device=Cpu, device=Cuda, precision=Fp32";
        folder.onebox(&set(value)).refused(2, &[value, message]);
    }
    let half = [&set("device=Cuda")[..], &["--set", "precision=Bf16"]].concat();
    let old = [("FAKECUDA_SM", "70")];
    onebox(&folder, &half, &old).refused(78, &["needs sm_80", "sm_70", "precision=Fp16"]);
    onebox(&folder, &set("device=Cuda"), &old).ok();
}
