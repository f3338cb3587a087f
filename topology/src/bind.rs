//! Binding of threads to CPUs.
//!
//! A rank thread binds itself before it allocates: Linux puts a page on the node of the thread that first touches it,
//! and threads inherit the binding of the thread that starts them.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Error;
use crate::hwloc::Hwloc;
use crate::machine::format_cpu_list;

/// Binds the calling thread to these logical CPUs (numbered as Linux does) and checks that it took effect.
///
/// On an error the thread may be bound to fewer CPUs than before: the kernel silently drops those that the process may
/// not use, which is reported as [`Error::BoundElsewhere`].
pub fn bind_current_thread(cpus: &[u32]) -> Result<(), Error> {
    let mut asked = cpus.to_vec();
    asked.sort_unstable();
    asked.dedup();

    let mut hwloc = shared_hwloc()?;
    hwloc
        .bind_current_thread(&asked)
        .map_err(|source| Error::Bind { cpus: format_cpu_list(&asked), source })?;
    must_match(&asked, &hwloc.current_binding()?)
}

/// The logical CPUs on which the calling thread may run, ascending.
pub fn current_binding() -> Result<Vec<u32>, Error> {
    shared_hwloc()?.current_binding()
}

/// Refuses a binding that the kernel made smaller than asked.
fn must_match(asked: &[u32], got: &[u32]) -> Result<(), Error> {
    if got == asked {
        return Ok(());
    }
    Err(Error::BoundElsewhere { asked: format_cpu_list(asked), got: format_cpu_list(got) })
}

/// One topology for all threads: loading takes time, and `hwloc2` binds through `&mut`.
fn shared_hwloc() -> Result<MutexGuard<'static, Hwloc>, Error> {
    static SHARED: OnceLock<Mutex<Hwloc>> = OnceLock::new();
    let shared = match SHARED.get() {
        Some(shared) => shared,
        // Two threads may both load; one result is kept, and an error is not remembered.
        None => {
            let loaded = Hwloc::load()?;
            SHARED.get_or_init(|| Mutex::new(loaded))
        }
    };
    // The topology is not changed by a call that panics.
    Ok(shared.lock().unwrap_or_else(PoisonError::into_inner))
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
        assert_eq!(source.kind(), std::io::ErrorKind::InvalidInput);
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
