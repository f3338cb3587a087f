//! Ranks in other processes. The process that has made a world's id has the world; a thread of it stands for each rank of
//! another process, with copies of that rank's buffers. Ranks of other processes ask over a socket that the id names: one
//! connection for each collective, and one that lasts as long as the rank.
#![expect(unsafe_code, reason = "collectives move data between addresses that were checked")]

use std::{
    ffi::c_int,
    io::{self, ErrorKind, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc, LazyLock, OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use super::{
    INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR,
    collective::{Collective, CollectiveKind},
    reduce::{Element, Reduction},
    world::World,
};
use crate::{machine::machine, sync::complain};

pub(super) type Id = [u8; 128];

/// What every id begins with.
pub(super) const MARK: &[u8; 8] = b"fakenccl";

/// Of this process among all: its number and its start.
static PROCESS: LazyLock<u64> = LazyLock::new(|| {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32
});

/// An id, behind which this process listens from now on.
pub(super) fn new_id() -> Result<Id, c_int> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    static LISTENS: OnceLock<bool> = OnceLock::new();
    let listens = LISTENS.get_or_init(|| {
        let listener = address(*PROCESS).and_then(|address| UnixListener::bind_addr(&address));
        let thread = listener.and_then(|listener| {
            let thread = std::thread::Builder::new().name("fake NCCL".into());
            thread.spawn(move || listener.incoming().flatten().for_each(serve))
        });
        thread.inspect_err(|e| complain(&format!("NCCL: nobody can join: {e}"))).is_ok()
    });
    let mut id = [0; 128];
    id[..8].copy_from_slice(MARK);
    id[8..16].copy_from_slice(&NEXT.fetch_add(1, SeqCst).to_le_bytes());
    id[16..24].copy_from_slice(&PROCESS.to_le_bytes());
    if *listens { Ok(id) } else { Err(SYSTEM_ERROR) }
}

/// The process that has made an id.
fn home(id: &Id) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&id[16..24]);
    u64::from_le_bytes(number)
}

/// Whether this process has made an id.
pub(super) fn is_here(id: &Id) -> bool {
    home(id) == *PROCESS
}

/// The number of this process.
pub(super) fn process() -> u64 {
    *PROCESS
}

/// An address without a file, which ends with the process.
fn address(process: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("onebox-fake-nccl-{process:016x}"))
}

fn connect(id: &Id) -> Result<UnixStream, c_int> {
    address(home(id)).and_then(|to| UnixStream::connect_addr(&to)).map_err(|_| REMOTE_ERROR)
}

/// Kinds of requests; each begins with one of them, an id, the number of ranks and a rank.
const JOIN: u64 = 0;
const STATE: u64 = 1;
const COLLECTIVE: u64 = 2;

/// Said at the end by a rank that leaves in order.
const LEAVES: u8 = 1;

fn request(what: u64, id: &Id, numbers: &[u64]) -> Vec<u8> {
    let words = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    [words(&[what]), id.to_vec(), words(numbers)].concat()
}

fn numbers<const N: usize>(stream: &mut impl Read) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

/// A world that another process has, as one of its ranks sees it.
#[derive(Debug)]
pub(super) struct RemoteRank {
    id: Id,
    ranks: usize,
}

/// The connection that lasts as long as a rank.
#[derive(Debug)]
pub(super) struct RankConnection(UnixStream);

impl Drop for RankConnection {
    fn drop(&mut self) {
        let _ = self.0.write_all(&[LEAVES]);
    }
}

impl RankConnection {
    /// Whether the other end is gone.
    fn is_over(&self) -> bool {
        let mut byte = [0];
        let _ = self.0.set_nonblocking(true);
        matches!((&self.0).read(&mut byte), Ok(0))
    }
}

impl RemoteRank {
    pub(super) fn new(id: Id, ranks: usize) -> Self {
        Self { id, ranks }
    }

    pub(super) fn join(&self, rank: usize, device: usize) -> Result<RankConnection, c_int> {
        let mut stream = connect(&self.id)?;
        let all = [self.ranks as u64, rank as u64, device as u64, process()];
        let answer = stream
            .write_all(&request(JOIN, &self.id, &all))
            .and_then(|()| numbers::<1>(&mut stream));
        match answer.map_err(|_| REMOTE_ERROR)? {
            [0] => Ok(RankConnection(stream)),
            [code] => Err(code as c_int),
        }
    }

    /// Number of ranks that have come, and the world's error.
    pub(super) fn state(&self, life: &RankConnection) -> (usize, c_int) {
        let all = [self.ranks as u64, 0];
        let asked = connect(&self.id).and_then(|mut stream| {
            let sent = stream.write_all(&request(STATE, &self.id, &all));
            sent.and_then(|()| numbers::<2>(&mut stream)).map_err(|_| REMOTE_ERROR)
        });
        match asked {
            Ok([joined, error]) if !life.is_over() => (joined as usize, error as c_int),
            _ => (0, REMOTE_ERROR),
        }
    }

    /// The work of a collective, on this rank's memory. False when it was given up, or never ends.
    pub(super) fn collective(
        &self,
        sequence: u64,
        rank: usize,
        part: &Collective,
        gives_up: &dyn Fn() -> bool,
    ) -> bool {
        let Collective { kind, count, element, reduction, root, .. } = *part;
        let all = [
            [self.ranks as u64, rank as u64, sequence, kind as u64, count as u64, element as u64],
            [reduction as u64, root as u64, 0, 0, 0, 0],
        ];
        let mut message = request(COLLECTIVE, &self.id, &all.concat()[..8]);
        let (sends, receives) = part.lengths(rank, self.ranks);
        let moves = !machine().config.accounting;
        if moves {
            // SAFETY: the caller has checked the buffer, which nobody writes before this ends.
            message.extend_from_slice(unsafe {
                std::slice::from_raw_parts(part.send as *const u8, sends)
            });
        }
        let Ok(mut stream) = connect(&self.id) else { return false };
        let sent = stream.write_all(&message);
        let mut received = vec![0; if moves { receives } else { 1 }];
        let _ = stream.set_read_timeout(Some(Duration::from_millis(5)));
        if sent.is_err() || !read_unless(&mut stream, &mut received, gives_up) {
            return false;
        }
        if moves {
            // SAFETY: the caller has checked the buffer, which nobody uses before this ends.
            unsafe { (part.recv as *mut u8).copy_from(received.as_ptr(), received.len()) };
        }
        true
    }
}

/// Fills `buffer`, unless the other end is gone or `gives_up`.
fn read_unless(stream: &mut UnixStream, buffer: &mut [u8], gives_up: &dyn Fn() -> bool) -> bool {
    let mut filled = 0;
    while filled < buffer.len() {
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return false,
            Ok(more) => filled += more,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                if gives_up() {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// Answers one connection, on a thread of its own.
fn serve(stream: UnixStream) {
    let thread = std::thread::Builder::new().name("fake NCCL peer".into());
    let answer = move || {
        let mut stream = stream;
        // A peer that is gone needs no answer.
        let _ = answer(&mut stream);
    };
    drop(thread.spawn(answer).map_err(|e| complain(&format!("NCCL: no thread for a peer: {e}"))));
}

fn answer(stream: &mut UnixStream) -> io::Result<()> {
    let [what] = numbers(stream)?;
    let mut id = [0; 128];
    stream.read_exact(&mut id)?;
    let [ranks, rank] = numbers(stream)?.map(|number: u64| number as usize);
    let world = World::named(id, ranks);
    match (what, world) {
        (JOIN, world) => {
            let [device, process] = numbers(stream)?;
            let joined = world
                .and_then(|world| world.join(rank, (process, device as usize)).map(|()| world));
            let code = joined.as_ref().err().copied().unwrap_or(SUCCESS);
            stream.write_all(&(code as u64).to_le_bytes())?;
            if let Ok(world) = joined {
                let mut last = [0];
                if !stream.read_exact(&mut last).is_ok_and(|()| last == [LEAVES]) {
                    world.lose(rank);
                }
            }
            Ok(())
        }
        (STATE, Ok(world)) => {
            let (joined, error) = world.state();
            stream.write_all(&(joined as u64).to_le_bytes())?;
            stream.write_all(&(error as u64).to_le_bytes())
        }
        (COLLECTIVE, Ok(world)) => stand_in(stream, &world, rank),
        _ => Err(io::Error::other("no such request")),
    }
}

/// Takes the part of a rank of another process in a collective.
fn stand_in(stream: &mut UnixStream, world: &Arc<World>, rank: usize) -> io::Result<()> {
    let [sequence, kind, count, element, reduction, root] = numbers(stream)?;
    let found =
        (CollectiveKind::new(kind), Element::new(element as i32), Reduction::new(reduction as i32));
    let (Some(kind), Some(element), Some(reduction)) = found else {
        return Err(io::Error::other(format!("no such collective: code {INVALID_ARGUMENT}")));
    };
    let mut part = Collective {
        kind,
        send: 0,
        recv: 0,
        count: count as usize,
        element,
        reduction,
        root: root as usize,
    };
    let (sends, receives) = part.lengths(rank, world.ranks);
    let moves = !machine().config.accounting;
    let mut sent = vec![0_u8; if moves { sends } else { 0 }];
    stream.read_exact(&mut sent)?;
    let mut received = vec![0_u8; if moves { receives } else { 1 }];
    (part.send, part.recv) = (sent.as_ptr() as usize, received.as_mut_ptr() as usize);
    world.post(sequence, rank, part);
    stream.set_nonblocking(true)?;
    let gone = || matches!((&*stream).read(&mut [0]), Ok(0));
    if !world.await_round(sequence, &gone) {
        // The last rank to come may still use them.
        let _: (&mut [u8], &mut [u8]) = (sent.leak(), received.leak());
        return Ok(());
    }
    stream.set_nonblocking(false)?;
    stream.write_all(&received)
}
