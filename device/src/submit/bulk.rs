//! Large reads and writes between steps, by the rank's own thread and its kernel threads. They set
//! the tensors that outlive a step before the first step, and read them after the last. Together
//! these tensors are as large as the model or larger.

use crate::{Device, Divisible, Error, Tensor, View, ViewMut};
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

/// Least number of elements per thread.
const UNIT: usize = 1024;
/// Number of elements that are staged at a time, for a tensor that the CPU cannot access.
const STAGED: usize = 1 << 20;

/// Elements `first..first + len` of tensors of equal length.
struct Runs<V> {
    first: usize,
    len: usize,
    views: Vec<V>,
}

/// A view that can be cut.
trait Cut: Sized {
    fn cut(self, mid: usize) -> (Self, Self);
}

impl Cut for View<'_> {
    fn cut(self, mid: usize) -> (Self, Self) {
        (self.slice(0..mid), self.slice(mid..self.len()))
    }
}

impl Cut for ViewMut<'_> {
    fn cut(self, mid: usize) -> (Self, Self) {
        self.split_at(mid)
    }
}

impl<V: Cut + Send> Divisible for Runs<V> {
    fn units(&self) -> usize {
        self.len.div_ceil(UNIT)
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let mid = units * UNIT;
        let (views, rest) = self.views.into_iter().map(|view| view.cut(mid)).unzip();
        let rest = Self { first: self.first + mid, len: self.len - mid, views: rest };
        (Self { first: self.first, len: mid, views }, rest)
    }
}

impl Device {
    /// Calls `work` on runs of `tensors` with the index of the first element and a view of each
    /// tensor; `work` sets every view. The tensors have equal length and do not overlap. The rank's
    /// kernel threads work in parallel, so the cuts between runs differ from machine to machine.
    /// Tensors on a GPU are staged in fp32, a part at a time.
    ///
    /// # Errors
    /// The errors of [`Device::write`], and the first error of `work`.
    ///
    /// # Panics
    /// If `work` uses this device.
    #[track_caller]
    pub fn write_runs(
        &self,
        tensors: &[Tensor],
        work: &(impl Fn(usize, &mut [ViewMut<'_>]) -> Result<(), Error> + Sync),
    ) -> Result<(), Error> {
        let len = self.admit_runs(tensors, true, Location::caller())?;
        if !self.executor().holds_data() {
            return Ok(());
        }
        // No op can be submitted while the views exist.
        let _state = self.lock();
        let in_memory = |t: &Tensor| self.executor().in_memory(*t).is_some();
        let part = if tensors.iter().all(in_memory) { len } else { STAGED };
        let mut staged = vec![Vec::new(); tensors.len()];
        for from in (0..len).step_by(part.max(1)) {
            let range = from..len.min(from + part);
            let view = |(t, staged)| -> ViewMut<'_> {
                let (t, staged): (&Tensor, &mut Vec<f32>) = (t, staged);
                self.executor().in_memory_mut(t.slice(range.clone())).unwrap_or_else(|| {
                    staged.resize(range.len(), 0.0);
                    ViewMut::F32(staged)
                })
            };
            let views = tensors.iter().zip(&mut staged).map(view).collect();
            let failed = Mutex::new(None);
            let all = Runs { first: from, len: range.len(), views };
            self.parallel_for(all, &|mut run: Runs<ViewMut<'_>>| {
                if let Err(error) = work(run.first, &mut run.views) {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            });
            if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
                return Err(error);
            }
            for (t, staged) in tensors.iter().zip(&staged).filter(|(_, s)| !s.is_empty()) {
                self.executor().write_f32(t.slice(range.clone()), staged)?;
            }
        }
        Ok(())
    }

    /// Calls `work` on runs of `tensors` of equal length, with the index of the first element and a
    /// view of each tensor. The rest is as in [`write_runs`](Self::write_runs).
    ///
    /// # Errors
    /// The errors of [`Device::read`].
    ///
    /// # Panics
    /// If `work` uses this device.
    #[track_caller]
    pub fn read_runs(
        &self,
        tensors: &[Tensor],
        work: &(impl Fn(usize, &[View<'_>]) + Sync),
    ) -> Result<(), Error> {
        let len = self.admit_runs(tensors, false, Location::caller())?;
        let _state = self.lock();
        let in_memory = |t: &Tensor| self.executor().in_memory(*t).is_some();
        let part = if tensors.iter().all(in_memory) { len } else { STAGED };
        let mut staged: Vec<Vec<f32>> = vec![Vec::new(); tensors.len()];
        for from in (0..len).step_by(part.max(1)) {
            let range = from..len.min(from + part);
            for (t, staged) in tensors.iter().zip(&mut staged).filter(|(t, _)| !in_memory(t)) {
                let mut exact = vec![0.0; range.len()];
                self.executor().read(t.slice(range.clone()), &mut exact)?;
                staged.clear();
                staged.extend(exact.into_iter().map(|x| x as f32));
            }
            let view = |(t, staged)| -> View<'_> {
                let (t, staged): (&Tensor, &Vec<f32>) = (t, staged);
                let in_memory = self.executor().in_memory(t.slice(range.clone()));
                in_memory.unwrap_or(View::F32(staged))
            };
            let views = tensors.iter().zip(&staged).map(view).collect();
            let all = Runs { first: from, len: range.len(), views };
            self.parallel_for(all, &|run: Runs<View<'_>>| work(run.first, &run.views));
        }
        Ok(())
    }

    /// Checks that the rank's thread may access each tensor, and returns their length.
    fn admit_runs(
        &self,
        tensors: &[Tensor],
        write: bool,
        site: crate::Site,
    ) -> Result<usize, Error> {
        let len = tensors.first().map_or(0, |t| t.len());
        let op = if write { "write" } else { "read" };
        for (i, t) in tensors.iter().enumerate() {
            if t.len() != len {
                let problem = format!("{} elements beside {len}", t.len());
                return Err(Error::Op { op, site, problem });
            }
            let twice = write && tensors[..i].iter().any(|other| other.overlaps(*t));
            if twice {
                let problem = format!("`{}` overlaps another one", self.plan().name(*t));
                return Err(Error::Op { op, site, problem });
            }
            let mode = if write { crate::Mode::Write } else { crate::Mode::Read };
            self.touch(mode, *t, site)?;
        }
        Ok(len)
    }

    /// Calls `work` on runs of `whole`, on the rank's kernel threads or on this thread alone.
    fn parallel_for<T: Divisible>(&self, whole: T, work: &(impl Fn(T) + Sync)) {
        match self.executor().team() {
            Some(team) => team.parallel_for(whole, &|_, piece| work(piece)),
            None => work(whole),
        }
    }
}
