//! Wire between processes that MPI has started. One thread of each process makes all MPI calls.
//!
//! No thread waits inside MPI for a process that is stopped: the thread receives other messages
//! while it sends a large one, and [`Processes::watch`] runs on a thread of its own.

use super::processes::{LOOK, Processes, Wire};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::point_to_point::MatchedReceiveVec;
use mpi::request;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::{Destination, Source};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Tag of all messages: MPI keeps the order of messages with the same tag.
const TAG: i32 = 7;

/// Time after the last message for which the MPI thread polls without sleeping.
const EAGER: Duration = Duration::from_millis(2);

/// Limit for joining, as a multiple of the limit for silence: a start is slower than a heartbeat.
const JOINING: u32 = 10;

/// A request to the thread that calls MPI.
#[derive(Debug)]
enum MpiRequest {
    Send(usize, Vec<u8>),
    /// Ends MPI in order, or aborts all processes with this exit code.
    Close(Option<u8>, Sender<()>),
}

#[derive(Debug)]
struct Mpi {
    jobs: Mutex<Sender<MpiRequest>>,
    /// Messages that overtake those of `jobs`.
    urgent: Mutex<Sender<(usize, Vec<u8>)>>,
    /// Longest time without a heartbeat, and longest wait for an orderly end of MPI.
    silence: Duration,
}

impl Wire for Mpi {
    fn send(&self, to: usize, bytes: Vec<u8>, urgent: bool) {
        // The result is ignored: sending fails only after the end, when no process needs the
        // message.
        if urgent {
            let _ = self.urgent.lock().unwrap_or_else(PoisonError::into_inner).send((to, bytes));
        } else {
            let _ = self
                .jobs
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .send(MpiRequest::Send(to, bytes));
        }
    }

    fn close(&self, abort: Option<u8>) {
        let (closed, over) = channel();
        let job = MpiRequest::Close(abort, closed);
        let _ = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send(job);
        // A thread that is stuck in MPI does not answer; the process ends without it, and the
        // launcher ends the others.
        let limit = if abort.is_some() { Duration::from_secs(5) } else { self.silence };
        let _ = over.recv_timeout(limit);
    }
}

/// Joins the processes that MPI has started together with this process. A process that sends
/// nothing for `silence` has failed. All have failed if not all join within ten times `silence`.
///
/// # Errors
/// MPI or a thread cannot start, or not all processes join in time.
pub fn join(silence: Duration) -> Result<Arc<Processes>, String> {
    let (jobs, job) = channel();
    let (urgent, hurried) = channel();
    let (ready, joined) = channel();
    let run = move || {
        let wire = Mpi { jobs: Mutex::new(jobs), urgent: Mutex::new(urgent), silence };
        serve(wire, &job, &hurried, &ready);
    };
    let thread = std::thread::Builder::new().name("mpi".into()).spawn(run);
    thread.map_err(|error| format!("no thread for MPI: {error}"))?;
    let limit = silence * JOINING;
    joined.recv_timeout(limit).unwrap_or_else(|why| match why {
        RecvTimeoutError::Disconnected => Err("the thread that calls MPI has ended".to_owned()),
        RecvTimeoutError::Timeout => Err(format!(
            "not all processes that the launcher has started have joined in {} s",
            limit.as_secs()
        )),
    })
}

fn serve(
    wire: Mpi,
    job: &Receiver<MpiRequest>,
    hurried: &Receiver<(usize, Vec<u8>)>,
    ready: &Sender<Result<Arc<Processes>, String>>,
) {
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = ready.send(Err("MPI was started before in this process".into()));
        return;
    };
    let world = universe.world();
    let (me, count) = (world.rank() as usize, world.size() as usize);
    let silence = wire.silence;
    let processes = Processes::new(me, nodes(&world, count), Box::new(wire), silence);
    let ended = Arc::new(AtomicBool::new(false));
    let watch = {
        let (processes, ended) = (Arc::clone(&processes), Arc::clone(&ended));
        move || processes.watch(&ended)
    };
    if let Err(error) = std::thread::Builder::new().name("watch".into()).spawn(watch) {
        let _ = ready.send(Err(format!("no thread to watch over processes: {error}")));
        return;
    }
    let _ = ready.send(Ok(Arc::clone(&processes)));
    let mut mailbox = Mailbox {
        world,
        processes,
        hurried,
        deferred: Vec::new(),
        beat: Instant::now(),
        active: Instant::now(),
    };
    let (abort, closed) = mailbox.serve(job);
    ended.store(true, Ordering::Relaxed);
    match abort {
        None => finalize(universe),
        Some(code) => mailbox.world.abort(i32::from(code)),
    }
    let _ = closed.send(());
}

/// Finalizes MPI by dropping the universe.
fn finalize(universe: Universe) {
    drop(universe);
}

/// The name of the machine of each process.
fn nodes(world: &SimpleCommunicator, count: usize) -> Vec<String> {
    use mpi::collective::CommunicatorCollectives;
    const LONGEST: usize = 256;
    let mut own = [0u8; LONGEST];
    let name = mpi::environment::processor_name().unwrap_or_default();
    own.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte);
    let mut all = vec![0u8; LONGEST * count];
    world.all_gather_into(&own[..], &mut all[..]);
    let text = |name: &[u8]| {
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    };
    all.chunks(LONGEST).map(text).collect()
}

/// The MPI thread's state, for receiving and sending messages.
struct Mailbox<'a> {
    world: SimpleCommunicator,
    processes: Arc<Processes>,
    hurried: &'a Receiver<(usize, Vec<u8>)>,
    /// Urgent messages to processes to which another message was in progress, with their receivers.
    deferred: Vec<(usize, Vec<u8>)>,
    /// Time of this process's last heartbeat.
    beat: Instant,
    /// Time of the last message that this process sent or received.
    active: Instant,
}

impl Mailbox<'_> {
    /// Sends and receives messages until a request to close; returns that request's fields.
    fn serve(&mut self, jobs: &Receiver<MpiRequest>) -> (Option<u8>, Sender<()>) {
        loop {
            self.look(None);
            let pause = self.pause();
            let job = match pause.is_zero() {
                true => jobs.try_recv().map_err(|error| error == TryRecvError::Disconnected),
                false => {
                    let job = jobs.recv_timeout(pause);
                    job.map_err(|error| error == RecvTimeoutError::Disconnected)
                }
            };
            match job {
                Ok(MpiRequest::Send(to, bytes)) => self.send(to, &bytes),
                Ok(MpiRequest::Close(abort, closed)) => return (abort, closed),
                Err(true) => unreachable!("the wire has the other end, and lives in `processes`"),
                Err(false) if pause.is_zero() => std::thread::yield_now(),
                Err(false) => {}
            }
        }
    }

    /// Time that this thread may sleep before it polls for messages again.
    fn pause(&self) -> Duration {
        match self.active.elapsed() {
            idle if idle < EAGER => Duration::ZERO,
            idle if idle < 50 * EAGER => Duration::from_micros(50),
            _ => Duration::from_millis(1),
        }
    }

    /// Handles the messages that have arrived, and sends heartbeats and urgent messages. `busy` is
    /// a process to which a send is in progress: urgent messages for it are sent later.
    fn look(&mut self, busy: Option<usize>) {
        while let Some((message, status)) =
            self.world.any_process().immediate_matched_probe_with_tag(TAG)
        {
            self.active = Instant::now();
            let (bytes, status) = (message, status).matched_receive_vec::<u8>();
            self.processes.hear(status.source_rank() as usize, bytes);
        }
        if self.beat.elapsed() >= LOOK {
            self.beat = Instant::now();
            self.processes.beat();
        }
        let hurried = self.hurried;
        let deferred = std::mem::take(&mut self.deferred).into_iter();
        for (to, bytes) in deferred.chain(std::iter::from_fn(|| hurried.try_recv().ok())) {
            if busy == Some(to) {
                self.deferred.push((to, bytes));
            } else {
                self.world.process_at_rank(to as i32).send_with_tag(&bytes[..], TAG);
            }
        }
    }

    /// Sends a message, and receives other messages until it is sent.
    fn send(&mut self, to: usize, bytes: &[u8]) {
        self.active = Instant::now();
        request::scope(|scope| {
            let to_process = self.world.process_at_rank(to as i32);
            let mut request = to_process.immediate_send_with_tag(scope, bytes, TAG);
            while let Err(not_yet) = request.test() {
                request = not_yet;
                self.look(Some(to));
            }
        });
    }
}
