//! `onebox plan --search`, and `onebox plan` for configs that do not fit.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::Value;

/// Four GPUs; each has memory for a part of the tiny models below.
const BOX: &str = r#"(
    gpus: 4, gpu_memory: "GPU", numa_nodes: 2, node_memory: "NODE",
    gpu: (gemm_tflops: 0.01, fp32_tflops: 0.005, memory_gb_per_s: 1, processors: 4, sm: 80),
    host: (node_gb_per_s: 1, core_gb_per_s: 0.2, cores: 8, link_gb_per_s: 0.5),
)"#;

const CONFIG: &str = r#"(
    device: Sim(box: "box.ron"),
    model: (layers: 3, hidden: 64, heads: 4, seq_len: 64),
    parallel: (tensor: 2, data: 2),
    batch: (micro: 1, global: 16),
    recompute: Block,
    train: (steps: 4),
)"#;

/// A folder with `box.ron`, and `tiny.ron` for this box. CUDA uses 1.5 GiB of a GPU.
fn folder(gpu: &str, node: &str) -> Folder {
    let folder = Folder::new();
    let text = BOX.replace("GPU", gpu).replace("NODE", node);
    std::fs::write(folder.path("box.ron"), text).unwrap();
    std::fs::write(folder.path("tiny.ron"), CONFIG).unwrap();
    folder
}

fn json(folder: &Folder, arguments: &[&str]) -> Value {
    let done = folder.onebox(&[arguments, &["--json"]].concat()).ok();
    serde_json::from_str(&done.stdout).unwrap()
}

/// Puts `--set` before each setting.
fn sets(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.flat_map(|set| ["--set".to_owned(), set.as_str().unwrap().to_owned()]).collect()
}

fn with<'a>(arguments: &[&'a str], sets: &'a [String]) -> Vec<&'a str> {
    arguments.iter().copied().chain(sets.iter().map(String::as_str)).collect()
}

#[test]
fn a_search_finds_what_trying_everything_finds() {
    let folder = folder("2GiB", "1GiB");
    let search = ["plan", "tiny.ron", "--search"];
    let found = json(&folder, &search);
    assert_eq!(found, json(&folder, &search), "a search is deterministic");
    let number = |key: &str| found[key].as_u64().unwrap();
    assert!(number("enumerated") >= number("fit") && number("left_out") == 0);
    assert_eq!(number("fit"), number("set_aside") + number("simulated_briefly"));
    let layouts = found["layouts"].as_array().unwrap();
    assert_eq!(layouts.len(), 5);
    // The layouts are in order, and `simulate` agrees with each of them.
    let mut last = 0.0;
    for layout in layouts {
        let seconds = layout["step_seconds"].as_f64().unwrap();
        assert!(seconds >= last * (1.0 - 1e-4));
        last = seconds;
        let simulation = json(&folder, &with(&["simulate", "tiny.ron"], &sets(&layout["sets"])));
        assert!((simulation["step_seconds"].as_f64().unwrap() / seconds - 1.0).abs() < 1e-12);
        assert_eq!(simulation["gpu_bytes"], layout["gpu_bytes"]);
    }
    // Simulates every layout by hand; optimizer shares and grouped passes can only be faster.
    let (mut best, mut tried) = (f64::INFINITY, 0);
    for (tensor, data) in [(1, 4), (2, 2), (4, 1)] {
        for micro in [1, 2, 4, 8, 16].iter().filter(|micro| 16 % (*micro * data) == 0) {
            // This is no layout of its own: parameters on the host, but all blocks on GPUs.
            tried += if tensor > 1 { 2 } else { 1 };
            for recompute in ["None", "Selective", "Block"] {
                let splits = [(false, false), (true, false), (false, true)];
                let splits = splits.into_iter().filter(|split| {
                    let (sequence, shares) = *split;
                    (tensor > 1 || !(sequence || shares)) && (recompute == "Block" || !shares)
                });
                for (sequence, shares) in splits {
                    for places in [["Host", "Host"], ["Host", "Device"], ["Device", "Device"]] {
                        if micro * data == 16 && places[1] == "Host" {
                            continue;
                        }
                        tried += 1;
                        let sets = [
                            format!("parallel.tensor={tensor}"),
                            format!("parallel.data={data}"),
                            format!("batch.micro={micro}"),
                            format!("recompute={recompute}"),
                            format!("parallel.sequence={sequence}"),
                            format!("partition_checkpoints={shares}"),
                            format!("offload.optimizer={}", places[0]),
                            format!("offload.accumulate={}", places[1]),
                        ];
                        best = simulated(&folder, &sets).min(best);
                    }
                }
            }
        }
    }
    assert_eq!(number("enumerated"), tried);
    let first = layouts[0]["step_seconds"].as_f64().unwrap();
    assert!(first < best * (1.0 + 1e-9), "{first} {best}");
}

/// Shares of the optimizer on the GPUs, and numbers of first forward passes that run together.
fn chosen(found: &Value) -> Vec<(f64, u64)> {
    let layouts = found["layouts"].as_array().unwrap().iter();
    let chosen =
        |l: &Value| (l["device_fraction"].as_f64().unwrap(), l["first_forward"].as_u64().unwrap());
    layouts.map(chosen).collect()
}

/// Asserts that `plan` and `simulate` agree with each listed layout, and that it fits.
fn is_so(folder: &Folder, config: &str, sets_before: &[&str], found: &Value) {
    for layout in found["layouts"].as_array().unwrap() {
        let sets = sets(&layout["sets"]);
        let of = |command| json(folder, &with(&[&[command, config], sets_before].concat(), &sets));
        let (plan, simulation) = (of("plan"), of("simulate"));
        assert_eq!((&plan["fits"], &simulation["fits"]), (&true.into(), &true.into()), "{layout}");
        assert_eq!(plan["gpu"]["bytes"], layout["gpu_bytes"], "{layout}");
        let nodes: Vec<&Value> =
            plan["nodes"].as_array().unwrap().iter().map(|n| &n["bytes"]).collect();
        assert_eq!(nodes, layout["node_bytes"].as_array().unwrap().iter().collect::<Vec<_>>());
        if layout["extrapolated"] == false {
            assert_eq!(simulation["step_seconds"], layout["step_seconds"], "{layout}");
        }
    }
}

#[test]
fn an_exposed_update_is_shared_with_the_gpus_as_far_as_it_fits() {
    let folder = Folder::new();
    let config = format!("{}/../../configs/paper/dgx2-10b.ron", env!("CARGO_MANIFEST_DIR"));
    // Few layers, on GPUs that are smaller in proportion.
    let small = std::fs::read_to_string(&config).unwrap();
    let box_ = format!("{}/../../configs/boxes/dgx2.ron", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&box_).unwrap();
    let topology = box_.replace("dgx2.ron", "topologies/dgx2.xml");
    let text = text.replace("31.7GiB", "7.4GiB").replace("topologies/dgx2.xml", &topology);
    std::fs::write(folder.path("box.ron"), text).unwrap();
    let small = small.replace("../boxes/dgx2.ron", "box.ron").replace("layers: 50", "layers: 8");
    std::fs::write(folder.path("10b.ron"), small).unwrap();
    let few = ["--set", "batch.global=32", "--set", "batch.micro=1"];
    let found = json(&folder, &[&["plan", "10b.ron", "--search"], &few[..]].concat());
    is_so(&folder, "10b.ron", &few, &found);
    let first = &found["layouts"][0];
    let (share, _) = chosen(&found)[0];
    assert!(share > 0.0 && share < 1.0, "{found}");
    // The whole optimizer on one side is slower or does not fit, also with a share of 1.
    let seconds = first["step_seconds"].as_f64().unwrap();
    for place in ["Host", "Device", "Split(device_fraction: 1.0)"] {
        let place = format!("offload.optimizer={place}");
        let mut sets = sets(&first["sets"]);
        sets.extend(["--set".to_owned(), place]);
        let arguments = [&["simulate", "10b.ron", "--json"], &few[..]].concat();
        let stdout = folder.onebox(&with(&arguments, &sets)).stdout;
        let simulation: Value = serde_json::from_str(&stdout).unwrap();
        let slower = simulation["step_seconds"].as_f64().unwrap() > seconds * 1.01;
        assert!(slower || simulation["fits"] == false, "{simulation}");
    }
}

/// A folder whose box has a slow host.
fn slow_host(node: &str) -> Folder {
    let folder = folder("1573600KiB", node);
    let slow = BOX.replace("GPU", "1573600KiB").replace("NODE", node);
    // Faster arithmetic in fp32: attention of 64 tokens is no larger part of the step than the update.
    let slow = slow.replace("core_gb_per_s: 0.2", "core_gb_per_s: 0.009");
    let slow = slow.replace("fp32_tflops: 0.005", "fp32_tflops: 0.02");
    std::fs::write(folder.path("box.ron"), slow).unwrap();
    folder
}

#[test]
fn updates_ahead_of_the_decision_are_found_where_they_gain_and_fit() {
    let found = |node: &str, more: &[&str]| {
        let folder = slow_host(node);
        let found = json(&folder, &[&["plan", "tiny.ron", "--search"], more].concat());
        is_so(&folder, "tiny.ron", more, &found);
        found
    };
    let share = |found: &Value| found["layouts"][0]["speculated_fraction"].as_f64().unwrap();
    let roomy = found("1GiB", &[]);
    let sets = roomy["layouts"][0]["sets"].as_array().unwrap();
    assert!(sets.iter().any(|set| set == "offload.update=Speculative"), "{roomy}");
    let [roomy, tight] = [share(&roomy), share(&found("1850KiB", &[]))];
    assert!(tight > 0.0 && tight < roomy, "as much as fits: {tight} of {roomy}");
    assert!(share(&found("1800KiB", &[])) == 0.0);
    // The setting of the config itself is one choice of many.
    for given in ["offload.update=Auto", "offload.update=Speculative"] {
        assert_eq!(share(&found("1GiB", &["--set", given])), roomy, "{given}");
    }
    let serial = found("1GiB", &["--set", "offload.update=Serial"]);
    assert_eq!(share(&serial), 0.0, "what is asked for by name stays");
}

#[test]
fn a_share_on_the_gpus_and_one_ahead_of_the_decision_are_chosen_together() {
    let folder = slow_host("1GiB");
    let found = json(&folder, &["plan", "tiny.ron", "--search"]);
    let first = &found["layouts"][0];
    let number = |key: &str| first[key].as_f64().unwrap();
    assert!(number("device_fraction") > 0.0 && number("speculated_fraction") > 0.0, "{found}");
    // Each choice alone is slower.
    for alone in ["offload.optimizer=Host", "offload.update=Overlapped"] {
        let mut sets = sets(&first["sets"]);
        sets.extend(["--set".to_owned(), alone.to_owned()]);
        let simulation = json(&folder, &with(&["simulate", "tiny.ron"], &sets));
        let seconds = simulation["step_seconds"].as_f64().unwrap();
        assert!(seconds > 1.01 * number("step_seconds"), "{alone}: {seconds}");
    }
}

#[test]
fn first_passes_go_together_where_that_hides_an_update() {
    // Second arrays of the states do not fit.
    let folder = slow_host("1800KiB");
    let within = |folder: &Folder, more: &[&str]| {
        let found = json(folder, &[&["plan", "tiny.ron", "--search"], more].concat());
        is_so(folder, "tiny.ron", more, &found);
        found
    };
    let of = |more: &[&str]| within(&folder, more);
    let found = of(&[]);
    assert!(chosen(&found)[0].1 > 1, "{found}");
    // A layout is listed once, with the best of its choices.
    let layouts = found["layouts"].as_array().unwrap().iter();
    let plain = ["offload.optimizer=Split", "offload.first_forward"];
    let mut layouts: Vec<Vec<String>> = layouts
        .map(|l| sets(&l["sets"]).into_iter().filter(|s| !plain.iter().any(|p| s.starts_with(p))))
        .map(Iterator::collect)
        .collect();
    layouts.iter_mut().for_each(|sets| sets.retain(|set| set != "--set"));
    layouts.sort();
    layouts.dedup();
    assert_eq!(layouts.len(), 5, "{found}");
    // The text is quoted for a shell.
    let text = folder.onebox(&["plan", "tiny.ron", "--search"]).ok().stdout;
    assert!(text.contains("--set 'offload.optimizer=Split(device_fraction: 0."), "{text}");
    // A delayed update hides behind the whole step anyway.
    let delayed =
        within(&slow_host("2000KiB"), &["--set", "offload.update=Delayed(after_step: 1)"]);
    assert!(chosen(&delayed).iter().all(|(_, together)| *together == 1), "{delayed}");
    // Given settings are not varied.
    let given = of(&["--set", "offload.first_forward=2", "--set", "batch.micro=2"]);
    assert_eq!(given["layouts"][0]["step_seconds"], found["layouts"][0]["step_seconds"]);
}

/// Seconds of a simulated step of `tiny.ron`, in this process.
fn simulated(folder: &Folder, sets: &[String]) -> f64 {
    let loaded = config::load(&folder.path("tiny.ron"), sets).unwrap();
    let built = layout::build::lay_out(&loaded.config, &layout::LocalMachine::default());
    predict::simulate::simulate(&loaded.config, &built).unwrap().step_seconds()
}

#[test]
fn a_search_of_one_gpu_in_one_pass_shows_no_layout_twice() {
    let folder = folder("2GiB", "1GiB");
    // In a single pass on one GPU, only recomputation and the optimizer's place can differ.
    let one = ["--set", "parallel.tensor=1", "--set", "parallel.data=1", "--set", "batch.global=1"];
    let found =
        json(&folder, &[&["plan", "tiny.ron", "--search", "--gpus", "1"], &one[..]].concat());
    let layouts = found["layouts"].as_array().unwrap();
    // One more has its parameters on the host, but all stay on the GPU: it does not count.
    assert_eq!((found["enumerated"].as_u64(), layouts.len()), (Some(7), 4), "{found}");
    assert_eq!(
        found["given"]["rank"].as_u64().unwrap() as usize,
        1 + layouts.iter().position(|l| l["changes"] == 0).unwrap()
    );
    folder
        .onebox(&["plan", "tiny.ron", "--search", "--gpus", "5"])
        .refused(78, &["--gpus 5: the box `box` has 4 GPUs"]);
    folder
        .onebox(&["plan", "tiny.ron", "--search", "--set", "device=Cpu(count: 4)"])
        .refused(78, &["only a described box can be simulated"]);
}

#[test]
fn a_few_micro_batches_tell_of_many() {
    let folder = folder("2GiB", "1GiB");
    let search = ["plan", "tiny.ron", "--search", "--set", "batch.global=256"];
    let found = json(&folder, &search);
    let error = found["brief_error"].as_f64().unwrap();
    assert!(error < 0.02, "{error}");
    // Steps with too many micro-batches are extrapolated, with at most the same error.
    let layouts = found["layouts"].as_array().unwrap();
    for layout in layouts.iter().filter(|layout| layout["extrapolated"] == true) {
        let simulation = json(&folder, &with(&["simulate", "tiny.ron"], &sets(&layout["sets"])));
        let ratio =
            simulation["step_seconds"].as_f64().unwrap() / layout["step_seconds"].as_f64().unwrap();
        assert!((ratio - 1.0).abs() < 0.02, "{ratio}");
    }
    // A config for another device is searched on a box too.
    let elsewhere = ["--set", "device=Cpu(count: 4)", "--box", "box.ron"];
    assert_eq!(json(&folder, &[&search[..], &elsewhere].concat()), found);
    let text = folder.onebox(&search).ok().stdout;
    assert!(text.contains("simulated, not measured") && text.contains("--set"), "{text}");
    assert!(text.contains("the range is ") && text.contains("this hangs on "), "{text}");
    assert!(text.contains("loses by: ") || text.contains("as fast, with more changes"), "{text}");
}

/// Plans a config that does not fit, and asserts that each pasted remedy makes it fit.
fn remedies_fit(folder: &Folder, arguments: &[&str]) -> Value {
    let json_arguments = [&["plan"], arguments, &["--json"]].concat();
    let done = folder.onebox(&json_arguments);
    assert_eq!(done.code, 1, "{}{}", done.stdout, done.stderr);
    let plan: Value = serde_json::from_str(&done.stdout).unwrap();
    let text = folder.onebox(&[&["plan"], arguments].concat()).stdout;
    for remedy in plan["remedies"].as_array().unwrap() {
        let sets = sets(&remedy["sets"]);
        assert!(text.contains(&sets.join(" ")), "{text}");
        let pasted = with(&[&["plan"], arguments].concat(), &sets)
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>();
        let pasted: Vec<&str> = pasted.iter().map(String::as_str).collect();
        assert!(folder.onebox(&pasted).ok().stdout.contains("it fits"));
    }
    plan
}

#[test]
fn remedies_for_a_full_gpu_fit_when_pasted() {
    // One MiB of a GPU is left.
    let folder = folder("1537MiB", "1GiB");
    let plan = remedies_fit(&folder, &["tiny.ron", "--set", "batch.micro=8"]);
    assert_eq!(plan["binding"]["what"], "gpu");
    let remedies = plan["remedies"].as_array().unwrap();
    assert_eq!(remedies.len(), 3, "{remedies:?}");
    let slower: Vec<f64> = remedies.iter().map(|r| r["slower"].as_f64().unwrap()).collect();
    assert!(slower.is_sorted(), "{slower:?}");
    // If the batch follows from the micro-batch, the remedies keep the batch.
    let derived = std::fs::read_to_string(folder.path("tiny.ron")).unwrap();
    let derived = derived.replace("micro: 1, global: 16", "micro: 8");
    std::fs::write(folder.path("tiny.ron"), derived).unwrap();
    let plan = remedies_fit(&folder, &["tiny.ron"]);
    let sets = plan["remedies"][0]["sets"].to_string();
    assert!(!sets.contains("batch.micro") || sets.contains("batch.global=16"), "{sets}");
}

#[test]
fn remedies_for_a_full_node_fit_when_pasted() {
    let folder = folder("2GiB", "1500KiB");
    let plan = remedies_fit(&folder, &["tiny.ron"]);
    assert_eq!(plan["binding"]["what"], "node 0");
    assert!(!plan["remedies"].as_array().unwrap().is_empty());
    assert!(plan["binding"]["words"].as_str().unwrap().contains("too much"));
}

#[test]
fn what_nothing_helps_is_told_the_largest_model_that_fits() {
    let folder = folder("1537MiB", "2MiB");
    let many = ["tiny.ron", "--set", "model.layers=200"];
    let plan = remedies_fit(&folder, &many);
    assert!(plan["remedies"].as_array().unwrap().is_empty());
    let layers = plan["largest"]["layers"].as_u64().unwrap();
    let sets = sets(&plan["largest"]["sets"]);
    folder.onebox(&with(&["plan", "tiny.ron"], &sets)).ok();
    assert!(!sets.iter().any(|set| set.contains("moments")), "{sets:?}");
    // One layer more does not fit with the same results under any change.
    let more = format!("model.layers={}", layers + 1);
    let plan = remedies_fit(&folder, &["tiny.ron", "--set", &more]);
    let remedies = plan["remedies"].as_array().unwrap();
    let others = |remedy: &Value| remedy["sets"].to_string().contains("offload.moments=Bf16");
    assert!(remedies.iter().all(others), "{remedies:?}");
}

#[test]
fn a_search_starts_from_the_box_whatever_ranks_the_config_has() {
    let folder = folder("2GiB", "1GiB");
    let many = CONFIG.replace("tensor: 2, data: 2", "tensor: 4, data: 4");
    std::fs::write(folder.path("many.ron"), many).unwrap();
    folder.onebox(&["plan", "many.ron"]).refused(78, &["the box has 4 GPUs", "= 16 ranks"]);
    let found = json(&folder, &["plan", "many.ron", "--search"]);
    assert_eq!((&found["gpus"], &found["given"]), (&4.into(), &Value::Null));
    is_so(&folder, "many.ron", &[], &found);
    // The batch of 16 samples is fixed, so the layouts equal those of a config with fewer ranks.
    let fewer = json(&folder, &["plan", "tiny.ron", "--search"]);
    let best = |found: &Value| found["layouts"][0]["tokens_per_second"].clone();
    assert_eq!(best(&found), best(&fewer));
    let stdout = folder.onebox(&["plan", "many.ron", "--search", "--gpus", "2"]).ok().stdout;
    assert!(stdout.contains("the config as it is takes 16 GPUs"), "{stdout}");
    // Keys that the search does not vary are checked as usual; a search may find no fit.
    let wrong = ["plan", "many.ron", "--search", "--set", "model.heads=5"];
    folder.onebox(&wrong).refused(78, &["model.heads", "5 heads"]);
    let none =
        ["plan", "many.ron", "--search", "--set", "model.hidden=4096", "--set", "model.heads=16"];
    let none = folder.onebox(&none);
    assert_eq!(none.code, 1, "{}", none.stderr);
    assert!(none.stdout.contains("no layout fits"), "{}", none.stdout);
}

#[test]
fn a_search_on_some_gpus_takes_just_these() {
    let folder = folder("2GiB", "1GiB");
    let search = ["plan", "tiny.ron", "--search", "--gpus"];
    for gpus in ["1", "2", "4"] {
        let found = json(&folder, &[&search[..], &[gpus]].concat());
        for layout in found["layouts"].as_array().unwrap() {
            let ranks = layout["tensor"].as_u64().unwrap() * layout["data"].as_u64().unwrap();
            assert_eq!(ranks.to_string(), gpus, "{layout}");
        }
    }
    // 3 divides neither 16 samples nor 4 heads.
    let none = folder.onebox(&[&search[..], &["3"]].concat());
    assert_eq!(none.code, 1, "{}", none.stderr);
    let says = "3 GPUs have no layout of TP x DP: DP divides the batch of 16 samples, and TP the 4 heads; say --gpus 2, or --set \
                batch.global=18\n";
    assert!(none.stdout.ends_with(says), "{}", none.stdout);
    folder.onebox(&[&search[..], &["3", "--set", "batch.global=18"]].concat()).ok();
    folder
        .onebox(&[&search[..], &["5"]].concat())
        .refused(78, &["--gpus 5: the box `box` has 4 GPUs"]);
}
