//! Work that is written outside this crate: for the Host lane, and for a GPU.

use crate::{Crew, Element, Mode, Pieces, Tensor, View, ViewMut};
use std::fmt::Debug;
use std::sync::Arc;

/// A piece of host work as data. It declares what it touches; that is its hazards and its cost, and
/// [`run`](Self::run) is given nothing else.
///
/// It is submitted as a [`HostOp`].
pub trait HostTask: Send + Sync + Debug {
    /// As it appears in errors and traces.
    fn name(&self) -> &'static str;
    /// Every range it touches. Asked once, in [`HostOp::new`].
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor));
    /// Arithmetic, for the simulator.
    fn flops(&self) -> f64 {
        0.0
    }
    /// Does the work. What is declared as `Write` must be written in full, on every path.
    ///
    /// # Errors
    /// Any text; it ends the run on all ranks with the task's name and place of submission.
    fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String>;
}

/// A task, and what it declared when this was made. The hazard check and the views that the task is given go by
/// that one answer, so no task can come by memory that was not checked.
///
/// Made with the plan and submitted by reference count, so that a step allocates nothing.
#[derive(Debug)]
pub struct HostOp {
    task: Box<dyn HostTask>,
    accesses: Box<[(Mode, Tensor)]>,
}

impl HostOp {
    /// Asks `task` what it touches.
    pub fn new(task: impl HostTask + 'static) -> Arc<Self> {
        Arc::new(Self::of(task))
    }

    fn of(task: impl HostTask + 'static) -> Self {
        let mut accesses = Vec::new();
        task.accesses(&mut |mode, t| accesses.push((mode, t)));
        Self { task: Box::new(task), accesses: accesses.into() }
    }

    /// See [`HostTask::name`].
    pub fn name(&self) -> &'static str {
        self.task.name()
    }

    /// Every range that the task touches.
    pub fn accesses(&self) -> &[(Mode, Tensor)] {
        &self.accesses
    }

    /// See [`HostTask::flops`].
    pub fn flops(&self) -> f64 {
        self.task.flops()
    }

    pub(crate) fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        self.task.run(arg, host)
    }
}

/// A task that a GPU does. A virtual GPU runs it as the Host lane would, a real one launches [`kernel`](Self::kernel).
///
/// It is submitted as a [`DeviceOp`].
pub trait DeviceTask: HostTask {
    /// Whether the sizes and storage types of its tensors fit together.
    ///
    /// # Errors
    /// Any text; the op is refused with it when it is submitted.
    fn check(&self) -> Result<(), String>;
    /// What a GPU launches, to the same bits as [`HostTask::run`]. Asked once, in [`DeviceOp::new`].
    fn kernel(&self) -> KernelCall;
}

/// A launch of a kernel whose threads take runs of 8 elements in turn, as `first_run` and `next_run` of
/// `cuda/kernels/prelude.cuh` deal them.
#[derive(Clone, Debug)]
pub struct KernelCall {
    /// The name of a `KERNEL(256)` in one of the device's [programs](crate::cuda::Program).
    pub name: &'static str,
    /// How many elements the threads share; of none nothing is launched.
    pub elements: usize,
    /// The kernel's parameters, in order.
    pub args: Vec<KernelArg>,
}

/// An argument of a kernel.
#[derive(Clone, Debug)]
pub enum KernelArg {
    /// The address of a tensor.
    At(Tensor),
    /// The storage types of some tensors in one `u32`, which `type_of` of the prelude takes apart.
    Types(Vec<Tensor>),
    /// A whole number of 4 or 8 bytes.
    Int(u64),
    /// A number in fp32.
    Float(f32),
}

/// A [`DeviceTask`], and what it said when this was made, like [`HostOp`].
#[derive(Debug)]
pub struct DeviceOp {
    on_cpus: HostOp,
    fits: Result<(), String>,
    kernel: KernelCall,
}

impl DeviceOp {
    /// Asks `task` what it touches, whether that fits together, and what it launches.
    pub fn new(task: impl DeviceTask + 'static) -> Arc<Self> {
        let (fits, kernel) = (task.check(), task.kernel());
        Arc::new(Self { on_cpus: HostOp::of(task), fits, kernel })
    }

    /// See [`HostTask::name`].
    pub fn name(&self) -> &'static str {
        self.on_cpus.name()
    }

    /// Every range that the task touches.
    pub fn accesses(&self) -> &[(Mode, Tensor)] {
        self.on_cpus.accesses()
    }

    /// See [`HostTask::flops`].
    pub fn flops(&self) -> f64 {
        self.on_cpus.flops()
    }

    /// What a virtual GPU runs.
    pub(crate) const fn on_cpus(&self) -> &HostOp {
        &self.on_cpus
    }

    /// What a real one launches.
    pub(crate) const fn kernel(&self) -> &KernelCall {
        &self.kernel
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.fits.clone()
    }
}

/// What a running task may use: the rank's worker threads, and views of the ranges that it declared.
#[derive(Debug)]
pub struct HostContext<'a> {
    pub(crate) crew: Option<&'a Crew>,
    pub(crate) declared: &'a mut Declared<'a>,
}

/// Most ranges of one host task.
pub(crate) const MAX_DECLARED: usize = 8;

/// A fixed table, so that running a task allocates nothing.
pub(crate) type Declared<'a> = [Option<Slot<'a>>; MAX_DECLARED];

#[derive(Debug)]
pub(crate) enum Slot<'a> {
    Read(Tensor, View<'a>),
    Write(Tensor, Option<ViewMut<'a>>),
}

impl<'a> HostContext<'a> {
    /// Does `work` on runs of `whole`, on the rank's worker threads or, when it has only its own, on all of it at once.
    pub fn share<T: Pieces>(&self, whole: T, work: &(impl Fn(T) + Sync)) {
        match self.crew {
            Some(crew) => crew.share(whole, &|_, piece| work(piece)),
            None => work(whole),
        }
    }

    /// A range declared as `Read`.
    ///
    /// # Errors
    /// The task did not declare it.
    pub fn read(&mut self, t: Tensor) -> Result<View<'a>, String> {
        let found = self.declared.iter().flatten().find_map(|d| match d {
            Slot::Read(have, view) if *have == t => Some(*view),
            _ => None,
        });
        found.ok_or_else(|| format!("{t:?} is not declared as read"))
    }

    /// A range declared as `Write` or `Update`. Each can be taken once; together they are disjoint.
    ///
    /// # Errors
    /// The task did not declare it, or has taken it.
    pub fn write(&mut self, t: Tensor) -> Result<ViewMut<'a>, String> {
        let found = self.declared.iter_mut().flatten().find_map(|d| match d {
            Slot::Write(have, view) if *have == t => view.take(),
            _ => None,
        });
        found.ok_or_else(|| format!("{t:?} is not declared as written, or is taken"))
    }

    /// [`read`](Self::read) as a slice of `T`.
    ///
    /// # Errors
    /// As there, or another storage type.
    pub fn read_as<T: Element>(&mut self, t: Tensor) -> Result<&'a [T], String> {
        self.read(t)?.as_slice().ok_or_else(|| format!("{t:?} has another type"))
    }

    /// [`write`](Self::write) as a slice of `T`.
    ///
    /// # Errors
    /// As there, or another storage type.
    pub fn write_as<T: Element>(&mut self, t: Tensor) -> Result<&'a mut [T], String> {
        self.write(t)?.into_slice().ok_or_else(|| format!("{t:?} has another type"))
    }
}
