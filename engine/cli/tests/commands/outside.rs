//! The view of onebox from outside, as texts in tests/fixtures/outside: a refactoring changes none
//! of them. Intended changes are written with `ONEBOX_UPDATE=1 cargo test -p onebox --test commands
//! outside::`, and their difference is reviewed.
//!
//! No text depends on the machine: documents describe boxes, or have equal fields everywhere.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod exits;
mod fields;
mod texts;

use crate::common::{CommandOutput, Folder, TINY, with_chats};
use fields::Fields;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use texts::{compare, difference, root, sources};

/// Runs `onebox` as if there were no terminal, no GPU and no cache.
fn onebox(folder: &Folder, args: &[&str]) -> CommandOutput {
    let mut command = folder.command(args);
    command.env("COLUMNS", "80").env("CUDA_VISIBLE_DEVICES", "").env_remove("ONEBOX_LOG");
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    Folder::done(command)
}

/// Runs `onebox` on a GPU of the stand-in driver, with `variables`.
fn on_gpus(folder: &Folder, args: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    let mut command = folder.command(args);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder()).env("FAKECUDA_BESIDE", "0");
    command.env("XDG_CACHE_HOME", folder.path("cache")).envs(variables.iter().copied());
    Folder::done(command)
}

/// Runs `onebox` with the words of a line. `ROOT` is the repository, `~` is a space in a word.
fn line_of_words(folder: &Folder, line: &str) -> CommandOutput {
    let root = root().display().to_string();
    let word = |word: &str| word.replace("ROOT", &root).replace('~', " ");
    let words: Vec<String> = line.split_terminator(' ').map(word).collect();
    onebox(folder, &words.iter().map(String::as_str).collect::<Vec<_>>())
}

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

/// Names in the lines `  name  what it is` below a heading of commands.
fn subcommands(help: &str) -> Vec<&str> {
    let mut listed = false;
    let names = help.lines().filter_map(|line| {
        if !line.starts_with(' ') {
            let heading = ["Commands:", "Train:", "Before a run:", "The machine:", "The program:"];
            listed = heading.contains(&line);
        }
        let name = line.strip_prefix("  ").filter(|name| !name.starts_with(' '));
        name.filter(|_| listed)?.split(' ').next()
    });
    names.filter(|name| *name != "help").collect()
}

#[test]
fn help_of_every_command() {
    let folder = Folder::new();
    let mut text = String::new();
    let mut left: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(words) = left.pop() {
        let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let help = onebox(&folder, &args).ok().stdout;
        let _ = writeln!(text, "# onebox {}\n\n{help}", args.join(" "));
        let below = subcommands(&help).into_iter().rev();
        left.extend(below.map(|name| [&words[..], &[name.to_owned()]].concat()));
    }
    assert!(text.matches("\n# onebox ").count() > 25, "{text}");
    compare("help", &text);
}

#[test]
fn keys_of_configs_and_boxes() {
    let folder = Folder::new();
    let of = |more: &[&str]| {
        let output = onebox(&folder, &[&["config", "keys"], more].concat()).ok().stdout;
        // docs/config.md has the meaning of a key.
        let mut keys: Vec<&str> = output.lines().filter(|line| !line.starts_with(' ')).collect();
        keys.sort_unstable();
        keys.join("\n")
    };
    compare("keys", &format!("# config\n{}\n\n# box\n{}\n", of(&[]), of(&["--box"])));
}

/// Commands that print JSON, by their documents; each line has its exit code.
const DOCUMENTS: [(&str, &[(i32, &str)]); 21] = [
    ("bench adam", &[(0, "bench adam --params 1000 --rounds 1 --threads 1 --json")]),
    ("bench collective", &[(0, "bench collective --mib 1 --json")]),
    ("bench copy", &[(0, "bench copy --mib 1 --tile-mib 1 --json")]),
    ("bench step", &[(0, "bench step tiny.ron --steps 1 --json")]),
    ("boxes", &[(0, "boxes --json")]),
    (
        "checkpoint diff",
        &[(1, "checkpoint diff run other --json"), (1, "checkpoint diff run smaller --json")],
    ),
    ("checkpoint show", &[(0, "checkpoint show run --json")]),
    (
        "checkpoint verify",
        &[(0, "checkpoint verify run --json"), (82, "checkpoint verify broken --json")],
    ),
    (
        "config check",
        &[
            (0, "config check tiny.ron --json"),
            (0, "config check tiny.ron --json --set device=Sim(box:\"dgx-a100\")"),
            (78, "config check tiny.ron --json --set model.hiden=3"),
        ],
    ),
    ("config show", &[(0, "config show tiny.ron --json --set train.seed=3")]),
    ("data cache", &[(0, "data cache --json")]),
    ("data check", &[(0, "data check tiny.ron --json")]),
    ("data show", &[(0, "data show tiny.ron --json"), (0, "data show chat.ron --json")]),
    ("generate", &[(0, "generate run --prompt the --tokens 4 --json")]),
    ("generate --logits", &[(0, "generate run --prompt the --logits")]),
    (
        "plan",
        &[
            (0, "plan tiny.ron --json --box dgx-a100"),
            (1, "plan one.ron --json --box few.ron --set batch.micro=8192 --set batch.global=8192"),
            (1, "plan one.ron --json --box few.ron --set model.hidden=512 --set model.layers=20"),
        ],
    ),
    (
        "plan --model",
        &[
            (
                0,
                "plan --model model --box h100-128gib --json --tokens 1000 --set batch.global=8 --set model.seq_len=16",
            ),
            (
                1,
                "plan --model model --box none.ron --json --set batch.global=8 --set model.seq_len=16",
            ),
        ],
    ),
    ("plan --ops", &[(0, "plan tiny.ron --ops --json")]),
    (
        "plan --search",
        &[
            (0, "plan one.ron --search --json --box h100-128gib"),
            (1, "plan one.ron --search --json --box none.ron"),
        ],
    ),
    ("simulate", &[(0, "simulate tiny.ron --json --box dgx-a100 --clipped 0.1 --compare run")]),
    (
        "topology",
        &[
            (0, "topology --json --tp 2 --xml ROOT/configs/boxes/topologies/dgx2.xml"),
            (0, "topology --json --xml ROOT/configs/boxes/topologies/vm-flat-8xH100.xml"),
            (0, "topology --json --tp 2 --synthetic pack:2~numa:1~core:8~pu:2"),
        ],
    ),
];

/// A box whose GPU has 300 MiB free next to the libraries.
const FEW: &str = r#"(
    gpus: 1, gpu_memory: "1.8GiB", numa_nodes: 1, node_memory: "10MiB",
    gpu: (gemm_tflops: 10, fp32_tflops: 5, memory_gb_per_s: 100, processors: 20, sm: 80),
    host: (node_gb_per_s: 20, core_gb_per_s: 5, cores: 4, link_gb_per_s: 8),
)"#;

/// Three different runs, a broken checkpoint, a model without weights, and two small boxes.
fn with_runs() -> Folder {
    let folder = with_chats();
    for (run, set) in [
        ("run", "train.seed=1"),
        ("other", "optimizer.lr=1e-2"),
        ("smaller", "model.ffn_hidden=64"),
    ] {
        onebox(&folder, &["train", "tiny.ron", "--run-dir", run, "--set", set]).ok();
    }
    let broken = folder.path("broken/checkpoints/step-00000004");
    fs::create_dir_all(broken.parent().unwrap()).unwrap();
    fs::create_dir_all(&broken).unwrap();
    fs::write(broken.join("MANIFEST"), "").unwrap();
    let one = TINY.replace("count: 4", "count: 1").replace("(tensor: 2, data: 2)", "()");
    fs::write(folder.path("one.ron"), one).unwrap();
    fs::write(folder.path("few.ron"), FEW).unwrap();
    fs::write(folder.path("none.ron"), FEW.replace("1.8GiB", "100KiB")).unwrap();
    let of = root().join("tests/fixtures/hf-qwen3-tiny/config.json");
    let mut model: Value = serde_json::from_str(&fs::read_to_string(of).unwrap()).unwrap();
    model["vocab_size"] = 300.into();
    fs::create_dir(folder.path("model")).unwrap();
    fs::write(folder.path("model/config.json"), model.to_string()).unwrap();
    folder
}

/// Checks a trace, and collects the names of its ops and lanes.
fn trace(text: &str, names: &mut BTreeSet<String>, lanes: &mut BTreeSet<String>) {
    let trace: Value = serde_json::from_str(text).unwrap();
    for event in trace["traceEvents"].as_array().unwrap() {
        match event["name"].as_str().unwrap() {
            "thread_name" => lanes.insert(event["args"]["name"].as_str().unwrap().to_owned()),
            "process_name" => false,
            name => names.insert(name.to_owned()),
        };
    }
}

#[test]
fn json_fields_of_every_command() {
    let folder = with_runs();
    let mut all: BTreeMap<&str, Fields> = BTreeMap::new();
    for (name, commands) in DOCUMENTS {
        for (code, line) in commands {
            let done = line_of_words(&folder, line);
            assert_eq!(done.code, *code, "{line}: {}", done.stderr);
            all.entry(name).or_default().add(&done.stdout);
        }
    }
    // A GPU of a kind that the compiler does not know.
    let unfit = [("FAKECUDA_SM", "120"), ("FAKECUDA_NVRTC", "12.6")];
    let doctor = on_gpus(&folder, &["doctor", "--json"], &unfit).refused(1, &[]);
    all.entry("doctor").or_default().add(&doctor.stdout);
    let copy = ["bench", "copy", "--mib", "1", "--tile-mib", "1", "--json"];
    all.entry("bench copy").or_default().add(&on_gpus(&folder, &copy, &[]).ok().stdout);
    // For a described box this field is null; the rest of this plan depends on the machine.
    let plan = onebox(&folder, &["plan", "tiny.ron", "--json"]).stdout;
    let plan: Value = serde_json::from_str(&plan).unwrap();
    all.entry("plan").or_default().value("data_memory", &plan["data_memory"]);
    let traced = ["--trace", "of-run", "--trace-steps", "2..2", "--run-dir", "traced"];
    onebox(&folder, &[&["train", "tiny.ron"][..], &traced].concat()).ok();
    onebox(
        &folder,
        &["simulate", "tiny.ron", "--box", "dgx-a100", "--no-schedules", "--trace", "of-box"],
    )
    .ok();
    for (name, file) in [("train --trace", "of-run"), ("simulate --trace", "of-box")] {
        all.entry(name).or_default().add(&folder.read(file));
    }
    let sections = all.iter().map(|(name, fields)| format!("# {name}\n{}", fields.text()));
    compare("json", &sections.collect::<Vec<_>>().join("\n"));
}

/// `checkpoint_failed` and `differs` need a fault: a file instead of the folder of checkpoints, and
/// hardware that computes wrong. The tests of `metrics.jsonl` itself cover the latter.
#[test]
fn metrics_fields_of_every_kind_of_line() {
    let folder = with_chats();
    let train = |run: &str, config: &str, more: &[&str]| {
        onebox(&folder, &[&["train", config, "--run-dir", run], &sets(more)[..]].concat())
    };
    train("ahead", "tiny.ron", &["offload.update=Speculative", "train.verify_every=2"]).ok();
    let several = "data.validation=[(name: \"some\", path: \"text.txt\"), (name: \"same\", path: \"text.txt\")]";
    train("several", "tiny.ron", &[several]).ok();
    train("chat", "chat.ron", &[]).ok();
    fs::create_dir(folder.path("full")).unwrap();
    fs::write(folder.path("full/checkpoints"), "").unwrap();
    train("full", "tiny.ron", &["train.checkpoint_every=2"]).refused(83, &["NOT SAVED"]);
    let mut kinds: BTreeMap<String, Fields> = BTreeMap::new();
    for line in ["ahead", "several", "chat", "full"].iter().flat_map(|run| folder.metrics(run)) {
        kinds.entry(line["kind"].as_str().unwrap().to_owned()).or_default().value("", &line);
    }
    let sections = kinds.iter().map(|(kind, fields)| format!("# {kind}\n{}", fields.text()));
    compare("metrics", &sections.collect::<Vec<_>>().join("\n"));
}

/// All names of ops, from the sources, since no small run has all ops. An op, or a task that is an
/// op, defines its name next to its accesses or FLOPs; the names of [`Op`](device::Op) itself stand apart.
fn names_of_ops() -> BTreeSet<String> {
    let all = sources();
    let blocks = all.iter().flat_map(|source| source.split("\nimpl ").skip(1));
    let blocks = blocks.map(|block| block.split("\n}\n").next().unwrap());
    let of_ops = blocks.filter(|block| {
        block.starts_with("Op {") || block.contains("fn accesses(") || block.contains("fn flops(")
    });
    let bodies = of_ops.filter_map(|block| block.split("fn name(&self) -> &'static str {").nth(1));
    let bodies = bodies.map(|body| body.split("\n    }\n").next().unwrap());
    let quoted = |text: &str| text.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    let names = bodies.flat_map(|body| -> Vec<String> {
        if body.contains('"') {
            return quoted(body);
        }
        // The name comes from a constant.
        let constant = format!("const {}: &str = ", body.trim());
        let defined =
            all.iter().find_map(|source| source.split(&constant).nth(1)?.split(';').next());
        defined.map(quoted).unwrap_or_default()
    });
    names.collect()
}

#[test]
fn names_of_ops_and_lanes() {
    let folder = Folder::new();
    let [mut run, mut simulation, mut lanes] = [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
    for (update, file) in
        [("offload.update=Serial", "serial"), ("offload.update=Speculative", "ahead")]
    {
        let traced = ["--trace", file, "--trace-steps", "1..4", "--set", update];
        onebox(
            &folder,
            &[&["train", "tiny.ron", "--run-dir", &format!("run-{file}")][..], &traced].concat(),
        )
        .ok();
        trace(&folder.read(file), &mut run, &mut lanes);
        let simulate = [
            "simulate",
            "tiny.ron",
            "--box",
            "dgx-a100",
            "--no-schedules",
            "--trace",
            "of-box",
            "--set",
            update,
        ];
        onebox(&folder, &simulate).ok();
        trace(&folder.read("of-box"), &mut simulation, &mut lanes);
    }
    let all = names_of_ops();
    assert!(all.len() > 30 && run.is_subset(&all), "{run:?} of {all:?}");
    let list = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join("\n");
    let sections = [
        ("all", all),
        ("in a trace of a run", run),
        ("in a trace of a simulation", simulation),
        ("lanes", lanes),
    ];
    let sections = sections.map(|(title, names)| format!("# {title}\n{}\n", list(names)));
    compare("ops", &sections.join("\n"));
}

/// From the sources: quoted names like `"ONEBOX_LOG"`, in files that read or define variables.
#[test]
fn variables_of_the_environment() {
    let all = sources();
    let mut text = String::new();
    let page = fs::read_to_string(root().join("docs/environment.md")).unwrap();
    let (_, page) = page.split_once("## The program\n").unwrap();
    let rows = page.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| `"));
    let named: BTreeSet<&str> =
        rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2)).collect();
    let is_variable = |word: &&str| {
        word.len() > 2
            && word.contains('_')
            && word.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    };
    let quoted: BTreeSet<&str> = all.iter().flat_map(|source| source.split('"')).collect();
    for name in &named {
        let by = if quoted.contains(name) { "onebox" } else { "a library, or Rust" };
        let _ = writeln!(text, "{name}: read by {by}");
    }
    let asks = all.iter().filter(|source| source.contains("env::var"));
    let asked: BTreeSet<&str> =
        asks.flat_map(|source| source.split('"')).filter(is_variable).collect();
    let unnamed: Vec<&&str> = asked.difference(&named).collect();
    assert!(unnamed.is_empty(), "docs/environment.md does not name {unnamed:?}");
    compare("variables", &text);
}

#[test]
fn exit_codes_of_situations() {
    compare("exit-codes", &exits::text());
}

#[test]
fn a_difference_shows_what_one_side_alone_has() {
    let [old, new] = ["# a\nx: 1\ny: 2\n# b\nx: 1\n", "# a\nx: 1\nz: 2\n# b\nx: 1\n"];
    assert_eq!(difference(old, new), "  # a\n- y: 2\n  # a\n+ z: 2\n");
    assert_eq!(difference("# a\nx\n# b\n", "# a\n# b\nx\n"), "  # a\n- x\n  # b\n+ x\n");
    assert!(difference("x\ny\n", "y\nx\n").contains("another order"));
}
