//! Tests of refused configs, and of their messages.

use super::super::*;
use super::{LEAST, loaded};

/// Error of the smallest config with these arguments, which must make it invalid.
fn spoiled(sets: &[&str]) -> ConfigError {
    loaded(LEAST, sets).expect_err(&format!("{sets:?} should be refused"))
}

pub(super) fn refuses(sets: &[&str], key: &str, parts: &[&str]) {
    let error = spoiled(sets);
    let [problem] = error.errors() else { panic!("one error expected:\n{error}") };
    assert_eq!(problem.key, key, "{error}");
    assert!(!problem.help.is_empty(), "{error}");
    let text = error.to_string();
    parts.iter().for_each(|part| assert!(text.contains(part), "no `{part}` in\n{text}"));
}

#[test]
fn a_run_that_would_leave_nothing() {
    let nothing = ["train.weights=Never", "train.checkpoint_overhead=None"];
    refuses(&nothing, "train.weights", &["nothing of the training would be left", "`Complete`"]);
    loaded(LEAST, &["train.weights=Never", "train.checkpoint_every=5"]).unwrap();
}

#[test]
fn heads_that_no_kernel_of_a_gpu_takes() {
    let wide = ["model.family=Llama", "model.head_dim=258"];
    loaded(LEAST, &wide).unwrap();
    let on = |device: &'static str| [&wide[..], &[device]].concat();
    let expected = ["heads of 258 elements", "at most 256", "258 elements", "`device: Cpu`"];
    refuses(&on("device=Cuda"), "model.head_dim", &expected);
    refuses(&on("device=Sim(box: \"h100-128gib\")"), "model.head_dim", &expected);
    loaded(LEAST, &["model.family=Llama", "model.head_dim=256", "device=Cuda"]).unwrap();
}

#[test]
fn more_blocks_on_a_gpu_than_the_model_has() {
    let with = |more: &'static str| ["offload.parameters=Host", "recompute=Block", more];
    let layers = loaded(LEAST, &[]).unwrap().config.model.layers;
    loaded(LEAST, &with("offload.resident_blocks=2")).unwrap();
    assert!((2..=8).contains(&layers));
    let has = format!("the model has {layers} blocks");
    for (key, set, what) in [
        ("offload.resident_blocks", "offload.resident_blocks=9", "9 blocks cannot stay on the GPU"),
        ("offload.ring", "offload.ring=9", "9 blocks cannot take turns in the ring"),
    ] {
        refuses(&with(set), key, &[what, &has, &format!("at most {layers}, or leave it out")]);
    }
}

#[test]
fn micro_batches_that_go_together_without_recomputation() {
    let sets = ["batch.global=8", "batch.micro=1", "recompute=None"];
    let with = |more: &[&'static str]| [&sets[..], more].concat();
    let expected =
        ["8 micro-batches would have to be kept at once", "come up once for all micro-batches"];
    refuses(&with(&["offload.parameters=Host"]), "offload.parameters", &expected);
    let error = spoiled(&with(&["offload.parameters=Host"])).to_string();
    assert!(!error.contains("4096"), "{error}");
    let both = ["offload.parameters=Host", "offload.first_forward=2"];
    refuses(&with(&both), "offload.first_forward", &["2 micro-batches at once"]);
    refuses(&with(&both[1..]), "offload.first_forward", &["leave `offload.first_forward` out"]);
}

#[test]
fn keys_of_other_data_than_there_is() {
    refuses(
        &["data.truncate=true"],
        "data.truncate",
        &["windows take all tokens", "leave `data.truncate` out"],
    );
    let system = ["data.system=\"Be brief.\"", "data.format=Megatron"];
    refuses(&system, "data.system", &["only the rows of `Chat` have messages", "prepared chats"]);
    let parsed = ["data.control_tokens=Parsed", "data.format=U16"];
    refuses(&parsed, "data.control_tokens", &["these files hold tokens", "`Jsonl` or `Chat`"]);
    refuses(&parsed[..1], "data.control_tokens", &["plain text are always parsed"]);
    for packing in ["data.packing=Documents", "data.packing=None"] {
        loaded(LEAST, &["data.truncate=true", "data.format=Megatron", packing]).unwrap();
    }
    let chats = [
        "data.system=\"Be brief.\"",
        "data.format=Chat",
        "data.tokenizer=\"t.json\"",
        "data.truncate=true",
    ];
    loaded(LEAST, &chats).unwrap();
}

#[test]
fn single_values() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("model.layers=0", "model.layers", &["from 1 to 10_000, found 0"]),
        ("model.layers=10_001", "model.layers", &["found 10_001"]),
        ("model.layers=-3", "model.layers", &["found -3"]),
        (
            "model.layers=\"two\"",
            "model.layers",
            &["expected a whole number, found the string \"two\""],
        ),
        ("model.layers=\"2\"", "model.layers", &["write 2 without the quotes"]),
        ("model.layers=4.0", "model.layers", &["found the number 4.0", "write 4, without a point"]),
        ("model.layers=1e3", "model.layers", &["write 1000, without"]),
        ("model.layers=1.5", "model.layers", &["expected a whole number, found the number 1.5"]),
        ("model.layers=1e999", "model.layers", &["from 1 to 10_000, found 1e999"]),
        ("model.layers=NaN", "model.layers", &["found NaN"]),
        ("model.layers=None", "model.layers", &["found `None`", "leave the key out"]),
        ("model.layers=Some(3)", "model.layers", &["without `Some`"]),
        ("model.layers=[3]", "model.layers", &["found a list"]),
        ("model.layers={}", "model.layers", &["found a map"]),
        ("model.layers='3'", "model.layers", &["found a character"]),
        ("model.layers=(3)", "model.layers", &["found a group of values"]),
        ("model.layers=true", "model.layers", &["found `true`"]),
        ("model.layers=99999999999999999999999", "model.layers", &["from 1 to 10_000"]),
        ("model.vocab=1", "model.vocab", &["from 2 to 16_777_216"]),
        ("model.dropout=1", "model.dropout", &["from 0 to below 1, found 1"]),
        ("model.dropout=0.99999999999", "model.dropout", &["which is 1.0 in 32 bits"]),
        ("model.init_std=1e-60", "model.init_std", &["which is 0.0 in 32 bits"]),
        ("optimizer.lr=0", "optimizer.lr", &["above 0 and at most 10, found 0"]),
        ("optimizer.lr=NaN", "optimizer.lr", &["a finite number", "found NaN"]),
        ("optimizer.lr=inf", "optimizer.lr", &["found inf"]),
        ("optimizer.lr=-inf", "optimizer.lr", &["found -inf"]),
        ("optimizer.lr=1e999", "optimizer.lr", &["a finite number", "found 1e999"]),
        ("optimizer.lr=\"0.1\"", "optimizer.lr", &["write 0.1 without the quotes"]),
        ("optimizer.clip=0", "optimizer.clip", &["at most 1e9", "`None` switches it off"]),
        ("optimizer.clip=Some(-1)", "optimizer.clip", &["found -1"]),
        ("parallel.sequence=1", "parallel.sequence", &["expected `true` or `false`"]),
        ("parallel.sequence=True", "parallel.sequence", &["found `True`"]),
        ("parallel.tensor=4097", "parallel.tensor", &["from 1 to 4_096"]),
        ("precision=half", "precision", &["did you mean `Fp16`?"]),
        ("precision=\"Bf16\"", "precision", &["write `Bf16` without the quotes"]),
        (
            "precision=Int8",
            "precision",
            &["expected `Fp8`, `Fp16`, `Bf16` or `Fp32`, found `Int8`"],
        ),
        ("precision=16", "precision", &["found the number 16"]),
        ("offload.update=Delayed", "offload.update.after_step", &["add `after_step: 40`"]),
        ("offload.update=Delayed(40)", "offload.update", &["write `Delayed(after_step: 40)`"]),
        ("offload.update=Delay", "offload.update", &["did you mean `Delayed(after_step: 40)`?"]),
        ("schedule.kind=trapezoid", "schedule.kind", &["`Wsd(stable_until: 900)`?"]),
        ("optimizer.kind=AdamW8bit", "optimizer.kind", &["`offload.moments: Bf16`"]),
        ("schedule.kind=warmup_stable_decay", "schedule.kind", &["`Wsd(stable_until: 900)`?"]),
        ("offload.update=Serial(x: 1)", "offload.update.x", &["`Serial` takes no keys"]),
        (
            "offload.optimizer=Split(device_fraction: 1.01)",
            "offload.optimizer.device_fraction",
            &["from 0 to 1"],
        ),
        ("offload.lookahead=65", "offload.lookahead", &["from 1 to 64"]),
        ("offload.tile_elements=1023", "offload.tile_elements", &["from 1_024"]),
        ("device=Cpu(memory: 512)", "device.memory", &["\"512MiB\" or \"512GiB\""]),
        ("device=Cpu(memory: \"512\")", "device.memory", &["\"512\" has no unit"]),
        ("device=Cpu(memory: \"2gib\")", "device.memory", &["is written `GiB`"]),
        ("device=Cpu(memory: \"2EiB\")", "device.memory", &["unknown unit `EiB`"]),
        ("device=Cpu(memory: \"0B\")", "device.memory", &["from 1KiB to 1048576TiB"]),
        ("device=Gpu", "device", &["did you mean `Cuda`?"]),
        ("device=(box: \"x\")", "device.box", &["`Cpu` has no key `box`"]),
        ("device=Sim", "device.box", &["required and missing"]),
        (
            "device=Sim(box: \"/nowhere/x.ron\")",
            "device.box",
            &["cannot read the box", "no directory"],
        ),
        ("data.train=", "data.train", &["expected a path"]),
        ("name=a/b", "name", &["without `/`"]),
        ("sample.prompt=\"\"", "sample.prompt", &["at least one character"]),
        ("sample.prompt=\"\\q\"", "sample.prompt", &["not RON"]),
        ("train=5", "train", &["`train` is a section"]),
        ("train.seed=18446744073709551616", "train.seed", &["18_446_744_073_709_551_615"]),
    ];
    for (set, key, parts) in cases {
        refuses(&[set], key, parts);
    }
}

#[test]
fn unknown_keys_name_the_nearest() {
    let cases: &[(&str, &str, &str)] = &[
        ("lr=1", "lr", "`optimizer.lr`"),
        ("model.lr=1", "model.lr", "`optimizer.lr`"),
        ("model.layer=1", "model.layer", "did you mean `layers`?"),
        ("modle.layers=1", "modle", "did you mean `model`?"),
        ("optimizer.beta=1", "optimizer.beta", "did you mean `beta1` or `beta2`?"),
        ("learning_rate=1", "learning_rate", "`optimizer.lr`"),
        ("batch.micro_batch_size=1", "batch.micro_batch_size", "`batch.micro`"),
        ("precison=Bf16", "precison", "did you mean `precision`?"),
        ("model.zzzzzz=1", "model.zzzzzz", "the keys here are `from`"),
        ("device.cuont=1", "device.cuont", "did you mean `count`?"),
    ];
    for (set, key, part) in cases {
        refuses(&[set], key, &[part, &format!("--set {set}")]);
    }
    refuses(&["device=Cuda", "device.count=2"], "device.count", &["`Cuda` has no key `count`"]);
}

#[test]
fn arguments_of_set() {
    refuses(&["train.steps"], "train.steps", &["`--set` without `=`"]);
    refuses(&["=5"], "", &["this is no key"]);
    refuses(&["train..steps=5"], "train..steps", &["this is no key"]);
    refuses(&[&format!("{}=1", "a.".repeat(100_000))], &"a.".repeat(100_000), &["no key"]);
    refuses(&["train.steps="], "train.steps", &["the value is empty"]);
    refuses(&["train.steps=(1"], "train.steps", &["the value is not RON"]);
    refuses(&["train.steps=1 2"], "train.steps", &["the value is not RON"]);
    refuses(&["train.steps.x=1"], "train.steps.x", &["`train.steps` is a single value"]);
    refuses(&["train=(seed: 1, seed: 2)"], "train.seed", &["given twice"]);
    refuses(&["name=\"open"], "name", &["not RON"]);
}

#[test]
fn rules_between_keys_show_every_value_and_the_arithmetic() {
    let cases: &[(&[&str], &str, &[&str])] = &[
        (
            &["parallel.tensor=3", "model.ffn_hidden=30"],
            "model.heads",
            &["4 = 1 x 3 + 1", "^ 4 heads", "^ 3 tensor-parallel ranks", "could be 3 or 6"],
        ),
        (&["model.hidden=30"], "model.hidden", &["30 = 7 x 4 + 2", "28 or 32", "3 or 5"]),
        (&["parallel.tensor=4", "model.ffn_hidden=30"], "model.ffn_hidden", &["30 = 7 x 4 + 2"]),
        (
            &["parallel.tensor=2", "device=Cpu(count: 3)"],
            "device.count",
            &[
                "3 devices, but tensor 2 x data 1 = 2 ranks",
                "note: `parallel.data` is 1 by default",
            ],
        ),
        (
            &["batch.global=30", "batch.micro=4", "parallel.data=2"],
            "batch.global",
            &[
                "micro 4 x data 2 = 8: 30 = 3 x 8 + 6",
                "use 24 or 32",
                "^ 4 samples",
                "^ 2 replicas",
            ],
        ),
        (&["batch.global=3", "batch.micro=8"], "batch.global", &["use 8"]),
        (
            &["parallel.sequence=true", "parallel.tensor=4", "model.seq_len=17"],
            "model.seq_len",
            &["micro 1 x seq_len 17 = 17 tokens", "17 = 4 x 4 + 1", "16 or 20"],
        ),
        (&["schedule.min_lr=0.1"], "schedule.min_lr", &["0.1 is above the peak rate 0.0006"]),
        (
            &["schedule.warmup_steps=11"],
            "schedule.warmup_steps",
            &[
                "11 steps is longer than the whole schedule of 10",
                "`schedule.decay_steps` is 10 (train.steps)",
            ],
        ),
        (
            &["schedule.kind=Wsd(stable_until: 11)"],
            "schedule.kind.stable_until",
            &["11, is not from 0 to 10", "`schedule.decay_steps` is 10 (train.steps)"],
        ),
        (
            &["schedule.kind=Wsd(stable_until: 4)", "schedule.warmup_steps=5"],
            "schedule.kind.stable_until",
            &["4, is not from 5 to 10", "^ the end of the warm-up"],
        ),
        (
            &["partition_checkpoints=true"],
            "partition_checkpoints",
            &["no block is recomputed", "`recompute` is None by default", "to `Block`"],
        ),
        (
            &["partition_checkpoints=true", "recompute=Selective"],
            "partition_checkpoints",
            &["no block is recomputed", "results of products and attention are kept", "to `Block`"],
        ),
        (
            &["host_checkpoints=true"],
            "host_checkpoints",
            &["no checkpoints to keep on the host", "`recompute` is None by default", "to `Block`"],
        ),
        (
            &[
                "partition_checkpoints=true",
                "recompute=Block",
                "parallel=(tensor: 2, sequence: true)",
            ],
            "partition_checkpoints",
            &["splits the checkpoints", "^ inputs are split by tokens", "one of the two"],
        ),
        (
            &["offload.transfer=Blocking"],
            "offload.transfer",
            &["overlaps nothing", "`offload.update` is Overlapped by default", "to `Serial`"],
        ),
        (
            &["offload=(transfer: Blocking, update: Serial, accumulate: Device)"],
            "offload.transfer",
            &["in host memory", "^ sums stay on the device", "`Auto` or `Host`"],
        ),
        (
            &["offload=(transfer: Blocking, update: Serial, optimizer: Device)"],
            "offload.transfer",
            &["a way to the host", "^ the optimizer on the device", "on the `Host`"],
        ),
        (
            &["offload.master=Split", "precision=Fp16"],
            "offload.master",
            &["only a bf16 parameter", "^ parameters are not bf16", "`precision` to `Bf16`"],
        ),
        (
            &["offload.master=Split", "precision=Bf16", "offload.optimizer=Device"],
            "offload.master",
            &["on the host only", "^ states on the device", "leave `offload.master` out"],
        ),
        (
            &["offload.moments=Bf16", "offload.optimizer=Device"],
            "offload.moments",
            &["on the host only", "leave `offload.moments` out"],
        ),
        (
            &["offload.moments=Bf16", "offload.optimizer=Split(device_fraction: 0.5)"],
            "offload.moments",
            &["on the host only", "^ states on the device", "`offload.optimizer` to `Host`"],
        ),
        (
            &["offload.moments=Bf16", "optimizer.kind=Sgd"],
            "offload.moments",
            &["has no moments", "to `AdamW`"],
        ),
        (&["model.vocab=255"], "model.vocab", &["too few for bytes", "`data.format` is Auto"]),
        (&["loss_scale.initial=1000"], "loss_scale.initial", &["use 512.0 or 1024.0"]),
        (&["loss_scale=(initial: 2, floor: 4)"], "loss_scale.initial", &["below the floor 4.0"]),
        (
            &["model=(layers: 10000, hidden: 1000000, heads: 1)"],
            "model.hidden",
            &["parameters, more than 2^50", "10000 layers x"],
        ),
        (&["batch.micro=2147483648", "model.seq_len=16777216"], "batch.micro", &["2^50"]),
        (&["train.steps=1000000000000", "batch.global=2147483648"], "train.steps", &["2^62"]),
    ];
    for (sets, key, parts) in cases {
        refuses(sets, key, parts);
    }
    refuses(
        &["batch.micro=2147483648", "parallel.data=2"],
        "batch.micro",
        &["= 4294967296 samples"],
    );
    refuses(
        &["device.memory=1048576TiB", "parallel=(data: 8)"],
        "device.memory",
        &["more than 2^62", "`device.count` is 8 (tensor x data)"],
    );
    refuses(&["loss_scale.initial=33554432"], "loss_scale.initial", &["at most 16777216"]);
}

#[test]
fn a_rule_is_silent_while_one_of_its_values_is_wrong() {
    refuses(&["model.hidden=0"], "model.hidden", &["found 0"]);
    refuses(&["parallel.tensor=0", "device=Cpu(count: 7)"], "parallel.tensor", &["found 0"]);
    refuses(&["batch.micro=0", "batch.global=7"], "batch.micro", &["found 0"]);
    refuses(&["train.steps=0", "schedule.warmup_steps=5"], "train.steps", &["found 0"]);
}

#[test]
fn all_errors_come_out_together_in_the_order_of_the_text() {
    let text = "(
    model: (layers: \"two\", hidden: 30, heads: 4, seq_len: 16),
    lr: 1e-3,
    precision: fp17,
    batch: (micro: 4, global: 30),
    train: (stepz: 10, seed: -1),
)";
    let error = loaded(text, &[]).unwrap_err();
    let keys: Vec<&str> = error.errors().iter().map(|problem| problem.key.as_str()).collect();
    let expected = [
        "model.layers",
        "model.hidden",
        "lr",
        "precision",
        "batch.global",
        "train.stepz",
        "train.seed",
    ];
    assert_eq!(keys, expected, "{error}");
    assert!(error.to_string().ends_with("\n7 errors in dir/test.ron"));
}

#[test]
fn every_missing_key_is_named() {
    let error = loaded("()", &[]).unwrap_err();
    let keys: Vec<&str> = error.errors().iter().map(|problem| problem.key.as_str()).collect();
    let expected = ["model.layers", "model.hidden", "model.heads", "model.seq_len", "train.steps"];
    assert_eq!(keys, expected);
}

#[test]
fn an_error_is_shown_with_its_line_and_the_exact_value_underlined() {
    let text = "(\n    model: (\n\t\tlayers: \"é\", hidden: 32, heads: 4, seq_len: 16),\n    train: (steps: 1),\n)";
    let expected = "\
error: model.layers: expected a whole number, found the string \"é\"
 --> dir/test.ron:3:11
  |
3 |   layers: \"é\", hidden: 32, heads: 4, seq_len: 16),
  |           ^^^
  = help: write a number from 1 to 10_000

1 error in dir/test.ron";
    assert_eq!(loaded(text, &[]).unwrap_err().to_string(), expected);
}

#[test]
fn text_that_is_no_ron_is_refused_with_its_place() {
    let cases: &[(&str, &str, &str)] = &[
        ("", "1:1", "the file is empty"),
        ("model: (layers: 1)", ":6", "one pair of parentheses around everything"),
        ("{\"model\": 1}", "1:1", "this looks like JSON"),
        ("(model: 1 train: 2)", "1:11", "a comma is missing"),
        ("(\n model: (\n", "2:10", "a `)` is missing at the end"),
        ("(name: \"abc)", "1:8", "close the string"),
        ("(model = 3)", "1:8", "stands `:`"),
        ("# comment\n()", "1:2", "comments start with `//`"),
        ("() ()", "1:4", "nothing may follow"),
        ("[]", "1:1", "one pair of parentheses"),
        ("Config()", "1:1", "parentheses around"),
    ];
    for (text, place, part) in cases {
        let error = loaded(text, &[]).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains(part), "{text}:\n{error}");
        assert!(error.ends_with("1 error in dir/test.ron"), "{error}");
    }
    let nested = format!("(name: {})", "[".repeat(100_000));
    assert!(loaded(&nested, &[]).is_err());
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("quickstart.ron"), LEAST).unwrap();
    std::fs::write(path("large.ron"), " ".repeat((1 << 20) + 1)).unwrap();
    std::fs::write(path("latin.ron"), b"(\n\xff)").unwrap();
    for (name, part) in [
        ("quikstart.ron", "did you mean"),
        ("none/x.ron", "there is no directory"),
        ("", "it is a directory"),
        ("large.ron", "larger than 1.00 MiB"),
        ("latin.ron", "line 2 is not UTF-8"),
    ] {
        let error = load(&path(name), &[]).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(error.contains(&path(name).display().to_string()), "{error}");
    }
}

#[test]
fn errors_of_a_box_show_the_box_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |text: &str| std::fs::write(folder.path().join("b.ron"), text).unwrap();
    let text = LEAST.replace("(model", "(device: Sim(box: \"b.ron\"), parallel: (data: 3), model");
    let refused = || load_str(&text, "a.ron", folder.path(), &[]).unwrap_err().to_string();
    write("(gpus: 0, gpu_memory: \"8GiB\", node_memorry: \"1TiB\")");
    let error = refused();
    assert!(error.contains("gpus: must be a whole number from 1 to 4_096, found 0"), "{error}");
    assert!(error.contains("b.ron:1:8\n") && error.contains("`node_memory`"), "{error}");
    assert!(error.contains("\n2 errors in /") && error.ends_with("/b.ron"), "{error}");
    let of_both = text.replace("(data: 3)", "(data: 0)");
    let error = load_str(&of_both, "a.ron", folder.path(), &[]).unwrap_err().to_string();
    assert!(
        error.ends_with("/b.ron") && error.contains("\n1 error in a.ron, 2 errors in "),
        "{error}"
    );
    for (rate, found) in [
        ("processors: 1", "gpu.processors: must be a whole number from 4 to 1_000, found 1"),
        ("processors: 1_001", "found 1_001"),
        ("sm: 9", "gpu.sm: must be a whole number from 70 to 200, found 9"),
        (
            "sm: 90, fused_attention: 400",
            "`gpu` has no key `fused_attention` any more: `sm` says which kernels",
        ),
        ("memory_gb_per_s: 1e7", "must be a number from 0 to 1000000"),
    ] {
        write(&format!("(gpus: 3, gpu_memory: \"8GiB\", node_memory: \"1TiB\", gpu: ({rate}))"));
        let error = refused();
        assert!(
            error.contains(found) && error.contains("\n1 error in /") && error.ends_with("/b.ron"),
            "{error}"
        );
    }
    write("(gpus: 3, gpu_memory: \"8GiB\", node_memory: \"1TiB\", gpu: (processors: 0, sm: 0))");
    load_str(&text, "a.ron", folder.path(), &[]).unwrap();
    write("(gpus: 2, gpu_memory: \"8GiB\", node_memory: \"1TiB\")");
    let error = refused();
    assert!(error.contains("the box has 2 GPUs, but tensor 1 x data 3 = 3 ranks"), "{error}");
    assert!(error.contains("b.ron:1:8\n") && error.contains("::: a.ron:1:"), "{error}");
    write("(gpus: 2");
    assert!(refused().contains("b.ron:1:"));
    let error = load_box(&folder.path().join("b.ron")).unwrap_err().to_string();
    assert!(error.contains("a comma is missing, or a `)`"), "{error}");
}
