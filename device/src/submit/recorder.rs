//! A backend that runs nothing: it checks a program and counts its ops. `onebox plan` and
//! `--dry-run` send the real step through it, so that their output matches a run.

use crate::error::Site;
use crate::op::lane::{Clock, join};
use crate::{
    AdmittedOp, Device, Error, Event, Executor, LANES, Lane, Mode, Op, Plan, Rank, Tensor,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Work that a program submits on one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Number of ops by lane.
    pub ops: [u64; LANES],
    /// Bytes read and written, by lane.
    pub bytes: [u64; LANES],
    /// Multiply-adds times two of the dense work.
    pub flops: f64,
}

/// An executor that runs nothing and passes each op to a function.
pub(super) struct Onlooker<F>(pub(super) F);

impl<F: Fn(AdmittedOp)> Executor for Onlooker<F> {
    fn submit(&self, op: AdmittedOp) {
        (self.0)(op);
    }
    fn wait(&self, _: Lane, _: &Event) {}
    fn sync(&self, _: Lane, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn write(&self, _: Tensor, _: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        Ok(())
    }
    fn fail(&self, _: u64, _: &Error) {}
    fn finish(&self) {}
}

/// A device that only counts ops, and its totals, which grow while it is used. Ops named `idle`
/// count as ops that move no bytes.
pub fn open(rank: Rank, plan: &Arc<Plan>, idle: &'static str) -> (Device, Rc<RefCell<Totals>>) {
    let totals = Rc::new(RefCell::new(Totals::default()));
    let counted = Rc::clone(&totals);
    let count = move |AdmittedOp { op, lane, .. }: AdmittedOp| {
        let mut totals = counted.borrow_mut();
        totals.ops[lane as usize] += 1;
        totals.bytes[lane as usize] += if op.name() == idle { 0 } else { moved(&op) };
        totals.flops += op.flops();
    };
    (Device::new(rank, Arc::clone(plan), Box::new(Onlooker(count))), totals)
}

/// Bytes that cross a link or a memory bus: the length of a copy, and all accesses of any other op.
fn moved(op: &Op) -> u64 {
    if let Op::Copy { src, .. } = op { src.bytes() } else { op.bytes() }
}

/// An op of a program, for a listing.
#[derive(Clone, Debug)]
pub struct ListedOp {
    /// Number of the op in the program, from 1, over all lanes.
    pub number: u64,
    /// Source line that submitted the op.
    pub site: Site,
    /// Lane of the op.
    pub lane: Lane,
    /// Name of the op in errors and traces.
    pub name: &'static str,
    /// Ranges that the op accesses, with their names in the plan.
    pub tensors: Vec<(Mode, String, Tensor)>,
    /// Bytes that cross a link or a memory bus.
    pub bytes: u64,
    /// Multiply-adds times two of the dense work.
    pub flops: f64,
    /// Numbers of other lanes' ops that the lane has waited for since its previous op.
    pub waits: Vec<u64>,
}

/// A function that receives every op in the order of the program.
pub type Listener = Box<dyn FnMut(ListedOp)>;

/// State of a listing.
struct Listing {
    plan: Arc<Plan>,
    tell: Listener,
    count: u64,
    /// Numbers of the ops by lane and tick.
    numbers: [Vec<u64>; LANES],
    /// The clock that each lane has waited for.
    known: [Clock; LANES],
    /// Numbers of the ops that each lane's next op waits for.
    waits: [Vec<u64>; LANES],
}

struct Lister(RefCell<Listing>);

/// A device that runs nothing and passes every op to `tell`.
pub fn list(rank: Rank, plan: &Arc<Plan>, tell: Listener) -> Device {
    let listing = Listing {
        plan: Arc::clone(plan),
        tell,
        count: 0,
        numbers: Default::default(),
        known: [Clock::default(); LANES],
        waits: Default::default(),
    };
    Device::new(rank, Arc::clone(plan), Box::new(Lister(RefCell::new(listing))))
}

impl Executor for Lister {
    fn submit(&self, AdmittedOp { op, lane, site, .. }: AdmittedOp) {
        let listing = &mut *self.0.borrow_mut();
        listing.count += 1;
        listing.numbers[lane as usize].push(listing.count);
        let mut tensors = Vec::new();
        let plan = &listing.plan;
        op.accesses(&mut |mode, t| tensors.push((mode, plan.name(t).to_owned(), t)));
        (listing.tell)(ListedOp {
            number: listing.count,
            site,
            lane,
            name: op.name(),
            tensors,
            bytes: moved(&op),
            flops: op.flops(),
            waits: std::mem::take(&mut listing.waits[lane as usize]),
        });
    }

    /// Lists the op that the event marks among the waits of `lane`. This op also stands for all ops
    /// for which it waited itself.
    fn wait(&self, lane: Lane, event: &Event) {
        let listing = &mut *self.0.borrow_mut();
        let known = &mut listing.known[lane as usize];
        let is_new = |of: usize| of != lane as usize && event.clock[of] > known[of];
        let marked = usize::from(event.lane);
        let all = if is_new(marked) { marked..marked + 1 } else { 0..LANES };
        let ticks = all.filter(|&of| is_new(of)).map(|of| (of, event.clock[of] as usize));
        let numbers = ticks.map(|(of, tick)| listing.numbers[of][tick - 1]);
        listing.waits[lane as usize].extend(numbers);
        join(known, &event.clock);
    }
    fn sync(&self, _: Lane, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn write(&self, _: Tensor, _: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        Ok(())
    }
    fn fail(&self, _: u64, _: &Error) {}
    fn finish(&self) {}
}
