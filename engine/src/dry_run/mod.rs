//! Steps without data. A run collects the ops of some steps before it starts, and a stand-in driver
//! runs steps to account for their memory.

mod count;

pub use count::{
    IDLE, alike, count, first_rank, play as play_steps, typical_step, with_micro_batches,
    with_steps,
};

use crate::TIMEOUT;
use config::Config;
use device::cuda::{self, Collectives, CudaOptions, MatmulSelection, Peers};
use device::warm::{self, DistinctOps};
use device::{Communicator, Device, Error, HostPlace, HostWork, Rank};
use layout::attention::attention_library;
use layout::build::{RankLayout, op_scratch};
use std::sync::Arc;

/// Returns `built` with a few micro-batches that have every kind of op: the first group, one, the
/// last.
fn few(built: &RankLayout, config: &Config) -> RankLayout {
    let micro_batches = built.micro_batches.min(layout::build::vertical_width(config) + 2);
    let optimizer = Arc::new(built.optimizer.with_micro_batches(micro_batches));
    RankLayout { micro_batches, optimizer, ..built.clone() }
}

/// Collects the distinct ops of `rank`'s first steps, at the addresses of `built`.
///
/// # Errors
/// The checks of a step refuse it. This is a defect of onebox.
pub(crate) fn distinct(
    config: &Config,
    built: &RankLayout,
    rank: Rank,
) -> Result<DistinctOps, Error> {
    let built = few(built, config);
    let (dev, distinct) = warm::open(rank, &built.plan);
    let typical = typical_step(config);
    // The first step, and two typical steps. The steps between are like the first step.
    let steps = std::iter::once(1).chain(typical.max(2)..=typical + 1);
    play(&with_steps(config, 3), &built, &dev, steps, &|_| {})?;
    Ok(distinct.take())
}

/// Runs `steps` without data. Calls `passed` with 0 before the first step, and with each finished
/// step.
fn play(
    config: &Config,
    built: &RankLayout,
    dev: &Device,
    steps: impl Iterator<Item = u64>,
    passed: &dyn Fn(u64),
) -> Result<(), Error> {
    let mut trainer = count::blank_trainer(config, built, dev)?;
    dev.sync_all()?;
    passed(0);
    for step in steps {
        dev.begin_step(step);
        let decided = trainer.train_step(dev, step);
        dev.sync(decided)?;
        dev.sync_all()?;
        passed(step);
    }
    trainer.finish_update(dev);
    dev.sync_all()
}

/// Opens the GPUs of all ranks as a run does, and runs `steps` steps on them without data. Host
/// tasks do not run, and host memory has addresses only. A stand-in driver, which moves no data,
/// accounts for the memory; real GPUs would compute on zeros. Calls `passed` with the rank and 0
/// before the first step, then with the rank and each finished step.
///
/// # Errors
/// The first error of a rank, for example if the plan does not fit next to other contents of its
/// GPU.
pub fn dry_run(
    config: &Config,
    built: &RankLayout,
    steps: u64,
    passed: &(dyn Fn(usize, u64) + Sync),
) -> Result<(), Error> {
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    let world = Communicator::new(tp, dp, TIMEOUT);
    let peers = Arc::new(Peers::new(tp * dp));
    let one = |rank: Rank| {
        let options = CudaOptions {
            gpu: None,
            host: HostPlace { untouched: true, ..HostPlace::default() },
            peers: Arc::clone(&peers),
            collectives: Collectives::Auto,
            attention: attention_library(config),
            // The stand-in driver of a dry run has no times.
            matmuls: MatmulSelection::Heuristic,
            scratch: op_scratch(config),
            work: HostWork { rehearsal: true, ..HostWork::default() },
            programs: offload::PROGRAMS,
            warm_up: Arc::new(distinct(config, built, rank)?),
        };
        let dev = cuda::open(rank, &built.plan, &world, &options)?;
        play(&with_steps(config, steps), built, &dev, 1..=steps, &|step| {
            passed(rank.index(), step);
        })?;
        dev.finish()
    };
    std::thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let started = std::thread::Builder::new().spawn_scoped(scope, move || one(rank));
            started.map_err(|error| world.not_started(rank, &error))
        };
        let threads: Vec<_> = Rank::all(tp, dp).map(spawn).collect();
        // A thread that did not start has reported this to `world`.
        let ended = threads.into_iter().flatten().map(|thread| thread.join());
        let died = |why: String| Error::RankDied { rank: 0, step: 0, why };
        let all: Vec<Result<(), Error>> = ended
            .map(|end| end.unwrap_or_else(|_| Err(died("its thread panicked".into()))))
            .collect();
        match world.failure() {
            Some((_, _, error)) => Err(error),
            None => all.into_iter().collect(),
        }
    })
}
