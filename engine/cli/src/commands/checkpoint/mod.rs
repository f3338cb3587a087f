//! `onebox checkpoint`: inspects checkpoints, and rewrites them for other layouts and programs.

mod diff;
mod exchange;
mod reshard;
mod show;

use super::{CommandError, Failable, code, print, print_json, say};
use crate::report::stage::Stage;
use checkpoint::inspect::{
    CheckpointChoice, ChoiceReason, best_of, checkpoints_of, open_chosen, open_newest, verify,
};
use checkpoint::manifest::MANIFEST;
use checkpoint::rewrite::{RewriteError, SealedCheckpoint};
use checkpoint::{Checkpoint, CheckpointError, RunFolder};
use clap::Subcommand;
use config::Config;
use data::Tokenizer;
use data::model_files::ModelFiles;
use engine::run_dir::RunDir;
use files::names::{CONFIG, TOKENIZER, is_there, step_of};
use files::path_text::ShownPath;
use layout::LocalMachine;
use serde_json::json;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use topology::counted;

/// Verbs of `onebox checkpoint`. A PATH is a checkpoint or a run directory.
#[derive(Debug, Subcommand)]
pub(super) enum CheckpointVerb {
    /// Show the step, model, layout and tensors of a checkpoint, or of a run's newest checkpoint.
    /// Checks the manifest, not the data
    Show(InspectionArgs),
    /// Compare every byte of a checkpoint, or of all checkpoints of a run, with the stored hashes
    /// (exit code 82 if one is broken, 74 if one cannot be read)
    Verify(InspectionArgs),
    /// Compare the configs and every tensor of all states of two checkpoints (exit code 1 if a bit
    /// of the tensors differs)
    Diff {
        /// First checkpoint, or run directory
        a: PathBuf,
        /// Second checkpoint, or run directory
        b: PathBuf,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Rewrite a checkpoint for another TP x DP, into a new run directory. Training does not need
    /// this: --resume accepts any layout
    Reshard(reshard::ReshardArgs),
    /// Write the parameters for other programs: a folder of Hugging Face's transformers
    Export(exchange::ExportArgs),
    /// Start a run from a folder of Hugging Face's transformers: a checkpoint of step 0
    Import(exchange::ImportArgs),
}

/// Arguments of the verbs that inspect a checkpoint.
#[derive(Debug, clap::Args)]
pub(super) struct InspectionArgs {
    /// Checkpoint, or run directory
    path: PathBuf,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(verb: &CheckpointVerb, machine: &LocalMachine) -> Result<(), CommandError> {
    match verb {
        CheckpointVerb::Show(args) => show::run(args),
        CheckpointVerb::Verify(args) => verified(args),
        CheckpointVerb::Diff { a, b, json } => diff::run([a, b], *json),
        CheckpointVerb::Reshard(args) => reshard::run(args, machine),
        CheckpointVerb::Export(args) => exchange::exported(args, machine),
        CheckpointVerb::Import(args) => exchange::imported(args, machine),
    }
}

fn verified(InspectionArgs { path, json }: &InspectionArgs) -> Result<(), CommandError> {
    let (mut broken, mut unread, mut verdicts) = (0, 0, Vec::new());
    let all = checkpoints_of(path)?;
    for checkpoint in &all {
        let stage = Stage::begin("comparing a checkpoint with its hashes", 0);
        let problems = verify(checkpoint);
        drop(stage);
        let unreadable = problems.iter().filter(|why| why.is_of_the_system()).count();
        broken += usize::from(unreadable < problems.len());
        unread += usize::from(unreadable > 0 && unreadable == problems.len());
        match &problems[..] {
            _ if *json => {
                let why: Vec<String> = problems.iter().map(ToString::to_string).collect();
                verdicts
                    .push(json!({ "path": checkpoint, "whole": why.is_empty(), "problems": why }));
            }
            [] => print(&format!("{}: whole\n", checkpoint.shown()))?,
            _ => problems.iter().try_for_each(|problem| print(&format!("{problem}\n")))?,
        }
    }
    if *json {
        print_json(&json!({ "checkpoints": verdicts, "broken": broken, "not_read": unread }))?;
    }
    let of = counted(all.len(), "checkpoint");
    let unusable =
        || CommandError::new(code::CHECKPOINT, format!("{broken} of {of} cannot be used"));
    // A checkpoint that could not be read may be complete.
    let not_read =
        format!("{unread} of {of} could not be read, which says nothing of what is in it");
    match (broken, unread) {
        (0, 0) => Ok(()),
        (0, _) => Err(CommandError::new(code::IO, not_read)),
        (_, 0) => Err(unusable()),
        _ => Err(unusable().and(&not_read)),
    }
}

/// Opens the newest complete checkpoint of `path`, and warns about broken checkpoints.
fn open(path: &Path) -> Result<Checkpoint, CommandError> {
    let (found, broken) = open_newest(path)?;
    broken.iter().for_each(|why| say(&format!("warning: {why}")));
    Ok(found)
}

/// Whether a path is that of a checkpoint, and not of a run.
fn is_checkpoint(path: &Path) -> bool {
    is_there(&path.join(MANIFEST))
}

/// Options that choose among the checkpoints of a run.
#[derive(Debug, clap::Args)]
pub(in crate::commands) struct ChoiceArgs {
    /// Take the newest parameters of the run, also if it has kept its best checkpoint
    #[arg(long, conflicts_with = "step")]
    last: bool,
    /// Take the checkpoint of step N
    #[arg(long, value_name = "N")]
    step: Option<u64>,
}

impl ChoiceArgs {
    /// Whether the user has named a checkpoint.
    pub(in crate::commands) const fn is_default(&self) -> bool {
        !self.last && self.step.is_none()
    }

    pub(in crate::commands) const fn is_step(&self) -> bool {
        self.step.is_some()
    }

    /// Opens the checkpoint, warns about broken newer ones, and says which one it is and why.
    pub(in crate::commands) fn open(&self, path: &Path) -> Result<Checkpoint, CommandError> {
        let choice = match self.step {
            Some(step) => CheckpointChoice::Step(step),
            None if self.last => CheckpointChoice::Newest,
            None => CheckpointChoice::Best,
        };
        if is_checkpoint(path) && !self.is_default() {
            let why = format!(
                "{}: it is one checkpoint: leave out --last and --step, or name its run",
                path.shown()
            );
            return Err(CommandError::new(code::USAGE, why));
        }
        let chosen = open_chosen(path, choice).map_err(|error| self.unusable(path, error))?;
        chosen.broken.iter().for_each(|why| say(&format!("warning: {why}")));
        let (at, step) = (chosen.checkpoint.path().shown(), chosen.checkpoint.step());
        let why = match chosen.reason {
            ChoiceReason::Best(best) => {
                format!(
                    ", the best of this run: validation loss {:.4} (--last takes the newest)",
                    best.loss()
                )
            }
            ChoiceReason::Newest => ", the newest checkpoint".to_owned(),
            ChoiceReason::Named => String::new(),
        };
        say(&format!("{at}: the parameters after step {step}{why}"));
        Ok(chosen.checkpoint)
    }

    fn unusable(&self, path: &Path, error: CheckpointError) -> CommandError {
        let all = checkpoints_of(path).unwrap_or_default();
        let best = best_of(&all).ok().and_then(|(best, _)| best);
        let steps: Vec<String> = all
            .iter()
            .filter_map(|path| step_of(path.file_name()?.to_str()?, &[""]))
            .map(|step| step.to_string())
            .collect();
        let is_missing = matches!(&error, CheckpointError::Io { source, .. } if source.kind() == ErrorKind::NotFound);
        let why = CommandError::from(error);
        match (best, self.step) {
            (Some(best), None) if !self.last => why.and(&format!(
                "it is the best checkpoint of the run, by its newest one: bring step {} back, or take another with --last or --step N",
                best.step
            )),
            (_, Some(_)) if is_missing && !steps.is_empty() => {
                why.and(&format!("the run has the steps {}", steps.join(", ")))
            }
            _ => why,
        }
    }
}

/// Directory of the run that contains the checkpoint; the checkpoint itself if there is none.
pub(super) fn run_of(checkpoint: &Checkpoint) -> &Path {
    let run = checkpoint.path().parent().and_then(Path::parent);
    run.unwrap_or(checkpoint.path())
}

/// Run directory whose folder of checkpoints gets its name last, when everything is complete.
struct NewRun {
    dir: RunDir,
    /// The folder of checkpoints under its name until then.
    folder: RunFolder,
    files: Vec<(&'static str, Vec<u8>)>,
    model_files: ModelFiles,
}

impl NewRun {
    /// Creates the directory of a run with `count` checkpoints. Files that the same command left when
    /// it was killed are no obstacle.
    fn create(
        out: &Path,
        config: &Config,
        tokenizer: Option<&Tokenizer>,
        model_files: ModelFiles,
        count: usize,
    ) -> Result<Self, CommandError> {
        let mut files = vec![(CONFIG, config.to_ron().into_bytes())];
        files.extend(tokenizer.map(|tokenizer| (TOKENIZER, tokenizer.bytes().to_owned())));
        let dir = RunDir::create_whole(out, &files)?;
        let folder = RunFolder::unfinished(dir.held(), count);
        let folder = folder.map_err(|why| format!("{why}, or give another directory"));
        Ok(Self { folder: folder.fail_with(code::NO_RUN_DIR)?, dir, files, model_files })
    }

    /// Folder for its checkpoints.
    const fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Writes the files, names `checkpoints`, the one to go on from last, and then their folder.
    /// Returns the path of the last one.
    fn finish(
        self,
        checkpoints: impl IntoIterator<Item = SealedCheckpoint>,
    ) -> Result<PathBuf, CommandError> {
        for (name, bytes) in &self.files {
            self.dir.write_atomically(name, bytes).fail_with(code::IO)?;
        }
        self.dir.keep(self.model_files.files())?;
        let mut newest = PathBuf::new();
        for checkpoint in checkpoints {
            newest = checkpoint.publish()?;
        }
        self.folder.publish().fail_with(code::IO)?;
        let name = newest.file_name().unwrap_or_default();
        Ok(self.dir.folder().path().join(name))
    }
}

impl From<CheckpointError> for CommandError {
    fn from(error: CheckpointError) -> Self {
        let code = match &error {
            CheckpointError::Io { source, .. } if source.kind() == ErrorKind::NotFound => {
                code::DATA
            }
            CheckpointError::Io { .. } => code::IO,
            CheckpointError::Broken { .. } => code::CHECKPOINT,
            CheckpointError::OtherModel { .. } => code::CONFIG,
        };
        Self::new(code, error)
    }
}

impl From<RewriteError> for CommandError {
    fn from(error: RewriteError) -> Self {
        let code = match error {
            RewriteError::Read(error) => return error.into(),
            RewriteError::Write { .. } => code::IO,
            RewriteError::Source(_) => code::DATA,
            RewriteError::Unequal { .. } => code::INTERNAL,
        };
        Self::new(code, error)
    }
}
