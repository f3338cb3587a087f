//! A backend that runs nothing: it checks a program and counts its ops. `onebox plan` and `--dry-run` send
//! the very step through it, so that what they print is what a run would do.

use crate::{Admitted, Device, Error, Event, Executor, LANES, Lane, Op, Plan, Rank, Tensor};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// What a program asked of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Ops by lane.
    pub ops: [u64; LANES],
    /// Bytes read and written, by lane.
    pub bytes: [u64; LANES],
    /// Multiply-adds times two of the dense work.
    pub flops: f64,
}

#[derive(Debug)]
struct Recorder {
    totals: Rc<RefCell<Totals>>,
}

/// A device that only counts; the totals grow while it is used.
pub fn open(rank: Rank, plan: &Arc<Plan>) -> (Device, Rc<RefCell<Totals>>) {
    let totals = Rc::new(RefCell::new(Totals::default()));
    let recorder = Recorder { totals: Rc::clone(&totals) };
    (Device::new(rank, Arc::clone(plan), Box::new(recorder)), totals)
}

/// Bytes that cross a link or a memory bus: a copy's own length, everything else's accesses.
fn moved(op: &Op) -> u64 {
    if let Op::Copy { src, .. } = op { src.bytes() } else { op.bytes() }
}

impl Executor for Recorder {
    fn submit(&self, Admitted { op, lane, .. }: Admitted) {
        let mut totals = self.totals.borrow_mut();
        totals.ops[lane as usize] += 1;
        totals.bytes[lane as usize] += moved(&op);
        totals.flops += op.flops();
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
