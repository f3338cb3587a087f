//! What the keys of a box mean for a simulation.

use super::*;
use crate::simulate::assumed;
use config::{DeviceConfig, load_box, load_str};
use std::path::Path;

/// A small model on a bundled box, changed by `change`.
fn on(name: &str, sets: &[&str], change: impl FnOnce(&mut BoxConfig)) -> Config {
    let ron = "(model: (layers: 2, hidden: 128, heads: 8, seq_len: 64), batch: (micro: 1, global: 8), \
               data: (train: \"unused\"), train: (steps: 6))";
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let loaded = load_str(ron, "test.ron", Path::new("."), &sets);
    let mut config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
    let mut described = load_box(Path::new(name)).unwrap();
    change(&mut described);
    config.device = DeviceConfig::Sim {
        path: name.into(),
        box_: Box::new(described),
        expert_load: LoadDistribution::Even,
    };
    config
}

fn of(config: &Config) -> Result<Hardware, BoxError> {
    let DeviceConfig::Sim { box_, .. } = &config.device else { panic!("a box") };
    hardware(config, box_, HostBytes::default())
}

#[test]
fn a_capped_card_keeps_a_share_of_its_arithmetic() {
    let full = of(&on("dgx-h100", &[], |_| ())).unwrap().gpu;
    let capped = of(&on("dgx-h100", &[], |b| b.gpu.clock_share = 0.5)).unwrap().gpu;
    assert_eq!([capped.flops_16, capped.flops_32], [full.flops_16 / 2.0, full.flops_32 / 2.0]);
    assert_eq!(capped.memory, full.memory);
}

#[test]
fn the_library_of_attention_is_the_runs_and_refused_where_a_run_refuses_it() {
    let own = of(&on("dgx-h100", &[], |_| ())).unwrap();
    assert_eq!(own.gpu.attention, AttentionKernels::Own);
    let cudnn = of(&on("dgx-h100", &["attention=Cudnn"], |_| ())).unwrap();
    assert_eq!(cudnn.gpu.attention, AttentionKernels::Cudnn);
    let refused = of(&on("desktop-4090", &["attention=Cudnn"], |_| ())).unwrap_err().to_string();
    for part in ["sm_89", "sm_90, sm_100, sm_103", "leave `attention` out", "one RTX 4090"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
}

#[test]
fn a_rate_between_gpus_is_nvlink_above_the_link_and_a_measured_sum_below() {
    let two = ["parallel.data=2"];
    let rates = |peers: f32| {
        let hardware = of(&on("workstation-4x4090", &two, |b| b.gpu.peer_gb_per_s = peers));
        let hardware = hardware.unwrap();
        (hardware.nvlink[0][1], hardware.pcie_sums)
    };
    assert_eq!([rates(0.0), rates(20.0), rates(300.0)], [(0.0, 0.0), (0.0, 20e9), (300e9, 0.0)]);
    // A topology says what NVLink joins; the measured sum holds for the rest.
    let joined = of(&on("dgx-h100", &two, |b| b.gpu.peer_gb_per_s = 20.0)).unwrap();
    assert_eq!(joined.nvlink[0][1], 450e9);
    // An assumed rate is told, a measured one and NVLink are not.
    let told =
        |name, sets: &[&str], peers: f32| assumed(&on(name, sets, |b| b.gpu.peer_gb_per_s = peers));
    let words = told("workstation-4x4090", &["parallel.data=4"], 0.0);
    assert!(words[0].contains("sums of 4 GPUs") && words[0].contains("12.6 GB/s"), "{words:?}");
    assert!(told("workstation-4x4090", &["parallel.data=4"], 5.0).is_empty());
    assert!(told("workstation-4x4090", &[], 0.0).is_empty());
    assert!(told("dgx-h100", &["parallel.tensor=8"], 0.0).is_empty());
    assert!(told("desktop-2x3090", &two, 0.0)[0].contains("9.5 GB/s"));
}
