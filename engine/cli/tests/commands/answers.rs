//! Commands: a config from the standard input, boxes by name, one JSON document, a verdict.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use serde_json::Value;

fn json(done: &CommandOutput) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

#[test]
fn every_command_that_looks_at_something_answers_in_json() {
    let folder = Folder::new();
    folder.train("run", &["-q", "--set", "train.checkpoint_every=2"]).ok();
    let checked = json(&folder.onebox(&["config", "check", "tiny.ron", "--json"]).ok());
    assert_eq!(
        (&checked["ok"], &checked["tensor"], &checked["data"]),
        (&true.into(), &2.into(), &2.into())
    );
    let wrong = ["config", "check", "tiny.ron", "--json", "--set", "batch.micro=7"];
    let wrong = folder.onebox(&wrong).refused(78, &[]);
    assert_eq!(wrong.stderr, "", "all of it is in the document");
    let error = &json(&wrong)["errors"][0];
    assert_eq!((&error["key"], &error["line"]), (&"batch.global".into(), &7.into()), "{error}");
    let missing = ["config", "check", "tiny.ron", "--json", "--set", "data.train=none.txt"];
    assert_eq!(json(&folder.onebox(&missing).refused(66, &[]))["ok"], false);
    let shown = ["config", "show", "tiny.ron", "--json", "--set", "train.steps=9"];
    let shown = json(&folder.onebox(&shown).ok());
    let key = |name| shown["keys"].as_array().unwrap().iter().find(|k| k["key"] == name).unwrap();
    assert_eq!(
        (&key("train.steps")["value"], &key("train.steps")["from"]),
        (&"9".into(), &"set".into())
    );
    assert_eq!(
        (&key("model.layers")["line"], &key("model.layers")["from"]),
        (&3.into(), &"file".into())
    );
    let verified = json(&folder.onebox(&["checkpoint", "verify", "run", "--json"]).ok());
    assert_eq!(
        (&verified["checkpoints"][1]["whole"], &verified["broken"]),
        (&true.into(), &0.into())
    );
    let rank = "run/checkpoints/step-00000004/rank-00000.safetensors";
    let mut bytes = std::fs::read(folder.path(rank)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(folder.path(rank), bytes).unwrap();
    let broken = folder.onebox(&["checkpoint", "verify", "run", "--json"]).refused(82, &["1 of 2"]);
    let broken = json(&broken);
    assert_eq!((&broken["checkpoints"][1]["whole"], &broken["broken"]), (&false.into(), &1.into()));
    assert!(broken["checkpoints"][1]["problems"][0].as_str().unwrap().contains("rank-00000"));
    let synthetic = ["topology", "--synthetic", "pack:1 numa:1 core:2 pu:1"];
    let [short, long] = [&["--json"][..], &["--format", "json"]];
    let [short, long] =
        [short, long].map(|how| folder.onebox(&[&synthetic[..], how].concat()).ok());
    assert_eq!(json(&short), json(&long));
    let flat = "/../../configs/boxes/topologies/vm-flat-8xH100.xml";
    let flat = format!("{}{flat}", env!("CARGO_MANIFEST_DIR"));
    let flat = json(&folder.onebox(&["topology", "--json", "--xml", &flat]).ok());
    assert_eq!(
        (&flat["virtual_machine"], &flat["warnings"][0]["id"]),
        (&true.into(), &"tree-hidden".into())
    );
}

#[test]
fn doctor_fails_where_gpus_are_wanted_and_only_there() {
    let folder = Folder::new();
    let driver = ["libcuda.so.1", "libcuda.so"];
    if driver.iter().any(|name| folder.shell(&format!("ldconfig -p | grep -q {name}")).code == 0) {
        return; // here the command may succeed either way
    }
    let output = folder.onebox(&["doctor", "--json"]).ok();
    let output = json(&output);
    assert_eq!((&output["ok"], &output["trains_on"]), (&true.into(), &serde_json::json!(["Cpu"])));
    let wanted = folder.onebox(&["doctor", "--cuda"]).refused(1, &[]);
    assert!(wanted.stdout.starts_with("fail  driver"), "{}", wanted.stdout);
    let wanted = json(&folder.onebox(&["doctor", "--cuda", "--json"]).refused(1, &[]));
    let driver = &wanted["findings"][0];
    assert_eq!((&wanted["ok"], &driver["verdict"]), (&false.into(), &"fail".into()));
    assert!(driver["remedy"].as_str().unwrap().contains("NVIDIA"), "{driver}");
}

#[test]
fn a_config_may_come_from_the_standard_input() {
    let folder = Folder::new();
    let shell = |line: &str| {
        folder.shell(&format!("cat tiny.ron | {} {line}", env!("CARGO_BIN_EXE_onebox")))
    };
    assert!(shell("config check -").ok().stdout.starts_with("stdin: ok: "));
    assert!(shell("config show -").ok().stdout.contains("model.layers"));
    shell("plan -").ok();
    shell("plan - --set batch.micro=7").refused(78, &[" --> stdin:7:", "1 error in stdin"]);
    let trained = shell("train - --run-dir run").ok();
    assert!(trained.stderr.contains(" train run/config.ron --set "), "{}", trained.stderr);
    folder.onebox(&["checkpoint", "export", "run", "hf", "--to", "safetensors"]).ok();
    let imported = shell("checkpoint import hf new - --set train.steps=2").ok().stderr;
    let proposed = "train new/config.ron --run-dir new --resume";
    assert!(imported.ends_with(&format!("\n  onebox {proposed}\n")), "{imported}");
    let args: Vec<&str> = proposed.split(' ').collect();
    assert_eq!(folder.onebox(&args).ok().stderr.matches("going on after step 0").count(), 1);
    assert_eq!(folder.metrics("new").iter().filter(|line| line["kind"] == "step").count(), 2);
}

#[test]
fn a_box_is_found_by_its_name_and_named_as_it_was_typed() {
    let folder = Folder::new();
    let boxes = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/boxes");
    let fp16 = ["--set", "precision=Fp16"];
    let on = |named: &str, more: &[&str]| {
        folder.onebox(
            &[&["simulate", "tiny.ron", "--box", named, "--no-schedules"], &fp16[..], more]
                .concat(),
        )
    };
    // The box does not exist; the config with a similar name is not suggested.
    let none = on("tinyx.ron", &[]).refused(78, &["--box tinyx.ron: there is no such file"]);
    assert!(!none.stderr.contains("tiny.ron"), "{}", none.stderr);
    std::os::unix::fs::symlink(&boxes, folder.path("boxes")).unwrap();
    assert!(
        on("v100-32gb", &["--set", "parallel.tensor=1", "--set", "parallel.data=1"])
            .ok()
            .stdout
            .contains("simulated on")
    );
    std::fs::create_dir(folder.path("dgx2")).unwrap();
    assert!(on("dgx2", &[]).ok().stdout.contains("simulated on"), "a folder of its name hides it");
    on("v100-32g", &[]).refused(78, &["--box v100-32g: ", "did you mean `--box v100-32gb`?"]);
    on("boxes/dgx3.ron", &[]).refused(78, &["did you mean `--box boxes/dgx2.ron`?"]);
    let many = on("v100-32gb", &[]).refused(78, &["the box has 1 GPU"]);
    assert!(!many.stderr.contains("--set device"), "{}", many.stderr);
    // A file that is no box is named as it was typed.
    let config = on("tiny.ron", &[]).refused(78, &["is a training config, not a box"]);
    assert!(!config.stderr.contains("Sim(box"), "{}", config.stderr);
    std::fs::create_dir(folder.path("folder.ron")).unwrap();
    on("folder.ron", &[]).refused(78, &["  | --box folder.ron\n", "it is a directory"]);
}

#[test]
fn a_config_in_another_format_is_told_which() {
    let folder = Folder::new();
    for (name, text, format) in [
        ("a.toml", "# sizes\n[model]\nlayers = 2\n", "TOML"),
        ("b.toml", "name = \"a\"\n[model]\nlayers = 2\n", "TOML"),
        ("a.yaml", "---\nmodel:\n  layers: 2\n", "YAML"),
        ("b.yml", "# sizes\nname: a\nmodel:\n  layers: 2\n", "YAML"),
        ("a.json", "{\"model\": {\"layers\": 2}}", "JSON"),
        ("b.json", "{\n  \"model\": {\"layers\": 2,},\n", "JSON"),
    ] {
        std::fs::write(folder.path(name), text).unwrap();
        let hint = format!("this looks like {format}");
        folder.onebox(&["config", "check", name]).refused(78, &[&hint]);
    }
}

#[test]
fn a_checkpoint_writes_text_too() {
    let folder = Folder::new();
    folder.train("run", &["-q", "--set", "train.checkpoint_every=2"]).ok();
    let text = |of| folder.onebox(&["generate", of, "--tokens", "16"]).ok();
    let last = text("run/checkpoints/step-00000004");
    assert_eq!(last.stdout, text("run").stdout);
    assert!(last.stderr.contains("the parameters after step 4"), "{}", last.stderr);
    assert!(text("run/checkpoints/step-00000002").stderr.contains("after step 2"));
    folder.onebox(&["generate", "."]).refused(66, &["is not a run directory", "no checkpoint"]);
}

#[test]
fn what_is_proposed_sets_each_key_once_and_names_what_the_command_has() {
    let folder = Folder::new();
    let sets = ["--set", "parallel.tensor=1", "--set", "parallel.data=4"];
    let done = folder.train("run", &sets).ok();
    let line = done.stderr.lines().find(|line| line.contains(" train tiny.ron")).unwrap();
    for key in ["parallel.tensor=", "parallel.data=", "device.count="] {
        assert_eq!(line.matches(key).count(), 1, "{line}");
    }
    for verb in [
        &["checkpoint", "reshard", "run", "text.txt", "--tp", "1", "--dp", "1"][..],
        &["checkpoint", "reshard", "run", "run", "--tp", "1", "--dp", "1"],
    ] {
        let refused = folder.onebox(verb).refused(73, &[]);
        assert!(!refused.stderr.contains("--"), "{}", refused.stderr);
    }
    let import = folder.onebox(&["checkpoint", "import", "gpt2", "out", "tiny.ron"]);
    import.refused(66, &["nothing is downloaded: name a folder on this machine"]);
}
