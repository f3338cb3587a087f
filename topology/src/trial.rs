//! A first load in a child process.
//!
//! hwloc crashes over some well-formed but wrong descriptions: with 2.9, 13 of 4000 damaged exports
//! ended in a segmentation fault or an abort, which no earlier check can foresee. A child process
//! therefore loads a description from outside first. If the child dies, the description is refused,
//! and this process lives.
#![expect(unsafe_code, reason = "forks, and waits for the child")]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::Error;
use crate::guard::refuse;

/// Seconds after which the child is killed. A DGX A100 needs 0.02.
const LONGEST: u32 = 20;

/// Runs `load` in a child process, and refuses the description if the child dies.
pub(crate) fn survive(load: impl FnOnce()) -> Result<(), Error> {
    // A fork would copy libxml2's locks in any state, so no other load may run meanwhile.
    let _one = LOADS.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the child calls hwloc, whose memory comes from glibc, which keeps its allocator usable after a fork; the
    // only other locks that hwloc takes are libxml2's, which no thread holds (above). The child never returns.
    let child = unsafe { libc::fork() };
    match child {
        0 => {
            quiet();
            // SAFETY: sets a timer of the child alone.
            unsafe { libc::alarm(LONGEST) };
            let _ = catch_unwind(AssertUnwindSafe(load));
            // SAFETY: ends the child immediately, without destructors that belong to the parent.
            unsafe { libc::_exit(0) }
        }
        // Without a child there is no trial. The reason for the failed fork will show elsewhere.
        -1 => Ok(()),
        child => match wait(child) {
            Some(libc::SIGALRM) => refuse(format!("hwloc took more than {LONGEST} s over it")),
            Some(signal) => refuse(format!("hwloc breaks down over it (signal {signal})")),
            None => Ok(()),
        },
    }
}

/// Loads in this process, one at a time.
pub(crate) static LOADS: Mutex<()> = Mutex::new(());

/// Suppresses messages and core files of a failed trial.
fn quiet() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads the structure and sets a limit of the child alone.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
    // SAFETY: the path is NUL-terminated.
    let nowhere = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY) };
    if nowhere >= 0 {
        // SAFETY: replaces the child's own standard error by a file that is open.
        unsafe { libc::dup2(nowhere, libc::STDERR_FILENO) };
    }
}

/// The signal that ended the child, if one did.
fn wait(child: libc::pid_t) -> Option<libc::c_int> {
    let mut status = 0;
    loop {
        // SAFETY: `status` has room for the answer.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if ended == child {
            return libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kills_the_child_is_refused_and_what_panics_or_ends_is_not() {
        assert!(survive(|| ()).is_ok());
        let refused = survive(|| std::process::abort()).unwrap_err().to_string();
        assert!(refused.contains("signal 6"), "{refused}");
    }
}
