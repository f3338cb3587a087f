//! Threads that help another thread with short work. The kernels of a step follow each other within
//! microseconds, and waking a sleeping thread needs tens of microseconds. Helpers therefore poll
//! for work before they sleep, and the caller waits only for helpers that have begun.
#![expect(unsafe_code, reason = "helpers run a closure that lives on the stack of whom they help")]

use super::spin_wait::{pause, spin_for};
use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time for which a helper polls before it sleeps: longer than the pause between two kernels.
const LOOK_FOR: Duration = Duration::from_micros(300);
/// Time between two checks whether helpers have started.
const STARTING: Duration = Duration::from_micros(50);

/// A team of threads that help the callers of [`ThreadTeam::run`].
pub struct ThreadTeam {
    shared: Arc<TeamState>,
    helpers: Vec<JoinHandle<()>>,
    busy: Mutex<()>,
    bind: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for ThreadTeam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadTeam").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// Mask of `state`: the number of helpers at work.
const AT_WORK: u64 = 0xffff;
/// Bit of `state`: helpers may begin.
const OPEN: u64 = 1 << 16;
/// Step of `state`: one more job.
const JOB: u64 = 1 << 17;

#[derive(Debug)]
struct TeamState {
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    sleepers: AtomicUsize,
    mutex: Mutex<()>,
    changed: Condvar,
    /// Whether the caller sleeps until no helper is at work.
    waits: AtomicBool,
    rested: Condvar,
    bound: AtomicUsize,
    ended: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job(Work<'static>);

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Job")
    }
}

// SAFETY: `job` is written only by the thread that holds `ThreadTeam::busy`, while `OPEN` is not
// set and no helper is at work; helpers read it only after they have counted themselves in under
// `OPEN`.
unsafe impl Sync for TeamState {}

impl ThreadTeam {
    /// Starts a team of `threads`, including the caller of `run`. Each other thread first calls
    /// `bind`, and this function returns after all these calls have returned.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(
        threads: usize,
        bind: impl Fn() + Clone + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(TeamState {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            mutex: Mutex::new(()),
            changed: Condvar::new(),
            waits: AtomicBool::new(false),
            rested: Condvar::new(),
            bound: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let (helpers, busy) = (Vec::new(), Mutex::new(()));
        let mut team = Self { shared, helpers, busy, bind: Box::new(bind.clone()) };
        let name = std::thread::current().name().unwrap_or("crew").to_owned();
        for index in 1..threads.min(AT_WORK as usize) {
            let (shared, bind) = (Arc::clone(&team.shared), bind.clone());
            let help = move || {
                bind();
                shared.bound.fetch_add(1, Ordering::SeqCst);
                // Computes the pause after `bind`, which changes the number of available cores.
                shared.help(index, pause(threads, LOOK_FOR));
            };
            let helper = std::thread::Builder::new().name(name.clone()).spawn(help)?;
            team.helpers.push(helper);
        }
        // Binding needs time and memory. Waiting for it here keeps both out of a later step.
        let is_bound = || team.shared.bound.load(Ordering::SeqCst) == team.helpers.len();
        while !is_bound() && !team.helpers.iter().any(JoinHandle::is_finished) {
            std::thread::sleep(STARTING);
        }
        Ok(team)
    }

    /// Calls `bind` on the calling thread, so that it is bound like the helpers.
    pub fn bind_caller(&self) {
        (self.bind)();
    }

    /// Number of threads, including the caller of [`ThreadTeam::run`].
    pub const fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work(0)` here and, on helpers that are free in time, `work(1)` and so on, once each.
    /// Returns after all begun calls have ended. `work` divides the job among the threads that call
    /// it, and `work(0)` alone must be able to complete the job.
    ///
    /// If the team already helps another thread or this thread, only `work(0)` runs. Two calls can
    /// therefore run `work(0)` at the same time, but only one call can run each other number.
    ///
    /// # Panics
    /// If `work` panics on any thread.
    pub fn run(&self, work: Work<'_>) {
        let helped = match self.busy.try_lock() {
            Ok(helped) => helped,
            Err(TryLockError::Poisoned(panicked)) => panicked.into_inner(),
            Err(TryLockError::WouldBlock) => return work(0),
        };
        let shared = &*self.shared;
        *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: the lifetime is erased; `OpenJob` closes the job and waits for its helpers first.
        let job = Job(unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) });
        // SAFETY: see `Sync`: the last job is closed, and no helper is at work in it.
        unsafe { *shared.job.get() = Some(job) };
        let open = OpenJob(shared);
        shared.state.fetch_add(JOB | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            shared.changed.notify_all();
        }
        work(0);
        drop(open);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            drop(helped);
            resume_unwind(panic);
        }
    }

    /// Divides `whole` into runs, and calls `work` with the thread's number and a run on all
    /// participating threads. Each thread begins with its own part, which is the same in every
    /// call, since its caches may hold it. It then works on the other threads' parts: cores differ
    /// in speed, and not all are free.
    pub fn parallel_for<T: Divisible>(&self, whole: T, work: &(impl Fn(usize, T) + Sync)) {
        let threads = self.threads().min(SLOTS);
        let least = whole.units().div_ceil(threads * LEAST).max(1);
        match whole.units() {
            0 => return,
            1 => return work(0, whole),
            _ => {}
        }
        let mut slots = [const { None }; SLOTS];
        let mut rest = Some(whole);
        for (slot, left) in slots.iter_mut().zip((1..=threads).rev()) {
            let units = rest.as_ref().map_or(0, Divisible::units).div_ceil(left);
            (*slot, rest) = rest.map_or((None, None), |rest| first(rest, units));
        }
        let slots = Mutex::new(slots);
        self.run(&|thread| {
            let take = || {
                let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
                let own = thread % threads;
                let slot = (own..threads).chain(0..own).find(|slot| slots[*slot].is_some())?;
                let whole = slots[slot].take()?;
                let units = whole.units().div_ceil(SHARE).max(least);
                let (piece, rest) = first(whole, units);
                slots[slot] = rest;
                piece
            };
            while let Some(piece) = take() {
                work(thread, piece);
            }
        });
    }
}

/// Divisor of a part's rest that gives the next run. Runs are large at first and small near the
/// end, so that no thread waits long for the others.
const SHARE: usize = 4;
/// Divisor of a whole part that gives the least size of a run, except for the last run.
const LEAST: usize = 16;
/// Largest number of parts of [`ThreadTeam::parallel_for`], one per thread.
const SLOTS: usize = 64;

/// Work that can be cut into units.
pub trait Divisible: Send + Sized {
    /// Number of units.
    fn units(&self) -> usize;
    /// The first `units` units, and the rest. Neither is empty.
    fn cut(self, units: usize) -> (Self, Self);
}

impl Divisible for Range<usize> {
    fn units(&self) -> usize {
        self.len()
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let mid = self.start + units;
        (self.start..mid, mid..self.end)
    }
}

/// The first `units` units, and the rest.
fn first<T: Divisible>(whole: T, units: usize) -> (Option<T>, Option<T>) {
    match whole.units() {
        0 => (None, None),
        all if all <= units => (Some(whole), None),
        _ if units == 0 => (None, Some(whole)),
        _ => {
            let (first, rest) = whole.cut(units);
            (Some(first), Some(rest))
        }
    }
}

/// A job that helpers may begin. Dropping it closes the job and waits for the helpers that have
/// begun.
struct OpenJob<'a>(&'a TeamState);

impl Drop for OpenJob<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        let is_at_rest = || shared.state.load(Ordering::SeqCst) & AT_WORK == 0;
        if spin_for(LOOK_FOR, || is_at_rest().then_some(())).is_some() {
            return;
        }
        let mut guard = shared.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        shared.waits.store(true, Ordering::SeqCst);
        while !is_at_rest() {
            guard = shared.rested.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        shared.waits.store(false, Ordering::SeqCst);
    }
}

impl TeamState {
    /// Runs open jobs until the team ends.
    fn help(&self, index: usize, looks_for: Duration) {
        let mut last = 0;
        while let Some(state) = self.look(last, looks_for) {
            let began =
                self.state.compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed);
            if began.is_err() {
                continue;
            }
            last = state / JOB;
            // SAFETY: see `Sync`: this thread is counted in, so the job does not change.
            if let Some(Job(work)) = unsafe { *self.job.get() }
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(index)))
            {
                let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(panic);
            }
            self.state.fetch_sub(1, Ordering::SeqCst);
            if self.waits.load(Ordering::SeqCst) {
                drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
                self.rested.notify_all();
            }
        }
    }

    /// Waits for an open job other than job `last` and returns its state; `None` when the team
    /// ends.
    fn look(&self, last: u64, looks_for: Duration) -> Option<u64> {
        let is_new = |state: u64| state & OPEN > 0 && state / JOB != last;
        loop {
            let state = spin_for(looks_for, || {
                let state = self.state.load(Ordering::Relaxed);
                (is_new(state) || self.ended.load(Ordering::Relaxed)).then_some(state)
            });
            if let Some(state) = state.filter(|state| is_new(*state)) {
                return Some(state);
            }
            let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let ended = self.ended.load(Ordering::SeqCst);
            if !ended && !is_new(self.state.load(Ordering::SeqCst)) {
                // A woken helper polls again: this job may be over, but the next one follows soon.
                drop(self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner));
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            if ended {
                return None;
            }
        }
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        drop(self.shared.mutex.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.changed.notify_all();
        for helper in self.helpers.drain(..) {
            drop(helper.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn team(threads: usize) -> ThreadTeam {
        ThreadTeam::new(threads, || ()).expect("threads")
    }

    impl Divisible for &mut [usize] {
        fn units(&self) -> usize {
            self.len()
        }
        fn cut(self, units: usize) -> (Self, Self) {
            self.split_at_mut(units)
        }
    }

    /// Squares each number on one of the threads.
    fn squares(team: &ThreadTeam, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        team.parallel_for(&mut all[..], &|_, piece: &mut [usize]| {
            piece.iter_mut().for_each(|x| *x *= *x);
        });
        all
    }

    /// Waits for a limited time; the assertion after it fails if the condition does not hold.
    fn wait_for(condition: &dyn Fn() -> bool) {
        let began = Instant::now();
        while !condition() && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(STARTING);
        }
    }

    #[test]
    fn every_thread_of_the_largest_crew_is_bound_before_it_helps() {
        let bound = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&bound);
        let bind = move || {
            count.fetch_add(1, Ordering::SeqCst);
        };
        let team = ThreadTeam::new(SLOTS + 6, bind).expect("threads");
        assert_eq!(bound.load(Ordering::SeqCst), SLOTS + 5);
        team.bind_caller();
        assert_eq!(bound.load(Ordering::SeqCst), SLOTS + 6);
        for n in [0, 1, SLOTS, SLOTS + 6, 5000] {
            assert!(squares(&team, n).into_iter().eq((0..n).map(|x| x * x)));
        }
    }

    #[test]
    fn a_helper_that_wakes_too_late_is_there_for_the_next_job() {
        let team = team(2);
        let helped = AtomicBool::new(false);
        let began = Instant::now();
        while !helped.load(Ordering::SeqCst) && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(2 * LOOK_FOR);
            for _ in 0..10 {
                // The job ends before any helper can wake.
                team.run(&|thread| {
                    helped.fetch_or(thread > 0, Ordering::SeqCst);
                });
                let until = Instant::now();
                while until.elapsed() < Duration::from_micros(50) {
                    std::hint::spin_loop();
                }
            }
        }
        assert!(helped.load(Ordering::SeqCst));
    }

    #[test]
    fn every_piece_is_done_once_whoever_comes() {
        for threads in [1, 2, 5] {
            let team = team(threads);
            assert_eq!(team.threads(), threads);
            for n in (0..400).chain([10_000]) {
                assert!(squares(&team, n).into_iter().eq((0..n).map(|x| x * x)));
                if n % 100 == 0 {
                    std::thread::sleep(2 * LOOK_FOR);
                }
            }
        }
    }

    #[test]
    fn helpers_come_even_from_sleep_and_each_only_once() {
        let team = team(4);
        for round in 0..20 {
            let came = [const { AtomicUsize::new(0) }; 4];
            team.run(&|thread| {
                came[thread].fetch_add(1, Ordering::SeqCst);
                wait_for(&|| came.iter().all(|came| came.load(Ordering::SeqCst) > 0));
            });
            assert!(came.iter().all(|came| came.load(Ordering::SeqCst) == 1), "{came:?}");
            if round % 2 == 0 {
                std::thread::sleep(3 * LOOK_FOR);
            }
        }
    }

    #[test]
    fn who_finds_the_crew_busy_does_its_work_alone() {
        let team = team(2);
        let (held, done) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                team.run(&|_| {
                    held.store(true, Ordering::SeqCst);
                    wait_for(&|| done.load(Ordering::SeqCst));
                });
            });
            wait_for(&|| held.load(Ordering::SeqCst));
            assert!(squares(&team, 300).into_iter().eq((0..300).map(|x| x * x)));
            done.store(true, Ordering::SeqCst);
        });
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 1..300 {
                        assert!(squares(&team, n).into_iter().eq((0..n).map(|x| x * x)));
                    }
                });
            }
        });
        let inner = AtomicUsize::new(0);
        team.run(&|thread| {
            if thread == 0 {
                team.run(&|thread| {
                    inner.fetch_add(thread + 1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(inner.load(Ordering::SeqCst), 1, "a job inside a job is the caller's");
    }

    #[test]
    fn a_panic_is_the_callers_and_the_crew_lives_on() {
        let team = team(2);
        for culprit in [0, 1] {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let came = AtomicBool::new(false);
                team.run(&|thread| {
                    came.fetch_or(thread == 1, Ordering::SeqCst);
                    assert!(thread != culprit, "thread {culprit}");
                    wait_for(&|| came.load(Ordering::SeqCst));
                });
            }));
            let panic = result.expect_err("a panic");
            assert_eq!(panic.downcast_ref::<String>().unwrap(), &format!("thread {culprit}"));
            assert!(squares(&team, 50).into_iter().eq((0..50).map(|x| x * x)));
        }
    }
}
