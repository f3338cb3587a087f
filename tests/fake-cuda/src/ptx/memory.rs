//! Memory that a launch may access: each byte's value, whether it was written, its last accesses.

use super::fault::FaultKind;
use super::shadow::{Cell, Stamp};

/// First generic address of shared memory.
pub(super) const WINDOW: u64 = 0x7fff_0000_0000;

/// A range of consecutive bytes.
#[derive(Debug, Default)]
pub(super) struct Region {
    start: u64,
    bytes: Vec<u8>,
    written: Vec<bool>,
    /// By byte, the copies under way that read it (global memory) or write it (shared memory).
    under_way: Vec<u16>,
    cells: Vec<Cell>,
}

impl Region {
    fn new(start: u64, bytes: Vec<u8>, written: bool) -> Self {
        let count = bytes.len();
        let (written, under_way) = (vec![written; count], vec![0; count]);
        Self { start, bytes, written, under_way, cells: vec![Cell::default(); count] }
    }

    /// A block's shared memory: NaN until it is written.
    pub(super) fn shared(bytes: usize) -> Self {
        Self::new(0, vec![0xff; bytes], false)
    }

    /// Resets shared memory for the next block.
    pub(super) fn forget(&mut self) {
        self.bytes.fill(0xff);
        self.written.fill(false);
        self.order();
    }

    /// Forgets all copies and accesses, so that later accesses do not race with them.
    fn order(&mut self) {
        self.under_way.fill(0);
        self.cells.fill(Cell::default());
    }

    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn holds(&self, at: u64, count: usize) -> bool {
        at >= self.start && at.checked_add(count as u64).is_some_and(|end| end <= self.end())
    }

    /// Reads bytes; `found` gets each fault.
    pub(super) fn read(
        &mut self,
        at: u64,
        to: &mut [u8],
        now: Stamp,
        found: &mut dyn FnMut(AccessFault),
    ) {
        let from = (at - self.start) as usize;
        let range = from..from + to.len();
        to.copy_from_slice(&self.bytes[range.clone()]);
        if let Some(byte) = self.written[range.clone()].iter().position(|written| !written) {
            let arrives = self.under_way[from + byte] > 0;
            let (kind, other) = if arrives {
                (FaultKind::Race, Some(self.cells[from + byte].written()))
            } else {
                (FaultKind::Uninitialised, None)
            };
            found(AccessFault { kind, at: at + byte as u64, other });
        }
        for (byte, cell) in self.cells[range].iter_mut().enumerate() {
            if let Some(other) = cell.read(now) {
                found(AccessFault {
                    kind: FaultKind::Race,
                    at: at + byte as u64,
                    other: Some(other),
                });
            }
        }
    }

    /// Writes bytes; `found` gets each fault.
    pub(super) fn write(
        &mut self,
        at: u64,
        from: &[u8],
        now: Stamp,
        found: &mut dyn FnMut(AccessFault),
    ) {
        let start = (at - self.start) as usize;
        let range = start..start + from.len();
        if let Some(byte) = self.under_way[range.clone()].iter().position(|&copies| copies > 0) {
            let cell = &self.cells[start + byte];
            let leaves = self.written[start + byte];
            let other = Some(if leaves { cell.was_read() } else { cell.written() });
            found(AccessFault { kind: FaultKind::Race, at: at + byte as u64, other });
        }
        self.bytes[range.clone()].copy_from_slice(from);
        self.written[range.clone()].fill(true);
        for (byte, cell) in self.cells[range].iter_mut().enumerate() {
            if let Some(other) = cell.write(now) {
                found(AccessFault {
                    kind: FaultKind::Race,
                    at: at + byte as u64,
                    other: Some(other),
                });
            }
        }
    }
}

/// Copies of `cp.async`.
impl Region {
    /// Reads the source of a copy that starts.
    pub(super) fn lend(
        &mut self,
        at: u64,
        to: &mut [u8],
        now: Stamp,
        found: &mut dyn FnMut(AccessFault),
    ) {
        self.read(at, to, now, found);
        self.pass(at, to.len(), |copies| *copies += 1);
    }

    /// Ends the read of a copy.
    pub(super) fn give_back(&mut self, at: u64, count: usize, now: Stamp) {
        self.pass(at, count, |copies| *copies -= 1);
        let from = (at - self.start) as usize;
        // The race of a copy and an earlier write was found when the copy started.
        for cell in &mut self.cells[from..from + count] {
            cell.read(now);
        }
    }

    /// Starts a copy that will write these bytes.
    pub(super) fn expect(
        &mut self,
        at: u64,
        count: usize,
        now: Stamp,
        found: &mut dyn FnMut(AccessFault),
    ) {
        self.write(at, &[0xff; 16][..count], now, found);
        self.pass(at, count, |copies| *copies += 1);
        let from = (at - self.start) as usize;
        self.written[from..from + count].fill(false);
    }

    /// Ends a copy: writes its bytes.
    pub(super) fn arrive(&mut self, at: u64, bytes: &[u8], now: Stamp) {
        self.pass(at, bytes.len(), |copies| *copies -= 1);
        // Races with accesses since the start of the copy were found at those accesses.
        self.write(at, bytes, now, &mut |_| ());
    }

    fn pass(&mut self, at: u64, count: usize, f: impl Fn(&mut u16)) {
        let from = (at - self.start) as usize;
        self.under_way[from..from + count].iter_mut().for_each(f);
    }
}

/// A fault of an access.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessFault {
    pub(super) kind: FaultKind,
    pub(super) at: u64,
    /// The other access of a race.
    pub(super) other: Option<Stamp>,
}

/// Global memory of a launch: the only addresses that its kernel may access.
#[derive(Debug, Default)]
pub struct Memory {
    /// Regions in the order of their addresses.
    regions: Vec<Region>,
}

impl Memory {
    /// Adds a region at an address. Without `written`, its bytes count as not written yet.
    pub fn add(&mut self, start: u64, bytes: Vec<u8>, written: bool) {
        let at = self.regions.partition_point(|region| region.start < start);
        self.regions.insert(at, Region::new(start, bytes, written));
    }

    /// The bytes of the region that starts at an address.
    pub fn bytes(&self, start: u64) -> Option<&[u8]> {
        self.regions
            .iter()
            .find(|region| region.start == start)
            .map(|region| region.bytes.as_slice())
    }

    /// The region that holds `count` bytes at an address.
    pub(super) fn region(&mut self, at: u64, count: usize) -> Option<&mut Region> {
        let next = self.regions.partition_point(|region| region.start <= at);
        self.regions.get_mut(next.checked_sub(1)?).filter(|region| region.holds(at, count))
    }

    /// Distinct bytes that this launch read, plus distinct bytes that it wrote.
    pub(super) fn touched(&self) -> u64 {
        let cells = self.regions.iter().flat_map(|region| &region.cells);
        cells.map(Cell::touches).sum()
    }

    /// Starts a launch, which is ordered after all earlier accesses.
    pub(super) fn begin(&mut self) {
        self.regions.iter_mut().for_each(Region::order);
    }
}

impl Region {
    /// The region itself, if it holds `count` bytes at an address.
    pub(super) fn hold(&mut self, at: u64, count: usize) -> Option<&mut Self> {
        self.holds(at, count).then_some(self)
    }
}
