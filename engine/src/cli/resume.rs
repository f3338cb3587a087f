//! What `train --resume` and `--fork` go on from, and whether they may.

use super::exit::{Failed, code};
use super::{data, say};
use crate::build::Built;
use crate::checkpoint::inspect::{Summary, differences_of};
use crate::checkpoint::{self, Checkpoint, CheckpointError, Difference, FOLDER, Kind, differences};
use crate::config::{Loaded, load_of_run};
use crate::data::{Dataset, Tokenizer};
use crate::run_dir::{CONFIG, RunDir, RunMode, TOKENIZER};
use std::path::Path;
use std::sync::Arc;

/// The newest whole checkpoint of the run; none when there is none, which is said. Broken ones that are newer are
/// named, and where the run goes on in its own directory they are set aside.
pub(super) fn start(
    dir: &RunDir,
    loaded: &Loaded,
    built: &Built,
    (data, tokenizer): (&Dataset, Option<&Tokenizer>),
    mode: RunMode,
) -> Result<Option<Arc<Checkpoint>>, Failed> {
    let from = dir.forked_from().unwrap_or(dir.path());
    let (found, broken) = checkpoint::newest(&from.join(FOLDER)).map_err(unusable)?;
    let why: Vec<String> = broken.iter().map(|(_, why)| why.to_string()).collect();
    let Some(found) = found else {
        if let Some(step) = RunDir::finished_in(dir.path()).filter(|_| why.is_empty()) {
            let why = format!(
                "{}: the run finished at step {step} without a checkpoint, so nothing can go on from there; \
                 --overwrite starts it anew",
                dir.path().display()
            );
            return Err(Failed::new(code::CHECKPOINT, why));
        }
        if why.is_empty() {
            say(&format!("{}: no complete checkpoint there; starting at step 1", from.display()));
            return Ok(None);
        }
        let why = format!("no checkpoint can be used:\n  {}", why.join("\n  "));
        return Err(Failed::new(code::CHECKPOINT, why));
    };
    why.iter().for_each(|why| say(&format!("warning: {why}")));
    let mut all = differences(&found, loaded, data).map_err(failed)?;
    all.extend(other_tokenizer(from, tokenizer)?);
    permitted(&all, mode)?;
    if !found.knows_its_data() {
        say(&format!(
            "{}: it has no hash of its data, as an earlier version wrote it: path and number of tokens were compared, \
             what the files hold was not",
            found.path().display()
        ));
    }
    found.check_model(&built.gpt).map_err(failed)?;
    let (done, steps) = (found.step(), loaded.config.train.steps);
    if done > steps {
        let why = format!(
            "{}: its {done} steps are more than train.steps, which is {steps}; set that to {done} or more",
            found.path().display()
        );
        return Err(Failed::new(code::CONFIG, why));
    }
    if mode == RunMode::Resume {
        for (path, _) in &broken {
            let to = checkpoint::set_aside(path).map_err(|error| {
                Failed::new(code::IO, format!("cannot set {} aside: {error}", path.display()))
            })?;
            say(&format!("it is set aside as {}", to.display()));
        }
    }
    say(&format!("{}: going on after step {}", found.path().display(), found.step()));
    Ok(Some(Arc::new(found)))
}

/// A run that has finished at `step`, of which no more steps are asked: says what differs from it. Its data is read only
/// where other data is named.
pub(super) fn finished(dir: &Path, step: u64, loaded: &Loaded) -> Result<(), Failed> {
    let nothing = format!("{}: finished at step {step}; nothing to do", dir.display());
    let saved = checkpoint::newest_name(&dir.join(FOLDER));
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
        let data = data::open(&loaded.config, tokenizer.as_ref(), true)?;
        all = saved.differences(loaded, &data).map_err(failed)?;
    }
    let (experiment, idle): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|d| d.kind == Kind::Experiment);
    permitted(&experiment, RunMode::Resume)?;
    let idle: String = idle.iter().map(|d| format!("\n  {d}")).collect();
    say(&match idle.as_str() {
        "" => nothing,
        _ => format!(
            "{nothing}\nwhat differs has no effect, unless train.steps is more than {step}:{idle}"
        ),
    });
    Ok(())
}

/// The config that a run has written.
fn config_of(dir: &Path) -> Option<Loaded> {
    let path = Some(dir.join(CONFIG)).filter(|path| path.is_file())?;
    load_of_run(&path).ok()
}

/// A run keeps a copy of its tokenizer: another content under the same name is another experiment.
fn other_tokenizer(from: &Path, now: Option<&Tokenizer>) -> Result<Option<Difference>, Failed> {
    let path = from.join(TOKENIZER);
    let (Some(now), true) = (now, path.exists()) else { return Ok(None) };
    let was = std::fs::read(&path)
        .map_err(|e| Failed::new(code::IO, format!("cannot read {}: {e}", path.display())))?;
    let values = [was.len(), now.bytes().len()].map(|bytes| format!("{bytes} bytes"));
    let key = format!("data.tokenizer (not {} any more)", path.display());
    let differs = was != now.bytes();
    Ok(differs.then_some(Difference { key, values, kind: Kind::Experiment }))
}

fn failed(error: CheckpointError) -> Failed {
    let code = match error {
        CheckpointError::Io { .. } => code::IO,
        CheckpointError::Broken { .. } => code::CHECKPOINT,
        CheckpointError::OtherModel { .. } => code::CONFIG,
    };
    Failed::new(code, error)
}

/// The same of the newest checkpoint: one that the system does not read may be as whole as ever.
fn unusable(error: CheckpointError) -> Failed {
    if !error.is_of_the_system() {
        return failed(error);
    }
    failed(error)
        .and("nothing is set aside: make it readable, or move it away to go on from the one before")
}

/// Says what differs; another experiment is a fork.
fn permitted(all: &[Difference], mode: RunMode) -> Result<(), Failed> {
    let table = |kind: Kind| {
        let lines = all.iter().filter(|d| d.kind == kind).map(|d| format!("\n  {d}"));
        lines.collect::<String>()
    };
    let moved = all.iter().filter(|d| d.kind == Kind::Harmless && d.key.starts_with("data."));
    let moved: String = moved.map(|d| format!("\n  {d}")).collect();
    if !moved.is_empty() {
        say(&format!("the same tokens, named otherwise:{moved}"));
    }
    let (layout, experiment) = (table(Kind::Layout), table(Kind::Experiment));
    if !layout.is_empty() {
        say(&format!("the same mathematics, laid out or rounded otherwise:{layout}"));
    }
    if experiment.is_empty() {
        return Ok(());
    }
    if mode == RunMode::Fork {
        say(&format!("another experiment from here on:{experiment}"));
        return Ok(());
    }
    let schedule = all.iter().find(|d| d.key == "schedule.decay_steps");
    let schedule = schedule.map_or(String::new(), |Difference { values: [was, _], .. }| {
        format!(
            "\n(it is train.steps unless set: --set schedule.decay_steps={was} keeps the schedule)"
        )
    });
    let why = format!(
        "the checkpoint is of another experiment than this config:{experiment}{schedule}\n\
         set them back, or give --fork to start from it in a new directory"
    );
    Err(Failed::new(code::CONFIG, why))
}
