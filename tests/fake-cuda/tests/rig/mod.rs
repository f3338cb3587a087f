//! Runs one op on a virtual GPU of the cpu backend and by emulated CUDA kernels, from the same
//! bits. With ONEBOX_REAL_GPU, the first GPU of the machine replaces the emulator.

#![expect(unsafe_code, reason = "the emulator is C++ and its kernels take addresses")]
#![expect(clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "a test")]

mod compiled;
mod nvrtc;

use compiled::CompiledKernels;
pub(crate) use compiled::{compile, nvrtc_or_skip, take_ran};

use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::testing::{self, Launch};
use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::numerics::{E4m3, E5m2};
use device::{Arena, Device, Dtype, Lane, Mode, Op, Plan, Rank, Tensor, random};
use device::{Communicator, HostWork};
use half::{bf16, f16};
use std::ffi::{CString, c_char, c_void};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

unsafe extern "C" {
    fn onebox_emulated_launch(
        kernel: *const c_char,
        grid: *const u32,
        block: u32,
        shared_bytes: u32,
        args: *mut *mut c_void,
    ) -> i32;
    fn onebox_emulated_parameters(kernel: *const c_char, sizes: *mut *const u32) -> i32;
}

// Links the emulator's library.
use fake_cuda as _;

pub(crate) const VALUES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Largest relative difference of two roundings of nearly the same number.
pub(crate) fn ulp(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 1.0 / 128.0,
        Dtype::F16 => 1.0 / 1024.0,
        Dtype::F32 => 1.2e-7,
        Dtype::F64 | Dtype::I32 | Dtype::U16 | Dtype::E4m3 | Dtype::E5m2 => 0.0,
    }
}

/// Numbers in -1..1 that are exact in every type.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<f64> {
    (0..n as u64).map(|i| random::below(seed, i, 255) as f64 / 128.0 - 0.992_187_5).collect()
}

/// Numbers of many sizes, rounded to f32.
pub(crate) fn normal(seed: u64, n: usize) -> Vec<f64> {
    (0..n as u64).map(|i| f64::from(random::normal(seed, i) as f32)).collect()
}

/// Tensors of a plan, with their values.
#[derive(Default)]
pub(crate) struct Rig {
    plan: Plan,
    values: Vec<(Tensor, Vec<f64>)>,
    tensors: Vec<Tensor>,
    /// Number of elements by which every tensor is moved from an aligned address.
    pub(crate) skew: usize,
    pub(crate) sm: u32,
    /// Bound of the absolute difference of kernels as C++ and as PTX; if set, both run.
    pub(crate) compiled: Option<f64>,
}

impl Rig {
    pub(crate) fn new(skew: usize) -> Self {
        Self { skew, sm: 70, ..Self::default() }
    }

    /// A rig that runs kernels as C++ and as PTX for a compute capability.
    pub(crate) fn compiled(skew: usize, sm: u32, bound: f64) -> Self {
        Self { sm, compiled: Some(bound), ..Self::new(skew) }
    }

    fn tensor(&mut self, dtype: Dtype, (rows, cols): (usize, usize)) -> Tensor {
        let n = rows * cols;
        let at = (Arena::Device, "test");
        let whole = self.plan.tensor(at, "t", dtype, (1, n + self.skew));
        let tensor = whole.slice(self.skew..self.skew + n).reshape(rows, cols);
        self.tensors.push(tensor);
        tensor
    }

    pub(crate) fn put(&mut self, dtype: Dtype, shape: (usize, usize), values: &[f64]) -> Tensor {
        assert_eq!(values.len(), shape.0 * shape.1);
        let t = self.tensor(dtype, shape);
        self.values.push((t, values.to_vec()));
        t
    }

    pub(crate) fn put_noise(&mut self, dtype: Dtype, shape: (usize, usize), seed: u64) -> Tensor {
        self.put(dtype, shape, &noise(seed, shape.0 * shape.1))
    }

    /// Adds, for rows of samples, the position in the sample where each row's document starts.
    /// `lengths` are the documents' rows.
    pub(crate) fn put_starts(
        &mut self,
        seq_len: usize,
        lengths: &[usize],
        rows: Range<usize>,
    ) -> Tensor {
        let mut all: Vec<i32> = Vec::new();
        for length in lengths {
            let start = (all.len() % seq_len) as i32;
            all.extend(std::iter::repeat_n(start, *length));
        }
        self.put_ints(&all[rows])
    }

    pub(crate) fn put_ints(&mut self, values: &[i32]) -> Tensor {
        let values: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
        self.put(Dtype::I32, (1, values.len()), &values)
    }

    /// Adds a tensor for an op to write.
    pub(crate) fn out(&mut self, dtype: Dtype, shape: (usize, usize)) -> Tensor {
        self.tensor(dtype, shape)
    }

    pub(crate) fn open(self) -> Pair {
        let plan = Arc::new(self.plan);
        let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch: cpu::ScratchFloats::new(300, 256, 4000, 0),
            work: HostWork::default(),
        };
        let world = Communicator::new(1, 1, Duration::from_secs(10));
        let cpu = cpu::open(rank, &plan, &world, &options).expect("a virtual GPU");
        // Poisoned with NaN of every type.
        let memory = vec![u64::MAX; plan.bytes(Arena::Device).div_ceil(8) as usize + 32];
        let gpu = real().then(|| open_gpu(rank, &plan));
        let tensors = self.tensors;
        let mut pair = Pair { cpu, memory, sm: self.sm, gpu, compiled: self.compiled, tensors };
        for (t, values) in &self.values {
            pair.cpu.write(*t, &|i| values[i]).expect("written");
            pair.follow(*t);
        }
        pair
    }
}

/// Whether the ops run on a real GPU.
pub(crate) fn real() -> bool {
    std::env::var_os("ONEBOX_REAL_GPU").is_some()
}

fn open_gpu(rank: Rank, plan: &Arc<Plan>) -> Device {
    let world = Communicator::new(1, 1, Duration::from_secs(60));
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::InProcess,
        attention: AttentionLibrary::Own,
        matmuls: MatmulSelection::Heuristic,
        scratch: 1 << 20,
        work: HostWork::default(),
        programs: offload::PROGRAMS,
        warm_up: Arc::default(),
    };
    cuda::open(rank, plan, &world, &options).unwrap_or_else(|e| panic!("{e}"))
}

/// The memories of the cpu backend and of the emulated device.
pub(crate) struct Pair {
    cpu: Device,
    memory: Vec<u64>,
    sm: u32,
    gpu: Option<Device>,
    pub(crate) compiled: Option<f64>,
    tensors: Vec<Tensor>,
}

impl Pair {
    /// The arena of the emulated device, aligned as in a plan.
    fn base(&self) -> u64 {
        (self.memory.as_ptr() as u64).next_multiple_of(256)
    }

    fn address(&self, t: Tensor) -> u64 {
        self.base() + t.range().start
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let offset = (self.base() - self.memory.as_ptr() as u64) as usize;
        let len = self.memory.len() * 8;
        // SAFETY: the bytes of a vector of integers, borrowed mutably as it is.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), len) };
        &mut bytes[offset..]
    }

    pub(crate) fn on_cpu(&self, t: Tensor) -> Vec<f64> {
        let mut values = vec![0.0; t.len()];
        self.cpu.read(t, &mut values).expect("read");
        values
    }

    pub(crate) fn emulated(&mut self, t: Tensor) -> Vec<f64> {
        if let Some(gpu) = &self.gpu {
            let mut values = vec![0.0; t.len()];
            gpu.read(t, &mut values).expect("read");
            return values;
        }
        let range = t.range().start as usize..t.range().end as usize;
        decode(&self.bytes_mut()[range], t.dtype())
    }

    /// Copies the cpu's values of `t` to the emulated device.
    fn follow(&mut self, t: Tensor) {
        if let Some(gpu) = &self.gpu {
            let values = self.on_cpu(t);
            gpu.write(t, &|i| values[i]).expect("written");
            return;
        }
        let bytes = encode(&self.on_cpu(t), t.dtype());
        let range = t.range().start as usize..t.range().end as usize;
        self.bytes_mut()[range].copy_from_slice(&bytes);
    }

    /// Runs `op` on both devices. Their results must agree within `absolute` plus `ulps` times
    /// `ulp` of the type. Both devices continue with the cpu's results.
    #[track_caller]
    pub(crate) fn check(&mut self, op: &Op, absolute: f64, ulps: f64) {
        self.cpu.submit(Lane::Compute, op.clone());
        self.cpu.sync_all().expect("the cpu runs it");
        let mut written = Vec::new();
        op.accesses(&mut |mode, t| match mode {
            Mode::Read => {}
            Mode::Update => written.push(t),
            Mode::Write => {
                self.bytes_mut()[t.range().start as usize..t.range().end as usize].fill(0xff);
                written.push(t);
            }
        });
        match &self.gpu {
            Some(gpu) => {
                for t in &written {
                    if op_only_writes(op, *t) {
                        gpu.write(*t, &|_| f64::NAN).expect("written");
                    }
                }
                gpu.submit(Lane::Compute, op.clone());
                gpu.sync_all().unwrap_or_else(|e| panic!("{e}"));
            }
            None => self.launch(op, &written),
        }
        for t in written {
            if is_scratch(op, t) {
                self.follow(t);
                continue;
            }
            let (got, want) = (self.emulated(t), self.on_cpu(t));
            let relative = ulp(t.dtype()) * ulps;
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let same = got == want || got.is_nan() && want.is_nan();
                assert!(
                    same || (got - want).abs() <= absolute + relative * want.abs(),
                    "{} of {:?} {:?}: element {i} is {got:e}, not {want:e}",
                    op.name(),
                    t.dtype(),
                    t.shape()
                );
            }
            self.follow(t);
        }
    }

    /// Runs `op` only on the emulated device. Returns `out`, the only tensor that it writes.
    #[track_caller]
    pub(crate) fn launched(&mut self, op: &Op, out: Tensor) -> Vec<f64> {
        match &self.gpu {
            Some(gpu) => {
                gpu.submit(Lane::Compute, op.clone());
                gpu.sync_all().unwrap_or_else(|e| panic!("{e}"));
            }
            None => self.launch(op, &[out]),
        }
        self.emulated(out)
    }

    /// Runs `op` on both devices and compares the results bit for bit.
    #[track_caller]
    pub(crate) fn check_exact(&mut self, op: &Op) {
        self.check(op, 0.0, 0.0);
    }

    /// Launches the op's kernels, and checks that only `written` changes.
    #[track_caller]
    fn launch(&mut self, op: &Op, written: &[Tensor]) {
        let mut scratch = vec![u64::MAX; testing::scratch_bytes(op).div_ceil(8) as usize + 1];
        let before = self.bytes_mut().to_vec();
        let base = self.base();
        let at = |t: Tensor| base + t.range().start;
        let mut compiled = self.compiled(op, &scratch);
        let scratch = scratch.as_mut_ptr() as u64;
        let both = |launch: &Launch| {
            if let Some(compiled) = &mut compiled {
                compiled.run(launch);
            }
            run(launch);
        };
        testing::launches(op, &at, scratch, self.sm).expect("kernels").iter().for_each(both);
        self.compare(op, compiled.as_ref(), written);
        let mut after = self.bytes_mut().to_vec();
        for t in written {
            let range = t.range().start as usize..t.range().end as usize;
            after[range.clone()].copy_from_slice(&before[range]);
        }
        assert!(before == after, "{} writes outside its tensors", op.name());
    }

    /// The rig's memory for compiled kernels: each tensor, and no other byte.
    fn compiled(&mut self, op: &Op, scratch: &[u64]) -> Option<CompiledKernels> {
        self.compiled?;
        let base = self.base();
        let mut compiled = CompiledKernels::new(self.sm);
        for t in self.tensors.clone() {
            let range = t.range().start as usize..t.range().end as usize;
            let bytes = self.bytes_mut()[range].to_vec();
            compiled.memory.add(base + t.range().start, bytes, !op_only_writes(op, t));
        }
        let bytes = scratch.iter().flat_map(|word| word.to_ne_bytes()).collect();
        compiled.memory.add(scratch.as_ptr() as u64, bytes, false);
        Some(compiled)
    }

    /// Compares the memory after the compiled kernels with the memory after those compiled as C++.
    #[track_caller]
    fn compare(&mut self, op: &Op, compiled: Option<&CompiledKernels>, written: &[Tensor]) {
        let (Some(compiled), Some(bound)) = (compiled, self.compiled) else { return };
        for t in self.tensors.clone() {
            let got = compiled.memory.bytes(self.address(t)).expect("a tensor");
            let got = decode(got, t.dtype());
            let is_written = written.iter().any(|w| w.range() == t.range());
            let bound = if is_written { bound } else { 0.0 };
            for (i, (got, want)) in got.iter().zip(self.emulated(t)).enumerate() {
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                let name = op.name();
                assert!(
                    same || bound > 0.0
                        && (got - want).abs() <= bound + ulp(t.dtype()) * want.abs(),
                    "{name} as PTX, {:?} {:?}: element {i} is {got:e}, not {want:e}",
                    t.dtype(),
                    t.shape()
                );
            }
        }
    }

    /// Runs `add_bias`, which is no op: c += bias on the emulated device; returns c.
    pub(crate) fn add_bias(&mut self, c: Tensor, bias: Tensor) -> Vec<f64> {
        let base = self.base();
        let at = |t: Tensor| base + t.range().start;
        let op = Op::Add { x: bias, into: c };
        let mut compiled = self.compiled(&op, &[]);
        let both = |launch: &Launch| {
            compiled.iter_mut().for_each(|compiled| compiled.run(launch));
            run(launch);
        };
        testing::add_bias(c, bias, &at).expect("a kernel").iter().for_each(both);
        self.compare(&op, compiled.as_ref(), &[c]);
        self.emulated(c)
    }

    /// Writes the combination of `parts` to `into` on the emulated device.
    pub(crate) fn combine(
        &mut self,
        into: Tensor,
        parts: &[Tensor],
        reduce: device::Reduction,
    ) -> Vec<f64> {
        let addresses: Vec<u64> = parts.iter().map(|t| self.address(*t)).collect();
        let at = self.address(into);
        let to = testing::DeviceElements { at, len: into.len(), dtype: into.dtype() };
        let op = Op::Add { x: into, into };
        let mut compiled = self.compiled(&op, &[]);
        let both = |launch: &Launch| {
            compiled.iter_mut().for_each(|compiled| compiled.run(launch));
            run(launch);
        };
        testing::combine_peers(to, &addresses, reduce).expect("a kernel").iter().for_each(both);
        self.compare(&op, compiled.as_ref(), &[into]);
        self.emulated(into)
    }
}

/// Whether `t` has arbitrary values after the op.
fn is_scratch(op: &Op, t: Tensor) -> bool {
    matches!(op, Op::SortByExpert { scratch, .. } if *scratch == t)
}

fn op_only_writes(op: &Op, t: Tensor) -> bool {
    let (mut writes, mut other_modes) = (false, false);
    op.accesses(&mut |mode, other| {
        writes |= other == t && mode == Mode::Write;
        other_modes |= other == t && mode != Mode::Write;
    });
    writes && !other_modes
}

/// Runs one launch, after a check of its arguments.
pub(crate) fn run(launch: &Launch) {
    let name = CString::new(launch.kernel).expect("a name");
    let mut sizes = std::ptr::null();
    // SAFETY: a string, and a place for a pointer.
    let count = unsafe { onebox_emulated_parameters(name.as_ptr(), &raw mut sizes) };
    let count = usize::try_from(count).unwrap_or_else(|_| panic!("no kernel {}", launch.kernel));
    // SAFETY: the table has this many sizes and is never freed.
    let sizes: &[u32] = unsafe { std::slice::from_raw_parts(sizes, count) };
    let slots = launch.args.slots();
    assert_eq!(slots.len(), count, "{launch:?}");
    assert!(sizes.iter().all(|size| *size <= 8), "a slot has 8 bytes");
    let mut room = slots.to_vec();
    let mut args: Vec<*mut c_void> = room.iter_mut().map(|slot| (&raw mut *slot).cast()).collect();
    let Launch { grid, block, shared_bytes, .. } = *launch;
    // SAFETY: as many arguments as parameters; the addresses among them are those of the rig's memory.
    let status = unsafe {
        onebox_emulated_launch(name.as_ptr(), grid.as_ptr(), block, shared_bytes, args.as_mut_ptr())
    };
    assert_eq!(status, 0, "{launch:?}");
}

fn encode(values: &[f64], dtype: Dtype) -> Vec<u8> {
    let each = values.iter();
    match dtype {
        Dtype::F16 => each.flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect(),
        Dtype::Bf16 => each.flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        Dtype::F32 => each.flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        Dtype::F64 => each.flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::I32 => each.flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        Dtype::U16 => each.flat_map(|x| (*x as u16).to_le_bytes()).collect(),
        Dtype::E4m3 => each.map(|x| E4m3::from_f32(*x as f32).0).collect(),
        Dtype::E5m2 => each.map(|x| E5m2::from_f32(*x as f32).0).collect(),
    }
}

fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|x| f(*x)).collect()
    }
    match dtype {
        Dtype::F16 => each(bytes, |x| f16::from_le_bytes(x).to_f64()),
        Dtype::Bf16 => each(bytes, |x| bf16::from_le_bytes(x).to_f64()),
        Dtype::F32 => each(bytes, |x| f64::from(f32::from_le_bytes(x))),
        Dtype::F64 => each(bytes, f64::from_le_bytes),
        Dtype::I32 => each(bytes, |x| f64::from(i32::from_le_bytes(x))),
        Dtype::U16 => each(bytes, |x| f64::from(u16::from_le_bytes(x))),
        Dtype::E4m3 => each(bytes, |[x]| f64::from(E4m3(x).to_f32())),
        Dtype::E5m2 => each(bytes, |[x]| f64::from(E5m2(x).to_f32())),
    }
}
