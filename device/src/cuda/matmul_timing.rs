//! Algorithms of matmuls by the clock, during the warm-up. Rank 0 times the matmuls of its program on
//! the planned buffers, while the other ranks wait for its choices.

use super::Gpu;
use super::blas::{MatmulForm, MatmulForms, WORKSPACE};
use super::blaslt::{self, MOST_ALGORITHMS, Product};
use super::compile::{cache_folder, read, write};
use super::driver::{self, Stream, TimedEvent};
use super::matmul_choices::{Choice, MatmulChoices, TimedSelection, printable};
use crate::op::Product as Gemm;
use crate::ranks::rendezvous::Arrival;
use crate::{AdmittedOp, Error, Group, Lane, Tensor};
use std::collections::BTreeMap;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::time::Instant;
use topology::counted;
use xxhash_rust::xxh3::xxh3_128;

/// Choices by the text of a shape.
type ChoicesByShape = BTreeMap<String, Choice>;

/// Number of times that each way is timed. The ways take turns, since the GPU's clock drifts.
const ROUNDS: usize = 11;
/// Shortest time of a measurement, in seconds, and most runs for it.
const LEAST_SECONDS: f64 = 1e-3;
const MOST_RUNS: f64 = 20.0;

/// Index of the fastest way; `seconds` has the times of each way by round. Another way than the
/// first counts as faster if the gain of its median round is larger than the spread of its rounds,
/// each compared with the first way's time in the same round. The fastest and the slowest round are
/// left out of the spread. Of eight equally fast ways with normal noise, the first stays in all but
/// about 1 of 1,000 cases.
fn index_of_fastest(seconds: &[[f64; ROUNDS]]) -> usize {
    let Some((first, others)) = seconds.split_first() else {
        unreachable!("there is a way for every matmul")
    };
    let median = |way: &[f64; ROUNDS]| {
        let mut ratios: [f64; ROUNDS] = std::array::from_fn(|round| way[round] / first[round]);
        ratios.sort_unstable_by(f64::total_cmp);
        let spread = ratios[ROUNDS - 2] - ratios[1];
        Some(ratios[ROUNDS / 2]).filter(|median| median + spread < 1.0)
    };
    let faster = others.iter().enumerate().filter_map(|(i, way)| Some((i + 1, median(way)?)));
    faster.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(i, _)| i)
}

/// The GPU, driver and library that choices are for, in printable ASCII.
fn machine(gpu: usize) -> Result<String, String> {
    let name = printable(&driver::device_name(gpu)?);
    let (sm, processors) = (driver::device_sm(gpu)?, driver::device_processors(gpu)?);
    let (driver, library) = (driver::version()?, blaslt::version()?);
    Ok(format!(
        "{name}, sm_{sm}, {processors} multiprocessors, driver {driver}, cuBLASLt {library}, workspace {WORKSPACE}"
    ))
}

/// The file of a machine's choices.
fn cache_file(machine: &str) -> Option<PathBuf> {
    let name = format!("matmuls-{:032x}.txt", xxh3_128(machine.as_bytes()));
    cache_folder().map(|folder| folder.join(name))
}

/// The choices of the cache for a machine. A damaged file has none, and is replaced.
fn cached(path: &Path, machine: &str) -> ChoicesByShape {
    let text = read(path).and_then(|bytes| String::from_utf8(bytes).ok());
    let choices = text.and_then(|text| MatmulChoices::of_lines(text.lines()).ok());
    let own = choices.filter(|choices| choices.machine() == machine);
    own.map(|choices| choices.by_shape().clone()).unwrap_or_default()
}

fn keep(path: &Path, choices: &MatmulChoices) {
    if let Err(error) = write(path, choices.lines().join("\n").as_bytes()) {
        tracing::warn!("the matmuls of each new run are timed again: {}: {error}", path.display());
    }
}

/// The choices of the run's checkpoint, if they are for this machine.
fn stored(selection: &TimedSelection, machine: &str) -> ChoicesByShape {
    match selection.stored() {
        Some(stored) if stored.machine() == machine => stored.by_shape().clone(),
        Some(stored) => {
            tracing::warn!(
                "the checkpoint's choices of matmuls are for another machine ({}) than this one ({machine}): onebox \
                 chooses anew, and results may differ by rounding",
                stored.machine()
            );
            ChoicesByShape::new()
        }
        None => ChoicesByShape::new(),
    }
}

impl Gpu {
    /// Warms up with the run's choices, which rank 0 makes. All ranks call it.
    pub(super) fn warm_up_timed(
        &self,
        ops: &[AdmittedOp],
        selection: &TimedSelection,
    ) -> Result<(), Error> {
        let (rank, world) = (self.rank(), &self.host.world);
        let first = rank.index() == 0;
        if first {
            let choices = self.choose(ops, selection)?;
            let text = choices.lines().join("\n");
            let away = (1..world.num_ranks()).filter(|to| world.is_remote_rank(*to));
            away.for_each(|to| {
                world.send(rank, Lane::Compute, Group::World, to, text.as_bytes());
            });
            selection.set(choices);
        }
        let (op, site, tensor) = ("open: matmuls", Location::caller(), Tensor::NONE);
        let arrival = Arrival { op, site, tensor, detail: 0, payload: 0 };
        let met = world.meet(rank, Lane::Compute, Group::World, arrival)?;
        if first {
            return Ok(());
        }
        let choices = if world.is_remote_rank(0) {
            let parcel = met.parcel(0);
            let text = std::str::from_utf8(parcel.bytes()).map_err(|e| e.to_string());
            let choices = text.and_then(|text| MatmulChoices::of_lines(text.lines()));
            let choices = choices.map_err(|why| format!("rank 0's choices of matmuls: {why}"));
            choices.map_err(|problem| self.not_set_up(problem))?
        } else {
            let Some(choices) = selection.chosen() else {
                unreachable!("rank 0 chooses before it comes to the meeting")
            };
            choices.clone()
        };
        self.blas.borrow_mut().choose(choices.by_shape().clone());
        self.warm_up(ops)?;
        let refusals = self.blas.borrow_mut().take_refusals();
        if let Some(why) = refusals.first() {
            tracing::warn!(
                "rank {}: cuBLASLt refuses {} of rank 0, such as {why}. This rank takes the library's first algorithm",
                rank.index(),
                counted(refusals.len(), "choice")
            );
        }
        Ok(())
    }

    /// Warms up rank 0, and chooses: stored choices count first, then those of the cache, and the
    /// other matmuls are timed.
    fn choose(
        &self,
        ops: &[AdmittedOp],
        selection: &TimedSelection,
    ) -> Result<MatmulChoices, Error> {
        let machine = machine(self.context.ordinal).map_err(|problem| self.not_set_up(problem))?;
        let path = cache_file(&machine);
        let mut cache = path.as_deref().map(|path| cached(path, &machine)).unwrap_or_default();
        let mut all = stored(selection, &machine);
        self.blas.borrow_mut().choose(cache.clone());
        self.blas.borrow_mut().choose(all.clone());
        // What the run needs is loaded before the other candidates, in case the memory ends.
        self.warm_up(ops)?;
        let program =
            move || ops.iter().filter_map(move |op| self.forms(op)).flat_map(MatmulForms::all);
        program().try_for_each(|form| {
            let ready = self.blas.borrow_mut().prepare(&form);
            ready.map_err(|problem| self.not_set_up(problem))
        })?;
        let refusals = self.blas.borrow_mut().take_refusals();
        if let Some(why) = refusals.first() {
            tracing::warn!(
                "cuBLASLt refuses {} for matmuls, such as {why}. onebox chooses anew for these, and results may \
                 differ by rounding",
                counted(refusals.len(), "stored choice")
            );
        }
        let timed = self.time_matmuls(ops)?;
        if let Some(path) = path.as_deref().filter(|_| !timed.is_empty()) {
            cache.extend(timed);
            keep(path, &MatmulChoices::new(machine.clone(), cache));
        }
        let (has_stored, mut unknown) = (!all.is_empty(), 0);
        for form in program() {
            let Some(choice) = self.blas.borrow().choice(&form.shape) else {
                unreachable!("every matmul of the program has a choice now")
            };
            unknown += usize::from(all.insert(form.shape.to_string(), choice).is_none());
        }
        if has_stored && unknown > 0 {
            tracing::warn!(
                "the checkpoint has no choice for {} of this run: another layout or another onebox wrote it. onebox \
                 chooses for these, and results may differ by rounding",
                counted(unknown, "matmul")
            );
        }
        Ok(MatmulChoices::new(machine, all))
    }

    /// The forms of the matmul of an op, if the op is a matmul.
    fn forms(&self, op: &AdmittedOp) -> Option<MatmulForms> {
        Gemm::of(&op.op).map(|gemm| MatmulForms::of(&gemm, &|t| self.peer.at(t), None))
    }

    /// Times the matmuls of the program that have no choice, and sets their choices.
    fn time_matmuls(&self, ops: &[AdmittedOp]) -> Result<ChoicesByShape, Error> {
        let (started, mut timed) = (Instant::now(), ChoicesByShape::new());
        let (mut others, mut without_epilogue) = (0, 0);
        for op in ops {
            let Some(forms) = self.forms(op) else { continue };
            let timing = MatmulTiming { gpu: self, op, plain: forms.plain };
            for form in forms.all() {
                if self.blas.borrow().choice(&form.shape).is_some() {
                    continue;
                }
                let (index, way) = timing.fastest_way(&form)?;
                others += usize::from(index > 0 && way.is_some());
                without_epilogue += usize::from(index > 0 && way.is_none());
                let choice = self.blas.borrow_mut().decide(form.shape, way);
                timed.insert(form.shape.to_string(), choice);
            }
        }
        if !timed.is_empty() {
            tracing::info!(
                "timed {} in {:.1} s: {others} by another algorithm than the library's first, {without_epilogue} without the epilogue",
                counted(timed.len(), "matmul"),
                started.elapsed().as_secs_f64()
            );
        }
        Ok(timed)
    }

    fn not_set_up(&self, problem: String) -> Error {
        Error::GpuSetup { rank: self.rank().index(), gpu: self.context.ordinal, problem }
    }
}

/// The ways of one matmul of the program. A way is an algorithm of the library, or `None`: the
/// matmul without its epilogue, then the kernel of the epilogue.
struct MatmulTiming<'a> {
    gpu: &'a Gpu,
    op: &'a AdmittedOp,
    plain: MatmulForm,
}

impl MatmulTiming<'_> {
    fn stream(&self) -> &Stream {
        self.gpu.stream(self.op.lane)
    }

    /// Enqueues the matmul.
    fn run(&self, form: &MatmulForm, way: Option<&Product>) -> Result<(), Error> {
        let (gpu, stream) = (self.gpu, self.stream());
        let failed = |problem: String| gpu.library_failed(self.op, stream, &problem);
        if let Some(product) = way {
            return gpu.blas.borrow().run_product(stream, product, form.at).map_err(failed);
        }
        if !gpu.blas.borrow_mut().run(stream, self.plain).map_err(failed)? {
            return Err(gpu.refused(self.op, "cuBLASLt has no algorithm for this product"));
        }
        let gemm = Gemm::of(&self.op.op);
        let separate_op = gemm.and_then(|gemm| gemm.epilogue.separate_op(gemm.a, gemm.c));
        separate_op.map_or(Ok(()), |separate_op| gpu.kernels(self.op, stream, &separate_op))
    }

    /// Seconds of `runs` runs.
    fn seconds(&self, form: &MatmulForm, way: Option<&Product>, runs: usize) -> Result<f64, Error> {
        const WHAT: &str = "timing of matmuls";
        let (gpu, stream) = (self.gpu, self.stream());
        let start = gpu.own(WHAT, TimedEvent::record(stream))?;
        for _ in 0..runs {
            self.run(form, way)?;
        }
        let end = gpu.own(WHAT, TimedEvent::record(stream))?;
        gpu.own(WHAT, stream.synchronize())?;
        gpu.own(WHAT, end.since(&start))
    }

    /// Times all ways of a form. Returns the index of the fastest, and the way.
    fn fastest_way(&self, form: &MatmulForm) -> Result<(usize, Option<Product>), Error> {
        let found = self.gpu.blas.borrow().candidates(form, MOST_ALGORITHMS);
        let failed = |problem: String| self.gpu.library_failed(self.op, self.stream(), &problem);
        let mut ways: Vec<Option<Product>> = found.map_err(failed)?.into_iter().map(Some).collect();
        if form.shape != self.plain.shape {
            ways.push(None);
        }
        let (mut usable, mut problem) = (Vec::new(), None);
        for way in ways {
            // The first run loads code, for which the memory may be too small.
            match self.run(form, way.as_ref()) {
                Ok(()) => usable.push(way),
                Err(error) => {
                    tracing::info!("a way to run {} is left out: {error}", form.shape);
                    problem.get_or_insert(error);
                }
            }
        }
        self.gpu.own("timing of matmuls", self.stream().synchronize())?;
        let Some(first) = usable.first() else {
            let none = || self.gpu.refused(self.op, "cuBLASLt has no algorithm for this product");
            return Err(problem.unwrap_or_else(none));
        };
        if usable.len() == 1 {
            return Ok((0, usable.swap_remove(0)));
        }
        let once = self.seconds(form, first.as_ref(), 1)?;
        let runs = (LEAST_SECONDS / once).clamp(1.0, MOST_RUNS) as usize;
        let mut seconds = vec![[0.0; ROUNDS]; usable.len()];
        for round in 0..ROUNDS {
            for (way, seconds) in usable.iter().zip(&mut seconds) {
                seconds[round] = self.seconds(form, way.as_ref(), runs)?;
            }
        }
        let index = index_of_fastest(&seconds);
        Ok((index, usable.swap_remove(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of a way that takes `base` seconds, with `noise` as the largest share that is added.
    fn noisy(base: f64, noise: f64, seed: u64) -> [f64; ROUNDS] {
        std::array::from_fn(|round| {
            let drawn = xxh3_128(&(seed * 1000 + round as u64).to_le_bytes()) as u64;
            base * (1.0 + noise * drawn as f64 / u64::MAX as f64)
        })
    }

    #[test]
    fn the_first_way_stays_unless_another_is_faster_by_more_than_the_noise() {
        assert_eq!(index_of_fastest(&[[1.0; ROUNDS]]), 0);
        assert_eq!(index_of_fastest(&[[1.0; ROUNDS], [1.0; ROUNDS]]), 0);
        assert_eq!(
            index_of_fastest(&[[1.0; ROUNDS], [0.9; ROUNDS], [0.8; ROUNDS], [0.85; ROUNDS]]),
            2
        );
        assert_eq!(index_of_fastest(&[[0.0; ROUNDS], [0.0; ROUNDS]]), 0);
        // A gain of 10 % in noise of 2 %, and one of 3 % in noise of 22 %.
        let mut taken = [0, 0];
        for seed in 0..50 {
            let way = |base: f64, noise: f64, i: u64| noisy(base, noise, 10 * seed + i);
            taken[0] += index_of_fastest(&[way(1.0, 0.02, 0), way(0.9, 0.02, 1)]);
            taken[1] += index_of_fastest(&[way(1.0, 0.22, 2), way(0.97, 0.22, 3)]);
        }
        assert!(taken[0] == 50 && taken[1] < 4, "{taken:?} of 50");
        let ways = |seed: u64| -> [[f64; ROUNDS]; 8] {
            std::array::from_fn(|i| noisy(1.0, 0.1, 8 * seed + i as u64))
        };
        let changed = (0..1000).filter(|seed| index_of_fastest(&ways(*seed)) > 0).count();
        assert!(changed < 10, "{changed} of 1000 choices follow the noise");
    }

    #[test]
    fn the_clock_may_drift_between_rounds_and_one_round_may_be_slow() {
        // The GPU becomes slower by a fifth while the ways take turns.
        let drift = |base: f64| -> [f64; ROUNDS] {
            std::array::from_fn(|round| base * (1.0 + 0.02 * round as f64))
        };
        assert_eq!(index_of_fastest(&[drift(1.0), drift(0.95)]), 1);
        let mut delayed = [0.9; ROUNDS];
        delayed[4] = 3.0;
        assert_eq!(index_of_fastest(&[[1.0; ROUNDS], delayed]), 1);
    }
}
