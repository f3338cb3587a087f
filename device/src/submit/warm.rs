//! The distinct ops of a program. A GPU runs each once before step 1, so nothing is loaded later.

use crate::op::{CollectiveKind, CollectiveOp};
use crate::submit::recorder::Onlooker;
use crate::{AdmittedOp, Device, Dtype, Group, Lane, Op, Plan, Rank};
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;

/// A collective of a program with its number of elements: NCCL chooses an algorithm by size, and
/// connects an algorithm at its first use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) group: Group,
    pub(crate) kind: CollectiveKind,
    pub(crate) dtype: Dtype,
    pub(crate) len: usize,
}

/// The kinds of work of a program, each kind once: matmuls and kernels by shapes, types and
/// alignment, collectives by group, kind, type and length.
#[derive(Debug, Default)]
pub struct DistinctOps {
    pub(crate) ops: Vec<AdmittedOp>,
    pub(crate) calls: Vec<Call>,
    seen: HashSet<String>,
}

impl DistinctOps {
    fn note(&mut self, op: AdmittedOp) {
        if let Some(call) = call(&op.op).filter(|call| !self.calls.contains(call)) {
            self.calls.push(call);
        }
        if self.seen.insert(key(&op.op)) {
            self.ops.push(op);
        }
    }
}

/// A key that is equal for ops that need the same code.
fn key(op: &Op) -> String {
    let mut key = op.name().to_owned();
    if let Op::Gemm { epilogue, .. } = op {
        let _ = write!(key, " {:?}", std::mem::discriminant(epilogue));
    }
    op.accesses(&mut |mode, t| {
        let align = t.range().start.trailing_zeros().min(8);
        let (transposed, stride) = (t.is_transposed(), t.stride());
        let shape = t.shape();
        let _ = write!(key, " {mode:?} {:?} {shape:?} {stride} {transposed} {align}", t.dtype());
    });
    if let Some(call) = call(op) {
        let _ = write!(key, " {:?} {:?}", call.group, call.kind);
    }
    key
}

fn call(op: &Op) -> Option<Call> {
    let CollectiveOp { x, group, kind } = op.collective()?;
    Some(Call { group, kind, dtype: x.dtype(), len: x.len() })
}

/// A device that runs nothing and collects the distinct ops of all lanes but the Host lane.
pub fn open(rank: Rank, plan: &Arc<Plan>) -> (Device, Rc<RefCell<DistinctOps>>) {
    let distinct = Rc::new(RefCell::new(DistinctOps::default()));
    let noted = Rc::clone(&distinct);
    let note = move |op: AdmittedOp| {
        if op.lane != Lane::Host {
            noted.borrow_mut().note(op);
        }
    };
    (Device::new(rank, Arc::clone(plan), Box::new(Onlooker(note))), distinct)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Epilogue, Error, Reduction};

    #[test]
    fn ops_of_one_kind_are_noted_once_and_collectives_of_every_length() -> Result<(), Error> {
        let mut plan = Plan::default();
        let mut tensor =
            |name: &str, shape| plan.tensor((Arena::Device, "test"), name, Dtype::F32, shape);
        let [a, b, c] = ["a", "b", "c"].map(|name| tensor(name, (16, 16)));
        let long = tensor("long", (1, 1000));
        let (rank, plan) = (Rank { tp: 0, tp_size: 2, dp: 0, dp_size: 1 }, Arc::new(plan));
        let (dev, distinct) = open(rank, &plan);
        [a, b, long].into_iter().try_for_each(|t| dev.write(t, &|_| 0.0))?;
        for _ in 0..2 {
            dev.submit(Lane::Compute, Op::product(a, b, c));
            dev.submit(
                Lane::Compute,
                Op::Gemm { a: b, b: a, c, bias: None, add: false, epilogue: Epilogue::None },
            );
            dev.submit(
                Lane::Compute,
                Op::Gemm { a: a.t(), b, c, bias: None, add: false, epilogue: Epilogue::None },
            );
        }
        for x in [long.slice(0..8), long] {
            let reduce = Reduction::Sum;
            dev.submit(Lane::TpComm, Op::AllReduce { x, reduce, group: Group::Tp });
        }
        dev.sync_all()?;
        let distinct = distinct.borrow();
        assert_eq!(distinct.ops.iter().filter(|op| op.op.name() == "gemm").count(), 2);
        let lens: Vec<usize> = distinct.calls.iter().map(|call| call.len).collect();
        assert_eq!(lens, [8, 1000]);
        Ok(())
    }
}
