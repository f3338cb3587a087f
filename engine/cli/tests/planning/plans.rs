//! `onebox plan` and `onebox config` from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use std::fs;
use std::path::{Path, PathBuf};

/// All configs of the repository.
fn configs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let of = |folder: PathBuf| fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let all = of(folder.clone()).chain(of(folder.join("paper")));
    let mut configs: Vec<PathBuf> =
        all.filter(|p| p.extension().is_some_and(|e| e == "ron")).collect();
    configs.sort();
    assert!(configs.len() >= 17, "{configs:?}");
    configs
}

#[test]
fn every_config_of_the_repository_is_right_and_fits() {
    let folder = Folder::new();
    let large = r#"(gpus: 64, gpu_memory: "64GiB", node_memory: "4TiB")"#;
    fs::write(folder.path("large.ron"), large).unwrap();
    for config in configs() {
        let path = config.display().to_string();
        let checked = folder.onebox(&["config", "check", &path]);
        // Two of the configs train on files that every user must provide.
        let brought = ["../data/", "no such file", "1 error in"];
        let lacks = checked.code == 66 && brought.iter().all(|text| checked.stderr.contains(text));
        assert!(checked.code == 0 || lacks, "{path}: {}", checked.stderr);
        // The free memory of this machine does not matter here.
        let described = fs::read_to_string(&config).unwrap().contains("device: Sim(");
        let on_box = if described { &[][..] } else { &["--box", "large.ron"] };
        let done = folder.onebox(&[&["plan", &path], on_box].concat());
        assert!(
            done.code == 0 && done.stdout.contains("it fits"),
            "{path}: {} {}",
            done.stdout,
            done.stderr
        );
    }
}

/// Without a GPU to examine, no GPU counts as large enough.
#[test]
fn gpus_that_are_not_there_are_not_said_to_be_large_enough() {
    // A machine with a GPU would examine it.
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let folder = Folder::new();
    let plan = ["plan", "tiny.ron", "--set", "device=Cuda"];
    let done = folder.onebox(&plan);
    assert_eq!(done.code, 1, "{}", done.stderr);
    assert!(!done.stdout.contains("it fits"), "{}", done.stdout);
    for text in ["GPU memory was not checked: no NVIDIA driver", "--box h100-128gib"] {
        assert!(done.stdout.contains(text), "{}", done.stdout);
    }
    let json = folder.onebox(&[&plan[..], &["--json"]].concat());
    let plan: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert!(json.code == 1 && plan["fits"].is_null() && plan["not_checked"].is_string(), "{plan}");
}

#[test]
fn bf16_is_refused_on_described_boxes_that_lack_it() {
    let folder = Folder::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let path = |name: &str| root.join(name).display().to_string();
    let (config, volta) = (path("h100-1.3b.ron"), path("boxes/v100-32gb.ron"));
    let plan = ["plan", &config, "--box", &volta];
    let text =
        "`Bf16` needs sm_80 or newer: each GPU of `one V100` is sm_70, which has no bf16 products";
    folder.onebox(&plan).refused(78, &[text, "precision: Fp16"]);
    let done = folder.onebox(&[&plan[..], &["--set", "precision=Fp16"]].concat());
    assert!(done.code < 2, "{}", done.stderr);
}

#[test]
fn fp8_is_refused_on_described_boxes_that_lack_it_and_for_sizes_without_products() {
    let folder = Folder::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let path = |name: &str| root.join(name).display().to_string();
    let (config, ampere) = (path("h100-1.3b.ron"), path("boxes/dgx-a100.ron"));
    let fp8 = ["plan", &config, "--set", "precision=Fp8"];
    let text =
        "`Fp8` needs sm_89 or newer: each GPU of `DGX A100` is sm_80, which has no fp8 products";
    folder
        .onebox(&[&fp8[..], &["--box", &ampere]].concat())
        .refused(78, &[text, "precision: Bf16"]);
    let done = folder.onebox(&fp8);
    assert!(done.code < 2 && done.stdout.contains("transients"), "{}{}", done.stdout, done.stderr);
    let odd = ["--set", "model.ffn_hidden=8200"];
    let text =
        "products of fp8 have sizes in multiples of 16: 8200 columns of a rank's MLP are none";
    folder.onebox(&[&fp8[..], &odd].concat()).refused(78, &[text, "set `model.ffn_hidden`"]);
}

#[test]
fn seventy_billion_parameters_fit_a_dgx2() {
    let folder = Folder::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/dgx2-70b.ron");
    let done = folder.onebox(&["plan", &path.display().to_string(), "--json"]).ok();
    let plan: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(plan["fits"], true);
    let gib = |v: &serde_json::Value| v.as_f64().unwrap() / f64::from(1 << 30);
    assert!(plan["parameters"].as_f64().unwrap() > 70e9);
    // 2 bytes per parameter of an eighth of the model, and less than 7 GiB for the rest.
    let parameters = plan["gpu"]["pools"][0]["bytes"].as_f64().unwrap();
    assert_eq!(plan["gpu"]["pools"][0]["name"], "parameters");
    assert!((parameters / (plan["parameters"].as_f64().unwrap() / 4.0) - 1.0).abs() < 0.01);
    assert!(gib(&plan["gpu"]["bytes"]) < 23.0, "{}", gib(&plan["gpu"]["bytes"]));
    for node in plan["nodes"].as_array().unwrap() {
        assert_eq!(node["ranks"].as_array().unwrap().len(), 8);
        assert!(node["bytes"].as_u64().unwrap() < node["limit"].as_u64().unwrap());
    }
    // Recomputation adds a third to the model's own work.
    let step = &plan["step"];
    let ratio =
        16.0 * step["hardware_flops"].as_f64().unwrap() / step["model_flops"].as_f64().unwrap();
    assert!((1.2..1.4).contains(&ratio), "{ratio}");
}

#[test]
fn the_copy_that_is_saved_from_is_counted_and_goes_where_it_does_not_fit() {
    let folder = Folder::new();
    let plan = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        folder.onebox(&["plan", "tiny.ron", "--json"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let host = |plan: &serde_json::Value| plan["host_per_rank"]["bytes"].as_u64().unwrap();
    let every = "train.checkpoint_every=100";
    // If the copy fits: 12 bytes per parameter that a rank owns, and some padding.
    let none = "train.checkpoint_overhead=None";
    let (without, with) = (plan(&[none]).ok(), plan(&[every]).ok());
    // By default a run saves checkpoints.
    let by_default = read(&plan(&[]).ok().stdout);
    assert_eq!(host(&by_default), host(&read(&with.stdout)));
    let (without, with) = (read(&without.stdout), read(&with.stdout));
    let least = 12 * with["parameters"].as_u64().unwrap() / 4;
    let copy = host(&with) - host(&without);
    assert!((least..least * 5 / 4).contains(&copy), "{copy}, {least}");
    assert!(without["saving"].is_null());
    assert!(with["saving"].as_str().unwrap().contains("while training goes on"));
    // If the copy does not fit, the run waits, and says so, unless the config chooses otherwise.
    let large = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/dgx2-70b.ron");
    let report = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let config = config::load(&large, &sets).unwrap().config;
        let machine = layout::LocalMachine::default();
        predict::plan::memory_report(&config, &layout::build::lay_out(&config, &machine))
    };
    let (auto, background) =
        (report(&[every]), report(&[every, "train.checkpoint_writer=Background"]));
    assert!(auto.fits && auto.saving.unwrap().contains("does not fit the host's memory"));
    assert_eq!(auto.host_per_rank.bytes, report(&[]).host_per_rank.bytes);
    assert!(
        !background.fits
            && background.saving.unwrap().contains("checkpoint_writer=Foreground needs none")
    );
}

#[test]
fn a_plan_is_the_sum_of_its_buffers() {
    let folder = Folder::new();
    let done = folder.onebox(&["plan", "tiny.ron", "--json"]).ok();
    let plan: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    for memory in ["gpu", "host_per_rank"] {
        let memory = &plan[memory];
        let sum = |list: &str| {
            memory[list]
                .as_array()
                .unwrap()
                .iter()
                .map(|b| b["bytes"].as_u64().unwrap())
                .sum::<u64>()
        };
        let buffers = memory["buffers"].as_array().unwrap();
        assert_eq!(sum("pools"), memory["bytes"].as_u64().unwrap());
        // The copy for checkpoints is one piece.
        let copy = memory["pools"].as_array().unwrap();
        let copy = copy.iter().find(|pool| pool["name"] == "checkpoint copy");
        let copy = copy.map_or(0, |pool| pool["bytes"].as_u64().unwrap());
        let padding = memory["bytes"].as_u64().unwrap() - sum("buffers") - copy;
        assert!(padding <= 255 * buffers.len() as u64);
        assert!(buffers.iter().any(|b| b["name"].as_str().unwrap().starts_with("block.1.")));
    }
}

#[test]
fn one_of_a_thing_is_no_plural() {
    let folder = Folder::new();
    let ones = "parallel.tensor=1 parallel.data=1 device.count=1 model.layers=1 batch.micro=1 batch.global=1 train.steps=1";
    let sets: Vec<&str> = ones.split(' ').flat_map(|set| ["--set", set]).collect();
    for command in [&["plan"][..], &["config", "check"], &["data", "check"], &["data", "show"]] {
        let done = folder.onebox(&[command, &["tiny.ron"], &sets].concat()).ok();
        let output = done.stdout + &done.stderr;
        let words: Vec<&str> = output.split_whitespace().collect();
        let plurals = words.windows(2).filter(|pair| pair[0] == "1" && pair[1].ends_with('s'));
        let plurals: Vec<_> = plurals.collect();
        assert!(plurals.is_empty(), "{command:?}: {plurals:?} in {output}");
    }
    let output = folder.onebox(&[&["plan", "tiny.ron"], &sets[..]].concat()).ok().stdout;
    assert!(output.contains("TP 1 x DP 1 = 1 virtual GPU, "), "{output}");
}

#[test]
fn every_value_is_shown_with_its_origin() {
    let folder = Folder::new();
    let done = folder.onebox(&["config", "show", "tiny.ron", "--set", "train.seed=5"]).ok();
    let line = |key: &str| {
        done.stdout
            .lines()
            .find(|l| l.starts_with(key))
            .unwrap_or_else(|| panic!("{key}: {}", done.stdout))
    };
    assert!(line("model.layers").ends_with("line 3"), "{}", line("model.layers"));
    assert!(line("train.seed").ends_with("--set"));
    assert!(line("optimizer.beta2").ends_with("default"));
    assert!(line("model.ffn_hidden").contains("128"));
}

#[test]
fn sets_of_checkpoints_that_do_not_fit_are_given_up() {
    let folder = Folder::new();
    let sets = ["recompute=Block", "batch.micro=1", "batch.global=16", "offload.accumulate=Host"];
    let plan = |more: &[&str]| {
        let sets: Vec<&str> = sets.iter().chain(more).flat_map(|set| ["--set", set]).collect();
        folder.onebox(&[&["plan", "tiny.ron", "--json"], &sets[..]].concat())
    };
    let report: serde_json::Value = serde_json::from_str(&plan(&[]).ok().stdout).unwrap();
    let limit = format!("device.memory=\"{}B\"", report["gpu"]["bytes"]);
    plan(&[&limit]).ok();
    let refused = plan(&[&limit, "offload.first_forward=4"]);
    assert_eq!(refused.code, 1);
    assert!(refused.stdout.contains("offload.first_forward=1"), "{}", refused.stdout);
}

#[test]
fn the_plan_says_why_sums_of_micro_batches_take_four_bytes() {
    let folder = Folder::new();
    let says = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let stdout = folder.onebox(&[&["plan", "tiny.ron"], &sets[..]].concat()).ok().stdout;
        stdout.contains("gradient staging has 4 bytes a parameter")
    };
    let on_device = "offload.accumulate=Device";
    assert!(says(&[on_device]));
    // Sums on the host are no staging, fp32 is not rounded, and one micro-batch needs no sum.
    for sets in [
        &["offload.accumulate=Host"][..],
        &[on_device, "precision=Fp32"],
        &[on_device, "batch.global=4"],
        &["offload.optimizer=Device"],
    ] {
        assert!(!says(sets), "{sets:?}");
    }
}

#[test]
fn one_gpu_uses_both_sockets_of_a_box_where_its_states_need_them() {
    let folder = Folder::new();
    let text = "(gpus: 1, gpu_memory: \"80GiB\", numa_nodes: 2, node_memory: \"2MiB\", \
                gpu: (gemm_tflops: 500, fp32_tflops: 51, memory_gb_per_s: 2000, processors: 114, sm: 90), \
                host: (node_gb_per_s: 300, core_gb_per_s: 14, cores: 32, link_gb_per_s: 60))";
    fs::write(folder.path("two.ron"), text).unwrap();
    let run = |verb: &str, sets: &[&str]| {
        let base = ["device=Sim(box: \"two.ron\")", "parallel.data=1", "parallel.tensor=1"];
        let sets = base.iter().chain(sets).flat_map(|set| ["--set", set]);
        folder.onebox(&[verb, "tiny.ron", "--json"].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let document =
        |done: &CommandOutput| serde_json::from_str::<serde_json::Value>(&done.stdout).unwrap();
    let bytes = |plan: &serde_json::Value| -> Vec<u64> {
        plan["nodes"].as_array().unwrap().iter().map(|n| n["bytes"].as_u64().unwrap()).collect()
    };
    let small = document(&run("plan", &[]).ok());
    assert_eq!((bytes(&small)[1], &small["placed"]), (0, &serde_json::json!([])));
    // These states need more than one node has.
    let layers = "model.layers=12";
    let large = document(&run("plan", &[layers]).ok());
    let [near, far] = bytes(&large)[..] else { panic!("{large}") };
    assert!(near > far && far > 0 && near + far > 2 << 20, "{near} {far}");
    let why = large["placed"][0].as_str().unwrap();
    assert!(why.contains("all sockets") && why.contains("crosses the link"), "{why}");
    let refused = run("plan", &[layers, "offload.sockets=Near"]);
    assert_eq!((refused.code, &document(&refused)["binding"]["what"]), (1, &"node 0".into()));
    assert!(bytes(&document(&run("plan", &["offload.sockets=All"]).ok()))[1] > 0);
    // Parameters on the host are mostly staging: more than the rest of the node next to the GPU.
    let host = ["offload.parameters=Host", "offload.resident_blocks=0", "recompute=Block"];
    let host =
        [&host[..], &["precision=Bf16", "offload.master=Split", "offload.moments=Bf16"]].concat();
    let sets = [&host[..], &["model.layers=24", "offload.sockets=All"]].concat();
    let large = document(&run("plan", &sets).ok());
    let [near, far] = bytes(&large)[..] else { panic!("{large}") };
    assert!(near <= 2 << 20 && far > near / 2, "{near} {far}");
    let why = large["placed"][0].as_str().unwrap();
    assert!(why.contains("node 0 does not hold all staging of its GPUs"), "{why}");
    // With twice the cores and channels, an update that is not hidden is faster.
    fs::write(folder.path("two.ron"), text.replace("2MiB", "64GiB")).unwrap();
    let seconds = |sockets: &str| {
        let sets = ["offload.update=Serial", "model.hidden=1024", sockets];
        document(&run("simulate", &sets).ok())["step_seconds"].as_f64().unwrap()
    };
    assert!(seconds("offload.sockets=All") < 0.9 * seconds("offload.sockets=Near"));
}

/// The listing and the totals of `plan` are counted separately; waits name earlier ops.
#[test]
fn every_op_of_a_step_is_listed_with_its_place_and_what_it_waits_for() {
    let folder = Folder::new();
    for update in ["Overlapped", "Serial", "Speculative", "Delayed(after_step: 3)"] {
        let set = format!("offload.update={update}");
        let json = |args: &[&str]| {
            let args = [&["plan", "tiny.ron", "--json", "--set", &set], args].concat();
            let done = folder.onebox(&args).ok();
            serde_json::from_str::<serde_json::Value>(&done.stdout).unwrap()
        };
        let (listed, plan) = (json(&["--ops"]), json(&[]));
        let ops = listed["ops"].as_array().unwrap();
        for (number, op) in (1..).zip(ops) {
            assert_eq!(op["number"], number, "{op}");
            let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
            let source = fs::read_to_string(place.join(op["file"].as_str().unwrap())).unwrap();
            let line = op["line"].as_u64().unwrap() as usize;
            assert!((1..=source.lines().count()).contains(&line), "{op}");
            assert!(!op["tensors"].as_array().unwrap().is_empty(), "{op}");
            for wait in op["waits"].as_array().unwrap() {
                let wait = wait.as_i64().unwrap();
                assert!(wait < number, "{op}");
                let other = usize::try_from(wait - 1).ok().map(|i| &ops[i]["lane"]);
                assert!(other.is_none_or(|lane| *lane != op["lane"]), "{op}");
            }
        }
        for lane in plan["step"]["lanes"].as_array().unwrap() {
            let of_lane = || ops.iter().filter(|op| op["lane"] == lane["lane"]);
            assert_eq!(lane["ops"], of_lane().count(), "{update}: {lane}");
            let bytes: u64 = of_lane().map(|op| op["bytes"].as_u64().unwrap()).sum();
            assert_eq!(lane["bytes"], bytes, "{update}: {lane}");
        }
        let flops: f64 = ops.iter().map(|op| op["flops"].as_f64().unwrap()).sum();
        let of_plan = plan["step"]["hardware_flops"].as_f64().unwrap();
        assert!((flops / of_plan - 1.0).abs() < 1e-12, "{flops} {of_plan}");
        // The sum over ranks waits for the matmul before it; the forward pass waits for the update
        // of the step before.
        let sum = ops.iter().find(|op| op["name"] == "all_reduce" && op["lane"] == "TpComm");
        let product =
            sum.unwrap()["waits"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
        assert_eq!(ops[product - 1]["name"], "embedding");
        let before = ops.iter().flat_map(|op| op["waits"].as_array().unwrap());
        let before = before.filter(|wait| wait.as_i64().unwrap() < 1).count();
        assert!(update == "Serial" || before > 0, "{update}: {before}");
    }
    let text = folder.onebox(&["plan", "tiny.ron", "--ops"]).ok().stdout;
    let line = text.lines().find(|line| line.contains(" adam_tile ")).unwrap();
    for part in ["Host", "offload/src/optimizer.rs:", "control ", "-> +embedding.master"] {
        assert!(line.contains(part), "{line}");
    }
    folder.onebox(&["plan", "tiny.ron", "--ops", "--search"]).refused(2, &["--search"]);
    assert_eq!(
        folder
            .shell(&format!("{} plan tiny.ron --ops | head -1", env!("CARGO_BIN_EXE_onebox")))
            .ok()
            .stdout
            .lines()
            .count(),
        1
    );
}

/// The start of a copy costs as much time as some hundred KB on a link, and a tile that waits for
/// its update must not hold much of a step.
#[test]
fn parameters_go_up_in_tiles_of_4_to_8_mib_and_gradients_come_down_in_whole_pieces() {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/h100-1.3b.ron");
    let folder = Folder::new();
    for (precision, width) in [("Bf16", 2), ("Fp32", 4)] {
        let sets =
            [format!("precision={precision}"), "batch.global=8".into(), "model.layers=2".into()];
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let args = ["plan", config.to_str().unwrap(), "--ops", "--json"].into_iter().chain(sets);
        let listed = folder.onebox(&args.collect::<Vec<_>>()).ok().stdout;
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let longest = |lane: &str, part: &str| {
            let ops = listed["ops"].as_array().unwrap().iter().filter(|op| op["lane"] == lane);
            let of_blocks = ops.filter(|op| {
                op["tensors"][1]["name"]
                    .as_str()
                    .is_some_and(|name| name.starts_with("block.") && name.ends_with(part))
            });
            of_blocks.map(|op| op["bytes"].as_u64().unwrap()).max().unwrap()
        };
        let up = longest("H2d", ".params");
        assert!((4 << 20..=8 << 20).contains(&up), "{precision}: {up}");
        let down = longest("D2h", ".grad_down");
        assert_eq!((down / width).div_ceil(1_000_000), 50, "{precision}: {down} bytes");
    }
}

#[test]
fn the_page_of_config_keys_is_what_the_program_says() {
    let folder = Folder::new();
    let page = folder.onebox(&["config", "keys", "--markdown"]).ok().stdout;
    let documented = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let documented = fs::read_to_string(documented).unwrap();
    assert!(page == documented, "write it anew: onebox config keys --markdown > docs/config.md");
    let of_train = folder.onebox(&["config", "keys", "train.seed"]).ok().stdout;
    assert!(of_train.starts_with("train.seed: whole number from 0 to"), "{of_train}");
    assert!(of_train.contains("; default 1337\n"), "{of_train}");
    folder.onebox(&["config", "keys", "nothing"]).refused(78, &["`nothing`", "--box"]);
    let of_box = folder.onebox(&["config", "keys", "--box", "gpu."]).ok().stdout;
    assert!(of_box.contains("gpu.gemm_tflops: number"), "{of_box}");
}

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

#[test]
fn the_plan_counts_what_the_data_takes() {
    let folder = Folder::new();
    let sparse = |name: &str, bytes: u64| {
        fs::File::create(folder.path(name)).unwrap().set_len(bytes).unwrap();
    };
    let plan = |train: &str, more: &[&str]| {
        let train = format!("data.train={train:?}");
        let args = ["plan", "tiny.ron", "--json", "--set", &train];
        folder.onebox(&[&args[..], &sets(more)].concat())
    };
    let json =
        |done: CommandOutput| serde_json::from_str::<serde_json::Value>(&done.stdout).unwrap();
    // The file exceeds the memory of any machine: tokens stay in their files.
    sparse("huge.bin", 8 << 40);
    let huge = plan("huge.bin", &["data.format=U16"]).ok();
    let memory = &json(huge)["data_memory"];
    assert_eq!((&memory["in_files"], &memory["tokens"]), (&(8u64 << 40).into(), &0.into()));
    // Positions of 1,000 documents of 8 tokens.
    sparse("corpus.bin", 16_000);
    let words = |of: &mut dyn Iterator<Item = u64>| of.flat_map(u64::to_le_bytes).collect();
    let index: Vec<Vec<u8>> = vec![
        b"MMIDIDX\x00\x00".to_vec(),
        words(&mut [1].into_iter()),
        vec![8],
        words(&mut [1000, 1001].into_iter()),
        (0..1000).flat_map(|_| 8u32.to_le_bytes()).collect(),
        words(&mut (0..1000).map(|i| 16 * i)),
        words(&mut (0..1001)),
    ];
    fs::write(folder.path("corpus.idx"), index.concat()).unwrap();
    for (packing, bytes) in
        [("Windows", 0), ("None", 12_000), ("Documents", 16_000 + 8 * 8000 / 16)]
    {
        let packing = format!("data.packing={packing}");
        let sets = ["data.format=Megatron", "model.vocab=300", "model.seq_len=16", &packing];
        let memory = json(plan("corpus", &sets).ok());
        assert_eq!(memory["data_memory"]["documents"], bytes, "{packing}");
    }
    // A text, and the tokens made from it.
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json");
    fs::copy(fixture, folder.path("tokenizer.json")).unwrap();
    let text = folder.read("text.txt").len() as u64;
    let memory = json(plan("text.txt", &["data.tokenizer=\"tokenizer.json\"", "model.vocab=300"]));
    let memory = &memory["data_memory"];
    let [cached, tokens, reading] =
        ["in_files", "tokens", "reading"].map(|key| memory[key].as_u64().unwrap());
    assert!(cached > 0 && cached < 2 * text && tokens == 0, "{memory}");
    assert!(reading > 2 * text + 2 * cached && reading < 300 * text, "{memory}");
    // Rows, of which some thousands are tokenized at the same time.
    let row =
        |i: usize| format!("{{\"text\": \"{}\"}}\n", "a word and another ".repeat(i % 20 + 1));
    let rows: String = (0..200_000).map(row).collect();
    fs::write(folder.path("rows.jsonl"), &rows).unwrap();
    let jsonl = ["data.tokenizer=\"tokenizer.json\"", "model.vocab=300", "data.format=Jsonl"];
    let memory = json(plan("rows.jsonl", &jsonl).ok());
    let memory = &memory["data_memory"];
    let [tokens, reading] = ["tokens", "reading"].map(|key| memory[key].as_u64().unwrap());
    let text = rows.len() as u64;
    assert!(tokens > text / 2 && reading > 2 * tokens && reading < 20 * text, "{text}: {memory}");
    // The tokens of rows are in memory, so data that exceeds every machine does not fit.
    sparse("huge.jsonl", 8 << 40);
    let huge = json(plan("huge.jsonl", &jsonl));
    assert!(huge["fits"] == false && huge["binding"]["what"] == "host", "{huge}");
    // Without the data, the rest is planned, and the plan says so.
    let absent = json(plan("absent", &[]).ok());
    assert!(absent["data_memory"].is_null());
    let why = absent["data_not_counted"].as_str().unwrap();
    assert!(why.starts_with("data.train: ") && why.contains("/absent: no such file"), "{why}");
    let stdout = folder.onebox(&["plan", "tiny.ron", "--set", "data.train=\"absent\""]).ok().stdout;
    assert!(stdout.contains(&format!("\n  data: not counted: {why}\n")), "{stdout}");
    let tokenizer = ["data.tokenizer=\"absent.json\"", "model.vocab=300"];
    let why = json(plan("text.txt", &tokenizer).ok())["data_not_counted"].clone();
    assert!(why.as_str().unwrap().starts_with("data.tokenizer: "), "{why}");
    assert!(json(plan("text.txt", &[]).ok())["data_not_counted"].is_null());
}
