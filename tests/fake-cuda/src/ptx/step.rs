//! Runs one instruction of a warp.

use super::alu::{alu, convert, f32_of, holds, keep, signed};
use super::block_state::BlockState;
use super::copies::Copy;
use super::count::unit;
use super::fault::FaultKind;
use super::memory::{AccessFault, Region, WINDOW};
use super::op::{Address, Kind, Op, Reg, Shuffle, Space, Type};
use super::shadow::Stamp;
use super::tensor::{Lanes, multiply, multiply_quarters, share};
use super::warp::Warp;

/// Outcome of an instruction for its warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepOutcome {
    Next,
    /// The warp waits for the block.
    Barrier,
    /// A fault ends the launch.
    Over,
}

/// Runs the instruction `at` in `lanes` of a warp.
pub(super) fn step(
    room: &mut BlockState<'_>,
    warp: &mut Warp,
    at: usize,
    lanes: u32,
) -> StepOutcome {
    let kernel = room.kernel;
    let instruction = &kernel.code[at];
    let taken = warp.guarded(instruction.guard, lanes);
    *room.run.counts.instructions.entry(unit(&instruction.op)).or_default() += 1;
    room.run.counts.threads += u64::from(taken.count_ones());
    match &instruction.op {
        Op::Branch { to } => warp.branch(taken, *to, kernel.meets[at]),
        Op::Return => warp.end(taken),
        op => {
            warp.advance();
            if taken != 0 {
                return Step { room, warp, at, lanes: taken }.run(op);
            }
        }
    }
    StepOutcome::Next
}

/// Ends the copies of `lanes`, except the last `most` groups.
pub(super) fn land(room: &mut BlockState<'_>, warp: &mut Warp, lanes: u32, most: Option<u64>) {
    for Copy { lane, from, to, bytes, count } in warp.copies.end(lanes, most) {
        let now = Stamp::new(room.number, room.epoch, warp.within, warp.first + lane);
        if let Some((from, count)) = from
            && let Some(region) = room.memory.region(from, count)
        {
            region.give_back(from, count, now);
        }
        if let Some(to) = to
            && let Some(region) = room.shared.hold(to, count)
        {
            region.arrive(to, &bytes[..count], now);
        }
    }
}

struct Step<'s, 'r> {
    room: &'s mut BlockState<'r>,
    warp: &'s mut Warp,
    at: usize,
    lanes: u32,
}

fn each(lanes: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| lanes >> lane & 1 == 1)
}

impl Step<'_, '_> {
    fn run(&mut self, op: &Op) -> StepOutcome {
        match *op {
            Op::Alu { f, ty, approx, d, of } => {
                let [a, b, c, e] = of.map(|register| self.warp.file[register]);
                self.put(d, |l| alu(f, ty, approx, [a[l], b[l], c[l], e[l]]).unwrap_or(0));
            }
            Op::Set { compare, ty, d, a, b } => {
                let (a, b) = (self.warp.file[a], self.warp.file[b]);
                self.put(d, |l| u64::from(holds(compare, ty, a[l], b[l])));
            }
            Op::Convert { to, from, round, integral, d, a } => {
                let a = self.warp.file[a];
                self.put(d, |l| convert(to, from, round, integral, a[l]).unwrap_or(0));
            }
            Op::ToFp8 { format, d, high, low } => {
                let (high, low) = (self.warp.file[high], self.warp.file[low]);
                let code = |x: u64| u64::from(format.code(f32_of(x)));
                self.put(d, |l| code(high[l]) << 8 | code(low[l]));
            }
            Op::Window { to_generic, d, a } => {
                let a = self.warp.file[a];
                self.put(d, |l| {
                    if to_generic { a[l].wrapping_add(WINDOW) } else { a[l].wrapping_sub(WINDOW) }
                });
            }
            Op::Load { space, ty, ref d, at } => self.load(space, ty, d, at),
            Op::Store { space, ty, ref a, at } => self.store(space, ty, a, at),
            Op::CopyAsync { to, from, bytes, valid } => self.copy(to, from, bytes, valid),
            Op::CloseCopies => self.warp.copies.close(each(self.lanes)),
            Op::WaitCopies { most } => land(self.room, self.warp, self.lanes, most),
            Op::Shuffle { how, d, valid, a, b, clamp, lanes } => {
                if !self.together(self.warp.file[lanes]) {
                    return StepOutcome::Over;
                }
                self.shuffle(how, d, valid, [a, b, clamp]);
            }
            Op::LoadMatrices { transposed, ref d, at } => {
                if !self.together([u64::MAX; 32]) {
                    return StepOutcome::Over;
                }
                self.load_matrices(transposed, d, at);
            }
            Op::Multiply { ty, d, a, b, c } => {
                if !self.together([u64::MAX; 32]) {
                    return StepOutcome::Over;
                }
                let file = &self.warp.file;
                let sums =
                    multiply(ty, &a.map(|r| file[r]), &b.map(|r| file[r]), &c.map(|r| file[r]));
                for (d, sum) in d.into_iter().zip(sums) {
                    self.warp.file[d] = sum;
                }
            }
            Op::MultiplyQuarters { rows, d, a, b, c } => {
                if !self.together([u64::MAX; 32]) {
                    return StepOutcome::Over;
                }
                let file = &self.warp.file;
                let (a, b, c) = (a.map(|r| file[r]), b.map(|r| file[r]), c.map(|r| file[r]));
                for (d, sum) in d.into_iter().zip(multiply_quarters(rows, &a, &b, &c)) {
                    self.warp.file[d] = sum;
                }
            }
            Op::Barrier => {
                self.warp.waits = true;
                return if self.together([u64::MAX; 32]) {
                    StepOutcome::Barrier
                } else {
                    StepOutcome::Over
                };
            }
            Op::WarpBarrier { lanes } => {
                let named = self.warp.file[lanes];
                if !self.together(named) {
                    return StepOutcome::Over;
                }
                self.warp.within += u64::from(self.lanes == self.warp.all);
            }
            Op::Fence | Op::Branch { .. } | Op::Return => {}
        }
        StepOutcome::Next
    }

    /// Writes the result of `f` into register d of each lane that runs the instruction.
    fn put(&mut self, d: Reg, f: impl Fn(usize) -> u64) {
        let to = &mut self.warp.file[d];
        for (lane, to) in to.iter_mut().enumerate() {
            let value = f(lane);
            if self.lanes >> lane & 1 == 1 {
                *to = value;
            }
        }
    }

    /// Whether all lanes that an instruction names are here.
    fn together(&mut self, named: Lanes) -> bool {
        let Some(lane) =
            each(self.lanes).find(|&lane| named[lane] as u32 & self.warp.all & !self.lanes != 0)
        else {
            return true;
        };
        let absent = named[lane] as u32 & self.warp.all & !self.lanes;
        let about = format!("the lanes {absent:#x} are absent");
        self.room.report(FaultKind::Parted, self.at, self.warp.first + lane, about);
        false
    }

    fn addresses(&self, at: Address) -> Lanes {
        self.warp.file[at.base].map(|base| base.wrapping_add_signed(at.offset))
    }

    fn load(&mut self, space: Space, ty: Type, d: &[Reg], at: Address) {
        let (addresses, size) = (self.addresses(at), ty.bytes());
        let mut room = [0; 16];
        let bytes = size * d.len();
        self.count(space, &addresses, bytes, false);
        for lane in each(self.lanes) {
            room.fill(0xff);
            self.touch(space, addresses[lane], lane, bytes, |region, at, now, found| {
                region.read(at, &mut room[..bytes], now, found);
            });
            for (&register, part) in d.iter().zip(room.chunks(size)) {
                let value = part.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
                let wide = ty.kind == Kind::Signed;
                self.warp.file[register][lane] =
                    if wide { signed(value, ty.bits).cast_unsigned() } else { value };
            }
        }
    }

    fn store(&mut self, space: Space, ty: Type, a: &[Reg], at: Address) {
        let (addresses, size) = (self.addresses(at), ty.bytes());
        let bytes = size * a.len();
        self.count(space, &addresses, bytes, true);
        let mut room = [0; 16];
        for lane in each(self.lanes) {
            for (&register, part) in a.iter().zip(room.chunks_mut(size)) {
                part.copy_from_slice(&self.warp.file[register][lane].to_le_bytes()[..size]);
            }
            self.touch(space, addresses[lane], lane, bytes, |region, at, now, found| {
                region.write(at, &room[..bytes], now, found);
            });
        }
    }

    fn copy(&mut self, to: Address, from: Address, bytes: usize, valid: Option<Reg>) {
        let (to, from) = (self.addresses(to), self.addresses(from));
        self.count(Space::Global, &from, bytes, false);
        self.count(Space::Shared, &to, bytes, true);
        for lane in each(self.lanes) {
            let mut room = [0; 16];
            let valid = valid
                .map_or(bytes, |register| (self.warp.file[register][lane] as usize).min(bytes));
            let reads = valid > 0
                && self.is_aligned(from[lane], lane, bytes)
                && self.reach(Space::Global, from[lane], lane, valid, |region, at, now, found| {
                    region.lend(at, &mut room[..valid], now, found);
                });
            let writes =
                self.touch(Space::Shared, to[lane], lane, bytes, |region, at, now, found| {
                    region.expect(at, bytes, now, found);
                });
            let (from, to) = (reads.then_some((from[lane], valid)), writes.then_some(to[lane]));
            self.warp.copies.begin(Copy { lane, from, to, bytes: room, count: bytes });
        }
    }

    fn count(&mut self, space: Space, addresses: &Lanes, bytes: usize, write: bool) {
        let shared = space == Space::Shared
            || space == Space::Generic && addresses.iter().any(|&at| at >= WINDOW);
        if shared {
            let used: Vec<(usize, u64)> =
                each(self.lanes).map(|lane| (lane, addresses[lane])).collect();
            self.room.run.counts.shared(&used, bytes);
        } else {
            let used: Vec<u64> = each(self.lanes).map(|lane| addresses[lane]).collect();
            self.room.run.counts.global(&used, bytes, write);
        }
    }

    /// Makes one lane's access with `f` if the address is valid; returns whether it is valid.
    fn touch(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        bytes: usize,
        f: impl FnOnce(&mut Region, u64, Stamp, &mut dyn FnMut(AccessFault)),
    ) -> bool {
        self.is_aligned(address, lane, bytes) && self.reach(space, address, lane, bytes, f)
    }

    fn is_aligned(&mut self, address: u64, lane: usize, bytes: usize) -> bool {
        let is = address.is_multiple_of(bytes as u64);
        if !is {
            let about = format!("{bytes} bytes at {address:#x}");
            self.room.report(FaultKind::Misaligned, self.at, self.warp.first + lane, about);
        }
        is
    }

    fn reach(
        &mut self,
        space: Space,
        address: u64,
        lane: usize,
        bytes: usize,
        f: impl FnOnce(&mut Region, u64, Stamp, &mut dyn FnMut(AccessFault)),
    ) -> bool {
        let thread = self.warp.first + lane;
        let now = Stamp::new(self.room.number, self.room.epoch, self.warp.within, thread);
        let is_shared = space == Space::Shared || space == Space::Generic && address >= WINDOW;
        let at = if space == Space::Generic && is_shared { address - WINDOW } else { address };
        let region = if is_shared {
            self.room.shared.hold(at, bytes)
        } else {
            self.room.memory.region(at, bytes)
        };
        let Some(region) = region else {
            let about = format!(
                "{bytes} bytes at {address:#x} of {}",
                if is_shared { "shared memory" } else { "memory" }
            );
            self.room.report(FaultKind::OutOfRange, self.at, thread, about);
            return false;
        };
        let mut first = None;
        f(region, at, now, &mut |wrong| first = first.or(Some(wrong)));
        if let Some(wrong) = first {
            self.report(wrong, thread, is_shared);
        }
        true
    }

    fn report(&mut self, wrong: AccessFault, thread: usize, is_shared: bool) {
        let place = if is_shared { "shared memory" } else { "memory" };
        let with = wrong.other.map_or(String::new(), |other| {
            format!(", after thread {} of block {}", other.thread(), other.block())
        });
        self.room.report(wrong.kind, self.at, thread, format!("{place} at {:#x}{with}", wrong.at));
    }

    fn shuffle(&mut self, how: Shuffle, d: Reg, valid: Option<Reg>, of: [Reg; 3]) {
        let [a, b, clamp] = of.map(|register| self.warp.file[register]);
        let source = |lane: usize| {
            let (own, by, clamp) = (lane as u64, b[lane] & 31, clamp[lane]);
            let segment = clamp >> 8 & 31;
            let last = own & segment | clamp & 31 & !segment;
            let (from, holds) = match how {
                Shuffle::Up => (own.wrapping_sub(by), own >= by && own - by >= last),
                Shuffle::Down => (own + by, own + by <= last),
                Shuffle::Xor => (own ^ by, own ^ by <= last),
                Shuffle::Index => {
                    let from = own & segment | by & !segment;
                    (from, from <= last)
                }
            };
            (if holds { from as usize } else { lane }, holds)
        };
        self.put(d, |lane| keep(a[source(lane).0], 32));
        if let Some(valid) = valid {
            self.put(valid, |lane| u64::from(source(lane).1));
        }
    }

    fn load_matrices(&mut self, transposed: bool, d: &[Reg], at: Address) {
        let addresses = self.addresses(at);
        let givers = u32::MAX >> (32 - 8 * d.len());
        let used: Vec<(usize, u64)> = each(givers).map(|lane| (lane, addresses[lane])).collect();
        self.room.run.counts.shared(&used, 16);
        for (matrix, &register) in d.iter().enumerate() {
            let mut rows = [[0xff; 16]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                let lane = 8 * matrix + row;
                self.touch(Space::Shared, addresses[lane], lane, 16, |region, at, now, found| {
                    region.read(at, bytes, now, found);
                });
            }
            self.warp.file[register] = std::array::from_fn(|lane| share(&rows, lane, transposed));
        }
    }
}
