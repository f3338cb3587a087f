//! The sources of the kernels: each file is a program, and NVRTC compiles all of them.

use crate::rig;
use device::cuda::testing;
use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn every_file_of_kernels_is_a_program_and_names_are_unique() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let mut names = BTreeSet::new();
    for (folder, programs) in
        [("device/src/cuda/kernels", testing::PROGRAMS), ("offload/src/kernels", offload::PROGRAMS)]
    {
        let entries = std::fs::read_dir(format!("{root}/{folder}")).expect("kernels").flatten();
        let mut files: Vec<String> =
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        files.retain(|name| name.ends_with(".cu"));
        files.sort();
        let listed: Vec<&str> = programs.iter().map(|program| program.name).collect();
        assert_eq!(files, listed);
        for program in programs {
            for kernel in program.source.split("\nKERNEL(").skip(1) {
                let name = kernel.split([' ', '(']).nth(1).expect("a name");
                assert!(names.insert(name), "{}: {name} twice", program.name);
            }
        }
    }
    assert!(names.len() > 35 && names.contains("gelu") && names.contains("update"), "{names:?}");
}

/// Architectures of the quick selection: every branch on `__CUDA_ARCH__` in the kernels is taken on one
/// of them. ONEBOX_FULL=1 and `.ci/run` compile for all architectures.
const QUICK_ARCHITECTURES: [&str; 2] = ["70", "89"];

#[test]
fn nvrtc_compiles_every_kernel_without_spills() {
    if !rig::nvrtc_or_skip() {
        return;
    }
    let library = std::env::var_os("ONEBOX_NVRTC").expect("a library");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/check_kernels.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(library);
    if std::env::var_os("ONEBOX_FULL").is_none_or(|value| value != "1") {
        command.args(QUICK_ARCHITECTURES);
    }
    let status = command.status().expect("python3 runs");
    assert!(status.success(), "a kernel does not compile, or spills");
}
