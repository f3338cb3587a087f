//! `onebox simulate`, traces and measured boxes for a user; no time is asserted.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

fn config(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name).display().to_string()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn seventy_billion_parameters_on_a_dgx2_are_simulated() {
    let folder = Folder::new();
    let sets = ["--set", "batch.global=64"]; // fewer micro-batches, for time
    let path = config("dgx2-70b.ron");
    let report =
        json(&folder.onebox(&[&["simulate", &path, "--json"], &sets[..]].concat()).ok().stdout);
    assert_eq!(report["simulated"], true);
    assert_eq!(report["kinds_of_ranks"], 1, "all GPUs of a DGX-2 are alike");
    let number = |key: &str| report[key].as_f64().unwrap();
    let step = number("step_seconds");
    // The data sheet has 125 TFLOPS; the box has 70 for matmuls alone.
    let hardware = number("hardware_tflops_per_gpu");
    assert!(hardware > 20.0 && hardware < 70.0, "{hardware}");
    assert!(number("model_tflops_per_gpu") < hardware);
    assert!((number("tokens_per_second") * step / (64.0 * 1024.0) - 1.0).abs() < 1e-9);
    let path: f64 = report["critical_path"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["seconds"].as_f64().unwrap())
        .sum();
    assert!((path / step - 1.0).abs() < 1e-6, "the critical path {path} is the step {step}");
    let compute = &report["lanes"][0];
    assert!(compute["share"].as_f64().unwrap() <= 1.0);
}

#[test]
fn the_report_says_what_submits_and_which_queue_collectives_stand_in() {
    let folder = Folder::new();
    let path = config("paper/dgx2-1b.ron");
    let of = |tensor: usize, data: usize, more: &[&str]| {
        let sets = [
            "--set",
            &format!("parallel.tensor={tensor}"),
            "--set",
            &format!("parallel.data={data}"),
        ];
        let args = [
            "simulate",
            &path,
            "--set",
            "batch.micro=1",
            "--set",
            "batch.global=8",
            "--no-schedules",
        ];
        folder.onebox(&[&args[..], &sets[..], more].concat()).ok().stdout
    };
    let shared = "TpComm and DpComm are one queue";
    for (tensor, data, one) in [(2, 4, true), (1, 8, false), (8, 1, false)] {
        let words = of(tensor, data, &[]);
        assert_eq!(words.contains(shared), one, "{words}");
        assert!(words.contains("calls of the driver, by the thread that submits"), "{words}");
        let report = json(&of(tensor, data, &["--json"]));
        assert_eq!(report["one_communication_queue"], one);
        let number = |key: &str| report[key].as_f64().unwrap();
        let (seconds, calls) = (number("submitting_seconds"), number("driver_calls"));
        assert!(seconds > 2e-6 * calls && seconds < number("step_seconds"), "{seconds}, {calls}");
        assert_eq!(report["schedules"].as_array().unwrap().len(), 0);
    }
}

/// The box can name exceptions from `as_of_2020`; a wrong name is refused with the valid names.
#[test]
fn a_box_can_leave_out_what_2020_did() {
    let folder = Folder::new();
    let described = std::fs::read_to_string(config("boxes/v100-32gb.ron")).unwrap();
    let path = config("paper/dgx2-1b.ron");
    let with = |facts: &str| {
        std::fs::write(
            folder.path("box.ron"),
            described.replace("gemm_tflops", &format!("{facts} gemm_tflops")),
        )
        .unwrap();
        let small = ["batch.micro=2", "batch.global=4", "parallel.data=1", "host_checkpoints=true"];
        let small = small.iter().flat_map(|set| ["--set", *set]);
        let args = ["simulate", &path, "--json", "--no-schedules", "--box", "box.ron"];
        folder.onebox(&args.into_iter().chain(small).collect::<Vec<_>>())
    };
    let seconds = |facts: &str| json(&with(facts).ok().stdout)["step_seconds"].as_f64().unwrap();
    let all = seconds("as_of_2020: true,");
    for fact in ["scores", "heads", "small_kernels", "pageable", "adam_rate", "unscaling"] {
        let without = seconds(&format!("as_of_2020: true, as_of_2020_without: \"{fact}\","));
        assert!(without < all, "{fact}: {without} of {all}");
    }
    // A single rank has no other ranks to wait for.
    assert_eq!(seconds("as_of_2020: true, as_of_2020_without: \"one_copier\","), all);
    with("as_of_2020: true, as_of_2020_without: \"bus\",")
        .refused(78, &["as_of_2020_without", "one_copier"]);
}

#[test]
fn what_is_simulated_moves_what_the_plan_counts() {
    let folder = Folder::new();
    for sets in [&["--set", "parallel.tensor=4", "--set", "parallel.data=4"][..], &[]] {
        let path = config("paper/dgx2-1b.ron");
        let with = |verb: &'static str| {
            let args = [&[verb, &path, "--json", "--set", "batch.micro=4"], sets].concat();
            json(&folder.onebox(&args).ok().stdout)
        };
        let (plan, report) = (with("plan"), with("simulate"));
        assert_eq!(plan["gpu"]["bytes"], report["gpu_bytes"]);
        assert_eq!(plan["host_per_rank"]["bytes"], report["host_bytes_per_rank"]);
        for (planned, simulated) in plan["step"]["lanes"]
            .as_array()
            .unwrap()
            .iter()
            .zip(report["lanes"].as_array().unwrap())
        {
            assert_eq!(planned["ops"], simulated["ops"], "{planned}");
            // For copies and the host, both count the same bytes; for collectives, payloads.
            if ["H2d", "D2h"].iter().any(|lane| planned["lane"] == *lane) {
                assert_eq!(planned["bytes"], simulated["bytes"], "{planned}");
            }
        }
    }
}

/// Start and end in microseconds, and name.
type Event = (f64, f64, String);

#[test]
fn the_update_of_smaller_states_takes_as_much_less_as_it_moves() {
    let folder = Folder::new();
    let path = config("paper/dgx2-1b.ron");
    // Split states need bf16 matmuls: this box has the DGX-2's host, and GPUs with bf16 matmuls.
    let text = std::fs::read_to_string(config("boxes/dgx2.ron")).unwrap();
    let ampere = text.replace("sm: 70", "sm: 80");
    assert_ne!(text, ampere);
    let ampere = ampere.replace("topologies/dgx2.xml", &config("boxes/topologies/dgx2.xml"));
    std::fs::write(folder.path("box.ron"), ampere).unwrap();
    let serial = "precision=Bf16 batch.micro=1 batch.global=16 offload.update=Serial";
    let seconds = |options: &str| {
        let sets = serial.split(' ').chain(options.split_terminator(' '));
        let sets: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
        let args = [&["simulate", &path, "--box", "box.ron", "--json"], &sets[..]].concat();
        let report = json(&folder.onebox(&args).ok().stdout);
        let lanes = report["lanes"].as_array().unwrap();
        lanes.iter().find(|lane| lane["lane"] == "Host").unwrap()["seconds"].as_f64().unwrap()
    };
    let whole = seconds("");
    // The paper's Table 4 has 0.22 s, on a box with the same memory.
    assert!(whole < 0.22, "{whole}");
    let (split, moments) = ("offload.master=Split", "offload.moments=Bf16");
    for (options, bytes) in
        [(split, 26.0), (moments, 20.0), (&format!("{split} {moments}")[..], 18.0)]
    {
        let share = seconds(options) / whole;
        // The norm reads the 2 bytes of the gradient once more.
        assert!((share - (bytes + 2.0) / 30.0).abs() < 0.01, "{options}: {share}");
    }
}

/// Events of a trace by (process, track), in the order of the file.
fn tracks(text: &str) -> BTreeMap<(u64, u64), Vec<Event>> {
    let mut tracks: BTreeMap<(u64, u64), Vec<Event>> = BTreeMap::new();
    for event in json(text)["traceEvents"].as_array().unwrap() {
        if event["ph"] == "X" {
            let (start, long) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let name = event["name"].as_str().unwrap().to_owned();
            tracks.entry(track).or_default().push((start, start + long, name));
        }
    }
    tracks
}

#[test]
fn a_real_trace_and_a_simulated_one_have_the_same_tracks_and_ops() {
    let folder = Folder::new();
    let steps = ["--trace", "real.json", "--trace-steps", "3..3"];
    // All updates run inside of their step, so that steps begin and end alike.
    let serial = ["--set", "offload.update=Serial"];
    folder.train("run", &[&steps[..], &serial[..]].concat()).ok();
    std::fs::write(folder.path("box.ron"), ONE_CORE).unwrap();
    let simulated = ["simulate", "tiny.ron", "--box", "box.ron", "--trace", "sim.json"];
    let output = folder.onebox(&[&simulated[..], &serial[..], &["--compare", "run"]].concat()).ok();
    assert!(output.stdout.contains(" per step (median); simulated "), "{}", output.stdout);
    let (real, sim) = (tracks(&folder.read("real.json")), tracks(&folder.read("sim.json")));
    assert_eq!(real.keys().collect::<Vec<_>>(), sim.keys().collect::<Vec<_>>());
    for (track, events) in &sim {
        // A simulated step lasts from decision to decision, a real step begins with its first op.
        let names = |e: &[Event]| {
            let mut names: Vec<String> = e.iter().map(|e| e.2.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(names(events), names(&real[track]), "{track:?}");
        for pair in events.windows(2) {
            assert!(pair[1].0 >= pair[0].1 - 0.01, "{track:?}: {pair:?} overlap");
        }
    }
}

/// A machine with invented figures.
const ONE_CORE: &str = r#"(
    gpus: 4, gpu_memory: "16MiB", node_memory: "1GiB",
    measured: (cores: 2, gemm_gflops_16: 10, gemm_gflops_32: 10, attention_gflops: 5,
        attention_backward_gflops: 5, other_gb_per_s: 4, op_us: 1, meeting_us: 5),
)"#;

#[test]
fn virtual_gpus_need_as_many_bytes_in_a_box_as_here() {
    let folder = Folder::new();
    let measured = ONE_CORE.replace("cores: 2", "cores: 4");
    std::fs::write(folder.path("box.ron"), measured).unwrap();
    let plan = json(&folder.onebox(&["plan", "tiny.ron", "--json"]).ok().stdout);
    let simulation =
        json(&folder.onebox(&["simulate", "tiny.ron", "--box", "box.ron", "--json"]).ok().stdout);
    assert_eq!(plan["gpu"]["bytes"], simulation["gpu_bytes"]);
}

#[test]
fn this_machine_is_measured_and_the_box_is_simulated() {
    let folder = Folder::new();
    let said = folder.onebox(&["bench", "--save-box", "here.ron"]).ok().stderr;
    let text = folder.read("here.ron");
    assert!(said.contains("residual: a step") && text.contains(" residual: (gpt2: "), "{text}");
    for key in ["cores:", "gemm_gflops_16:", "attention_gflops:", "adam_tile:", "op_us:"] {
        assert!(text.contains(key), "{key} in {text}");
    }
    // Ops of both families, in both widths.
    for op in ["layer_norm", "gelu", "rms_norm", "rotary", "swiglu"] {
        for key in [format!(" {op}: "), format!(" {op}_backward: ")] {
            assert_eq!(text.matches(&key).count(), 2, "{key} in {text}");
        }
    }
    let report =
        json(&folder.onebox(&["simulate", "tiny.ron", "--box", "here.ron", "--json"]).ok().stdout);
    assert!(report["step_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn gpus_of_a_box_without_a_topology_reach_each_other_as_it_says() {
    let folder = Folder::new();
    let seconds = |peer: &str| {
        let ron = format!(
            "(gpus: 2, gpu_memory: \"8GiB\", node_memory: \"8GiB\",
              gpu: (gemm_tflops: 100, fp32_tflops: 20, memory_gb_per_s: 1000, processors: 80, sm: 80, {peer}),
              host: (node_gb_per_s: 100, core_gb_per_s: 10, cores: 8, link_gb_per_s: 0.01))"
        );
        std::fs::write(folder.path("box.ron"), ron).unwrap();
        let args =
            ["simulate", "tiny.ron", "--box", "box.ron", "--set", "parallel.data=1", "--json"];
        let output = json(&folder.onebox(&args).ok().stdout);
        let lanes = output["lanes"].as_array().unwrap().clone();
        let lane = lanes.iter().find(|lane| lane["lane"] == "TpComm").unwrap();
        lane["seconds"].as_f64().unwrap()
    };
    // Over links of 10 MB/s, and at the speed of NVLink.
    let (links, peers) = (seconds(""), seconds("peer_gb_per_s: 300"));
    assert!(peers > 0.0 && peers < 0.1 * links, "{links} {peers}");
}

#[test]
fn what_cannot_be_simulated_is_said() {
    let folder = Folder::new();
    let done = folder.onebox(&["simulate", "tiny.ron"]);
    assert_eq!(done.code, 78);
    assert!(done.stderr.contains("--save-box"), "{}", done.stderr);
    let bare = "(gpus: 4, gpu_memory: \"8GiB\", node_memory: \"64GiB\")";
    std::fs::write(folder.path("bare.ron"), bare).unwrap();
    let done = folder.onebox(&["simulate", "tiny.ron", "--box", "bare.ron"]);
    assert_eq!(done.code, 78);
    assert!(done.stderr.contains("\n  gpu.gemm_tflops: "), "{}", done.stderr);
    std::fs::write(folder.path("small.ron"), ONE_CORE.replace("gpus: 4", "gpus: 2")).unwrap();
    let done = folder.onebox(&["simulate", "tiny.ron", "--box", "small.ron"]);
    assert_eq!(done.code, 78, "{}", done.stderr);
    assert!(done.stderr.contains("2 GPUs"), "{}", done.stderr);
    let done = folder.train("run", &["--trace", "t.json"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    let done = folder.train("run", &["--trace", "t.json", "--trace-steps", "5..3"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
}

#[test]
fn steps_that_a_run_never_comes_to_are_no_empty_trace() {
    let folder = Folder::new();
    let traced = |path: &str, steps: &str, more: &[&str]| {
        folder.train("run", &[&["-q", "--trace", path, "--trace-steps", steps], more].concat())
    };
    let texts = ["--trace-steps 5..7", "the last step of the run is 4 (train.steps)"];
    traced("t.json", "5..7", &[]).refused(78, &texts);
    assert!(!folder.path("run").exists() && !folder.path("t.json").exists());
    // The trace has the steps that exist.
    traced("t.json", "4..9", &[]).ok();
    assert!(folder.read("t.json").contains("\"ph\":\"X\""));
    // The run continues after these steps.
    let more = ["--resume", "--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    let output = traced("late.json", "1..2", &more).ok().stderr;
    assert!(
        output.contains("nothing was traced") && output.contains("no step of 1..2"),
        "{output}"
    );
    assert!(!folder.path("late.json").exists());
}

#[test]
fn bench_measures_steps_or_copies_or_writes_a_box() {
    let folder = Folder::new();
    let usage = ["onebox bench step", "onebox bench copy", "onebox bench --save-box <FILE>"];
    folder.onebox(&["bench"]).refused(2, &usage);
    folder.onebox(&["bench", "--save-box", "a.ron", "copy"]).refused(2, &["cannot be used with"]);
    assert!(!folder.path("a.ron").exists());
    let step = ["bench", "step", "tiny.ron", "--steps", "2"];
    let output = folder.onebox(&[&step[..], &["--json"]].concat()).ok().stdout;
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["steps"], 2, "{output}");
    assert_eq!(output["exposed_seconds"], Value::Null, "lanes run inline: {output}");
    // This is the third step of a run; the first step is not measured.
    folder.train("run", &[]).ok();
    let third = folder.metrics("run").into_iter().filter(|line| line["kind"] == "step").nth(2);
    assert_eq!(output["loss"], third.unwrap()["loss"], "{output}");
    assert!(folder.onebox(&step).ok().stdout.contains("of the model per GPU"));
    let output = folder.onebox(&["bench", "copy", "--mib", "1"]).ok().stdout;
    assert!(output.contains("ceiling   ") && output.contains("change "), "{output}");
    assert!(output.contains("%) in tiles of 1.0 MiB, each behind a task of the host"), "{output}");
    let args = ["bench", "copy", "--mib", "3", "--tile-mib", "2", "--json"];
    let output: Value = serde_json::from_str(&folder.onebox(&args).ok().stdout).unwrap();
    let parts = &output["parts"];
    assert_eq!(
        (&parts["tile_bytes"], &parts["piece_bytes"]),
        (&(2 << 20).into(), &(3 << 20).into())
    );
    let number = |of: &Value| of.as_f64().unwrap();
    let (up, down) = (number(&output["up"]), number(&output["down"]));
    // Shares are relative to one copy of the same run, or to the sum of both directions.
    for (share, is) in [
        (&output["both_share"], number(&output["both"]) / (up + down)),
        (&parts["up_share"], number(&parts["up"]) / up),
        (&parts["down_share"], number(&parts["down"]) / down),
        (&parts["both_share"], number(&parts["both"]) / (up + down)),
    ] {
        assert!((number(share) / is - 1.0).abs() < 1e-12, "{share} {is}: {output}");
    }
}

#[test]
fn bench_measures_the_update_products_and_collectives_beside_their_ceilings() {
    let folder = Folder::new();
    let json = |args: &[&str]| -> Value {
        serde_json::from_str(&folder.onebox(&[args, &["--json"]].concat()).ok().stdout).unwrap()
    };
    let small = ["bench", "adam", "--params", "70001", "--threads", "2", "--rounds", "2"];
    let output = json(&small);
    let rows = output["rows"].as_array().unwrap();
    let bytes = |row: &Value| row["bytes_per_param"].as_f64().unwrap();
    let all: Vec<f64> = rows.iter().map(bytes).collect();
    assert!([28.0, 26.0, 20.0, 18.0].iter().all(|bytes| all.contains(bytes)), "{output}");
    for (key, value) in [("path", "portable".into()), ("threads", 1.into()), ("page_kib", 4.into())]
    {
        assert!(rows.iter().any(|row| row[key] == Value::clone(&value)), "{key} {output}");
    }
    for row in rows {
        for key in ["gb_per_s", "share_of_ceiling", "ceiling_gb_per_s", "pass_seconds"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} {row}");
        }
        assert!(row["state"].is_string(), "{row}");
    }
    let one = json(&[&small[..], &["--simd", "portable", "--states-only"]].concat());
    let one = one["rows"].as_array().unwrap();
    assert!(one.len() == 4 && one.iter().all(|row| row["path"] == "portable"), "{one:?}");
    let output = json(&["bench", "collective", "--mib", "1"]);
    assert_eq!(output["rows"].as_array().unwrap().len(), 3, "{output}");
    let missing = if cfg!(target_arch = "aarch64") { "avx512" } else { "neon" };
    let args = [&small[..], &["--simd", missing]].concat();
    folder.onebox(&args).refused(78, &["--simd", &format!("no `{missing}`"), "portable"]);
    folder
        .onebox(&["bench", "adam", "--simd", "mmx"])
        .refused(2, &["avx512, avx2, neon, portable"]);
}

#[test]
fn a_simulation_compares_the_update_modes_and_each_is_what_it_is_alone() {
    let folder = Folder::new();
    let config = config("paper/dgx2-10b.ron");
    let of = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        let small = ["simulate", &config, "--json", "--set", "batch.global=160"];
        let args: Vec<&str> = small.into_iter().chain(sets).collect();
        json(&folder.onebox(&args).ok().stdout)
    };
    let report = of(&[]);
    let schedules = report["schedules"].as_array().unwrap();
    let names: Vec<&str> = schedules.iter().map(|s| s["schedule"].as_str().unwrap()).collect();
    assert_eq!(names, ["Overlapped", "Serial", "Delayed(after_step: 40)", "Speculative"]);
    let number = |s: &Value, key: &str| s[key].as_f64().unwrap();
    for s in schedules {
        let alone = of(&[&format!("offload.update={}", s["schedule"].as_str().unwrap())]);
        assert_eq!(number(s, "step_seconds"), number(&alone, "step_seconds"), "{s}");
        let bytes = "host_bytes_per_rank";
        assert_eq!((&s[bytes], &s["fits"]), (&alone[bytes], &alone["fits"]), "{s}");
        // The ratio has the precision of the printed text.
        let ratio = number(s, "step_seconds") / number(&report, "step_seconds");
        assert!((number(s, "ratio") / ratio - 1.0).abs() < 1e-12, "{s}");
    }
    let [overlapped, serial, delayed] = [0, 1, 2].map(|i| number(&schedules[i], "step_seconds"));
    assert!(delayed < overlapped && overlapped < serial, "{schedules:?}");
    let [exact, delayed_is_exact] = [0, 2].map(|i| schedules[i]["exact"].as_bool().unwrap());
    assert!(exact && !delayed_is_exact);
    // On the device an update has no duration to hide.
    let device = of(&["offload.optimizer=Device", "model.layers=2"]);
    assert_eq!(device["schedules"].as_array().unwrap().len(), 1);
}

/// Speculative updates need second arrays of states: a smaller share of them may fit.
#[test]
fn a_smaller_share_ahead_of_the_decision_is_named_where_the_states_do_not_fit() {
    let folder = Folder::new();
    let path = config("dgx2-70b.ron");
    let base = ["plan", &path, "--set", "batch.global=32", "--set", "offload.update=Speculative"];
    let refused =
        folder.onebox(&[&base[..], &["--set", "offload.speculated_fraction=0.5"]].concat());
    assert_ne!(refused.code, 0);
    assert!(refused.stdout.contains("--set offload.speculated_fraction=0.2"), "{}", refused.stdout);
    let args = [&base[..], &["--set", "offload.speculated_fraction=0.2"]].concat();
    folder.onebox(&args).ok();
}

/// This is simulated; no GPU has run it. The host's rate is the simulated rate of its updates.
#[test]
fn the_update_of_a_billion_parameters_hides_behind_the_first_forward_pass_of_an_h100() {
    let folder = Folder::new();
    let (path, described) = (config("h100-1.3b.ron"), config("boxes/h100-128gib.ron"));
    let described = std::fs::read_to_string(described).unwrap();
    let simulated = |box_: &str, more: &[&str]| {
        let box_ = format!("device.box=\"{box_}\"");
        let args = ["simulate", &path, "--json", "--set", &box_, "--trace", "step.json"];
        json(&folder.onebox(&[&args[..], more].concat()).ok().stdout)
    };
    let lane = |report: &Value, name: &str, key: &str| {
        let lanes = report["lanes"].as_array().unwrap();
        lanes.iter().find(|l| l["lane"] == name).unwrap()[key].as_f64().unwrap()
    };
    for node_gb_per_s in ["100", "200", "307"] {
        let rate = format!("node_gb_per_s: {node_gb_per_s},");
        let text = described.replace("node_gb_per_s: 307,", &rate);
        assert!(text.contains(&rate), "the box says another rate");
        std::fs::write(folder.path("box.ron"), text).unwrap();
        let box_ = folder.path("box.ron").display().to_string();
        let report = simulated(&box_, &[]);
        let (step, update) =
            (report["step_seconds"].as_f64().unwrap(), lane(&report, "Host", "seconds"));
        let exposed = step - lane(&report, "Compute", "seconds");
        let compute = tracks(&folder.read("step.json"));
        let compute = compute.values().find(|t| t.iter().any(|e| e.2 == "row_max")).unwrap();
        let forward = compute.iter().take_while(|e| e.2 != "row_max");
        let forward = forward.map(|(start, end, _)| end - start).sum::<f64>() / 1e6;
        assert!(forward > 0.2 * step / 32.0 && forward < 0.5 * step / 32.0, "{forward} of {step}");
        let allowed = (update - forward).max(0.0) + 0.02 * step;
        assert!(exposed <= allowed, "{exposed} of {update}, {forward} of forward");
        let on_device = simulated(&box_, &["--set", "offload.optimizer=Device"]);
        let speed = on_device["step_seconds"].as_f64().unwrap() / step;
        let given = lane(&report, "Host", "bytes") / update / 1e9;
        println!(
            "{given:.0} GB/s: {exposed:.3} s exposed, {allowed:.3} allowed; {speed:.3} of Device's speed"
        );
        assert!(speed < 1.0 && (given < 140.0 || speed >= 0.95), "{speed} at {given} GB/s");
        assert!((node_gb_per_s == "100") == (given < 140.0), "{given}");
    }
}

#[test]
fn an_exact_update_hides_behind_the_first_forward_of_several_micro_batches() {
    let folder = Folder::new();
    let config = config("dgx2-70b.ron");
    let of = |together: &str| {
        let args = ["--json", "--set", "batch.global=64", "--set", together];
        json(&folder.onebox(&[&["simulate", config.as_str()], &args[..]].concat()).ok().stdout)
    };
    let reports = [1, 2, 4].map(|n| of(&format!("offload.first_forward={n}")));
    let step = |report: &Value| report["step_seconds"].as_f64().unwrap();
    assert!(step(&reports[2]) < step(&reports[1]) && step(&reports[1]) < step(&reports[0]));
    // Compute idles for the time of the host's work, minus the time of the forward passes.
    let compute = reports[0]["lanes"][0]["seconds"].as_f64().unwrap();
    let idle = |i: usize| step(&reports[i]) - compute;
    assert!(idle(2) < 0.5 * idle(0), "{:?}", [0, 1, 2].map(idle));
    let row = &reports[0]["schedules"][3];
    assert_eq!(row["schedule"], "Overlapped, first_forward 4");
    assert_eq!(row["step_seconds"], reports[2]["step_seconds"]);
}
