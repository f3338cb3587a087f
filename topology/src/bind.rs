//! Binding of threads and memory, on the live machine only.
//!
//! A rank thread binds itself before it allocates: Linux puts a page on the node of the thread that
//! first touches it, and threads inherit the binding of the thread that starts them.
//!
//! This file uses only `hwloc2` calls that were read and found sound: `Topology::new`, `support`,
//! `set_cpubind`, `get_cpubind`, and owned bitmaps. `hwloc_ext` declares the missing functions.

use std::io;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use hwloc2::{CpuBindError, CpuBindFlags, CpuSet, Topology};

use crate::hwloc_ext::{Handle, Input};
use crate::{Error, ascending, format_cpu_list, hwloc_ext};

/// Number of hardware threads that this process may use, within its cgroup; 1 if unknown. It is for
/// thread pools and measurements; the layout of a run uses the cores of its machine description.
///
/// The first answer is kept for the whole process: the system reports the binding of the calling
/// thread, which is the binding of the process only before any thread is bound.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// This machine, for binding. hwloc accepts a binding through the description of another box, does nothing and reports
/// success; so a [`Machine`](crate::Machine) cannot bind, and this type exists for the live machine alone.
pub(crate) struct LiveMachine {
    /// One topology for all threads, since `hwloc2` binds through `&mut`. A call that panics does not change it.
    threads: Mutex<Topology>,
    /// hwloc's handle for binding memory, loaded at the first use.
    memory: OnceLock<Handle>,
}

impl LiveMachine {
    /// The live machine of this process. It is loaded once, which needs milliseconds, more on a
    /// large box.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static LIVE: OnceLock<LiveMachine> = OnceLock::new();
        if let Some(live) = LIVE.get() {
            return Ok(live);
        }
        hwloc_ext::check_library()?;
        let why = || "hwloc2 gave no topology".to_owned();
        let topology = Topology::new().ok_or_else(|| Error::HwlocLoad { why: why() })?;
        if !topology.support().cpu().set_current_thread() {
            return Err(Error::NotThisMachine);
        }
        // Two threads may both load. The first result is kept; an error is not.
        let threads = Mutex::new(topology);
        Ok(LIVE.get_or_init(|| Self { threads, memory: OnceLock::new() }))
    }

    fn threads(&self) -> MutexGuard<'_, Topology> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// hwloc's handle for binding memory.
    pub(crate) fn memory(&self) -> Result<&Handle, Error> {
        if let Some(handle) = self.memory.get() {
            return Ok(handle);
        }
        let handle = Handle::load(Input::Live)?;
        if !handle.is_this_machine() {
            return Err(Error::NotThisMachine);
        }
        Ok(self.memory.get_or_init(|| handle))
    }
}

/// Binds the calling thread to these logical CPUs (numbered as Linux does) and checks that it took effect.
///
/// After an error the thread may be bound to fewer CPUs than before: the kernel silently drops
/// CPUs that the process may not use. [`Error::BoundElsewhere`] reports this.
pub fn bind_current_thread(cpus: &[u32]) -> Result<(), Error> {
    let requested = ascending(cpus.iter().copied());
    let set: CpuSet = requested.iter().copied().collect();
    let mut threads = LiveMachine::get()?.threads();
    threads.set_cpubind(set, CpuBindFlags::CPUBIND_THREAD).map_err(
        |CpuBindError::Generic(errno, _)| Error::Bind {
            cpus: format_cpu_list(&requested),
            source: io::Error::from_raw_os_error(errno),
        },
    )?;
    must_match(&requested, &binding(&threads)?)
}

/// The logical CPUs on which the calling thread may run, ascending.
pub fn current_binding() -> Result<Vec<u32>, Error> {
    binding(&LiveMachine::get()?.threads())
}

fn binding(threads: &Topology) -> Result<Vec<u32>, Error> {
    let set = threads.get_cpubind(CpuBindFlags::CPUBIND_THREAD);
    // hwloc2 drops the error number, but makes no other call after the failed one.
    let set = set.ok_or_else(|| Error::ReadBinding { source: io::Error::last_os_error() })?;
    Ok(set.into_iter().collect())
}

/// Refuses a binding that the kernel reduced.
fn must_match(requested: &[u32], got: &[u32]) -> Result<(), Error> {
    if got == requested {
        return Ok(());
    }
    Err(Error::BoundElsewhere { requested: format_cpu_list(requested), got: format_cpu_list(got) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `body` on a thread of its own, so that the test thread keeps its binding.
    fn on_a_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(body).join().unwrap()
    }

    #[test]
    fn a_bound_thread_reads_its_binding_back() {
        for cpu in current_binding().unwrap() {
            let got = on_a_thread(move || {
                bind_current_thread(&[cpu, cpu]).unwrap();
                current_binding().unwrap()
            });
            assert_eq!(got, [cpu]);
        }
    }

    #[test]
    fn a_binding_leaves_other_threads_alone_and_is_inherited() {
        let before = current_binding().unwrap();
        let cpu = before[0];
        let inherited = on_a_thread(move || {
            bind_current_thread(&[cpu]).unwrap();
            on_a_thread(|| current_binding().unwrap())
        });
        assert_eq!(inherited, [cpu]);
        assert_eq!(current_binding().unwrap(), before);
    }

    #[test]
    fn every_allowed_cpu_at_once_is_a_binding_too() {
        let all = current_binding().unwrap();
        on_a_thread(move || bind_current_thread(&all).unwrap());
    }

    #[test]
    fn an_absent_cpu_is_refused_with_its_number_and_the_reason() {
        let error = on_a_thread(|| bind_current_thread(&[4000]).unwrap_err());
        let Error::Bind { cpus, source } = &error else { panic!("{error:?}") };
        assert_eq!(cpus, "4000");
        assert_eq!(source.kind(), io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("4000"), "{error}");
    }

    #[test]
    fn cpus_that_the_kernel_left_out_are_reported() {
        assert!(must_match(&[0, 1], &[0, 1]).is_ok());
        let error = must_match(&[0, 1, 2, 8], &[0, 1, 2]).unwrap_err().to_string();
        assert!(error.contains("0-2,8") && error.contains("\"0-2\""), "{error}");
    }

    #[test]
    fn no_cpu_is_refused() {
        let error = on_a_thread(|| bind_current_thread(&[]).unwrap_err());
        assert!(matches!(error, Error::Bind { .. }), "{error:?}");
    }
}
