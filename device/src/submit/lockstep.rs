//! Runs each op on two devices and compares its results. Both devices have the same inputs at each
//! op, since the reference gets the results of the device under test. A difference therefore
//! belongs to the op that shows it, and errors do not add up from op to op.

use crate::error::Site;
use crate::{
    AdmittedOp, BLOCK, Device, Dtype, Error, Event, Executor, Lane, Mode, Op, Plan, Tensor,
    ThreadTeam, ViewMut,
};
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

/// Number of elements that are compared at a time.
const PART: usize = 1 << 18;

/// Two devices of one rank with one plan.
#[derive(Debug)]
pub struct DevicePair {
    /// Device whose results are checked.
    pub subject: Device,
    /// Device whose results are right. Its memory is memory of the host.
    pub reference: Device,
}

/// The results of the ops so far.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// Number of ops that ran on both devices.
    pub ops: u64,
    /// Number of elements that were compared.
    pub elements: u64,
    /// The first op whose results differ. No op ran after it.
    pub discrepancy: Option<Discrepancy>,
}

/// An op whose results differ by more than rounding and the order of sums explain.
#[derive(Clone, Debug, PartialEq)]
pub struct Discrepancy {
    /// Number of the op in the program, from 1.
    pub number: u64,
    /// Name of the op.
    pub op: &'static str,
    /// Source line that submitted the op.
    pub site: Site,
    /// Name of the tensor in the plan.
    pub tensor: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Rows and columns of the range that the op writes.
    pub shape: (usize, usize),
    /// Number of elements that differ.
    pub differing: usize,
    /// Index of the worst element.
    pub index: usize,
    /// Its value on the device under test.
    pub got: f64,
    /// Its value on the reference.
    pub expected: f64,
    /// The largest difference that is allowed for this element.
    pub allowed: f64,
}

impl std::fmt::Display for Discrepancy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, op, site, tensor, dtype, shape, differing, .. } = self;
        let Self { index, got, expected, allowed, .. } = self;
        write!(
            f,
            "op {number}, {op} at {site}, writes `{tensor}`, {dtype:?} {} x {}: {differing} of {} numbers differ; number {index} is \
             {got:e} and should be {expected:e}, within {allowed:.1e}",
            shape.0,
            shape.1,
            shape.0 * shape.1
        )
    }
}

struct Lockstep {
    pair: DevicePair,
    plan: Arc<Plan>,
    comparison: Rc<RefCell<Comparison>>,
    error: RefCell<Option<Error>>,
    /// Elements of the device under test, and of the reference.
    parts: RefCell<[Vec<f64>; 2]>,
}

/// The worst element of a range so far.
struct WorstElement {
    /// Difference divided by the allowed difference.
    excess: f64,
    index: usize,
    got: f64,
    expected: f64,
    allowed: f64,
}

/// A device that runs each op on both devices of `pair`, which have the plan `plan`. It runs nothing
/// after the first discrepancy, and `sync` returns an error.
pub fn open(pair: DevicePair, plan: &Arc<Plan>) -> (Device, Rc<RefCell<Comparison>>) {
    let comparison = Rc::new(RefCell::new(Comparison::default()));
    let rank = pair.subject.rank();
    let executor = Lockstep {
        pair,
        plan: Arc::clone(plan),
        comparison: Rc::clone(&comparison),
        error: RefCell::new(None),
        parts: RefCell::default(),
    };
    (Device::new(rank, Arc::clone(plan), Box::new(executor)), comparison)
}

impl Lockstep {
    const fn devices(&self) -> [&Device; 2] {
        [&self.pair.subject, &self.pair.reference]
    }

    fn run(&self, lane: Lane, op: &Op, site: Site) -> Result<(), Error> {
        if let Op::Host { .. } | Op::Task { .. } = op {
            let problem = "devices in lockstep run no tasks of other crates".to_owned();
            return Err(Error::Op { op: op.name(), site, problem });
        }
        self.comparison.borrow_mut().ops += 1;
        for dev in self.devices() {
            dev.submit_at(lane, op.clone(), site);
            dev.sync(dev.record(lane))?;
        }
        let mut written = Vec::new();
        op.accesses(&mut |mode, t| written.extend((mode != Mode::Read).then_some(t)));
        for t in written {
            let t = self.defined(op, t);
            let Some(found) = self.compare(op, t, site)? else { continue };
            let (rank, op, problem) = (self.rank(), op.name(), found.to_string());
            self.comparison.borrow_mut().discrepancy = Some(found);
            return Err(Error::Task { rank, op, site, problem });
        }
        Ok(())
    }

    fn rank(&self) -> usize {
        self.pair.subject.rank().index()
    }

    /// The part of `t` that the op defines: a reduce-scatter leaves the parts of other ranks
    /// undefined. Of a window it is the whole span, since the devices agree in its gaps before.
    fn defined(&self, op: &Op, t: Tensor) -> Tensor {
        let t = if t.is_window() { t.span() } else { t };
        let Op::ReduceScatter { group, .. } = op else { return t };
        let (me, size) = self.pair.subject.rank().within(*group);
        t.shard(me, size)
    }

    /// Compares `t`, which the op has written, and gives the reference the values of the device
    /// under test.
    fn compare(&self, op: &Op, t: Tensor, site: Site) -> Result<Option<Discrepancy>, Error> {
        let rank = self.pair.subject.rank();
        let tolerance = op.tolerance(t, op.group().map_or(1, |group| rank.within(group).1));
        let largest = self.largest(t, site)?;
        self.pair.subject.touch(Mode::Read, t, site)?;
        let parts = &mut *self.parts.borrow_mut();
        let (mut worst, mut differing, mut is_equal) = (None::<WorstElement>, 0, true);
        for start in (0..t.len()).step_by(PART) {
            let part = t.slice(start..t.len().min(start + PART));
            for (dev, values) in self.devices().into_iter().zip(&mut *parts) {
                values.resize(part.len(), 0.0);
                load(dev, part, values)?;
            }
            let [got, expected] = &*parts;
            let mut same = true;
            for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
                if got == expected {
                    continue;
                }
                same = false;
                let (difference, allowed) =
                    ((got - expected).abs(), tolerance.limit(expected, largest));
                if difference <= allowed {
                    continue;
                }
                differing += 1;
                // A difference that is no number is the worst.
                let excess = if difference.is_nan() { f64::INFINITY } else { difference / allowed };
                if worst.as_ref().is_none_or(|worst| excess > worst.excess) {
                    let index = start + i;
                    worst = Some(WorstElement { excess, index, got, expected, allowed });
                }
            }
            if !same && differing == 0 {
                if is_equal {
                    self.pair.reference.touch(Mode::Write, t, site)?;
                    is_equal = false;
                }
                let memory = self.pair.reference.executor().in_memory_mut(part);
                store(memory.ok_or(Error::NoData)?, got);
            }
        }
        let number = {
            let mut comparison = self.comparison.borrow_mut();
            comparison.elements += t.len() as u64;
            comparison.ops
        };
        Ok(worst.map(|WorstElement { index, got, expected, allowed, .. }| Discrepancy {
            number,
            op: op.name(),
            site,
            tensor: self.plan.name(t).to_owned(),
            dtype: t.dtype(),
            shape: t.shape(),
            differing,
            index,
            got,
            expected,
            allowed,
        }))
    }

    /// The largest magnitude in `t` on the reference.
    fn largest(&self, t: Tensor, site: Site) -> Result<f64, Error> {
        self.pair.reference.touch(Mode::Read, t, site)?;
        let mut parts = self.parts.borrow_mut();
        let values = &mut parts[1];
        let mut largest = 0.0f64;
        for start in (0..t.len()).step_by(PART) {
            let part = t.slice(start..t.len().min(start + PART));
            values.resize(part.len(), 0.0);
            load(&self.pair.reference, part, values)?;
            largest = values.iter().fold(largest, |most, x| most.max(x.abs()));
        }
        Ok(largest)
    }
}

/// Copies a range of a device, which the rank's thread may access, to `values`.
fn load(dev: &Device, part: Tensor, values: &mut [f64]) -> Result<(), Error> {
    match dev.executor().in_memory(part) {
        Some(view) => {
            view.widen(values);
            Ok(())
        }
        None => dev.executor().read(part, values),
    }
}

/// Stores values that the type of `memory` has.
fn store(mut memory: ViewMut<'_>, values: &[f64]) {
    if let ViewMut::F64(exact) = &mut memory {
        exact.copy_from_slice(values);
        return;
    }
    let mut block = [0.0f32; BLOCK];
    for (i, values) in values.chunks(BLOCK).enumerate() {
        let narrow = &mut block[..values.len()];
        narrow.iter_mut().zip(values).for_each(|(to, from)| *to = *from as f32);
        memory.store(i * BLOCK, narrow);
    }
}

impl Executor for Lockstep {
    fn submit(&self, AdmittedOp { op, site, lane, .. }: AdmittedOp) {
        if self.error.borrow().is_some() {
            return;
        }
        if let Err(error) = self.run(lane, &op, site) {
            *self.error.borrow_mut() = Some(error);
        }
    }

    /// Does nothing, since each op has finished on both devices before the next one is submitted.
    fn wait(&self, _: Lane, _: &Event) {}

    fn sync(&self, _: Lane, _: u64) -> Result<(), Error> {
        self.error.borrow().clone().map_or(Ok(()), Err)
    }

    fn team(&self) -> Option<&ThreadTeam> {
        self.pair.reference.executor().team()
    }

    fn read(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        self.pair.subject.read(t, out)
    }

    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        self.devices().into_iter().try_for_each(|dev| dev.write(t, value))
    }

    fn write_f32(&self, t: Tensor, values: &[f32]) -> Result<(), Error> {
        for dev in self.devices() {
            dev.touch(Mode::Write, t, Location::caller())?;
            match dev.executor().in_memory_mut(t) {
                Some(mut memory) => memory.store(0, values),
                None => dev.executor().write_f32(t, values)?,
            }
        }
        Ok(())
    }

    fn fail(&self, step: u64, error: &Error) {
        self.devices().into_iter().for_each(|dev| dev.executor().fail(step, error));
    }

    fn finish(&self) {
        for dev in self.devices() {
            if let Err(error) = dev.leave() {
                tracing::warn!("a device in lockstep does not end in order: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{self, CpuOptions, Lanes, ScratchFloats};
    use crate::{Arena, Communicator, Dropout, Group, HostPlace, HostWork, Rank, Reduction};
    use std::time::Duration;

    const ALONE: Rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };

    fn device(rank: Rank, plan: &Arc<Plan>, world: &Arc<Communicator>) -> Device {
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::new(16, 8, 64, 64),
            work: HostWork::default(),
        };
        cpu::open(rank, plan, world, &options).unwrap()
    }

    /// A virtual GPU in lockstep with another one.
    fn pair(rank: Rank, plan: &Arc<Plan>, worlds: &[Arc<Communicator>; 2]) -> DevicePair {
        let [subject, reference] = [&worlds[0], &worlds[1]].map(|world| device(rank, plan, world));
        DevicePair { subject, reference }
    }

    fn worlds(tp_size: usize) -> [Arc<Communicator>; 2] {
        [(); 2].map(|()| Communicator::new(tp_size, 1, Duration::from_secs(20)))
    }

    /// The executor of a device with wrong results: the op `name` leaves `error` in one element.
    struct FaultyExecutor {
        inner: Device,
        name: &'static str,
        error: f64,
    }

    impl Executor for FaultyExecutor {
        fn submit(&self, AdmittedOp { op, site, lane, .. }: AdmittedOp) {
            let mut written = None;
            op.accesses(&mut |mode, t| {
                written = if mode == Mode::Read { written } else { Some(t) }
            });
            let wrong = op.name() == self.name;
            self.inner.submit_at(lane, op, site);
            self.inner.sync_all().unwrap();
            if let Some(t) = written.filter(|_| wrong) {
                let mut values = vec![0.0; t.len()];
                self.inner.read(t, &mut values).unwrap();
                values[7] += self.error;
                self.inner.write(t, &|i| values[i]).unwrap();
            }
        }
        fn wait(&self, _: Lane, _: &Event) {}
        fn sync(&self, _: Lane, _: u64) -> Result<(), Error> {
            Ok(())
        }
        fn read(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
            self.inner.read(t, out)
        }
        fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
            self.inner.write(t, value)
        }
        fn fail(&self, _: u64, _: &Error) {}
        fn finish(&self) {
            self.inner.leave().unwrap();
        }
    }

    /// Runs three ops. The op `name` of the device under test has a wrong element.
    fn compared(name: &'static str, error: f64) -> (Result<(), Error>, Comparison) {
        let mut plan = Plan::default();
        let mut tensor =
            |name: &str| plan.tensor((Arena::Device, "test"), name, Dtype::Bf16, (16, 16));
        let [a, b, c, d] = ["a", "b", "c", "d"].map(&mut tensor);
        let (plan, worlds) = (Arc::new(plan), worlds(1));
        let DevicePair { subject: inner, reference } = pair(ALONE, &plan, &worlds);
        let faulty = FaultyExecutor { inner, name, error };
        let subject = Device::new(ALONE, Arc::clone(&plan), Box::new(faulty));
        let (dev, comparison) = open(DevicePair { subject, reference }, &plan);
        for t in [a, b] {
            dev.write(t, &|i| (i % 13) as f64 / 8.0 - 0.75).unwrap();
        }
        // The sum with element 7 of the product is 0.
        dev.write(d, &|_| 15.0 / 64.0).unwrap();
        dev.submit(Lane::Compute, Op::product(a, b, c));
        dev.submit(Lane::Compute, Op::Add { x: c, into: d });
        dev.submit(Lane::Compute, Op::Gelu { x: d, y: a });
        let ended = dev.finish();
        let comparison = comparison.borrow().clone();
        (ended, comparison)
    }

    #[test]
    fn the_first_op_with_a_wrong_number_is_named_with_both_numbers() {
        let (ended, comparison) = compared("add", 0.5);
        let found = comparison.discrepancy.unwrap();
        assert_eq!((found.number, found.op, &*found.tensor), (2, "add", "d"));
        assert_eq!((found.differing, found.index), (1, 7));
        assert_eq!((found.got, found.expected), (0.5, 0.0));
        assert_eq!(comparison.ops, 2, "no op runs after it");
        let text = ended.unwrap_err().to_string();
        for part in ["add at ", "lockstep.rs", "`d`, Bf16 16 x 16: 1 of 256", "number 7 is "] {
            assert!(text.contains(part), "`{part}` is not in {text}");
        }
    }

    #[test]
    fn a_number_that_is_none_is_a_wrong_number() {
        let found = compared("gelu", f64::NAN).1.discrepancy.unwrap();
        assert_eq!((found.op, found.differing, found.index), ("gelu", 1, 7));
        assert!(found.got.is_nan());
    }

    /// The product has an error of one spacing, which would be too large for the sum.
    #[test]
    fn results_within_rounding_pass_and_the_reference_goes_on_from_them() {
        let (ended, comparison) = compared("gemm", 1.0 / 1024.0);
        assert!(ended.is_ok() && comparison.discrepancy.is_none(), "{comparison:?}");
        assert_eq!((comparison.ops, comparison.elements), (3, 3 * 256));
    }

    #[test]
    fn ranks_compare_their_parts_of_collectives() {
        let mut plan = Plan::default();
        let [x, y] =
            ["x", "y"].map(|name| plan.tensor((Arena::Device, "test"), name, Dtype::F32, (4, 8)));
        let (plan, worlds, group) = (Arc::new(plan), worlds(2), Group::Tp);
        let one = |rank: Rank| {
            let (dev, comparison) = open(pair(rank, &plan, &worlds), &plan);
            for t in [x, y] {
                dev.write(t, &|i| (i + rank.tp) as f64).unwrap();
            }
            dev.submit(Lane::Compute, Op::AllReduce { x, group, reduce: Reduction::Sum });
            dev.submit(Lane::Compute, Op::ReduceScatter { x: y, group });
            dev.submit(Lane::Compute, Op::Dropout { x, y: x, dropout: Dropout::NONE, scale: 1.0 });
            dev.finish().unwrap();
            let comparison = comparison.borrow();
            (comparison.ops, comparison.elements)
        };
        std::thread::scope(|scope| {
            let one = &one;
            let threads: Vec<_> =
                Rank::all(2, 1).map(|rank| scope.spawn(move || one(rank))).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), (3, 32 + 16 + 32));
            }
        });
    }
}
