//! A step without data: what it asks of a GPU, gathered before a run, and played on a stand-in driver that only
//! accounts for memory.

mod count;

pub use count::{
    IDLE, alike, count, first_rank, play as play_steps, typical_step, with_micro_batches,
    with_steps,
};

use crate::TIMEOUT;
use config::Config;
use device::cuda::{self, Collectives, CudaOptions, Peers};
use device::warm::{self, DistinctOps};
use device::{Communicator, Device, Error, HostPlace, HostWork, Rank};
use layout::build::{RankLayout, op_scratch};
use std::sync::Arc;

/// Micro-batches in which every kind of op of a step comes: the first ones, one between, the last.
fn few(built: &RankLayout, config: &Config) -> RankLayout {
    let micro_batches = built.micro_batches.min(layout::build::vertical_width(config) + 2);
    let optimizer = Arc::new(built.optimizer.with_micro_batches(micro_batches));
    RankLayout { micro_batches, optimizer, ..built.clone() }
}

/// The distinct ops of `rank`'s first steps, at the addresses of `built`.
///
/// # Errors
/// A step that its own checks refuse; that is a defect of onebox.
pub(crate) fn distinct(
    config: &Config,
    built: &RankLayout,
    rank: Rank,
) -> Result<DistinctOps, Error> {
    let built = few(built, config);
    let (dev, distinct) = warm::open(rank, &built.plan);
    let typical = typical_step(config);
    // The first, and two like all behind them: those between are like the first.
    let steps = std::iter::once(1).chain(typical.max(2)..=typical + 1);
    play(&with_steps(config, 3), &built, &dev, steps, &|_| {})?;
    Ok(distinct.take())
}

/// These steps without data; `passed` hears 0 before the first, and the number of each when it is over.
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

/// Opens the GPUs of all ranks as a run does and plays `steps` steps on them, without data and without tasks on the host, whose
/// memory is addresses alone. For the accounting of a stand-in driver: it moves nothing, and real GPUs would work on zeros.
/// `passed` hears the rank and 0 before the first step, then the rank and the step when one is over.
///
/// # Errors
/// The first that a rank meets: a plan that does not fit beside what else lies on its GPU.
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
        // One that has not started has told the world.
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
