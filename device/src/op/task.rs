//! Work written outside this crate, for the Host lane and for a GPU.

use crate::{Divisible, Element, Mode, Tensor, ThreadTeam, View, ViewMut};
use std::fmt::Debug;
use std::sync::Arc;

/// A piece of host work as data. The task declares the ranges that it accesses. The ranges decide
/// its hazards and its cost, and [`run`](Self::run) gets no other ranges.
///
/// A host task is submitted as a [`HostOp`].
pub trait HostTask: Send + Sync + Debug {
    /// The task's name in errors and traces.
    fn name(&self) -> &'static str;
    /// Calls `visit` with every range that the task accesses. [`HostOp::new`] calls it once.
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor));
    /// Number of floating-point operations, for the simulator.
    fn flops(&self) -> f64 {
        0.0
    }
    /// Number of bytes that the task moves. `declared` is the number for a task that accesses all
    /// its declared ranges in full.
    fn bytes(&self, declared: u64) -> u64 {
        declared
    }
    /// Does the work. Every execution writes each range declared as `Write` in full.
    ///
    /// # Errors
    /// Any text. An error ends the run on all ranks, with the task's name and the line that
    /// submitted it.
    fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String>;
}

/// A task, and its declarations at the time of construction. The hazard check and the task's views
/// use the same declarations, so no task can access unchecked memory.
///
/// A `HostOp` is created with the plan and submitted by reference count: a step allocates nothing.
#[derive(Debug)]
pub struct HostOp {
    task: Box<dyn HostTask>,
    accesses: Box<[(Mode, Tensor)]>,
}

impl HostOp {
    /// Makes an op of `task`, with the accesses that the task declares now.
    pub fn new(task: impl HostTask + 'static) -> Arc<Self> {
        Arc::new(Self::of(task))
    }

    fn of(task: impl HostTask + 'static) -> Self {
        let mut accesses = Vec::new();
        task.accesses(&mut |mode, t| accesses.push((mode, t)));
        Self { task: Box::new(task), accesses: accesses.into() }
    }

    /// The task's [`HostTask::name`].
    pub fn name(&self) -> &'static str {
        self.task.name()
    }

    /// Every range that the task accesses.
    pub fn accesses(&self) -> &[(Mode, Tensor)] {
        &self.accesses
    }

    /// The task's [`HostTask::flops`].
    pub fn flops(&self) -> f64 {
        self.task.flops()
    }

    /// The task's [`HostTask::bytes`].
    pub fn bytes(&self, declared: u64) -> u64 {
        self.task.bytes(declared)
    }

    pub(crate) fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        self.task.run(arg, host)
    }
}

/// A task for a GPU. A virtual GPU runs it like a host task, and a real GPU launches
/// [`kernel`](Self::kernel).
///
/// A device task is submitted as a [`DeviceOp`].
pub trait DeviceTask: HostTask {
    /// Checks that the sizes and storage types of the task's tensors fit together.
    ///
    /// # Errors
    /// Any text. Submitting the op fails with it.
    fn check(&self) -> Result<(), String>;
    /// The kernel that a GPU launches, with the same bits as [`HostTask::run`]. [`DeviceOp::new`]
    /// calls it once.
    fn kernel(&self) -> KernelCall;
}

/// A launch of a kernel. Its threads process runs of 8 elements, which `first_run` and `next_run`
/// of `cuda/kernels/prelude.cuh` distribute.
#[derive(Clone, Debug)]
pub struct KernelCall {
    /// The name of a `KERNEL(256)` in one of the device's [programs](crate::cuda::Program).
    pub name: &'static str,
    /// Number of elements that the threads share. If it is 0, no kernel is launched.
    pub elements: usize,
    /// The kernel's parameters, in order.
    pub args: Vec<KernelArg>,
}

/// An argument of a kernel.
#[derive(Clone, Debug)]
pub enum KernelArg {
    /// The address of a tensor.
    At(Tensor),
    /// The storage types of some tensors in one `u32`; `type_of` of the prelude decodes it.
    Types(Vec<Tensor>),
    /// A whole number of 4 or 8 bytes.
    Int(u64),
    /// A number in fp32.
    Float(f32),
}

/// A [`DeviceTask`] and its declarations at the time of construction, like [`HostOp`].
#[derive(Debug)]
pub struct DeviceOp {
    on_cpus: HostOp,
    fits: Result<(), String>,
    kernel: KernelCall,
}

impl DeviceOp {
    /// Makes an op of `task`, with the task's present accesses, check and kernel.
    pub fn new(task: impl DeviceTask + 'static) -> Arc<Self> {
        let (fits, kernel) = (task.check(), task.kernel());
        Arc::new(Self { on_cpus: HostOp::of(task), fits, kernel })
    }

    /// The task's [`HostTask::name`].
    pub fn name(&self) -> &'static str {
        self.on_cpus.name()
    }

    /// Every range that the task accesses.
    pub fn accesses(&self) -> &[(Mode, Tensor)] {
        self.on_cpus.accesses()
    }

    /// The task's [`HostTask::flops`].
    pub fn flops(&self) -> f64 {
        self.on_cpus.flops()
    }

    /// The host op that a virtual GPU runs.
    pub(crate) const fn on_cpus(&self) -> &HostOp {
        &self.on_cpus
    }

    /// The kernel that a real GPU launches.
    pub(crate) const fn kernel(&self) -> &KernelCall {
        &self.kernel
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.fits.clone()
    }
}

/// The resources of a running task: the rank's kernel threads, and views of the declared ranges.
#[derive(Debug)]
pub struct HostContext<'a> {
    pub(crate) team: Option<&'a ThreadTeam>,
    pub(crate) declared: &'a mut DeclaredRanges<'a>,
}

/// Largest number of ranges of one host task.
pub(crate) const MAX_DECLARED: usize = 12;

/// The declared ranges in a fixed table, so that running a task allocates nothing.
pub(crate) type DeclaredRanges<'a> = [Option<Slot<'a>>; MAX_DECLARED];

#[derive(Debug)]
pub(crate) enum Slot<'a> {
    Read(Tensor, View<'a>),
    Write(Tensor, Option<ViewMut<'a>>),
}

impl<'a> HostContext<'a> {
    /// Calls `work` on runs of `whole` on the rank's kernel threads. If the rank has only its own
    /// thread, calls it once on all of `whole`.
    pub fn parallel_for<T: Divisible>(&self, whole: T, work: &(impl Fn(T) + Sync)) {
        match self.team {
            Some(team) => team.parallel_for(whole, &|_, piece| work(piece)),
            None => work(whole),
        }
    }

    /// A view of a range declared as `Read`.
    ///
    /// # Errors
    /// The task did not declare the range as `Read`.
    pub fn read(&mut self, t: Tensor) -> Result<View<'a>, String> {
        let found = self.declared.iter().flatten().find_map(|d| match d {
            Slot::Read(have, view) if *have == t => Some(*view),
            _ => None,
        });
        found.ok_or_else(|| format!("{t:?} is not declared as read"))
    }

    /// A view of a range declared as `Write` or `Update`; each view only once. Views are disjoint.
    ///
    /// # Errors
    /// The task did not declare the range as `Write` or `Update`, or has already obtained its view.
    pub fn write(&mut self, t: Tensor) -> Result<ViewMut<'a>, String> {
        let found = self.declared.iter_mut().flatten().find_map(|d| match d {
            Slot::Write(have, view) if *have == t => view.take(),
            _ => None,
        });
        found.ok_or_else(|| format!("{t:?} is not declared as written, or is taken"))
    }

    /// The view of [`read`](Self::read) as a slice of `T`.
    ///
    /// # Errors
    /// The errors of `read`, and another storage type.
    pub fn read_as<T: Element>(&mut self, t: Tensor) -> Result<&'a [T], String> {
        self.read(t)?.as_slice().ok_or_else(|| format!("{t:?} has another type"))
    }

    /// The view of [`write`](Self::write) as a slice of `T`.
    ///
    /// # Errors
    /// The errors of `write`, and another storage type.
    pub fn write_as<T: Element>(&mut self, t: Tensor) -> Result<&'a mut [T], String> {
        self.write(t)?.into_slice().ok_or_else(|| format!("{t:?} has another type"))
    }
}
