//! Streams: jobs that a thread runs in order, from the stream's own queue or from a hardware queue
//! that streams share.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::c_int,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    call::CallResult,
    code,
    config::config,
    counters::STATS,
    failure::fails,
    health::Health,
    sync::{Random, complain, lock, wait, wait_briefly},
};

type Run = Box<dyn FnOnce(&Health) -> CallResult + Send>;

enum Job {
    /// Work that is skipped on a lost device; its own error marks the device as lost.
    Work(Run),
    /// Work that always runs, because events complete on a lost device too.
    Mark(Box<dyn FnOnce(&Health) + Send>),
}

/// Jobs of a queue, each with the progress of its stream.
#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Arc<Progress>, Job)>,
    closed: bool,
}

/// A queue of a device, and the thread that runs its jobs in order. It belongs to one stream, or it
/// is a hardware queue of the device. In a hardware queue, a job also waits for earlier jobs of
/// other streams.
#[derive(Default)]
struct Channel {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// A device's hardware queues, and the number of streams created on them.
#[derive(Default)]
struct Hardware {
    next: usize,
    channels: Vec<Arc<Channel>>,
}

/// Numbers of one stream's jobs.
#[derive(Default)]
struct Progress {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default, Clone, Copy)]
struct Counts {
    submitted: u64,
    completed: u64,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    health: Arc<Health>,
    pub(crate) flags: u32,
    pub(crate) priority: c_int,
    channel: Arc<Channel>,
    /// Whether no other stream has this channel.
    alone: bool,
    progress: Arc<Progress>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Lock of every enqueue: a full queue stops every launch of the process, as real drivers do.
static LAUNCHES: Mutex<()> = Mutex::new(());

/// Waits while a thread is blocked in a full queue, with `FAKECUDA_BLOCKING`. That a query of an
/// event waits too is the worst behaviour that is reported of drivers.
pub(crate) fn wait_for_launches() {
    if config().blocking {
        drop(lock(&LAUNCHES));
    }
}

impl Stream {
    /// Starts a stream with its own queue.
    pub(crate) fn start(health: &Arc<Health>, flags: u32, priority: c_int) -> Arc<Self> {
        Self::on(Channel::start(health), true, health, flags, priority)
    }

    /// Creates a stream on the next hardware queue in turn, as `cuStreamCreate` does. Without
    /// hardware queues, the stream has its own queue.
    pub(crate) fn create(health: &Arc<Health>, flags: u32, priority: c_int) -> Arc<Self> {
        static QUEUES: Mutex<BTreeMap<usize, Hardware>> = Mutex::new(BTreeMap::new());
        let Some(connections) = config().connections else {
            return Self::start(health, flags, priority);
        };
        let mut queues = lock(&QUEUES);
        let Hardware { next, channels } = queues.entry(health.ordinal).or_default();
        let index = *next % connections;
        *next += 1;
        if channels.len() == index {
            channels.push(Channel::start(health));
        }
        Self::on(channels[index].clone(), false, health, flags, priority)
    }

    fn on(
        channel: Arc<Channel>,
        alone: bool,
        health: &Arc<Health>,
        flags: u32,
        priority: c_int,
    ) -> Arc<Self> {
        let (device, health, progress) = (health.ordinal, health.clone(), Arc::default());
        Arc::new(Self { device, health, flags, priority, channel, alone, progress })
    }

    /// Enqueues work and returns.
    pub(crate) fn push(&self, run: impl FnOnce(&Health) -> CallResult + Send + 'static) {
        self.enqueue(Job::Work(Box::new(run)));
    }

    /// Enqueues work that must run even on a lost device.
    pub(crate) fn mark(&self, run: impl FnOnce(&Health) + Send + 'static) {
        self.enqueue(Job::Mark(Box::new(run)));
    }

    /// Enqueues a job. A full queue blocks the caller and every other launch of the process.
    fn enqueue(&self, job: Job) {
        let limit = config().queue.max(1);
        let _turn = (limit < usize::MAX).then(|| lock(&LAUNCHES));
        let mut queue = lock(&self.channel.queue);
        STATS.blocked.add(u64::from(queue.jobs.len() >= limit));
        while queue.jobs.len() >= limit && self.health.alive().is_ok() {
            queue = wait_briefly(&self.channel.changed, queue);
        }
        lock(&self.progress.counts).submitted += 1;
        queue.jobs.push_back((self.progress.clone(), job));
        self.channel.changed.notify_all();
    }

    pub(crate) fn is_idle(&self) -> bool {
        let counts = *lock(&self.progress.counts);
        counts.completed == counts.submitted
    }

    /// Waits for everything submitted so far, or until the device is lost.
    pub(crate) fn synchronize(&self) -> CallResult {
        STATS.synchronizations.add(1);
        let mut counts = lock(&self.progress.counts);
        let target = counts.submitted;
        while counts.completed < target {
            self.health.alive()?;
            counts = wait_briefly(&self.progress.changed, counts);
        }
        self.health.alive()
    }

    /// Ends the thread of the stream's own queue when the queue is empty.
    pub(crate) fn close(&self) {
        if self.alone {
            lock(&self.channel.queue).closed = true;
            self.channel.changed.notify_all();
        }
    }
}

impl Channel {
    fn start(health: &Arc<Health>) -> Arc<Self> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let index = STARTED.fetch_add(1, Relaxed);
        let channel = Arc::new(Self::default());
        let random = Random(config().seed.wrapping_mul(0x1_0001).wrapping_add(index));
        let (worker, health) = (channel.clone(), health.clone());
        let name = format!("fake-gpu{}-{index}", health.ordinal);
        let run = move || worker.run_jobs(&health, random);
        if let Err(error) = std::thread::Builder::new().name(name).spawn(run) {
            complain(&format!("no thread for a stream: {error}"));
        }
        channel
    }

    fn run_jobs(&self, health: &Health, mut random: Random) {
        let chaos_us = config().chaos_us;
        while let Some((progress, job)) = self.next_job() {
            if chaos_us > 0 {
                std::thread::sleep(Duration::from_micros(random.next() % (chaos_us + 1)));
            }
            match job {
                Job::Work(run) => run_work(run, health),
                Job::Mark(run) => run(health),
            }
            lock(&progress.counts).completed += 1;
            progress.changed.notify_all();
        }
    }

    /// Waits for the next job and removes it; `None` if the queue is closed and empty.
    fn next_job(&self) -> Option<(Arc<Progress>, Job)> {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                self.changed.notify_all();
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = wait(&self.changed, queue);
        }
    }
}

fn run_work(run: Run, health: &Health) {
    if fails("lost", health.ordinal) {
        health.lose(code::ILLEGAL_ADDRESS);
    }
    if health.alive().is_err() {
        return;
    }
    STATS.ops.add(1);
    if let Err(error) = run(health) {
        health.lose(error);
    }
}
