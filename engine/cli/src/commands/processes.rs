//! Processes that a launcher starts for one run: they agree before the run, and end with one code.

use super::exit::{CommandError, Failable, code};
use crate::report::message::message;
use config::{CheckpointWriter, Config, DeviceConfig};
use device::Processes;
use device::cuda::LibraryInfo;
use device::numerics::SimdPath;
use files::input;
use layout::LocalMachine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use topology::counted;
use xxhash_rust::xxh3::xxh3_64;

/// Environment variables of launchers with the number of processes.
const SIZES: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];
/// Environment variables that Slurm sets in a step with `--mpi=pmix`.
const SLURM: [&str; 2] = ["PMIX_RANK", "SLURM_STEP_NUM_TASKS"];

/// Lines that this process does not print, since process 0 prints the same lines.
static HELD_BACK: OnceLock<Mutex<String>> = OnceLock::new();

/// Whether this process keeps `text` back. A failure of this process shows the text.
pub(super) fn holds_back(text: &str) -> bool {
    let Some(held) = HELD_BACK.get() else { return false };
    let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
    *held += text.trim_end();
    held.push('\n');
    true
}

fn held_back() -> String {
    let Some(held) = HELD_BACK.get() else { return String::new() };
    std::mem::take(&mut *held.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Number of processes that a launcher has started with this one; `None` without a launcher.
fn launched() -> Option<usize> {
    let number = |name: &&str| std::env::var(name).ok()?.parse().ok();
    let of_slurm = || {
        let [rank, tasks] = SLURM;
        std::env::var_os(rank).and_then(|_| number(&tasks))
    };
    SIZES.iter().find_map(number).or_else(of_slurm)
}

/// Reason why `count` processes cannot share the ranks of `config`, and the remedy.
fn refusal(config: &Config, count: usize) -> Option<String> {
    let (ranks, tensor) = (config.world_size(), config.parallel.tensor);
    if count < 2 {
        return None;
    }
    if matches!(config.device, DeviceConfig::Sim { .. }) {
        return Some(format!(
            "device: `Sim(..)` has no data that could be dealt to several processes, and the launcher has started {count}"
        ));
    }
    if !ranks.is_multiple_of(count) {
        return Some(format!(
            "parallel.tensor x parallel.data is {}, which {count} processes cannot share evenly: start as many as divide it",
            counted(ranks, "rank")
        ));
    }
    let each = ranks / count;
    if !each.is_multiple_of(tensor) && !config.parallel.tensor_across_nodes {
        return Some(format!(
            "parallel.tensor: groups of {tensor} ranks would have ranks in several processes, each of which has {each}: start \
             fewer processes, or set `parallel.tensor_across_nodes=true`, and sums inside layers go through the network"
        ));
    }
    (config.train.checkpoint_writer == CheckpointWriter::Background).then(|| {
        "train.checkpoint_writer: in several processes training waits while checkpoints are written, so `Background` cannot be \
         done: set `Auto`"
            .to_owned()
    })
}

/// Seconds without a sign of life after which a process counts as failed.
pub(super) const SILENCE: u64 = 60;

/// The processes of a run, or this one alone.
pub(super) struct Team {
    pub(super) processes: Option<Arc<Processes>>,
    /// Machine of this process, with the ranks assigned to this process.
    pub(super) machine: LocalMachine,
}

/// Result of one stage that a process sends to the others.
#[derive(Serialize, Deserialize)]
enum StageResult {
    /// Names and values of facts that must be equal in all processes.
    Done(Vec<(String, String)>),
    /// Exit code and message of a failure.
    Failed(u8, String),
}

impl Team {
    /// Connects the processes that were started together. A process that is silent for `silence`
    /// seconds counts as failed.
    pub(super) fn join(silence: u64) -> Result<Self, CommandError> {
        let silence = Duration::from_secs(silence);
        let processes = launched().map(|count| join(count, silence)).transpose()?.flatten();
        if processes.as_ref().is_some_and(|processes| processes.me() > 0) {
            HELD_BACK.get_or_init(Mutex::default);
        }
        let machine = processes.as_deref().map(LocalMachine::of_processes).unwrap_or_default();
        Ok(Self { processes, machine })
    }

    pub(super) fn is_first(&self) -> bool {
        self.processes.as_ref().is_none_or(|processes| processes.me() == 0)
    }

    /// Text about the processes: `processes 0 on a (ranks 0 to 3), 1 on b (ranks 4 to 7)`.
    pub(super) fn words(&self, config: &Config) -> Option<String> {
        let processes = self.processes.as_ref()?;
        let of = |process| {
            let ranks = processes.ranks(process, config.world_size());
            let (first, last) = (ranks.start, ranks.end - 1);
            let ranks = match first == last {
                true => format!("rank {first}"),
                false => format!("ranks {first} to {last}"),
            };
            format!("{process} on {} ({ranks})", processes.node(process))
        };
        let all: Vec<String> = (0..processes.count()).map(of).collect();
        Some(format!("processes {}", all.join(", ")))
    }

    /// Refuses a config that this number of processes cannot run.
    pub(super) fn check(&self, config: &Config) -> Result<(), CommandError> {
        let count = self.processes.as_ref().map_or(1, |processes| processes.count());
        refusal(config, count).map_or(Ok(()), |why| Err(CommandError::new(code::CONFIG, why)))
    }

    /// Waits until all processes have finished the stage `what`. If a process fails, all fail with
    /// the error of the first failed process. `facts` must be equal in all processes.
    pub(super) fn all<T>(
        &self,
        what: &str,
        own: Result<T, CommandError>,
        facts: impl FnOnce(&T) -> Vec<(String, String)>,
    ) -> Result<T, CommandError> {
        let Some(processes) = &self.processes else { return own };
        let result = match &own {
            Ok(done) => StageResult::Done(facts(done)),
            Err(failed) => StageResult::Failed(failed.code, held_back() + &failed.message),
        };
        let all = self.exchange::<StageResult>(processes, what, &result)?;
        let mut first = None;
        for (process, result) in all.iter().enumerate() {
            match (result, &first) {
                (StageResult::Failed(code, message), _) => {
                    let message = format!("{}: {message}", processes.name(process));
                    let other = CommandError::new(*code, message);
                    return Err(own.err().filter(|_| processes.me() == process).unwrap_or(other));
                }
                (StageResult::Done(facts), None) => first = Some(facts),
                (StageResult::Done(facts), Some(first)) => {
                    differs(processes, process, facts, first)?;
                }
            }
        }
        own
    }

    /// Sends the value of process 0 to all processes; the other processes pass `None`.
    pub(super) fn first<T: Serialize + for<'a> Deserialize<'a>>(
        &self,
        what: &str,
        own: Option<T>,
    ) -> Result<T, CommandError> {
        let Some(processes) = &self.processes else {
            return own.ok_or("a process alone is the first").fail_with(code::INTERNAL);
        };
        let own: Vec<T> = own.into_iter().collect();
        let all = self.exchange::<Vec<T>>(processes, what, &own)?;
        let first = all.into_iter().next().and_then(|first| first.into_iter().next());
        first.ok_or("process 0 tells what the others ask for").fail_with(code::INTERNAL)
    }

    /// Facts that must be equal in all processes: program and SIMD path, and for a config on real
    /// GPUs also the GPUs and their libraries.
    pub(super) fn facts(&self, config: Option<&Config>) -> Vec<(String, String)> {
        /// Maximum bytes of the program's file.
        const LARGEST: u64 = 1 << 32;
        let program =
            input::bytes(Path::new("/proc/self/exe"), LARGEST).map_or(0, |bytes| xxh3_64(&bytes));
        let program = format!("{} ({program:016x})", files::VERSION);
        let path = SimdPath::current().to_string();
        let mut all = vec![("the program", program), ("the instructions", path)];
        if config.is_some_and(|config| config.device == DeviceConfig::Cuda) {
            let gpus = self.machine.cuda().gpus.iter().map(|gpu| gpu.name.clone());
            let kinds: BTreeSet<String> = gpus.collect();
            all.push(("the GPUs", kinds.into_iter().collect::<Vec<_>>().join(", ")));
            let libraries = self.machine.cuda().libraries.iter();
            let text = |library: &LibraryInfo| {
                format!("{} {}", library.name, library.version.as_deref().unwrap_or("missing"))
            };
            all.push(("the libraries", libraries.map(text).collect::<Vec<_>>().join(", ")));
        }
        all.into_iter().map(|(name, is)| (name.into(), is)).collect()
    }

    fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
        &self,
        processes: &Processes,
        what: &str,
        own: &T,
    ) -> Result<Vec<T>, CommandError> {
        let own = serde_json::to_vec(own).fail_with(code::INTERNAL)?;
        let lost = |why| CommandError::new(processes.ended().unwrap_or(code::RANK), why);
        let all = processes.exchange(what, own).map_err(lost)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
        let read: Result<Vec<T>, _> = all.iter().map(read).collect();
        read.map_err(|_| CommandError::new(code::CONFIG, "another program runs in another process"))
    }

    /// Ends this process. All processes end with the code of process 0, which prints the reason.
    pub(super) fn end(&self, ended: Result<(), CommandError>) -> Result<(), CommandError> {
        let Some(processes) = &self.processes else { return ended };
        let mut own = ended.as_ref().err().map_or(0, |failed| failed.code);
        if self.is_first() {
            if let Err(failed) = &ended {
                failed.report();
            }
        } else if own == 0 || own == code::INTERRUPTED {
            own = processes.await_first().unwrap_or(code::RANK);
        }
        let lost = !self.is_first() && processes.is_lost(0);
        if let (Err(failed), true) = (&ended, lost) {
            super::say_now(&message(&format!("error: {}", failed.message)));
        }
        crate::report::stderr::flush();
        let left = processes.part(own);
        if let Some(why) = left.as_ref().filter(|_| own == 0) {
            own = code::RANK;
            super::say_now(&message(&format!("error: {why}")));
        }
        processes.close(left.map(|_| own));
        if own == 0 { Ok(()) } else { Err(CommandError::silent(own)) }
    }
}

fn differs(
    processes: &Processes,
    process: usize,
    facts: &[(String, String)],
    first: &[(String, String)],
) -> Result<(), CommandError> {
    let Some(((name, first_value), (_, value))) = first.iter().zip(facts).find(|(a, b)| a != b)
    else {
        return Ok(());
    };
    let why = format!(
        "{} has {name} {value}, and {} has {first_value}: all processes of a run need the same",
        processes.name(process),
        processes.name(0)
    );
    Err(CommandError::new(code::CONFIG, why))
}

#[cfg(feature = "mpi")]
fn join(_: usize, silence: Duration) -> Result<Option<Arc<Processes>>, CommandError> {
    device::mpi::join(silence).map(Some).fail_with(code::RANK)
}

#[cfg(not(feature = "mpi"))]
fn join(count: usize, _: Duration) -> Result<Option<Arc<Processes>>, CommandError> {
    if count < 2 {
        return Ok(None);
    }
    let why = format!(
        "a launcher has started this program {count} times for one run, and this onebox is built without MPI: build it with \
         `--features mpi` (docs/cluster.md)"
    );
    Err(CommandError::new(code::CONFIG, why))
}
