//! Tries every change and every size that `plan` names for a model that does not fit.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::{Value, json};

/// A model of transformers in `model`, and a config of it in `from.ron`.
fn folder() -> Folder {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("model")).unwrap();
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 512,
        "num_attention_heads": 16, "num_hidden_layers": 4, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000, "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
        "vocab_size": 32768, "torch_dtype": "bfloat16"
    });
    std::fs::write(folder.path("model/config.json"), config.to_string()).unwrap();
    let ron = "(model: (from: \"model\", weights: Random), batch: (global: 4), train: (steps: 4))";
    std::fs::write(folder.path("from.ron"), ron).unwrap();
    folder
}

/// A box: numbers of GPUs and NUMA nodes, and the memory of each.
#[derive(Clone, Debug)]
struct Memories {
    gpus: usize,
    nodes: usize,
    gpu: String,
    node: String,
}

impl Memories {
    fn new((gpus, nodes): (usize, usize), gpu: &str, node: &str) -> Self {
        Self { gpus, nodes, gpu: gpu.to_owned(), node: node.to_owned() }
    }

    fn write(&self, folder: &Folder) {
        let Self { gpus, nodes, gpu, node } = self;
        let text = format!(
            "(gpus: {gpus}, gpu_memory: \"{gpu}\", numa_nodes: {nodes}, node_memory: \"{node}\",
              gpu: (gemm_tflops: 1, fp32_tflops: 0.5, memory_gb_per_s: 100, processors: 40, sm: 80),
              host: (node_gb_per_s: 10, core_gb_per_s: 2, cores: 8, link_gb_per_s: 5))"
        );
        std::fs::write(folder.path("box.ron"), text).unwrap();
    }
}

/// Whether `onebox plan` with these words fits, and its output.
fn plan(folder: &Folder, words: &[&str]) -> (bool, String) {
    let words = [&["plan", "--box", "box.ron"], words].concat();
    let done = folder.onebox(&words);
    assert!([0, 1].contains(&done.code) && done.stderr.is_empty(), "{words:?}: {}", done.stderr);
    (done.code == 0, done.stdout)
}

fn model<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["--model", "model", "--set", "batch.global=4"], more].concat()
}

fn search<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["--search", "from.ron"], more].concat()
}

fn config<'a>(more: &[&'a str], sets: &'a [String]) -> Vec<&'a str> {
    [&["from.ron"], more].concat().into_iter().chain(sets.iter().map(String::as_str)).collect()
}

/// The rest of each line that begins with `start`.
fn lines<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(start)).collect()
}

/// Parses `--set a=1 --set 'b=C(d: 2)'   # notes` into arguments.
fn arguments(line: &str) -> Vec<String> {
    let line = line.split("   #").next().unwrap();
    let sets = line.split("--set ").skip(1).map(|set| set.trim().trim_matches('\''));
    sets.flat_map(|set| ["--set".to_owned(), set.to_owned()]).collect()
}

/// The sizes in `1.78 GiB of GPU memory and 1.54 GiB of host memory: yes`: whether a size is that
/// of a GPU, its number in hundredths, and its unit.
fn sizes(line: &str) -> Vec<(bool, u64, String)> {
    let (amounts, _) = line.split_once(": yes").unwrap();
    let size = |amount: &str| {
        let mut words = amount.split(' ');
        let hundredths = words.next().unwrap().replace('.', "").parse().unwrap();
        (amount.contains("GPU memory"), hundredths, words.next().unwrap().to_owned())
    };
    amounts.split(" and ").map(size).collect()
}

/// `memories` with the sizes of such a line, and once more for each size with a hundredth less.
fn enlarged(memories: &Memories, line: &str) -> (Memories, Vec<Memories>) {
    let (sizes, mut enough, mut less) = (sizes(line), memories.clone(), Vec::new());
    let put = |to: &mut Memories, of_gpu: bool, n: u64, unit: &str| {
        let size = format!("{}.{:02}{unit}", n / 100, n % 100);
        *(if of_gpu { &mut to.gpu } else { &mut to.node }) = size;
    };
    sizes.iter().for_each(|(of_gpu, n, unit)| put(&mut enough, *of_gpu, *n, unit));
    for (of_gpu, n, unit) in &sizes {
        let mut short = enough.clone();
        put(&mut short, *of_gpu, n - 1, unit);
        less.push(short);
    }
    (enough, less)
}

const ONLY_BF16: &str = "yes, but only with bf16 Adam moments";

/// Answer of `plan`: whether a layout fits, whether only with bf16 moments, and enough memory.
struct PlanAnswer {
    fits: bool,
    bf16: bool,
    enough: Vec<String>,
    of_config: String,
}

/// Runs `plan` in three ways, which agree.
fn answers_of(folder: &Folder, more: &[&str]) -> PlanAnswer {
    let (fits, answers) = plan(folder, &model(more));
    let (found, listed) = plan(folder, &search(more));
    let (as_it_is, planned) = plan(folder, &config(more, &[]));
    assert_eq!(fits, found, "{answers}\n{listed}");
    let bf16 = answers.contains(ONLY_BF16);
    assert_eq!(bf16, listed.contains("results change: bf16 moments"), "{answers}\n{listed}");
    let remedies = lines(&planned, "--set ");
    assert_eq!(fits, as_it_is || !remedies.is_empty(), "{answers}\n{planned}");
    if fits && !as_it_is {
        let change = remedies.iter().all(|remedy| remedy.contains("offload.moments=Bf16"));
        assert_eq!(bf16, change, "{answers}\n{planned}");
    }
    for text in [&answers, &listed, &planned] {
        assert!(text.contains("117 M parameters"), "{text}");
        // The model of a folder has a fixed number of layers.
        assert!(!text.contains("layers=") && !text.contains("of this shape"), "{text}");
    }
    let enough = [&answers, &listed, &planned].map(|text| {
        let (_, rest) = text.split_once("too small").unwrap_or_default();
        let plain = |line: &str| line.split(": --set").next().unwrap().to_owned();
        lines(rest, "with ").into_iter().map(plain).collect::<Vec<_>>()
    });
    assert!(enough.iter().all(|lines| *lines == enough[0]), "{enough:?}");
    assert_eq!(fits, enough[0].is_empty(), "{answers}");
    PlanAnswer { fits, bf16, enough: enough[0].clone(), of_config: planned }
}

#[test]
fn every_answer_of_plan_agrees_and_what_it_promises_is_so() {
    let folder = folder();
    let bf16 = ["--set", "offload.moments=Bf16"];
    for (box_, gpu, node, more, verdict, short) in [
        ((1, 1), "3GiB", "4GiB", &[][..], "yes", ""),
        ((1, 1), "2GiB", "1.2GiB", &[], "bf16", ""),
        ((1, 1), "2GiB", "800MiB", &[], "no", "host"),
        ((1, 1), "1.6GiB", "3GiB", &[], "no", "gpu"),
        ((1, 1), "1.6GiB", "1GiB", &bf16, "no", "gpu host"),
        ((4, 2), "1.7GiB", "500MiB", &[], "no", "host"),
    ] {
        let memories = Memories::new(box_, gpu, node);
        memories.write(&folder);
        let answers = answers_of(&folder, more);
        let answer = if answers.bf16 {
            "bf16"
        } else if answers.fits {
            "yes"
        } else {
            "no"
        };
        assert_eq!(answer, verdict, "{memories:?}: {}", answers.of_config);
        for remedy in lines(&answers.of_config, "--set ") {
            let sets = arguments(&format!("--set {remedy}"));
            let (fits, stdout) = plan(&folder, &config(more, &sets));
            assert!(fits && stdout.contains("it fits"), "{remedy}:\n{stdout}");
        }
        let lacks = answers.enough.first().map_or(Vec::new(), |line| sizes(line));
        let lacks: Vec<&str> =
            lacks.iter().map(|(of_gpu, ..)| if *of_gpu { "gpu" } else { "host" }).collect();
        assert_eq!(lacks.join(" "), short, "{memories:?}: {:?}", answers.enough);
        for line in &answers.enough {
            let exact = !line.contains("which change results");
            let holds = |memories: &Memories| {
                memories.write(&folder);
                let ((fits, answers), (found, _)) =
                    (plan(&folder, &model(more)), plan(&folder, &search(more)));
                assert_eq!(fits, found, "{line}: {memories:?}");
                fits && !(exact && answers.contains(ONLY_BF16))
            };
            let (enough, less) = enlarged(&memories, line);
            assert!(less.iter().all(|less| !holds(less)), "{line}: {less:?}");
            assert!(holds(&enough), "{line}: {enough:?}");
            // The arguments next to this amount make the config fit.
            let remedies = lines(&answers.of_config, "with ");
            let sets = remedies.into_iter().find(|whole| whole.starts_with(line)).map(arguments);
            assert!(plan(&folder, &config(more, &sets.unwrap())).0, "{line}");
        }
    }
}

#[test]
fn a_yes_shows_how_full_memories_are_and_warns_above_95_percent() {
    let folder = folder();
    let mut warned = Vec::new();
    for (gpu, node) in [("3GiB", "4GiB"), ("6GiB", "2.32GiB")] {
        Memories::new((1, 1), gpu, node).write(&folder);
        let answers = plan(&folder, &model(&[])).1;
        let json = plan(&folder, &[&model(&[])[..], &["--json"]].concat()).1;
        let json: Value = serde_json::from_str(&json).unwrap();
        let best = &json["search"]["layouts"][0];
        let full = |used: &Value, total: &Value| {
            let share = 100.0 * used.as_f64().unwrap() / total.as_f64().unwrap();
            (share > 95.0, format!("({share:.1} %)"))
        };
        let gpu = full(&best["gpu_bytes"], &best["gpu_limit"]);
        let host = full(&best["node_bytes"][0], &best["node_limit"]);
        for (what, (is_full, share)) in [("GPU memory", gpu), ("host memory", host)] {
            let line = answers.lines().find(|line| line.contains("GPU memory ")).unwrap();
            let (_, rest) = line.split_once(what).unwrap();
            assert!(rest.contains(&share), "{what} {share}: {answers}");
            assert_eq!(answers.contains(&format!("warning: {what} is ")), is_full, "{answers}");
            warned.push(is_full);
        }
        // The plan of the named config says the same.
        let line =
            answers.lines().find_map(|line| line.split_once("with a config of this model: "));
        let planned = plan(&folder, &config(&[], &arguments(line.unwrap().1)));
        assert!(planned.0, "{}", planned.1);
        for warning in lines(&answers, "warning: ") {
            assert!(planned.1.contains(warning), "{warning}: {}", planned.1);
        }
    }
    assert!(warned.contains(&true) && warned.contains(&false), "{warned:?}");
}

#[test]
fn a_no_in_json_has_the_short_memory_and_what_is_enough() {
    let folder = folder();
    Memories::new((1, 1), "2GiB", "800MiB").write(&folder);
    let json = |words: &[&str]| -> Value {
        serde_json::from_str(&plan(&folder, &[words, &["--json"]].concat()).1).unwrap()
    };
    let all = [json(&model(&[])), json(&search(&[])), json(&config(&[], &[]))];
    // q and o, k and v, three linears, two norms, and the norms of heads.
    let block = 1024 * (2 * 1024 + 2 * 512 + 3 * 3072 + 2) + 2 * 64;
    for answer in &all {
        let short = |of: &Value, at: usize| of["shortages"][at]["short"].clone();
        assert_eq!([0, 1].map(|at| short(answer, at)), [0, 1].map(|at| short(&all[0], at)));
        assert_eq!(answer["parameters"], 2 * 32768 * 1024 + 4 * block + 1024, "{answer}");
        let short = &answer["shortages"][0]["short"];
        assert_eq!((&short[0]["memory"], &short[1]), (&json!("host"), &Value::Null), "{answer}");
        assert_eq!(short[0]["there"], 800 << 20);
        assert!(short[0]["enough"].as_u64().unwrap() > 800 << 20);
        assert_eq!(answer["shortages"][0]["states"], "bf16_moments");
    }
}

#[test]
fn virtual_gpus_are_called_so_and_their_memory_is_a_key() {
    let folder = Folder::new();
    let small = ["plan", "tiny.ron", "--set", "device.memory=64KiB"];
    let answers = folder.onebox(&small);
    assert_eq!(answers.code, 1, "{}", answers.stderr);
    assert!(answers.stdout.contains("virtual GPU memory does not fit"), "{}", answers.stdout);
    let remedies = lines(&answers.stdout, "--set ");
    assert!(remedies.iter().any(|remedy| remedy.starts_with("device.memory=")), "{remedies:?}");
    for remedy in remedies {
        let sets = arguments(&format!("--set {remedy}"));
        let args = ["plan", "tiny.ron"].into_iter().chain(sets.iter().map(String::as_str));
        assert!(
            folder.onebox(&args.collect::<Vec<_>>()).ok().stdout.contains("it fits"),
            "{remedy}"
        );
    }
    let (_, on) = answers.stdout.split_once("name a box: --box ").unwrap();
    let on = ["--box", on.split(' ').next().unwrap(), "--set", "device.memory=64KiB"];
    let on = folder.onebox(
        &[
            &["plan", "tiny.ron"],
            &on[..2],
            &["--set", "parallel.data=1", "--set", "parallel.tensor=1"],
        ]
        .concat(),
    );
    assert!(on.stdout.contains("GPU of ") && !on.stdout.contains("virtual"), "{}", on.stdout);
    folder.onebox(&["plan", "--model", "."]).refused(2, &["--box NAME", "onebox boxes"]);
}

#[test]
fn tiers_of_activations_stand_among_pools_and_lanes() {
    let folder = Folder::new();
    let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let config = configs.join("h100-1.3b.ron").display().to_string();
    let tiers = "activations=Tiers(gpu_blocks: 2, host_blocks: 8)";
    let sets = ["--set", "recompute=Block", "--set", tiers];
    let done = folder.onebox(&[&["plan", &config][..], &sets].concat());
    let pools = ["activation ring", "activation staging", "ActivationsUp", "ActivationsDown"];
    for part in pools {
        assert!(done.stdout.contains(part), "no `{part}`: {}{}", done.stdout, done.stderr);
    }
    let done = folder.onebox(&[&["simulate", &config, "--no-schedules"][..], &sets].concat());
    for part in &pools[2..] {
        assert!(done.stdout.contains(part), "no `{part}`: {}{}", done.stdout, done.stderr);
    }
    // The choice of `Auto` has a reason.
    let few = ["model.layers=4", "offload.optimizer=Device", "recompute=Block", "activations=Auto"];
    let few: Vec<&str> = few.into_iter().flat_map(|set| ["--set", set]).collect();
    let done = folder.onebox(&[&["plan", &config][..], &few].concat());
    let says = done.stdout.contains("activations: Auto is Tiers(gpu_blocks: ");
    assert!(says && done.stdout.contains("(simulated)"), "{}{}", done.stdout, done.stderr);
}
