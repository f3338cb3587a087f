//! Server in the process that created a world's id. One thread represents each rank of another
//! process, with copies of that rank's buffers.

use std::{
    ffi::c_int,
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use super::{
    INVALID_ARGUMENT, SUCCESS, SYSTEM_ERROR,
    collective::{Collective, CollectiveKind},
    reduce::{Element, Reduction},
    remote::{COLLECTIVE, Id, JOIN, LEAVES, MARK, PROCESS, STATE, address, numbers},
    world::World,
};
use crate::{config::config, sync::complain};

/// Creates an id. The first call starts to listen for ranks of other processes.
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

/// Answers one connection on its own thread.
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

/// Represents a rank of another process in a collective.
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
    let moves = !config().accounting;
    let mut sent = vec![0_u8; if moves { sends } else { 0 }];
    stream.read_exact(&mut sent)?;
    let mut received = vec![0_u8; if moves { receives } else { 1 }];
    (part.send, part.recv) = (sent.as_ptr() as usize, received.as_mut_ptr() as usize);
    world.post(sequence, rank, part);
    stream.set_nonblocking(true)?;
    let gone = || matches!((&*stream).read(&mut [0]), Ok(0));
    if !world.await_round(sequence, &gone) {
        // The last rank of the collective may still use the buffers.
        let _: (&mut [u8], &mut [u8]) = (sent.leak(), received.leak());
        return Ok(());
    }
    stream.set_nonblocking(false)?;
    stream.write_all(&received)
}
