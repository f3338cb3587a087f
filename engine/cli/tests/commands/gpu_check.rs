//! `gpu-check` with the stand-in driver: the steps of its first part that need only onebox. The
//! programs of the other steps are tests themselves.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::Folder;
use std::path::{Path, PathBuf};

const STEPS: [&str; 2] = ["sharing", "largest"];

/// A folder like those of `gpu-pack --dev`, without programs of tests.
fn packed(folder: &Folder) -> PathBuf {
    let here = folder.path("packed");
    std::fs::create_dir_all(&here).unwrap();
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, here.join(name)).unwrap();
    link(Path::new(env!("CARGO_BIN_EXE_onebox")), "onebox");
    link(&fake_cuda::library_folder(), "fake");
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
    for file in ["gpu-check", "gpu_check.py", "gpu_first.py"] {
        std::fs::copy(scripts.join(file), here.join(file)).unwrap();
    }
    let text: String = (0..4000).map(|i| format!("line {i} of a text\n")).collect();
    std::fs::write(here.join("text.txt"), text).unwrap();
    std::fs::write(here.join("commit"), "of a test\n").unwrap();
    here
}

#[test]
fn the_first_part_of_gpu_check_passes_under_the_stand_in() {
    let folder = Folder::new();
    if folder.shell("python3 --version").code != 0 {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "no python3");
        println!("skipped: no python3");
        return;
    }
    let here = packed(&folder);
    let steps: String = STEPS.map(|step| format!(" --step {step}")).concat();
    let done = folder.shell(&format!("{}/gpu-check --fake --part first{steps}", here.display()));
    for step in STEPS {
        assert!(done.stdout.contains(&format!("ok    {step} ")), "{step}: {}", done.stdout);
    }
    assert_eq!(done.code, 0, "{}{}", done.stdout, done.stderr);
}
