//! `gpu-check` under the stand-in for the driver: what it runs on a GPU first.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod common;

use common::Folder;
use std::path::{Path, PathBuf};

/// The newest program that cargo built of this file of tests.
fn built(name: &str) -> Option<PathBuf> {
    let this = std::env::current_exe().unwrap();
    let is_hash = |hash: &str| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit());
    let is_it = |path: &PathBuf| {
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        file.rsplit_once('-').is_some_and(|(program, hash)| program == name && is_hash(hash))
    };
    let all = std::fs::read_dir(this.parent().unwrap()).unwrap().flatten().map(|e| e.path());
    all.filter(is_it).max_by_key(|path| path.metadata().and_then(|m| m.modified()).ok())
}

/// What a step needs beside onebox.
const PROGRAMS: [&str; 2] = ["kernels", "probes"];

/// A folder as `gpu-pack --dev` makes it, of links to what is built here.
fn packed(folder: &Folder) -> PathBuf {
    let here = folder.path("packed");
    std::fs::create_dir_all(here.join("tests")).unwrap();
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, here.join(name)).unwrap();
    for program in PROGRAMS {
        built(program).inspect(|path| link(path, &format!("tests/{program}")));
    }
    link(Path::new(env!("CARGO_BIN_EXE_onebox")), "onebox");
    link(fake_cuda::library_folder().as_ref(), "fake");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for file in ["gpu-check", "gpu_check.py", "gpu_first.py", "gpu_torch.py"] {
        std::fs::copy(root.join("scripts").join(file), here.join(file)).unwrap();
    }
    std::fs::copy(root.join("benchmarks/kernels.md"), here.join("kernels.md")).unwrap();
    let text: String = (0..4000).map(|i| format!("line {i} of a text\n")).collect();
    std::fs::write(here.join("text.txt"), text).unwrap();
    std::fs::write(here.join("commit"), "of a test\n").unwrap();
    here
}

#[test]
fn the_first_part_of_gpu_check_passes_under_the_stand_in() {
    let folder = Folder::new();
    let missing = |why: &str| {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
        println!("skipped: {why}");
    };
    if folder.shell("python3 --version").code != 0 {
        return missing("no python3");
    }
    let check = format!("{}/gpu-check --fake --part first", packed(&folder).display());
    // With all programs all of it; steps that need none of them in any case.
    let (steps, passed): (&str, &[&str]) = match PROGRAMS.iter().find(|name| built(name).is_none())
    {
        None => (
            "",
            &[
                "ledger",
                "queue",
                "sharing",
                "kernel_tests",
                "products",
                "ops",
                "tiles",
                "timeline",
                "largest",
            ],
        ),
        Some(name) => {
            missing(&format!("cargo has not built `{name}` of fake-cuda's tests: some steps"));
            (" --step sharing --step timeline --step largest", &["sharing", "timeline", "largest"])
        }
    };
    let done = folder.shell(&format!("{check}{steps}")).ok();
    for step in passed {
        let verdict = format!("ok    {step} ");
        assert!(done.stdout.contains(&verdict), "{verdict}: {}", done.stdout);
    }
}
