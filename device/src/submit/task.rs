//! Work for the Host lane that is written outside this crate.

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
        let mut accesses = Vec::new();
        task.accesses(&mut |mode, t| accesses.push((mode, t)));
        Arc::new(Self { task: Box::new(task), accesses: accesses.into() })
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

/// What a running host task may use: the rank's worker threads, and views of the ranges that it declared.
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
