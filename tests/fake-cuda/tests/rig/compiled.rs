//! Kernels as NVRTC compiles them, run by the interpreter of PTX.

use super::nvrtc;
use device::cuda::testing::{self, Launch};
use fake_cuda::ptx::{Counts, Memory, Module, Shape};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock};

/// Whether NVRTC is available. With CI=true it must be.
pub(crate) fn nvrtc_or_skip() -> bool {
    if std::env::var_os("ONEBOX_NVRTC").is_some() {
        return true;
    }
    let none = "ONEBOX_NVRTC names no libnvrtc.so.12; scripts/check-kernels fetches one";
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(!in_ci, "{none}");
    eprintln!("skipped: {none}");
    false
}

/// A program compiled by NVRTC, cached by its text.
pub(crate) fn compile(name: &str, source: &str, sm: u32) -> Arc<Module> {
    type ModuleCache = Mutex<HashMap<(String, u32), Arc<OnceLock<Arc<Module>>>>>;
    static KEPT: OnceLock<ModuleCache> = OnceLock::new();
    let mut kept = KEPT.get_or_init(ModuleCache::default).lock().expect("no test panics here");
    let place = Arc::clone(kept.entry((source.to_string(), sm)).or_default());
    drop(kept);
    let make = || {
        let text = format!("#line 1 \"prelude.cuh\"\n{source}");
        let module = Module::parse(&nvrtc::ptx(name, &text, sm));
        Arc::new(module.unwrap_or_else(|problem| panic!("{name}: {problem}")))
    };
    Arc::clone(place.get_or_init(make))
}

/// The compiled program that holds a kernel.
fn program_of(kernel: &str, sm: u32) -> Arc<Module> {
    let call = format!(") {kernel}(");
    let mut all = testing::PROGRAMS.iter().chain(offload::PROGRAMS);
    let program = all.find(|program| program.source.contains(&call)).expect("a program");
    compile(program.name, &program.text(), nvrtc::compiled_for(kernel, sm))
}

thread_local! {
    static RAN: RefCell<BTreeMap<String, Counts>> = RefCell::default();
}

/// Memory in which compiled kernels run.
pub(crate) struct CompiledKernels {
    sm: u32,
    pub(crate) memory: Memory,
}

impl CompiledKernels {
    pub(crate) fn new(sm: u32) -> Self {
        Self { sm, memory: Memory::default() }
    }

    /// Runs one launch; a fault is a failure.
    #[track_caller]
    pub(crate) fn run(&mut self, launch: &Launch) {
        let Launch { kernel: name, grid, block, shared_bytes, args } = *launch;
        let module = program_of(name, self.sm);
        let kernel = module.kernel(name).unwrap_or_else(|| panic!("no kernel {name}"));
        let shape = Shape { grid, block, shared_bytes };
        let run = kernel.run(&shape, args.slots(), &mut self.memory).expect("arguments");
        let faults: Vec<String> = run.faults.iter().map(ToString::to_string).collect();
        assert!(faults.is_empty(), "{faults:#?}");
        RAN.with_borrow_mut(|ran| ran.insert(name.to_string(), run.counts));
    }
}

/// The kernels that this thread ran, with the counts of the last run.
pub(crate) fn take_ran() -> BTreeMap<String, Counts> {
    RAN.take()
}
