//! The key of a box on which a simulated speed depends most. The step is simulated again for each key,
//! with the key 10 % larger.

use super::Brief;
use crate::range::KeyInfluence;
use crate::simulate::{SimulateError, described_box, simulate_unchecked};
use config::{BoxConfig, Config, DeviceConfig, ParameterPlace};
use engine::dry_run::{alike, with_micro_batches};
use layout::build::{RankLayout, lay_out};
use std::sync::Arc;

/// Factor by which a key is made larger.
const MORE: f32 = 1.1;

/// A key of a box, and the parts of a step that it can make shorter.
struct BoxKey {
    key: &'static str,
    /// Names of [`groups`](crate::simulate::groups).
    groups: &'static [&'static str],
    /// Makes the key larger by [`MORE`]. A box without the key does not change.
    enlarge: fn(&mut BoxConfig),
}

const PRODUCTS: &str = "matrix products";
const ATTENTION: &str = "attention";
const KERNELS: &str = "small kernels";
const TP_SUMS: &str = "tensor-parallel collectives";
const DP_SUMS: &str = "data-parallel collectives";
const COPIES: &str = "copies to and from the host";
const HOST: &str = "work of the host";

/// Keys of a box with GPUs.
const KEYS_OF_GPUS: [BoxKey; 9] = [
    BoxKey {
        key: "gpu.gemm_tflops",
        groups: &[PRODUCTS, ATTENTION],
        enlarge: |b| b.gpu.gemm_tflops *= MORE,
    },
    BoxKey {
        key: "gpu.fp32_tflops",
        groups: &[PRODUCTS, ATTENTION],
        enlarge: |b| b.gpu.fp32_tflops *= MORE,
    },
    BoxKey {
        key: "gpu.memory_gb_per_s",
        groups: &[PRODUCTS, ATTENTION, KERNELS],
        enlarge: |b| b.gpu.memory_gb_per_s *= MORE,
    },
    BoxKey { key: "gpu.peer_gb_per_s", groups: &[TP_SUMS, DP_SUMS], enlarge: enlarge_peers },
    BoxKey { key: "topology (its NVLink)", groups: &[TP_SUMS, DP_SUMS], enlarge: enlarge_nvlink },
    BoxKey {
        key: "host.link_gb_per_s",
        groups: &[TP_SUMS, DP_SUMS, COPIES],
        enlarge: |b| b.host.link_gb_per_s *= MORE,
    },
    BoxKey {
        key: "host.node_gb_per_s",
        groups: &[COPIES, HOST, DP_SUMS],
        enlarge: |b| b.host.node_gb_per_s *= MORE,
    },
    BoxKey {
        key: "host.core_gb_per_s",
        groups: &[HOST],
        enlarge: |b| b.host.core_gb_per_s *= MORE,
    },
    BoxKey {
        key: "network_gb_per_s",
        groups: &[TP_SUMS, DP_SUMS],
        enlarge: |b| b.network_gb_per_s *= MORE,
    },
];

/// All groups but the submission, which virtual GPUs do not have.
const ALL: &[&str] = &[PRODUCTS, ATTENTION, KERNELS, TP_SUMS, DP_SUMS, COPIES, HOST];

/// Keys of a box of measured cores.
const KEYS_OF_CORES: [BoxKey; 9] = [
    BoxKey {
        key: "measured.gemm_gflops_16",
        groups: &[PRODUCTS],
        enlarge: |b| with_gemm(b, |gemm| gemm[0][0] *= MORE),
    },
    BoxKey {
        key: "measured.gemm_gb_per_s_16",
        groups: &[PRODUCTS],
        enlarge: |b| with_gemm(b, |gemm| gemm[0][1] *= MORE),
    },
    BoxKey {
        key: "measured.gemm_gflops_32",
        groups: &[PRODUCTS],
        enlarge: |b| with_gemm(b, |gemm| gemm[1][0] *= MORE),
    },
    BoxKey {
        key: "measured.gemm_gb_per_s_32",
        groups: &[PRODUCTS],
        enlarge: |b| with_gemm(b, |gemm| gemm[1][1] *= MORE),
    },
    BoxKey {
        key: "measured.attention_gflops",
        groups: &[ATTENTION],
        enlarge: |b| with_attention(b, |attention| attention[0][0] *= MORE),
    },
    BoxKey {
        key: "measured.attention_backward_gflops",
        groups: &[ATTENTION],
        enlarge: |b| with_attention(b, |attention| attention[1][0] *= MORE),
    },
    BoxKey { key: "measured.gb_per_s_16", groups: ALL, enlarge: |b| enlarge_ops(b, 0) },
    BoxKey { key: "measured.gb_per_s_32", groups: ALL, enlarge: |b| enlarge_ops(b, 1) },
    BoxKey { key: "measured.other_gb_per_s", groups: ALL, enlarge: enlarge_other },
];

/// Enlarges the rate between GPUs. A rate of sums over PCIe stays below the rate of a link, because
/// a larger rate would mean NVLink.
fn enlarge_peers(b: &mut BoxConfig) {
    let is_nvlink = b.nvlink_gb_per_s() > 0.0;
    b.gpu.peer_gb_per_s *= MORE;
    if !is_nvlink && b.topology.is_none() {
        b.gpu.peer_gb_per_s = b.gpu.peer_gb_per_s.min(b.host.link_gb_per_s);
    }
}

fn enlarge_nvlink(b: &mut BoxConfig) {
    if let Some(machine) = &mut b.machine {
        let rates = Arc::make_mut(machine).nvlink.iter_mut().flatten();
        rates.for_each(|rate| *rate = (*rate as f64 * f64::from(MORE)).round() as u64);
    }
}

fn with_gemm(b: &mut BoxConfig, change: impl FnOnce(&mut [[f32; 2]; 2])) {
    if let Some(measured) = &mut b.measured {
        change(&mut measured.gemm);
    }
}

fn with_attention(b: &mut BoxConfig, change: impl FnOnce(&mut [[f32; 2]; 2])) {
    if let Some(measured) = &mut b.measured {
        change(&mut measured.attention);
    }
}

fn enlarge_other(b: &mut BoxConfig) {
    if let Some(measured) = &mut b.measured {
        measured.other_gb_per_s *= MORE;
    }
}

/// Enlarges the rates of all ops on one width of storage: 0 for 16 bits, 1 for 32.
fn enlarge_ops(b: &mut BoxConfig, width: usize) {
    if let Some(measured) = &mut b.measured {
        measured.ops_gb_per_s.iter_mut().for_each(|(_, rates)| rates[width] *= MORE);
    }
}

/// The key of the box of `config` with the most influence on its step, which takes `seconds`. `parts` has
/// the seconds of the step by [`groups`](crate::simulate::groups) of ops that it waits for. The step is
/// shortened to a few micro-batches, and a key that cannot have more influence than the best one so far is
/// left out. `None`: no key makes the step faster.
///
/// # Errors
/// Returns the errors of [`simulate`](crate::simulate::simulate).
pub fn most_influential(
    config: &Config,
    built: &RankLayout,
    parts: &[(&'static str, f64)],
    seconds: f64,
) -> Result<Option<KeyInfluence>, SimulateError> {
    let share = |key: &BoxKey| {
        let own = parts.iter().filter(|(group, _)| key.groups.contains(group));
        own.map(|(_, waited)| waited).sum::<f64>() / seconds
    };
    let keys: &[BoxKey] = match described_box(config).measured {
        Some(_) => &KEYS_OF_CORES,
        None => &KEYS_OF_GPUS,
    };
    let mut keys: Vec<(f64, &BoxKey)> = keys.iter().map(|key| (share(key), key)).collect();
    keys.sort_by(|a, b| b.0.total_cmp(&a.0));
    let before = step_seconds(config, built)?;
    let mut best: Option<KeyInfluence> = None;
    for (share, BoxKey { key, enlarge, .. }) in keys {
        let least = best.map_or(0.0, |best| best.percent);
        if most_percent(share) <= least {
            break;
        }
        let mut changed = config.clone();
        if let DeviceConfig::Sim { box_, .. } = &mut changed.device {
            (*enlarge)(box_);
        }
        if changed.device == config.device {
            continue;
        }
        let after = step_seconds(&changed, built)?;
        let percent = 100.0 * (before / after - 1.0);
        if percent > least {
            best = Some(KeyInfluence { key, percent });
        }
    }
    Ok(best)
}

/// Seconds of a step, from a few of its micro-batches. A [`Brief`] simulates all of them if parameters are
/// on the host; here a line through two short steps is enough.
fn step_seconds(config: &Config, built: &RankLayout) -> Result<f64, SimulateError> {
    let (unit, all) = (alike(config, built), built.micro_batches);
    let streams = config.offload.parameters == ParameterPlace::Host;
    if !streams || all <= 3 * unit || !all.is_multiple_of(unit) {
        return Ok(Brief::of(config, built)?.seconds);
    }
    let of = |micro_batches| -> Result<f64, SimulateError> {
        let few = with_micro_batches(config, built, micro_batches);
        Ok(simulate_unchecked(&few, &lay_out(&few, &built.machine))?.step_seconds())
    };
    let (less, more) = (of(2 * unit)?, of(3 * unit)?);
    Ok(less + (more - less) * ((all - 2 * unit) / unit) as f64)
}

/// Largest influence in percent of a key that can shorten the part `share` of a step.
fn most_percent(share: f64) -> f64 {
    let shorter = share.clamp(0.0, 1.0) * (1.0 - 1.0 / f64::from(MORE));
    100.0 * (1.0 / (1.0 - shorter) - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::memory_report;
    use crate::simulate::{groups, simulate, summary};
    use config::load_str;
    use layout::LocalMachine;
    use std::path::Path;

    /// The most influential key of a model with these settings on a bundled box.
    fn most(on: &str, sets: &[&str]) -> KeyInfluence {
        let ron = format!(
            "(device: Sim(box: {on:?}), model: (layers: 4, hidden: 2048, heads: 16, seq_len: 1024), \
              batch: (micro: 8, global: 64), data: (train: \"unused\"), train: (steps: 6))"
        );
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let config = load_str(&ron, "test.ron", Path::new("."), &sets);
        let config = config.unwrap_or_else(|e| panic!("{e}")).config;
        let built = lay_out(&config, &LocalMachine::default());
        let timeline = simulate(&config, &built).unwrap();
        let report = summary(&config, &memory_report(&config, &built), &timeline);
        let parts = groups(&report.critical_path);
        let most = most_influential(&config, &built, &parts, report.step_seconds).unwrap();
        most.unwrap_or_else(|| panic!("no key makes this step faster: {sets:?}"))
    }

    #[test]
    fn the_most_influential_key_is_that_of_what_the_step_waits_for() {
        let products = most("h100-512gib", &["offload.optimizer=Device"]);
        assert_eq!(products.key, "gpu.gemm_tflops");
        assert!(products.percent > 3.0 && products.percent <= 10.0, "{products:?}");
        assert_eq!(
            products.words(),
            format!(
                "this hangs on gpu.gemm_tflops most: 10 % there are {:.0} % here",
                products.percent
            )
        );
        // One sample a step: the update on the host takes most of it.
        let small = ["batch.global=1", "batch.micro=1", "offload.update=Serial"];
        let host = most("h100-512gib", &small);
        assert!(host.key.starts_with("host."), "{host:?}");
    }

    #[test]
    fn sums_over_pcie_stay_on_pcie() {
        let mut described = config::load_box(Path::new("workstation-4x4090")).unwrap();
        described.gpu.peer_gb_per_s = 0.98 * described.host.link_gb_per_s;
        enlarge_peers(&mut described);
        assert_eq!(described.nvlink_gb_per_s(), 0.0);
        assert_eq!(described.pcie_sums_gb_per_s(), described.host.link_gb_per_s);
        described.gpu.peer_gb_per_s = 2.0 * described.host.link_gb_per_s;
        let peers = described.gpu.peer_gb_per_s;
        enlarge_peers(&mut described);
        assert_eq!(described.nvlink_gb_per_s(), MORE * peers);
    }

    #[test]
    fn an_influence_is_bounded_by_the_part_of_the_step() {
        assert_eq!(most_percent(0.0), 0.0);
        assert!((most_percent(1.0) - 10.0).abs() < 1e-4);
        assert!(most_percent(0.5) < 5.0);
    }
}
