//! Worlds of other processes. The process that created a world's id owns the world. Ranks of other
//! processes send requests over a socket that the id names: one connection for each collective, and
//! one connection for the lifetime of the rank.
#![expect(unsafe_code, reason = "collectives move data between addresses that were checked")]

use std::{
    ffi::c_int,
    io::{self, ErrorKind, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::LazyLock,
    time::{Duration, SystemTime},
};

use super::{REMOTE_ERROR, collective::Collective};
use crate::config::config;

pub(super) type Id = [u8; 128];

/// First bytes of every id.
pub(super) const MARK: &[u8; 8] = b"fakenccl";

/// Number that identifies this process, from the process id and the time.
pub(super) static PROCESS: LazyLock<u64> = LazyLock::new(|| {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32
});

/// Number of the process that created an id.
fn home(id: &Id) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&id[16..24]);
    u64::from_le_bytes(number)
}

/// Whether this process created an id.
pub(super) fn is_here(id: &Id) -> bool {
    home(id) == *PROCESS
}

/// Number that identifies this process.
pub(super) fn process() -> u64 {
    *PROCESS
}

/// Socket address of a process. It has no file and ends with the process.
pub(super) fn address(process: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("onebox-fake-nccl-{process:016x}"))
}

fn connect(id: &Id) -> Result<UnixStream, c_int> {
    address(home(id)).and_then(|to| UnixStream::connect_addr(&to)).map_err(|_| REMOTE_ERROR)
}

/// Kinds of requests. A request begins with its kind, an id, the number of ranks and a rank.
pub(super) const JOIN: u64 = 0;
pub(super) const STATE: u64 = 1;
pub(super) const COLLECTIVE: u64 = 2;

/// Last byte of a rank that leaves in order.
pub(super) const LEAVES: u8 = 1;

fn request(what: u64, id: &Id, numbers: &[u64]) -> Vec<u8> {
    let words = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    [words(&[what]), id.to_vec(), words(numbers)].concat()
}

pub(super) fn numbers<const N: usize>(stream: &mut impl Read) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

/// A rank's view of a world that another process owns.
#[derive(Debug)]
pub(super) struct RemoteRank {
    id: Id,
    ranks: usize,
}

/// The connection for the lifetime of a rank.
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

    /// Number of ranks that have joined, and the world's error.
    pub(super) fn state(&self, life: &RankConnection) -> (usize, c_int) {
        let all = [self.ranks as u64, 0];
        let answer = connect(&self.id).and_then(|mut stream| {
            let sent = stream.write_all(&request(STATE, &self.id, &all));
            sent.and_then(|()| numbers::<2>(&mut stream)).map_err(|_| REMOTE_ERROR)
        });
        match answer {
            Ok([joined, error]) if !life.is_over() => (joined as usize, error as c_int),
            _ => (0, REMOTE_ERROR),
        }
    }

    /// Runs a collective on this rank's memory. False if the wait ends early or the connection
    /// fails.
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
        let moves = !config().accounting;
        if moves {
            // SAFETY: the caller has checked the buffer, and nothing writes it before this ends.
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
            // SAFETY: the caller has checked the buffer, and nothing else uses it before this ends.
            unsafe { (part.recv as *mut u8).copy_from(received.as_ptr(), received.len()) };
        }
        true
    }
}

/// Fills `buffer`; false if the other end is gone or the caller gives up.
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
