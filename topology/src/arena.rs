//! Host memory on chosen NUMA nodes.
//!
//! The order is what makes it work: threads are bound first; then addresses are mapped, at 2 MiB; huge pages are asked
//! for; the kernel is told the nodes; each thread, on its own cores, brings in its own slice; samples are looked up;
//! and only then may CUDA register the memory, since pinned pages never move again.
#![expect(unsafe_code, reason = "maps memory, advises the kernel about it, and unmaps it")]

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::bind::Live;
use crate::machine::format_cpu_list;
use crate::{Error, format_bytes};

/// Bytes of a huge page, to which an arena is aligned.
const HUGE: usize = 2 << 20;
/// Bytes at most of one madvise; between two of them another thread can be scheduled.
const POPULATE_STEP: usize = 256 << 20;
/// Pages at most that are looked up afterwards.
const SAMPLES: usize = 256;
/// `MADV_POPULATE_WRITE`, Linux 5.14 and later.
const POPULATE_WRITE: i32 = 23;

/// Zeroed host memory, mapped once and never resized.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    /// Bytes that may be used.
    bytes: usize,
    /// Bytes that are mapped, a multiple of 2 MiB.
    mapped: usize,
    report: ArenaReport,
}

// SAFETY: the mapping belongs to the arena alone and is not tied to a thread; the arena itself neither reads nor
// writes it after `new`. Who does so through `as_ptr` orders the accesses.
unsafe impl Send for Arena {}
// SAFETY: as above: `&Arena` gives out addresses and numbers only.
unsafe impl Sync for Arena {}

/// What became of an arena.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArenaReport {
    /// Bytes mapped.
    pub bytes: u64,
    /// The nodes asked for.
    pub nodes: Vec<u32>,
    /// Why the kernel was not bound to the nodes, if it is not: then the first touch decides. In containers this is
    /// usual: `EPERM`.
    pub not_bound: Option<String>,
    /// Whether the kernel was asked for huge pages and agreed.
    pub huge_pages: bool,
    /// The CPUs whose threads brought the pages in; empty if pages come in when they are used.
    pub touched_by: Vec<u32>,
    /// Sampled pages by the node on which they are.
    pub found: BTreeMap<u32, usize>,
    /// Why samples could not be looked up.
    pub not_verified: Option<String>,
    /// How long mapping and touching took.
    pub took: Duration,
}

impl ArenaReport {
    /// Sampled pages that are on none of the nodes asked for.
    pub fn misplaced(&self) -> usize {
        let elsewhere = self.found.iter().filter(|(node, _)| !self.nodes.contains(node));
        if self.nodes.is_empty() { 0 } else { elsewhere.map(|(_, pages)| pages).sum() }
    }
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format_bytes(self.bytes))?;
        if !self.nodes.is_empty() {
            write!(f, " for node {}", format_cpu_list(&self.nodes))?;
        }
        match &self.not_bound {
            Some(why) => write!(f, ", not bound ({why}): by first touch")?,
            None if !self.nodes.is_empty() => write!(f, ", bound")?,
            None => {}
        }
        if self.huge_pages {
            write!(f, ", huge pages")?;
        }
        if !self.touched_by.is_empty() {
            write!(f, ", brought in by CPU {}", format_cpu_list(&self.touched_by))?;
        }
        let sampled: usize = self.found.values().sum();
        match &self.not_verified {
            Some(why) => write!(f, ", not verified ({why})")?,
            None if sampled > 0 => {
                write!(f, ", {} of {sampled} samples there", sampled - self.misplaced())?;
            }
            None => {}
        }
        write!(f, ", {:.3} s", self.took.as_secs_f64())
    }
}

impl Arena {
    /// Maps `bytes` zeroed bytes for `nodes` and lets one thread per CPU of `cpus` bring in its slice. With no nodes
    /// nothing is bound, with no CPUs the pages come in when they are used. Returns when all threads are done.
    ///
    /// The calling thread should be bound before. Where the kernel refuses to bind memory, which containers do, the
    /// first touch by bound threads has the same effect; the report says so.
    ///
    /// # Errors
    /// Memory that cannot be mapped, or not be brought in.
    pub fn new(bytes: usize, nodes: &[u32], cpus: &[u32]) -> Result<Self, Error> {
        let began = Instant::now();
        let refused = |source| Error::Map { bytes, source };
        let mapped = bytes.max(1).checked_next_multiple_of(HUGE);
        let mapped = mapped.ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        let start = map_aligned(mapped).map_err(refused)?;
        let report =
            ArenaReport { bytes: bytes as u64, nodes: nodes.to_vec(), ..ArenaReport::default() };
        let mut arena = Self { start, bytes, mapped, report };
        arena.report.huge_pages = advise(start.as_ptr(), mapped, libc::MADV_HUGEPAGE).is_ok();
        if !nodes.is_empty() {
            let bound = Live::get()?.memory()?.bind_area(start.as_ptr(), mapped, nodes);
            arena.report.not_bound = bound.err().map(|error| error.to_string());
        }
        if !cpus.is_empty() {
            arena.touch(cpus).map_err(refused)?;
            arena.verify();
        }
        arena.report.took = began.elapsed();
        arena.tell();
        Ok(arena)
    }

    /// Says where a placed arena is; what went wrong once, not once per rank.
    fn tell(&self) {
        if self.report.nodes.is_empty() {
            return;
        }
        let thread = std::thread::current();
        tracing::info!("{}: host memory {}", thread.name().unwrap_or("?"), self.report);
        static SAID: Once = Once::new();
        let report = &self.report;
        if report.not_bound.is_some() || report.misplaced() > 0 {
            SAID.call_once(|| tracing::warn!("host memory is not where it should be: {report}"));
        }
    }

    /// The first byte, aligned to 2 MiB. What is read and written there is the caller's to order.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it is, as far as the kernel told.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// Brings in all pages: one bound thread per CPU, each its own slice, as the threads that will work on it.
    fn touch(&mut self, cpus: &[u32]) -> io::Result<()> {
        let pages = self.mapped / HUGE;
        let threads = cpus.len().min(pages);
        let start = Address(self.start.as_ptr());
        let slice = |index: usize| {
            let (from, to) = (index * pages / threads * HUGE, (index + 1) * pages / threads * HUGE);
            (from, to - from)
        };
        let on = |index: usize| {
            let (offset, bytes) = slice(index);
            let cpu = cpus[index * cpus.len() / threads];
            move || {
                // Unbound it still brings the pages in; `verify` shows where.
                let bound = crate::bind_current_thread(&[cpu]).is_ok();
                start.populate(offset, bytes).map(|()| bound.then_some(cpu))
            }
        };
        let touched = std::thread::scope(|scope| {
            let spawn = |index| std::thread::Builder::new().spawn_scoped(scope, on(index));
            let threads: Vec<_> = (0..threads).map(spawn).collect();
            let join = |thread: io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
                thread?.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
            };
            threads.into_iter().map(join).collect::<io::Result<Vec<Option<u32>>>>()
        })?;
        self.report.touched_by = touched.into_iter().flatten().collect();
        self.report.touched_by.sort_unstable();
        self.report.touched_by.dedup();
        Ok(())
    }

    /// Looks up single pages over the whole arena: hwloc's query of a larger area wraps at 4 GiB.
    fn verify(&mut self) {
        let pages = self.mapped / HUGE;
        let samples = SAMPLES.min(pages * 4);
        let at = |index: usize| index * (self.mapped / samples) / 4096 * 4096;
        let look = || {
            let handle = Live::get()?.memory()?;
            let mut found = BTreeMap::new();
            for index in 0..samples {
                let page = self.start.as_ptr().wrapping_add(at(index));
                let nodes = handle.location_of(page, 4096);
                let nodes = nodes.map_err(|source| Error::Map { bytes: 4096, source })?;
                for node in nodes {
                    *found.entry(node).or_insert(0) += 1;
                }
            }
            Ok::<_, Error>(found)
        };
        match look() {
            Ok(found) => self.report.found = found,
            Err(Error::Map { source, .. }) => self.report.not_verified = Some(source.to_string()),
            Err(error) => self.report.not_verified = Some(error.to_string()),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nothing that borrows the arena is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

/// An address that threads may carry.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: it is an address of an arena that outlives the scope of the threads; their slices do not overlap.
unsafe impl Send for Address {}

impl Address {
    /// Brings in a slice of fresh pages.
    fn populate(self, offset: usize, bytes: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let (at, step) = (self.0.wrapping_add(offset + done), POPULATE_STEP.min(bytes - done));
            if let Err(error) = advise(at, step, POPULATE_WRITE) {
                if error.raw_os_error() != Some(libc::EINVAL) {
                    return Err(error);
                }
                // An older kernel.
                for page in (0..step).step_by(4096) {
                    // SAFETY: inside this thread's slice of a writable mapping that no one else uses yet.
                    unsafe { at.wrapping_add(page).write_volatile(0) };
                }
            }
            done += step;
        }
        Ok(())
    }
}

/// Maps zeroed private memory at a multiple of 2 MiB. `bytes` is a multiple of it too.
fn map_aligned(bytes: usize) -> io::Result<NonNull<u8>> {
    let room = bytes.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: asks for new memory anywhere; nothing that exists is touched.
    let at = unsafe { libc::mmap(ptr::null_mut(), room, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let at = at.cast::<u8>();
    let before = at.align_offset(HUGE);
    let start = at.wrapping_add(before);
    if before > 0 {
        // SAFETY: the part before the aligned start belongs to the mapping just made, and no one has it.
        unsafe { libc::munmap(at.cast(), before) };
    }
    if room - before - bytes > 0 {
        // SAFETY: the part behind the end, likewise.
        unsafe { libc::munmap(start.wrapping_add(bytes).cast(), room - before - bytes) };
    }
    NonNull::new(start).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// madvise with advice that keeps what is in the pages.
fn advise(at: *mut u8, bytes: usize, advice: i32) -> io::Result<()> {
    // SAFETY: the advice given here neither unmaps nor clears; a range outside a mapping is an error, not a fault.
    let result = unsafe { libc::madvise(at.cast(), bytes, advice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_bound_brought_in_and_found_on_its_node() {
        let machine = crate::Machine::discover().unwrap();
        let node = machine.allowed_nodes[0];
        let cpus = crate::current_binding().unwrap();
        let arena = Arena::new(9 << 20, &[node], &cpus).unwrap();
        let report = arena.report();
        assert_eq!(report.touched_by, cpus, "{report}");
        assert!(arena.as_ptr().align_offset(HUGE) == 0 && arena.len() == 9 << 20);
        if report.not_verified.is_none() {
            assert!(report.found.values().sum::<usize>() > 0, "{report}");
            assert_eq!(report.misplaced(), 0, "{report}");
        }
        let text = report.to_string();
        assert!(text.contains("9.00 MiB") && text.contains("brought in by"), "{text}");
        for at in [0, 4096, (9 << 20) - 1] {
            // SAFETY: inside the arena, which no one else uses.
            unsafe {
                assert_eq!(arena.as_ptr().wrapping_add(at).read(), 0);
            }
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_said_and_the_memory_is_there_all_the_same() {
        let cpus = crate::current_binding().unwrap();
        let arena = Arena::new(1, &[77], &cpus).unwrap();
        let report = arena.report();
        assert!(report.not_bound.is_some(), "{report}");
        assert!(report.to_string().contains("first touch"), "{report}");
    }

    #[test]
    fn memory_that_no_machine_has_is_refused() {
        for bytes in [usize::MAX, usize::MAX / 2] {
            assert!(matches!(Arena::new(bytes, &[], &[]), Err(Error::Map { .. })));
        }
        assert!(Arena::new(0, &[], &[]).unwrap().is_empty());
    }
}
