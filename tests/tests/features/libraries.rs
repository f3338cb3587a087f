//! Pairs with a library of GPUs, under the fake driver. A run with the library is near the run
//! without it, and uses it.

use super::runs::{Backend, assert_results, reference, train};
use super::table::{CUDNN, Coverage, Effect, Feature, pairs};
use std::collections::BTreeMap;
use std::process::Command;
use tests::compare::RunDistance;

/// Environment variable of the child process that runs under the fake driver.
const CHILD: &str = "ONEBOX_FEATURES_ON_GPUS";

/// Largest distance of two libraries. cuBLASLt's algorithms and cuDNN sum in other orders, and
/// round weights of attention to the storage type. Measured over the pairs in 16 bits: 1e-3, 3.1e-3
/// and 2.1e-3, and 1.1e-2, 6.3e-3 and 1.3e-2 with experts, of which a token chooses others; in fp8:
/// 9e-3, 2.3e-2 and 6e-3.
fn limit(sets: &[&str]) -> RunDistance {
    if sets.contains(&"precision=Fp8") {
        RunDistance { loss: 2.5e-2, norm: 7e-2, weights: 2.5e-2 }
    } else if sets.iter().any(|set| set.starts_with("model.experts=")) {
        RunDistance { loss: 2.5e-2, norm: 1.5e-2, weights: 2.5e-2 }
    } else {
        RunDistance { loss: 4e-3, norm: 5e-3, weights: 6e-3 }
    }
}

/// Number of uses of a library so far.
fn uses(library: &Feature) -> u64 {
    let stats = fake_cuda::stats().expect("the fake driver");
    if library.name == CUDNN { stats.graphs } else { stats.other_gemms }
}

/// Runs all pairs with a library. Does nothing outside of the child process.
#[test]
fn on_gpus() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let mut runs = BTreeMap::new();
    for pair in pairs() {
        let Some(Coverage::Library(library)) = pair.coverage() else { continue };
        let name = pair.name();
        println!("{name}");
        let before = uses(library);
        if matches!(pair.first.effect, Effect::Command) {
            assert_results(&name, &[pair.first, library], Backend::Cuda);
        } else {
            let (base, sets) = (pair.settings_without(library), pair.settings());
            // Both libraries have the same reference.
            let first = runs.entry(base.clone()).or_insert_with(|| train(&base, Backend::Cuda));
            let reference = reference(&base, first.clone());
            reference.assert_ran_near(&name, &train(&sets, Backend::Cuda), limit(&sets));
        }
        assert!(uses(library) > before, "{name}: the run does not use the library");
    }
    println!("all pairs are done");
}

#[test]
fn pairs_with_a_library_train_and_generate_on_gpus() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["libraries::on_gpus", "--exact", "--nocapture"]).env(CHILD, "1");
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", cache.path());
    command.env("FAKECUDA_DEVICES", "2").env("FAKECUDA_SM", "90");
    // The second algorithm of each matmul is the fastest.
    command.env("FAKECUDA_ALGORITHMS", "2000,1000");
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && stdout.contains("all pairs are done");
    assert!(passed, "{stdout}{}", String::from_utf8_lossy(&output.stderr));
}
