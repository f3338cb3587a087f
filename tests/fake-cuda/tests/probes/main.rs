//! Measurements of a new GPU for gpu-check. Each test prints lines `figure NAME key=value ...` on
//! stderr and checks nothing that depends on time. With ONEBOX_REAL_GPU the tests use the machine's
//! first GPU, else they use small sizes and the fake driver.
#![expect(unsafe_code, reason = "raw driver calls")]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::exit,
    reason = "a test passes its own live buffers"
)]

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod delta;
mod experts;
mod ledger;
mod nccl;
mod ops;
mod queue;
mod rates;
mod tiles;

use common::in_child;

/// Whether sizes must be small enough for the emulator.
fn small() -> bool {
    fake_cuda::stats().is_some()
}

/// Runs `body` on the machine's GPU, or in a child under the fake driver. The child must print at
/// least `figures` lines.
fn probe(name: &str, variables: &[(&str, &str)], figures: usize, body: impl FnOnce()) {
    if std::env::var_os("ONEBOX_REAL_GPU").is_some() {
        body();
    } else if let Some(output) = in_child(name, variables, body) {
        let found = output.lines().filter(|line| line.starts_with("figure ")).count();
        assert!(found >= figures, "{found} figures, not {figures}:\n{output}");
        assert!(!output.contains(" note="), "something could not be measured:\n{output}");
    }
}

/// Fills a folder with the fake libraries; NCCL has only its second name.
fn as_packages_install(folder: &std::path::Path) {
    let all = fake_cuda::library_folder();
    for name in std::fs::read_dir(&all).unwrap().map(|entry| entry.unwrap().file_name()) {
        if name != "libnccl.so" {
            std::os::unix::fs::symlink(all.join(&name), folder.join(&name)).unwrap();
        }
    }
}

#[test]
fn memory_ledger() {
    let folder = tempfile::tempdir().unwrap();
    if std::env::var_os("ONEBOX_REAL_GPU").is_none() {
        as_packages_install(folder.path());
    }
    let variables = [
        ("FAKECUDA_MEMORY", "2147483648"),
        ("FAKECUDA_DEVICES", "4"),
        ("LD_LIBRARY_PATH", folder.path().to_str().unwrap()),
    ];
    // Six of the lines are registrations by GPUs 0, 2 and 3.
    probe("memory_ledger", &variables, 21, ledger::print);
}

#[test]
fn queries_behind_a_full_queue() {
    probe("queries_behind_a_full_queue", &[("FAKECUDA_QUEUE", "300")], 4, queue::print);
}

#[test]
fn products_of_a_block_and_head() {
    probe("products_of_a_block_and_head", &[("FAKECUDA_SM", "90")], 60, rates::products);
}

#[test]
fn ops_beside_their_ceilings() {
    probe("ops_beside_their_ceilings", &[("FAKECUDA_SM", "90")], 16, rates::ops);
}

#[test]
fn tiles_behind_words() {
    probe("tiles_behind_words", &[], 5, tiles::print);
}

#[test]
fn attention_libraries() {
    probe("attention_libraries", &[], 1, attention::measure);
}
