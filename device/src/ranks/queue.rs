//! A lane's queue. It allocates all its memory at the start, since a step allocates nothing. A
//! channel would allocate when it sends, and at a thread's first wait.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Least number of jobs that a lane holds before [`Queue::push`] waits. The wait ends, since an op
/// waits only for earlier ops of this rank and its peers. But a thread that waits submits nothing
/// to other lanes either, so the Host lane's queue holds its work of two steps
/// ([`HostWork::jobs`](super::HostWork::jobs)).
const LEAST: usize = 1024;

#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    capacity: usize,
}

#[derive(Debug)]
struct State<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

impl<T> Queue<T> {
    /// Makes room for at least `jobs` jobs.
    pub(crate) fn new(jobs: usize) -> Self {
        let capacity = jobs.max(LEAST);
        let state = State { jobs: VecDeque::with_capacity(capacity), closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), capacity }
    }

    /// Adds a job. Only the submitting thread calls it.
    pub(crate) fn push(&self, job: T) {
        let mut state = self.lock();
        while state.jobs.len() == self.capacity {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        state.jobs.push_back(job);
        drop(state);
        self.changed.notify_one();
    }

    /// Removes the next job, and blocks until there is a job. `None` if the queue is closed and
    /// empty. Only the lane's thread calls it.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        while state.jobs.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        let was_full = state.jobs.len() == self.capacity;
        let job = state.jobs.pop_front();
        drop(state);
        if was_full {
            self.changed.notify_one();
        }
        job
    }

    /// Closes the queue; no job is pushed afterwards.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_come_out_in_order_through_a_full_queue_and_none_is_lost_on_close() {
        let queue = Queue::new(0);
        let n = 10 * LEAST;
        std::thread::scope(|scope| {
            let lane = scope.spawn(|| std::iter::from_fn(|| queue.pop()).collect::<Vec<_>>());
            (0..n).for_each(|job| queue.push(job));
            queue.close();
            assert!(lane.join().unwrap().into_iter().eq(0..n));
        });
        assert!(queue.state.lock().unwrap().jobs.capacity() < 2 * LEAST);
    }

    #[test]
    fn a_queue_takes_as_many_jobs_as_it_was_made_for() {
        let queue = Queue::new(3 * LEAST);
        (0..3 * LEAST).for_each(|job| queue.push(job));
        assert_eq!(queue.pop(), Some(0));
    }
}
