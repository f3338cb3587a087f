//! A stream: a queue of jobs and one thread that runs them in order.

use std::{
    collections::VecDeque,
    ffi::c_int,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    config::Config,
    driver::code,
    failure::fails,
    machine::{Device, Done, machine},
    stats::STATS,
    sync::{Random, complain, lock, wait, wait_briefly},
};

type Run = Box<dyn FnOnce(&Device) -> Done + Send>;

enum Job {
    /// Skipped once the device is lost; its error loses the device.
    Work(Run),
    /// Runs in any case: events complete on a lost device, too.
    Mark(Box<dyn FnOnce(&Device) + Send>),
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    submitted: u64,
    completed: u64,
    closed: bool,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) flags: u32,
    pub(crate) priority: c_int,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn start(device: usize, flags: u32, priority: c_int, config: &Config) -> Arc<Self> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let index = STARTED.fetch_add(1, Relaxed);
        let stream = Arc::new(Self {
            device,
            flags,
            priority,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let random = Random(config.seed.wrapping_mul(0x1_0001).wrapping_add(index));
        let (worker, chaos) = (stream.clone(), config.chaos_us);
        let name = format!("fake-gpu{device}-{index}");
        let spawned =
            std::thread::Builder::new().name(name).spawn(move || worker.run_jobs(random, chaos));
        if let Err(error) = spawned {
            complain(&format!("no thread for a stream: {error}"));
        }
        stream
    }

    /// Enqueues work and returns.
    pub(crate) fn push(&self, run: impl FnOnce(&Device) -> Done + Send + 'static) {
        self.enqueue(Job::Work(Box::new(run)));
    }

    /// Enqueues what must happen even on a lost device.
    pub(crate) fn mark(&self, run: impl FnOnce(&Device) + Send + 'static) {
        self.enqueue(Job::Mark(Box::new(run)));
    }

    /// A full stream blocks the caller, and with it whoever else launches anything: so do real drivers.
    fn enqueue(&self, job: Job) {
        static LAUNCHES: Mutex<()> = Mutex::new(());
        let machine = machine();
        let limit = machine.config.queue.max(1);
        let _turn = (limit < usize::MAX).then(|| lock(&LAUNCHES));
        let mut queue = lock(&self.queue);
        while queue.jobs.len() >= limit && machine.devices[self.device].alive().is_ok() {
            queue = wait_briefly(&self.changed, queue);
        }
        queue.jobs.push_back(job);
        queue.submitted += 1;
        self.changed.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.completed == queue.submitted
    }

    /// Waits for everything submitted so far, or until the device is lost.
    pub(crate) fn synchronize(&self) -> Done {
        STATS.synchronizations.add(1);
        let device = &machine().devices[self.device];
        let mut queue = lock(&self.queue);
        let target = queue.submitted;
        while queue.completed < target {
            device.alive()?;
            queue = wait_briefly(&self.changed, queue);
        }
        device.alive()
    }

    /// The thread ends when the queue is empty.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    fn run_jobs(&self, mut random: Random, chaos_us: u64) {
        while let Some(job) = self.next_job() {
            if chaos_us > 0 {
                std::thread::sleep(Duration::from_micros(random.next() % (chaos_us + 1)));
            }
            let device = &machine().devices[self.device];
            match job {
                Job::Work(run) => run_work(run, device),
                Job::Mark(run) => run(device),
            }
            lock(&self.queue).completed += 1;
            self.changed.notify_all();
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = wait(&self.changed, queue);
        }
    }
}

fn run_work(run: Run, device: &Device) {
    if fails("lost", device.ordinal) {
        device.lose(code::ILLEGAL_ADDRESS);
    }
    if device.alive().is_err() {
        return;
    }
    STATS.ops.add(1);
    if let Err(error) = run(device) {
        device.lose(error);
    }
}
