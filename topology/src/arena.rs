//! Host memory on chosen NUMA nodes.
//!
//! The order matters. Threads are bound first. Then addresses are mapped, at 2 MiB, huge pages are
//! requested, and the kernel receives the nodes. Each thread, on its own cores, then touches its
//! own slice, which allocates the pages, and the nodes of sample pages are looked up. Only then may
//! CUDA register the memory, since pinned pages never move again.
#![expect(unsafe_code, reason = "maps memory, advises the kernel about it, and unmaps it")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::time::{Duration, Instant};
use std::{fmt, io};

use crate::bind::LiveMachine;
use crate::{Error, ascending, format_bytes, format_cpu_list};

/// Bytes of a small page.
const PAGE: usize = 4096;
/// Bytes of a huge page, and alignment of an arena's start.
const HUGE: usize = 2 << 20;
/// Largest number of bytes of one madvise. Between two calls another thread can be scheduled.
const POPULATE_STEP: usize = 256 << 20;
/// Largest number of pages that are looked up afterwards.
const SAMPLES: usize = 256;
/// `MADV_POPULATE_WRITE`, since Linux 5.14.
const POPULATE_WRITE: i32 = 23;

/// Zeroed host memory, mapped once and never resized.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    /// Usable bytes.
    bytes: usize,
    /// Mapped bytes, a multiple of 2 MiB.
    mapped: usize,
    report: ArenaReport,
}

// SAFETY: the mapping belongs to the arena alone and is not tied to a thread; the arena itself
// neither reads nor writes it after `new`. Callers that read or write through `as_ptr` order their
// accesses.
unsafe impl Send for Arena {}
// SAFETY: as above: `&Arena` gives out addresses and numbers only.
unsafe impl Sync for Arena {}

/// A range of an arena with nodes of its own. Only whole pages inside the range count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Bytes from the arena's start.
    pub range: Range<usize>,
    /// The NUMA nodes of the range.
    pub nodes: Vec<u32>,
}

/// The placement of an arena's pages.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ArenaReport {
    /// Mapped bytes.
    pub bytes: u64,
    /// The requested nodes.
    pub nodes: Vec<u32>,
    /// Bytes of all parts, and the nodes requested for them.
    pub parts: Option<(u64, Vec<u32>)>,
    /// Why the kernel refused to bind the memory, if it did; the first touch then decides the node.
    /// Containers usually refuse: `EPERM`.
    pub not_bound: Option<String>,
    /// Whether the kernel accepted the request for huge pages.
    pub huge_pages: bool,
    /// The CPUs whose threads touched the pages first. Empty if pages come in at their first use.
    pub touched_by: Vec<u32>,
    /// Number of sampled pages by node.
    pub found: BTreeMap<u32, usize>,
    /// Number of sampled pages that are on none of the requested nodes.
    pub misplaced: usize,
    /// Why samples could not be looked up, if they could not.
    pub not_verified: Option<String>,
    /// Duration of mapping and touching.
    pub took: Duration,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format_bytes(self.bytes))?;
        if !self.nodes.is_empty() {
            write!(f, " for node {}", format_cpu_list(&self.nodes))?;
        }
        if let Some((bytes, nodes)) = &self.parts {
            write!(f, ", {} of it for node {}", format_bytes(*bytes), format_cpu_list(nodes))?;
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
                write!(f, ", {} of {sampled} samples there", sampled - self.misplaced)?;
            }
            None => {}
        }
        write!(f, ", {:.3} s", self.took.as_secs_f64())
    }
}

impl Arena {
    /// Maps `bytes` zeroed bytes for `nodes`; one thread per CPU of `cpus` allocates the pages of
    /// its slice. Without nodes nothing is bound; without CPUs the first use of a page allocates
    /// it. Returns after all threads have ended.
    ///
    /// The caller should bind its thread first. Containers often refuse to bind memory; the first
    /// touch by bound threads then has the same effect, and the report says so.
    ///
    /// # Errors
    /// If memory cannot be mapped, or its pages cannot be allocated.
    pub fn new(bytes: usize, nodes: &[u32], cpus: &[u32]) -> Result<Self, Error> {
        Self::with_parts(bytes, nodes, cpus, &[])
    }

    /// [`Arena::new`] with `parts` on nodes of their own. Parts do not overlap. If the kernel
    /// refuses to bind, the parts are on the nodes of the rest.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn with_parts(
        bytes: usize,
        nodes: &[u32],
        cpus: &[u32],
        parts: &[Part],
    ) -> Result<Self, Error> {
        let began = Instant::now();
        let refused = |source| Error::Map { bytes, source };
        let mut arena = Self::map(bytes, 0).map_err(refused)?;
        arena.report.nodes = nodes.to_vec();
        arena.report.huge_pages = arena.advise(libc::MADV_HUGEPAGE).is_ok();
        if !nodes.is_empty() {
            let bound = arena.bind(parts)?;
            arena.report.not_bound = bound.err().map(|error| error.to_string());
        }
        if !cpus.is_empty() {
            arena.touch(cpus).map_err(refused)?;
            arena.verify(parts);
        }
        arena.report.took = began.elapsed();
        arena.tell();
        Ok(arena)
    }

    /// [`Arena::new`] without nodes and with pages of 4 KiB, for comparison.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn of_small_pages(bytes: usize) -> Result<Self, Error> {
        Self::with_small_pages(bytes, 0)
    }

    /// Reserves `bytes` of address space for a caller that touches few of them. The kernel sets no
    /// memory aside, and the first touch of a word does not allocate 2 MiB.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn untouched(bytes: usize) -> Result<Self, Error> {
        Self::with_small_pages(bytes, libc::MAP_NORESERVE)
    }

    fn with_small_pages(bytes: usize, flags: i32) -> Result<Self, Error> {
        let refused = |source| Error::Map { bytes, source };
        let arena = Self::map(bytes, flags).map_err(refused)?;
        arena.advise(libc::MADV_NOHUGEPAGE).map_err(refused)?;
        Ok(arena)
    }

    /// Maps memory without touching it.
    fn map(bytes: usize, flags: i32) -> io::Result<Self> {
        let mapped = bytes.max(1).checked_next_multiple_of(HUGE);
        let mapped = mapped.ok_or(io::ErrorKind::OutOfMemory)?;
        let report = ArenaReport { bytes: bytes as u64, ..ArenaReport::default() };
        Ok(Self { start: map_aligned(mapped, flags)?, bytes, mapped, report })
    }

    fn advise(&self, advice: i32) -> io::Result<()> {
        advise(self.as_ptr(), self.mapped, advice)
    }

    /// Reports where a placed arena is. The same problem is reported once, not once per rank.
    fn tell(&self) {
        if self.report.nodes.is_empty() {
            return;
        }
        let thread = std::thread::current();
        tracing::info!("{}: host memory {}", thread.name().unwrap_or("?"), self.report);
        static SAID: Once = Once::new();
        let report = &self.report;
        if report.not_bound.is_some() || report.misplaced > 0 {
            SAID.call_once(|| tracing::warn!("host memory is not where it should be: {report}"));
        }
    }

    /// The first byte, aligned to 2 MiB. The caller orders its reads and writes there.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Usable bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no usable byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The placement of the pages, as the kernel reports it.
    pub fn report(&self) -> &ArenaReport {
        &self.report
    }

    /// Gives the kernel the nodes. The inner result is the kernel's answer.
    fn bind(&mut self, parts: &[Part]) -> Result<io::Result<()>, Error> {
        let memory = LiveMachine::get()?.memory()?;
        if let Err(refused) = memory.bind_area(self.as_ptr(), self.mapped, &self.report.nodes) {
            return Ok(Err(refused));
        }
        let (mut bytes, mut all) = (0, Vec::new());
        for part in parts {
            let (start, end) =
                (part.range.start.next_multiple_of(PAGE), part.range.end / PAGE * PAGE);
            if start >= end || end > self.mapped {
                continue;
            }
            let at = self.as_ptr().wrapping_add(start);
            if let Err(refused) = memory.bind_area(at, end - start, &part.nodes) {
                return Ok(Err(refused));
            }
            bytes += (end - start) as u64;
            all.extend_from_slice(&part.nodes);
        }
        self.report.parts = (bytes > 0).then(|| (bytes, ascending(all)));
        Ok(Ok(()))
    }

    /// Allocates all pages: each thread is bound to one CPU and touches its own slice, as the later
    /// worker threads do.
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
                // An unbound thread still allocates the pages; `verify` shows where.
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
        self.report.touched_by = ascending(touched.into_iter().flatten());
        Ok(())
    }

    /// Looks up single pages over the whole arena, since hwloc's query of a larger area wraps at 4
    /// GiB.
    fn verify(&mut self, parts: &[Part]) {
        let pages = self.mapped / HUGE;
        let samples = SAMPLES.min(pages * 4);
        let at = |index: usize| index * (self.mapped / samples) / PAGE * PAGE;
        let inside = |part: &&Part, at| part.range.start <= at && at + PAGE <= part.range.end;
        let wanted = |at: usize| {
            let part = parts.iter().find(|part| inside(part, at));
            part.map_or(&self.report.nodes, |part| &part.nodes)
        };
        let look = || {
            let handle =
                LiveMachine::get().and_then(LiveMachine::memory).map_err(|e| e.to_string())?;
            let (mut found, mut misplaced) = (BTreeMap::new(), 0);
            for at in (0..samples).map(at) {
                let page = self.start.as_ptr().wrapping_add(at);
                for node in handle.location_of(page, PAGE).map_err(|e| e.to_string())? {
                    *found.entry(node).or_insert(0) += 1;
                    let wanted = wanted(at);
                    misplaced += usize::from(!wanted.is_empty() && !wanted.contains(&node));
                }
            }
            Ok((found, misplaced))
        };
        match look() {
            Ok((found, misplaced)) => {
                self.report.found = found;
                self.report.misplaced = misplaced;
            }
            Err(why) => self.report.not_verified = Some(why),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no borrow of the arena is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
    }
}

/// An address that may be sent to another thread.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: it is an address of an arena that outlives the scope of the threads; their slices do not overlap.
unsafe impl Send for Address {}

impl Address {
    /// Allocates the pages of a slice by touching them.
    fn populate(self, offset: usize, bytes: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let (at, step) = (self.0.wrapping_add(offset + done), POPULATE_STEP.min(bytes - done));
            if let Err(error) = advise(at, step, POPULATE_WRITE) {
                if error.raw_os_error() != Some(libc::EINVAL) {
                    return Err(error);
                }
                // An older kernel lacks the call.
                for page in (0..step).step_by(PAGE) {
                    // SAFETY: inside this thread's slice of a writable mapping that no one else uses yet.
                    unsafe { at.wrapping_add(page).write_volatile(0) };
                }
            }
            done += step;
        }
        Ok(())
    }
}

/// Maps zeroed private memory at a multiple of 2 MiB, with further `flags`. `bytes` is a multiple
/// of 2 MiB too.
fn map_aligned(bytes: usize, flags: i32) -> io::Result<NonNull<u8>> {
    let room = bytes.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags);
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
        // SAFETY: the part after the end, likewise.
        unsafe { libc::munmap(start.wrapping_add(bytes).cast(), room - before - bytes) };
    }
    NonNull::new(start).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Calls madvise with advice that keeps the contents of the pages.
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
            assert_eq!(report.misplaced, 0, "{report}");
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
    fn a_missing_node_is_named_and_the_memory_is_allocated_elsewhere() {
        let cpus = crate::current_binding().unwrap();
        let arena = Arena::new(1, &[77], &cpus).unwrap();
        let report = arena.report();
        assert!(report.not_bound.is_some(), "{report}");
        assert!(report.to_string().contains("first touch"), "{report}");
    }

    #[test]
    fn parts_have_nodes_of_their_own_and_what_is_elsewhere_is_counted() {
        let machine = crate::Machine::discover().unwrap();
        let (node, cpus) = (machine.allowed_nodes[0], crate::current_binding().unwrap());
        let part = |range, node| Part { range, nodes: vec![node] };
        let parts = [part(100..(1 << 20), node), part(5 << 20..6 << 20, node), part(1..4096, node)];
        let arena = Arena::with_parts(8 << 20, &[node], &cpus, &parts).unwrap();
        let report = arena.report();
        if report.not_bound.is_none() {
            // Only whole pages count: the first part begins inside a page, the last part has no
            // whole page.
            assert_eq!(report.parts, Some(((2 << 20) - 4096, vec![node])), "{report}");
            assert!(report.to_string().contains("2.00 MiB of it for node"), "{report}");
            assert_eq!(report.misplaced, 0, "{report}");
        }
        // A part on a node that does not exist is refused, and its pages are elsewhere.
        let parts = [part(0..4 << 20, 77)];
        let arena = Arena::with_parts(8 << 20, &[node], &cpus, &parts).unwrap();
        let report = arena.report();
        assert!(report.not_bound.is_some(), "{report}");
        if report.not_verified.is_none() {
            assert_eq!(report.misplaced * 2, report.found.values().sum::<usize>(), "{report}");
        }
    }

    /// Forbids this thread, and the threads that it starts, to bind memory or to query its node.
    /// Docker's default profile does the same to a process without CAP_SYS_NICE. Returns false if
    /// the
    /// kernel has no such filters.
    fn forbid_binding() -> bool {
        const LOAD_NUMBER: (u16, u32) = (0x20, 0);
        const EQUAL: u16 = 0x15;
        const RETURN: u16 = 0x06;
        const ALLOW: u32 = 0x7fff_0000;
        const REFUSE: u32 = 0x0005_0000 | libc::EPERM.cast_unsigned();
        let op = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
        let calls = [
            libc::SYS_mbind,
            libc::SYS_set_mempolicy,
            libc::SYS_get_mempolicy,
            libc::SYS_move_pages,
        ];
        let mut filter = vec![op(LOAD_NUMBER.0, 0, LOAD_NUMBER.1)];
        for (index, call) in calls.iter().enumerate() {
            filter.push(op(EQUAL, (calls.len() - index) as u8, *call as u32));
        }
        filter.extend([op(RETURN, 0, ALLOW), op(RETURN, 0, REFUSE)]);
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: gives up rights of this thread that it does not use.
        let given_up = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } == 0;
        // SAFETY: the kernel copies the program, which is alive.
        given_up && unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) } == 0
    }

    #[test]
    fn if_binding_is_forbidden_the_first_touch_places_and_a_warning_says_so() {
        let arena = |cpus: Vec<u32>| {
            move || forbid_binding().then(|| Arena::new(5 << 20, &[0], &cpus).unwrap())
        };
        let cpus = crate::current_binding().unwrap();
        let Some(arena) = std::thread::spawn(arena(cpus.clone())).join().unwrap() else {
            let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
            assert!(!in_ci, "the kernel has no system call filters");
            println!("skipped: the kernel has no system call filters");
            return;
        };
        let report = arena.report();
        assert!(report.not_bound.as_ref().unwrap().contains("not permitted"), "{report}");
        assert!(report.not_verified.as_ref().unwrap().contains("not permitted"), "{report}");
        assert_eq!((&report.touched_by, report.misplaced), (&cpus, 0), "{report}");
        let text = report.to_string();
        assert!(text.contains("not bound (Operation not permitted"), "{text}");
        assert!(text.contains("by first touch") && text.contains("not verified"), "{text}");
        // Other threads can still bind.
        assert!(Arena::new(1, &[0], &cpus).unwrap().report().not_bound.is_none());
    }

    #[test]
    fn memory_that_no_machine_has_is_refused() {
        for bytes in [usize::MAX, usize::MAX / 2] {
            assert!(matches!(Arena::new(bytes, &[], &[]), Err(Error::Map { .. })));
        }
        assert!(Arena::new(0, &[], &[]).unwrap().is_empty());
    }
}
