//! Finds the checkpoint for `train --resume` and `--fork`, and checks that the run may continue.

use super::{CommandError, Failable, code, data, say};
use ::data::{Dataset, Tokenizer};
use checkpoint::{
    self, Checkpoint, CheckpointError, Difference, ReplacedCheckpoint, RunFolder, Summary,
    differences_of, gone, newest_as_restored, newest_until, open_named, replaced, restore,
    set_aside,
};
use config::{Adapter, Config, LoadedConfig, ResumeEffect, load_of_run};
use engine::run_dir::{RunDir, RunMode};
use files::directory::Directory;
use files::names::{CHECKPOINTS, CONFIG, FORKED, METRICS, TOKENIZER, WEIGHTS};
use files::path_text::ShownPath;
use files::{input, regular_file};
use layout::build::RankLayout;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use topology::format_bytes;

/// Returns the newest complete checkpoint of the run, or the source checkpoint of a fork that has
/// no checkpoint yet. Returns `None`, with a message, for a run that ended before its first
/// checkpoint. Newer broken checkpoints are named; if the run continues in its own directory, they
/// are set aside. `from`: directory of the run, or of a new fork's source. `own`: checkpoint folder
/// of a run that is not a new fork. A dry run has none; it says what a run would change, and changes
/// nothing.
pub(super) fn start(
    from: &Path,
    own: Option<&RunFolder>,
    loaded: &LoadedConfig,
    built: &RankLayout,
    data: &Dataset,
    tokenizer: Option<&Tokenizer>,
    mode: RunMode,
) -> Result<Option<Arc<Checkpoint>>, CommandError> {
    let folder = match own {
        Some(own) => own.find(),
        None => match Directory::open(&from.join(CHECKPOINTS)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(|folder| Some(Arc::new(folder))),
        },
    };
    let unreadable = |source| CheckpointError::Io { path: from.join(CHECKPOINTS), source };
    let folder = folder.map_err(|error| unusable(unreadable(error)))?;
    let is_dry = own.is_none() && mode == RunMode::Resume;
    let newest = |folder: &Arc<Directory>| {
        let restored = match own {
            _ if is_dry => say_replaced(folder),
            // A kill may have left the newest checkpoint under another name.
            Some(_) => restore(folder),
            None => Ok(()),
        };
        restored.map_err(unreadable)?;
        if is_dry { newest_as_restored(folder) } else { newest_until(folder, u64::MAX) }
    };
    let newest = folder.as_ref().map_or(Ok((None, Vec::new())), newest);
    let (mut found, broken) = newest.map_err(unusable)?;
    let why: Vec<String> = broken.iter().map(|(_, why)| why.to_string()).collect();
    let mut mode = mode;
    if found.is_none() && broken.is_empty() && mode == RunMode::Resume {
        nothing_gone(from, mode)?;
        found = fork_source(from)?;
        // The fork's settings may differ from the source's, but not from its own earlier settings.
        if found.is_some() {
            still_its_own(from, loaded, tokenizer)?;
            mode = RunMode::Fork;
        }
    }
    let Some(found) = found else {
        if let Some(step) = RunDir::finished_in(from)
            && why.is_empty()
            && mode == RunMode::Resume
        {
            let why = format!(
                "{}: the run finished at step {step} without a checkpoint, so nothing can go on from there; \
                 --overwrite starts it anew",
                from.shown()
            );
            return Err(CommandError::new(code::CHECKPOINT, why));
        }
        if why.is_empty() {
            may_start_over(from, mode)?;
            still_pretrained(from, loaded)?;
            say(&format!("{}: no complete checkpoint there; starting at step 1", from.shown()));
            return Ok(None);
        }
        let why = format!("no checkpoint can be used:\n  {}", why.join("\n  "));
        return Err(CommandError::new(code::CHECKPOINT, why));
    };
    why.iter().for_each(|why| say(&format!("warning: {why}")));
    let mut all = found.summary().differences(loaded, data).map_err(failed)?;
    all.extend(other_tokenizer(from, tokenizer)?);
    if mode == RunMode::Fork {
        keeps_random_weights(&all, &loaded.config)?;
    }
    permitted(&all, mode, CHECKPOINT)?;
    if !found.knows_its_data() {
        say(&format!(
            "{}: it has no hash of its data, as an earlier version wrote it: path and number of tokens were compared, \
             what the files hold was not",
            found.path().shown()
        ));
    }
    found.check_model(&built.decoder).map_err(failed)?;
    let (done, steps) = (found.step(), loaded.config.train.steps);
    if done > steps {
        let why = format!(
            "{}: its {done} steps are more than train.steps, which is {steps}; set that to {done} or more",
            found.path().shown()
        );
        return Err(CommandError::new(code::CONFIG, why));
    }
    if let (RunMode::Resume, Some(folder)) = (mode, &folder) {
        for (name, _) in &broken {
            let path = folder.called(name);
            if is_dry {
                say(&format!("{}: a run sets it aside", path.shown()));
                continue;
            }
            let to = set_aside(folder, name).map_err(|error| {
                CommandError::new(code::IO, format!("cannot set {} aside: {error}", path.shown()))
            })?;
            say(&format!("it is set aside as {}", folder.called(&to).shown()));
        }
    }
    say(&format!("{}: going on after step {}", found.path().shown(), found.step()));
    Ok(Some(Arc::new(found)))
}

/// Says what a run does with checkpoints in `folder` that a kill left under another name.
fn say_replaced(folder: &Directory) -> std::io::Result<()> {
    for ReplacedCheckpoint { now, name, is_replaced } in replaced(folder)? {
        let (now, name) = (folder.called(&now), folder.called(&name));
        say(&match is_replaced {
            true => {
                format!("{}: a run removes it, since {} has its name", now.shown(), name.shown())
            }
            false => format!("{}: a run gives it its name {} back", now.shown(), name.shown()),
        });
    }
    Ok(())
}

/// Writes the path of the fork's source checkpoint into `dir`.
pub(super) fn note_source(dir: &RunDir, source: &Checkpoint) -> Result<(), CommandError> {
    let path = source.path().as_os_str().as_bytes();
    dir.write_atomically(FORKED, path).fail_with(code::IO)
}

/// Refuses to continue the fork in `dir` with other settings than at its start. The fork has no
/// checkpoint yet that would record the settings.
fn still_its_own(
    dir: &Path,
    now: &LoadedConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<(), CommandError> {
    let Some(stored) = config_of(dir) else {
        let dir = dir.shown();
        say(&format!("{dir}: its config cannot be read, so this one was not compared with it"));
        return Ok(());
    };
    let mut all = differences_of(&stored, now);
    all.extend(other_tokenizer(dir, tokenizer)?);
    all.retain(|difference| difference.effect == ResumeEffect::Experiment);
    permitted(&all, RunMode::Resume, FORK)
}

/// Opens the source checkpoint of the fork in `dir`; `None` if the run is no fork.
fn fork_source(dir: &Path) -> Result<Option<Checkpoint>, CommandError> {
    let path = dir.join(FORKED);
    /// Maximum bytes of a path.
    const LONGEST: u64 = 1 << 16;
    let source = match input::own_bytes(&path, LONGEST) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| unread(&path, &error))?,
    };
    let source = Path::new(OsStr::from_bytes(&source));
    let opened = open_named(source).map_err(|error| {
        let error = match source.exists() {
            true => failed(error),
            false => CommandError::new(code::CHECKPOINT, error),
        };
        error.and(&format!(
            "{} is a fork of that checkpoint, and has none of its own yet: bring it back, or fork another run",
            dir.shown()
        ))
    });
    opened.map(Some)
}

/// Refuses a run with missing checkpoints: a start at another step would remove the rest.
fn nothing_gone(from: &Path, mode: RunMode) -> Result<(), CommandError> {
    let folder = from.join(CHECKPOINTS);
    let made = || {
        let steps = std::fs::metadata(from.join(METRICS)).is_ok_and(|file| file.len() > 0);
        let saves = config_of(from).is_some_and(|loaded| loaded.config.train.saves());
        let why = "the run made this folder before its first step, and";
        (steps && saves && !folder.exists()).then(|| format!("{why} {METRICS} holds steps"))
    };
    let Some(gone) = gone(&folder).or_else(made) else { return Ok(()) };
    let why = format!("{}: no checkpoint is there, but {gone}", folder.shown());
    Err(not_anew(&why, "bring the checkpoints back", mode))
}

/// Refuses a start at step 1 if the run was further.
fn may_start_over(from: &Path, mode: RunMode) -> Result<(), CommandError> {
    nothing_gone(from, mode)?;
    let from_here = from.shown();
    if mode == RunMode::Fork {
        let why = format!("{from_here}: no checkpoint to start from");
        return Err(not_anew(&why, "train without --fork", mode));
    }
    if from.join(WEIGHTS).exists() {
        let why = format!(
            "{from_here}: the run kept its weights and no checkpoint, and without the optimizer's states nothing goes on from them"
        );
        return Err(not_anew(&why, "take another --run-dir", mode));
    }
    Ok(())
}

/// Refuses random weights for a run that was started with the weights of a folder.
fn still_pretrained(from: &Path, now: &LoadedConfig) -> Result<(), CommandError> {
    let stored = config_of(from).map(|loaded| loaded.config.model);
    let folder = stored.as_ref().and_then(|was| was.pretrained());
    let (Some(folder), None) = (folder, &now.config.model.from) else { return Ok(()) };
    let why = format!(
        "{}: no checkpoint is there, so the run starts at step 1, from the weights of {folder}, and model.from is None; set it \
         to the folder, or give --overwrite to start from random weights",
        from.shown()
    );
    Err(CommandError::new(code::CONFIG, why))
}

fn not_anew(why: &str, remedy: &str, mode: RunMode) -> CommandError {
    let anew = if mode == RunMode::Fork { "" } else { ", or give --overwrite to start anew" };
    CommandError::new(code::CHECKPOINT, format!("{why}; {remedy}{anew}"))
}

/// Reports how `loaded` differs from a run that finished at `step`, if no more steps are requested.
/// The data is read only if other data is named.
pub(super) fn finished(dir: &Path, step: u64, loaded: &LoadedConfig) -> Result<(), CommandError> {
    let nothing = format!("{}: finished at step {step}; nothing to do", dir.shown());
    let saved = checkpoint::newest_name(&dir.join(CHECKPOINTS));
    let saved = saved.and_then(|path| Summary::read(&path).ok());
    let stored = match &saved {
        Some(saved) => saved.config().ok(),
        None => config_of(dir),
    };
    let Some(stored) = stored else {
        say(&format!("{nothing}; its config cannot be read, so this one was not compared with it"));
        return Ok(());
    };
    let mut all = differences_of(&stored, loaded);
    if let (Some(saved), true) = (&saved, all.iter().any(|d| d.key.starts_with("data."))) {
        let tokenizer = data::tokenizer(&loaded.config)?;
        let dry = data::ReadOptions { dry: true, ..data::ReadOptions::default() };
        let data = data::open(&loaded.config, tokenizer.as_ref(), dry)?;
        all = saved.differences(loaded, &data).map_err(failed)?;
    }
    let (experiment, idle): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|d| d.effect == ResumeEffect::Experiment);
    permitted(&experiment, RunMode::Resume, CHECKPOINT)?;
    let idle = listed(&idle);
    say(&match idle.as_str() {
        "" => nothing,
        _ => format!(
            "{nothing}\nwhat differs has no effect, unless train.steps is more than {step}:{idle}"
        ),
    });
    Ok(())
}

/// Loads the config that a run has written.
fn config_of(dir: &Path) -> Option<LoadedConfig> {
    let path = Some(dir.join(CONFIG)).filter(|path| path.is_file())?;
    load_of_run(&path).ok()
}

/// Compares the tokenizer with the run's copy: other contents are another experiment.
fn other_tokenizer(
    from: &Path,
    now: Option<&Tokenizer>,
) -> Result<Option<Difference>, CommandError> {
    let path = from.join(TOKENIZER);
    let (Some(now), true) = (now, path.exists()) else { return Ok(None) };
    let was = regular_file::read(&path).and_then(|file| {
        let bytes = file.metadata()?.len();
        // A file of another length is another tokenizer.
        let has_length = bytes == now.bytes().len() as u64;
        Ok((bytes, if has_length { input::whole(file, bytes)? } else { Vec::new() }))
    });
    let (bytes, was) = was.map_err(|error| unread(&path, &error))?;
    let values = [bytes, now.bytes().len() as u64].map(format_bytes);
    let key = format!("data.tokenizer (not {} any more)", path.shown());
    let differs = was != now.bytes();
    Ok(differs.then_some(Difference { key, values, effect: ResumeEffect::Experiment }))
}

fn failed(error: CheckpointError) -> CommandError {
    match error {
        // The user has named a run, so a missing checkpoint is no wrong argument.
        CheckpointError::Io { .. } => CommandError::new(code::IO, error),
        _ => error.into(),
    }
}

/// Error about the newest checkpoint. It may be complete if only the system cannot read it.
pub(super) fn unusable(error: CheckpointError) -> CommandError {
    if !error.is_of_the_system() {
        return failed(error);
    }
    failed(error)
        .and("nothing is set aside: make it readable, or move it away to go on from the one before")
}

fn unread(path: &Path, error: &std::io::Error) -> CommandError {
    CommandError::new(code::IO, format!("cannot read {}: {error}", path.shown()))
}

/// One line for each difference.
pub(super) fn listed<'a>(all: impl IntoIterator<Item = &'a Difference>) -> String {
    all.into_iter().map(|difference| format!("\n  {difference}")).collect()
}

/// The thing that was trained with other settings, and the alternative to restoring them.
type ForkAdvice = (&'static str, &'static str);
const CHECKPOINT: ForkAdvice = (
    "checkpoint",
    "give --fork to start from it in a new directory, with the same shape of the model",
);
const FORK: ForkAdvice = ("fork", "give --fork with the --run-dir of its source");
/// Alternative to restoring the trained tensors: a fork keeps those of its source.
const NEW_RUN: &str =
    "train other tensors in a new run: with another --run-dir, and without --resume and --fork";

/// Refuses a fork that changes random frozen weights, which are in no checkpoint: the config gives them.
fn keeps_random_weights(all: &[Difference], config: &Config) -> Result<(), CommandError> {
    let freezes = config.adapter != Adapter::None || !config.optimizer.frozen.is_empty();
    if !freezes || config.model.pretrained().is_some() {
        return Ok(());
    }
    let sources = ["train.seed", "model.init_std", "model.weights", "model.from"];
    let changed = listed(all.iter().filter(|d| sources.contains(&d.key.as_str())));
    if changed.is_empty() {
        return Ok(());
    }
    let why = format!(
        "the frozen weights of the checkpoint are random, and follow from these keys:{changed}\nset them back, or {NEW_RUN}"
    );
    Err(CommandError::new(code::CONFIG, why))
}

/// Reports the differences. Another experiment is refused unless the run is a fork.
fn permitted(
    all: &[Difference],
    mode: RunMode,
    (what, or): ForkAdvice,
) -> Result<(), CommandError> {
    let table = |kind: ResumeEffect| listed(all.iter().filter(|d| d.effect == kind));
    let harmless = all.iter().filter(|d| d.effect == ResumeEffect::Harmless);
    let moved = listed(harmless.filter(|d| d.key.starts_with("data.")));
    if !moved.is_empty() {
        say(&format!("the same tokens, named otherwise:{moved}"));
    }
    for kind in [ResumeEffect::Placement, ResumeEffect::Layout] {
        let differ = table(kind);
        if !differ.is_empty() {
            say(&format!("{}:{differ}", kind.words()));
        }
    }
    let names_folder = |d: &&Difference| !["None", "absent"].contains(&&*d.values[1]);
    if all.iter().filter(names_folder).any(|d| d.key == "adapter.from") {
        say("adapter.from is not read: the checkpoint has the adapters of the run");
    }
    let experiment = table(ResumeEffect::Experiment);
    if experiment.is_empty() {
        return Ok(());
    }
    let changed = listed(all.iter().filter(|d| d.changes_tensors()));
    if mode == RunMode::Fork && !changed.is_empty() {
        let why = format!(
            "the {what} has other trained tensors, and a fork goes on from these:{changed}\nset them back, or {NEW_RUN}"
        );
        return Err(CommandError::new(code::CONFIG, why));
    }
    if mode == RunMode::Fork {
        say(&format!("another experiment from here on:{experiment}"));
        return Ok(());
    }
    let schedule = all.iter().find(|d| d.key == "schedule.decay_steps");
    let schedule = schedule.map_or(String::new(), |Difference { values: [was, _], .. }| {
        format!(
            "\nschedule.decay_steps follows train.steps. To train longer on the old schedule, add --set schedule.decay_steps={was}."
        )
    });
    let or = if changed.is_empty() { or } else { NEW_RUN };
    let why = format!(
        "this config differs from the one that the {what} was trained with:{experiment}{schedule}\n\
         set them back, or {or}"
    );
    Err(CommandError::new(code::CONFIG, why))
}
