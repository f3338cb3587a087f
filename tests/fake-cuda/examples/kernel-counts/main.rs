//! Counts of every kernel at the shapes of configs and models, from the interpreter of PTX, for
//! scripts/kernel-report. Each launch is one line of fields separated by tabs. A kernel runs on a
//! part of its rows or heads; `scale` is the whole work divided by the work of that part. With
//! arguments, only of the configs with these names.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a tool of scripts/kernel-report"
)]
#![expect(unsafe_code, reason = "NVRTC is a C library")]

mod delta;
mod experts;
#[path = "../../tests/rig/nvrtc.rs"]
mod nvrtc;
mod shapes;

use device::cuda::testing::{self, Launch};
use device::{Arena, Dtype, Mode, Op, Plan, Tensor};
use fake_cuda::ptx::{Memory, Module, Shape, Unit};
use shapes::{Config, configs};
use std::collections::HashMap;

/// First address of the tensors, and of the scratch memory.
const BASE: u64 = 1 << 32;
const SCRATCH: u64 = 1 << 40;

/// Creates an op with this number of rows (or heads, or experts).
pub(crate) type OpMaker = Box<dyn Fn(&mut Tensors, usize) -> Op>;

/// An op on tensors of a plan.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) make: OpMaker,
    /// Rows (or heads, or experts) of the whole op, and of the part that runs.
    pub(crate) whole: usize,
    pub(crate) part: usize,
    /// Factor of the work between whole and part in addition to their rows.
    pub(crate) times: f64,
}

/// Tensors of an op, as the op is created.
#[derive(Default)]
pub(crate) struct Tensors {
    plan: Plan,
    all: Vec<Tensor>,
    /// Tensors of integers that are not 0.
    integers: Vec<(Tensor, Vec<i32>)>,
}

impl Tensors {
    pub(crate) fn make(&mut self, dtype: Dtype, shape: (usize, usize)) -> Tensor {
        let tensor = self.plan.tensor((Arena::Device, "test"), "t", dtype, shape);
        self.all.push(tensor);
        tensor
    }

    pub(crate) fn integers(&mut self, shape: (usize, usize), values: Vec<i32>) -> Tensor {
        let tensor = self.make(Dtype::I32, shape);
        self.integers.push((tensor, values));
        tensor
    }
}

/// The launches of an op with `rows` rows, and the bytes that the op must move at least.
fn launches(case: &Case, rows: usize, sm: u32) -> (Vec<Launch>, Tensors, u64, Op) {
    let mut tensors = Tensors::default();
    let op = (case.make)(&mut tensors, rows);
    let mut least = 0;
    op.accesses(&mut |mode, t| {
        let bytes = t.range().end - t.range().start;
        least += if mode == Mode::Update { 2 * bytes } else { bytes };
    });
    let at = |t: Tensor| BASE + t.range().start;
    let launches = testing::launches(&op, &at, SCRATCH, sm).expect("kernels");
    (launches.iter().copied().collect(), tensors, least, op)
}

/// Memory in which each float is 0.25, and each integer without a value and each fp8 number is 0.
fn memory(tensors: &Tensors, op: &Op) -> Memory {
    let mut memory = Memory::default();
    for t in &tensors.all {
        let bytes = match t.dtype() {
            Dtype::Bf16 => 0x3e80_u16.to_le_bytes().to_vec(),
            Dtype::F16 => 0x3400_u16.to_le_bytes().to_vec(),
            Dtype::F32 => 0.25_f32.to_le_bytes().to_vec(),
            Dtype::F64 => 0.25_f64.to_le_bytes().to_vec(),
            Dtype::I32 | Dtype::U16 | Dtype::E4m3 | Dtype::E5m2 => {
                vec![0; t.dtype().bytes() as usize]
            }
        };
        let given = tensors.integers.iter().find(|(other, _)| other == t);
        let bytes = match given {
            Some((_, values)) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            None => bytes.repeat(t.len()),
        };
        memory.add(BASE + t.range().start, bytes, true);
    }
    memory.add(SCRATCH, vec![0; testing::scratch_bytes(op) as usize], false);
    memory
}

/// Programs compiled by NVRTC.
#[derive(Default)]
struct Programs(HashMap<(&'static str, u32), Module>);

impl Programs {
    fn of(&mut self, kernel: &str, sm: u32) -> &Module {
        let call = format!(") {kernel}(");
        let mut all = testing::PROGRAMS.iter().chain(offload::PROGRAMS);
        let program = all.find(|program| program.source.contains(&call)).expect("a program");
        self.0.entry((program.name, sm)).or_insert_with(|| {
            let text = nvrtc::ptx(program.name, &program.text(), sm);
            Module::parse(&text).unwrap_or_else(|problem| panic!("{}: {problem}", program.name))
        })
    }
}

const UNITS: [Unit; 17] = [
    Unit::Single,
    Unit::Double,
    Unit::Integer,
    Unit::Convert,
    Unit::Move,
    Unit::Special,
    Unit::Tensor,
    Unit::Matrix,
    Unit::LoadGlobal,
    Unit::StoreGlobal,
    Unit::LoadShared,
    Unit::StoreShared,
    Unit::Copy,
    Unit::Wait,
    Unit::Shuffle,
    Unit::Barrier,
    Unit::Branch,
];

fn report(config: &Config, case: &Case, programs: &mut Programs) {
    let (whole, _, least, _) = launches(case, case.whole, config.sm);
    let (parts, tensors, _, op) = launches(case, case.part, config.sm);
    let mut memory = memory(&tensors, &op);
    let scale = case.whole as f64 / case.part as f64 * case.times;
    for (at, (launch, part)) in whole.iter().zip(&parts).enumerate() {
        let sm = nvrtc::compiled_for(part.kernel, config.sm);
        let kernel = programs.of(part.kernel, sm).kernel(part.kernel).expect("a kernel");
        let shape = Shape { grid: part.grid, block: part.block, shared_bytes: part.shared_bytes };
        let run = kernel.run(&shape, part.args.slots(), &mut memory).expect("arguments");
        assert!(run.faults.is_empty(), "{:#?}", run.faults);
        let c = &run.counts;
        let blocks: f64 = launch.grid.iter().map(|x| f64::from(*x)).product();
        let of_part: f64 = part.grid.iter().map(|x| f64::from(*x)).product();
        let scale = match part.kernel {
            // The work of this kernel grows with the tokens, not with pairs of tokens.
            "attention_delta" => blocks / of_part,
            // The rows of this kernel are the blocks of the kernel before.
            "norm_gradients" => f64::from(whole[0].grid[0]) / f64::from(parts[0].grid[0]),
            _ => scale,
        };
        let mut fields = vec![config.name.to_string(), case.name.into(), part.kernel.into()];
        // The least bytes belong to the op; its first launch has them.
        let least = if at == 0 { least as f64 } else { 0.0 };
        let numbers = [blocks, part.block.into(), (part.shared_bytes as f64), scale, least];
        fields.extend(numbers.map(|x| format!("{x:.0}")));
        let counts = [c.requests, c.sectors, c.least_sectors, c.touched, c.passes, c.least_passes];
        fields.extend(counts.map(|x| x.to_string()));
        fields.push(format!("{:.2}", c.lanes()));
        fields
            .extend(UNITS.map(|unit| c.instructions.get(&unit).copied().unwrap_or(0).to_string()));
        println!("{}", fields.join("\t"));
    }
}

fn main() {
    let head = "config op kernel blocks threads dynamic scale least requests sectors least_sectors touched passes least_passes lanes";
    let units = UNITS.map(|unit| format!("{unit:?}"));
    println!("{}\t{}", head.replace(' ', "\t"), units.join("\t"));
    let mut programs = Programs::default();
    let names: Vec<String> = std::env::args().skip(1).collect();
    for config in configs() {
        if !names.is_empty() && !names.iter().any(|name| name == config.name) {
            continue;
        }
        for case in config.cases() {
            report(&config, &case, &mut programs);
        }
    }
}
