//! Compiles the CUDA kernels of `device` and `offload` as C++, with an emulator of the language around them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Folders of kernels; the prelude is in the first one.
const FOLDERS: [&str; 2] = ["../../device/src/cuda/kernels", "../../offload/src/kernels"];

fn main() -> Result<()> {
    println!("cargo::rustc-check-cfg=cfg(kernel_emulator)");
    println!("cargo::rustc-cfg=kernel_emulator");
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in FOLDERS {
        let folder = fs::canonicalize(root.join(folder))?;
        println!("cargo::rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(folder)? {
            files.push(entry?.path());
        }
    }
    files.retain(|path| path.extension().is_some_and(|e| e == "cu"));
    files.sort();
    let prelude = fs::canonicalize(root.join(FOLDERS[0]).join("prelude.cuh"))?;
    let generated = PathBuf::from(env::var("OUT_DIR")?).join("kernels.cpp");
    fs::write(&generated, program(&prelude, &files)?)?;
    let mut build = cc::Build::new();
    if env::var("CARGO_CFG_TARGET_ARCH")? == "x86_64" {
        // Converts f16 and computes fma by instructions.
        build.flag("-march=x86-64-v3");
    }
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // Only explicit fma, as for NVRTC; and u32 loads of values that are stored as u16.
        .flag("-ffp-contract=off")
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .flag("-Wno-unused-function")
        .flag("-Wno-unused-parameter")
        .include(root.join("shim"))
        .file(root.join("shim/emulator.cpp"))
        .file(generated)
        .compile("onebox_emulated_kernels");
    println!("cargo::rerun-if-changed=shim");
    Ok(())
}

/// One program with a namespace for each file and a table of all kernels.
fn program(prelude: &Path, files: &[PathBuf]) -> Result<String> {
    let mut program = String::from("#include \"language.h\"\n");
    let mut table = String::new();
    for path in files {
        let name = path.file_stem().and_then(|s| s.to_str()).ok_or("a file without a name")?;
        writeln!(program, "namespace of_{name} {{")?;
        writeln!(program, "#include {prelude:?}\n#include {path:?}\n}}")?;
        for (threads, kernel) in kernels_of(&fs::read_to_string(path)?) {
            writeln!(table, "    entry<&of_{name}::{kernel}>(\"{kernel}\", {threads}),")?;
        }
    }
    write!(program, "namespace emulator {{\nconst Kernel KERNELS[] = {{\n{table}")?;
    program.push_str("    {nullptr, 0, 0, nullptr, nullptr},\n};\n}\n");
    Ok(program)
}

/// The kernels of a file, which are written `KERNEL(256) name(...`: largest number of threads of a
/// block, and name.
fn kernels_of(source: &str) -> Vec<(&str, &str)> {
    let starts = source.split("\nKERNEL(").skip(1);
    starts
        .filter_map(|rest| {
            let (threads, rest) = rest.split_once(") ")?;
            Some((threads, rest.split_once('(')?.0))
        })
        .collect()
}
