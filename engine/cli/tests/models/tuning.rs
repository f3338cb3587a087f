//! Defaults of pretrained weights, and words of other tools, as a user meets them.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{Folder, with_chats};

/// The config of `with_chats` without batch sizes.
fn with_defaults() -> Folder {
    let folder = with_chats();
    let ron = folder.read("chat.ron").replace("batch: (micro: 2, global: 8),", "");
    std::fs::write(folder.path("chat.ron"), ron).unwrap();
    folder
}

#[test]
fn a_fine_tune_shows_its_defaults_and_keeps_them_when_it_is_resumed() {
    let folder = with_defaults();
    let shown = folder.onebox(&["config", "show", "chat.ron"]).ok().stdout;
    for (key, value, origin) in [
        ("optimizer.lr", "5e-5", "default of pretrained weights"),
        ("optimizer.beta2", "0.999", "default of pretrained weights"),
        ("schedule.warmup_steps", "1", "3 % of decay_steps: default of pretrained weights"),
        (
            "batch.global",
            "8",
            "8, or the next multiple of micro x data: default of pretrained weights",
        ),
    ] {
        let line = shown.lines().find(|line| line.split_whitespace().next() == Some(key)).unwrap();
        assert!(line.contains(value) && line.ends_with(origin), "{line}");
    }
    let random =
        folder.onebox(&["config", "show", "chat.ron", "--set", "model.weights=Random"]).ok();
    assert!(!random.stdout.contains("default of pretrained weights"), "{}", random.stdout);
    folder.onebox(&["train", "chat.ron", "-q", "--run-dir", "run"]).ok();
    // Neither its own config nor that of the user is another experiment.
    let longer = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    for config in ["run/config.ron", "chat.ron"] {
        let more = [&["train", config, "-q", "--run-dir", "run"], &longer[..]].concat();
        folder.onebox(&more).ok();
    }
}

#[test]
fn a_data_set_smaller_than_a_step_is_trained() {
    let folder = with_defaults();
    folder.shell("head -n 4 chats.jsonl > few.jsonl").ok();
    let few = ["--set", "data.train=few.jsonl", "--set", "data.validation_fraction=0.3"];
    for length in
        [&[][..], &["--set", "train.epochs=2", "--set", "parallel.data=1", "--set", "device=Cpu"]]
    {
        let ron = folder.read("chat.ron");
        let ron = if length.is_empty() { ron } else { ron.replace("steps: 4, ", "") };
        std::fs::write(folder.path("few.ron"), ron).unwrap();
        let args = [
            &["train", "few.ron", "-q", "--run-dir"],
            &[if length.is_empty() { "a" } else { "b" }][..],
        ];
        folder.onebox(&[&args.concat()[..], &few, length].concat()).ok();
    }
}

#[test]
fn a_rate_of_pretraining_is_warned_of_once() {
    let folder = with_defaults();
    let high = ["--set", "optimizer.lr=6e-4"];
    let warned = |args: &[&str]| {
        let stderr = folder.onebox(&[args, &high].concat()).ok().stderr;
        stderr.matches("warning: optimizer.lr is 0.0006 for pretrained weights").count()
    };
    assert_eq!(warned(&["config", "check", "chat.ron"]), 1);
    assert_eq!(warned(&["config", "check", "chat.ron", "--json"]), 1);
    assert_eq!(warned(&["train", "chat.ron", "-q", "--run-dir", "run"]), 1);
    // A run that goes on has begun with this rate.
    let longer = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    assert_eq!(
        warned(&[&["train", "chat.ron", "-q", "--run-dir", "run"], &longer[..]].concat()),
        0
    );
    let usual = folder.onebox(&["config", "check", "chat.ron"]).ok().stderr;
    assert!(!usual.contains("optimizer.lr"), "{usual}");
}

#[test]
fn words_of_other_tools_are_answered() {
    let folder = with_defaults();
    let check = |set: &str, expected: &str| {
        folder.onebox(&["config", "check", "chat.ron", "--set", set]).refused(78, &[expected]);
    };
    check("lora_r=8", "here it is called `adapter.rank`");
    check("num_train_epochs=3", "write `--set train.epochs=3`");
    check("optimizer.clip=0", "`None` switches it off");
    check("optimizer.kind=AdamW8bit", "`offload.moments: Bf16`");
    check("optim=adamw_bnb_8bit", "onebox has no 8-bit moments");
    check("lr_scheduler_type=cosine", "ends at 0, here at `schedule.min_lr`");
    check("max_steps=-1", "`train.steps`: leave it out, and set `train.epochs`");
    check("val_size=500", "`data.validation_fraction`: it is a share of `data.train`");
    // A proposed value is taken.
    check("eval_steps=2e0", "write `--set train.eval_every=2`");
    folder.onebox(&["config", "check", "chat.ron", "--set", "train.eval_every=2"]).ok();
    let yaml = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\n";
    for (file, more, expected) in [
        ("axolotl.yml", "", "`sequence_len` is `model.seq_len`"),
        ("axolotl.yml", "load_in_4bit: true\n", "onebox has no quantized weights"),
        ("axolotl.yml", "rl: dpo\n", "onebox has no preference or reinforcement learning"),
        ("factory.yaml", "stage: dpo\n", "onebox has no preference or reinforcement learning"),
        ("factory.yaml", "quantization_bit: 4\n", "onebox has no quantized weights"),
    ] {
        std::fs::write(folder.path(file), format!("{yaml}{more}")).unwrap();
        let refusal = folder.onebox(&["train", file]).refused(78, &["YAML", expected]);
        assert_eq!(refusal.stderr.contains("onebox has "), !more.is_empty());
    }
    let shown =
        folder.onebox(&["config", "show", "chat.ron", "--set", "precision=bf16"]).ok().stdout;
    assert!(
        shown.lines().any(|line| line.starts_with("precision ") && line.contains("Bf16")),
        "{shown}"
    );
}

#[test]
fn a_fine_tune_of_few_steps_is_warned_of() {
    let folder = with_defaults();
    let ron = folder.read("chat.ron").replace("steps: 4, ", "");
    std::fs::write(folder.path("few.ron"), ron).unwrap();
    let epochs = ["--set", "train.epochs=1"];
    let large = ["--set", "batch.global=64"];
    let warned = |args: &[&str]| {
        let stderr = folder.onebox(&[args, &epochs].concat()).ok().stderr;
        stderr.matches("So few steps hardly change pretrained weights").count()
    };
    assert_eq!(warned(&[&["data", "check", "few.ron"][..], &large].concat()), 1);
    assert_eq!(warned(&["data", "check", "few.ron"]), 0);
    let train = ["train", "few.ron", "-q", "--run-dir", "run"];
    assert_eq!(warned(&[&train[..], &large].concat()), 1);
    assert_eq!(warned(&["train", "few.ron", "-q", "--run-dir", "usual"]), 0);
}
