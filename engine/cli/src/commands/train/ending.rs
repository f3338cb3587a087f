//! The end of `onebox train`: its last messages, and the files that it leaves.

use super::Session;
use super::guess::Rise;
use super::watch::Watch;
use crate::commands::{CommandError, ConfigArgs, code, quoted, quoted_path, say, set_arguments};
use crate::generate::{
    ModelSource, Piece, Sampling, StopCondition, WeightSource, default_prompt, generate,
};
use crate::report::progress::{clock, si};
use ::data::chat::Template;
use ::data::model_files::ModelFiles;
use checkpoint::inspect::open_newest;
use config::{DataFormat, DeviceConfig};
use engine::run::Outcome;
use files::names::{CHECKPOINTS, CONFIG, METRICS, WEIGHTS, checkpoint_name};
use files::path_text::ShownPath;
use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use topology::counted;

impl Session<'_> {
    /// Ends a run after its last step: prints the closing line, the summary and a sample.
    pub(super) fn end(
        &self,
        outcome: &Outcome,
        watch: &mut Watch,
        seconds: f64,
    ) -> Result<(), CommandError> {
        let weights = self.dir.held().called(WEIGHTS);
        let owed = watch.not_saved.as_ref().filter(|(step, _)| *step == outcome.step);
        let owed = owed.map(|(step, why)| self.unsaved(watch, *step, why));
        let lost = |why: String| match &owed {
            Some(owed) => CommandError::new(code::NOT_SAVED, format!("{owed}\n{why}")),
            None => CommandError::new(code::IO, why),
        };
        if let Some(problem) = &outcome.weights_problem {
            let weights = weights.shown();
            return Err(lost(format!("the weights are not written to {weights}: {problem}")));
        }
        let skipped = watch.last.map_or(0, |last| last.skipped_total);
        // An interrupted run is not hopeless: its next steps might not have been skipped.
        let hopeless = outcome.complete && skipped == outcome.step;
        let hopeless = hopeless.then_some((1, outcome.step));
        if let Some(steps) = outcome.diverged.or(hopeless) {
            let why = self.diverged(outcome, watch, steps);
            return Err(match self.dir.held().check() {
                Ok(_) => CommandError::new(code::NUMERIC, why),
                Err(error) => self.moved(&error).and(&why),
            });
        }
        // Written last, since it finishes a run for good; a checkpoint or the weights must be
        // saved.
        if outcome.complete && (owed.is_none() || outcome.weights_written) {
            watch.metrics.end(outcome.step, &outcome.state_hash);
        }
        if watch.metrics.dropped() > 0 {
            let (lines, path) = (watch.metrics.dropped(), self.dir.held().called(METRICS));
            let lines = counted(lines, "line");
            return Err(lost(format!("{}: {lines} could not be written", path.shown())));
        }
        if outcome.complete || watch.last.is_some() {
            self.summary(outcome, watch, seconds);
        }
        if let Some(rise) = watch.guess.rise().filter(|_| outcome.complete) {
            let why = rise.words(self.run.loaded.config.optimizer.lr);
            let mut why =
                format!("training has diverged: {why}{}", self.before_rise(outcome, rise));
            if let Some(owed) = owed {
                why = format!("{owed}\n{why}");
            }
            return Err(CommandError::new(code::NUMERIC, why));
        }
        if outcome.complete {
            self.sample(outcome.weights_written, &watch.stop);
            self.next_commands(watch.saved.is_some());
            return owed.map_or(Ok(()), |owed| Err(CommandError::new(code::NOT_SAVED, owed)));
        }
        say(&self.interrupted(outcome, watch.saved));
        Err(match owed {
            Some(owed) => CommandError::new(code::NOT_SAVED, owed),
            None => CommandError::silent(code::INTERRUPTED),
        })
    }

    /// Names the best checkpoint, if it is from before the `rise`.
    fn before_rise(&self, outcome: &Outcome, rise: Rise) -> String {
        let best = outcome.evaluations.and_then(|seen| seen.best());
        let best = best.filter(|best| best.step < rise.since);
        best.map_or_else(String::new, |best| {
            let path = self.dir.folder().path().join(checkpoint_name(best.step));
            format!("; the best checkpoint is from before it: {}", path.shown())
        })
    }

    /// Message about a run that has ended after `step` without the checkpoint of that step.
    fn unsaved(&self, watch: &Watch, step: u64, why: &str) -> String {
        let before = match (self.dir.held().place(), watch.saved) {
            (None, _) => "where its checkpoints are is not known".into(),
            (Some(place), Some(saved)) => {
                let folder = place.join(CHECKPOINTS);
                format!("in {} the newest that is whole is of step {saved}", folder.shown())
            }
            (Some(place), None) => {
                let again = self.source().map_or_else(String::new, |source| {
                    format!("; --resume starts again from {}", source.shown())
                });
                format!("in {} there is none before it{again}", place.join(CHECKPOINTS).shown())
            }
        };
        format!(
            "the run has ended after step {step}, whose checkpoint is NOT SAVED: {why}; {before}"
        )
    }

    /// Message about an interrupted run: its step, and its files on the disk.
    fn interrupted(&self, outcome: &Outcome, saved: Option<u64>) -> String {
        let weights = self.dir.held().called(WEIGHTS);
        let weights = match outcome.weights_written {
            true => format!("; its weights are in {}", weights.shown()),
            false => String::new(),
        };
        let source = self.source().map(|_| self.done());
        let back = back(outcome.step, saved.or(source));
        format!("interrupted after step {}{weights}; {back}", outcome.step)
    }

    /// Message about a run that ends before it runs a step.
    pub(super) fn stopped_at_start(&self) -> String {
        let (step, saved) = (self.done(), self.start.as_ref().map(|from| from.step()));
        format!("interrupted after step {step}; {}", back(step, saved))
    }

    fn summary(&self, outcome: &Outcome, watch: &Watch, seconds: f64) {
        let config = &self.run.loaded.config;
        let trained = outcome.step - self.done();
        let tokens = trained as f64 * (config.batch.global * config.model.seq_len) as f64;
        let unit = self.unit();
        let loss = match watch.last {
            Some(last) => format!("{:.4} {unit} in the last step", last.loss),
            None if outcome.complete => {
                "of no step, since no step was left: set train.steps higher to train more".into()
            }
            None => "of no step, since none was trained".into(),
        };
        let validation = watch.validation.filter(|(step, ..)| *step == outcome.step);
        let validation = validation.map_or_else(String::new, |(_, loss, whole)| {
            let part =
                if whole { "the whole validation set" } else { "a part of the validation set" };
            format!(", {loss:.4} over {part}")
        });
        let steps = counted(config.train.steps, "step");
        let ended = match (outcome.complete, outcome.out_of_patience) {
            (_, true) => format!("ended   after {} of {steps}", outcome.step),
            (true, false) => format!("done    {steps}"),
            (false, false) => format!("interrupted after {} of {steps}", outcome.step),
        };
        let state = match outcome.state_hash.as_str() {
            "" => String::new(),
            hash => format!("\nstate   {hash}"),
        };
        let weights = if outcome.weights_written { format!(", {WEIGHTS}") } else { String::new() };
        let files = self.dir.held().place().map_or_else(String::new, |place| {
            format!("\nfiles   {}: {METRICS}, {CONFIG}{weights}", place.shown())
        });
        let compared = self.compared(outcome);
        let skipped = watch.last.map_or(0, |last| last.skipped_total);
        let speculation = match watch.speculation {
            [0, 0, 0] => String::new(),
            [no, committed, redone] => format!(
                "\nupdates ahead of the decision: {committed} committed, {redone} redone, {no} not tried"
            ),
        };
        let verified = match watch.verified {
            [0, _] => String::new(),
            [all, 0] => format!("\n{} ran twice: the same bits", counted(all, "step")),
            [all, other] => format!(
                "\n{} ran twice: {other} with OTHER BITS; see \"differs\" in {METRICS}",
                counted(all, "step")
            ),
        };
        self.say(&format!(
            "\n{ended} in {} ({} in training, {}tok/s), {skipped} skipped{speculation}{verified}\n\
             loss    {loss}{validation}{compared}{state}{files}",
            clock(seconds),
            clock(watch.train_seconds),
            si(tokens / watch.train_seconds.max(1e-9)),
        ));
    }

    /// Lines about the evaluations of a run that compares them.
    fn compared(&self, outcome: &Outcome) -> String {
        let Some(seen) = outcome.evaluations else { return String::new() };
        let mut text = String::new();
        if outcome.out_of_patience {
            let count = counted(seen.without_improvement(), "evaluation");
            let least = seen.least().map_or_else(String::new, |least| {
                format!(", which was {:.4} after step {}", least.loss(), least.step)
            });
            text += &format!(
                "\nearly   {count} without a validation loss below the least{least} (train.patience)"
            );
        }
        if let Some(best) = seen.best() {
            let name = checkpoint_name(best.step);
            text += &format!("\nbest    {CHECKPOINTS}/{name}, validation loss {:.4}", best.loss());
        }
        text
    }

    const fn unit(&self) -> &'static str {
        let bytes = self.run.loaded.config.data.format.is_bytes() && self.run.tokenizer.is_none();
        if bytes { "nats per byte" } else { "nats per token" }
    }

    /// Prints a text from the new model. A failure here is no failure of the run.
    fn sample(&self, weights: bool, stop: &AtomicBool) {
        let config = &self.run.loaded.config;
        if self.args.quiet || config.sample.tokens == 0 {
            return;
        }
        let Some(place) = self.dir.held().place() else { return };
        let sampling = Sampling {
            tokens: config.sample.tokens,
            temperature: f64::from(config.sample.temperature),
            top_k: None,
            top_p: 1.0,
            seed: config.train.seed,
            stop: StopCondition::default(),
            echo: true,
            special: false,
        };
        let tokenizer = self.run.tokenizer.as_ref();
        let prompt = default_prompt(config, tokenizer, &config.sample.prompt);
        let none =
            |why: &dyn Display| say(&format!("\nno sample: {why} (see `sample` in the config)"));
        let newest = match (!weights).then(|| open_newest(&place)).transpose() {
            Ok(newest) => newest.map(|(checkpoint, _)| checkpoint),
            Err(why) => return none(&why),
        };
        let path = place.join(WEIGHTS);
        let trained =
            newest.as_ref().map_or(WeightSource::Weights(&path), WeightSource::Checkpoint);
        let mut text = Vec::new();
        let mut emit = |_: usize, piece: Piece<'_>| {
            if let Piece::Prompt(piece) | Piece::Text(piece) = piece {
                text.extend_from_slice(piece);
            }
            !stop.load(Ordering::Relaxed)
        };
        let from = ModelSource::on_cores(trained, tokenizer, &self.run.built.machine);
        if let Err(why) = generate(config, &from, &[prompt], &sampling, &mut emit) {
            return none(&why);
        }
        let text = String::from_utf8_lossy(&text);
        say(&format!("\nit writes:\n  {}", text.replace('\n', "\n  ")));
    }

    /// Whether the model learns to answer in chats, raw or prepared.
    fn is_of_chats(&self) -> bool {
        let prepared = self.run.data.has_masks() && self.run.tokenizer.is_some();
        let is_chat = prepared || self.run.loaded.config.data.format == DataFormat::Chat;
        // Questions and answers of a model without a chat template are plain texts.
        let template = || {
            let place = self.dir.held().place()?;
            Template::of(&ModelFiles::of_run(&place).ok()?).ok()
        };
        is_chat && template().is_some()
    }

    /// Prints up to three commands that the user can run next. `saved`: there is a checkpoint.
    fn next_commands(&self, saved: bool) {
        let program = std::env::args_os().next().unwrap_or_else(|| "onebox".into());
        let program = quoted_path(Path::new(&program));
        let Some(place) = self.dir.held().place() else { return };
        let dir = quoted_path(&place);
        let sample = &self.run.loaded.config.sample.prompt;
        let prompt = match sample.trim() {
            _ if self.is_of_chats() => " --chat".into(),
            "" => " --temperature 0.5".into(),
            _ => format!(" --prompt {} --temperature 0.5", quoted(sample)),
        };
        let model = &self.run.loaded.config.model;
        let shape = self.run.built.decoder.shape();
        // Frozen weights that are random are in no file.
        let is_whole = !shape.has_frozen_params() || model.pretrained().is_some();
        let mut lines = Vec::new();
        if is_whole {
            lines.push(format!("{program} generate {dir}{prompt}"));
        }
        let exported = place.with_file_name(place.file_name().map_or_else(
            || "exported".into(),
            |name| format!("{}-exported", name.to_string_lossy()),
        ));
        let is_exported = is_whole || shape.adapters().is_some();
        if saved && is_exported && exported.symlink_metadata().is_err() {
            let exported = quoted_path(&exported);
            let form = match (shape.adapters(), model.pretrained()) {
                (Some(_), Some(_)) => "safetensors --merge",
                (Some(_), None) => "peft",
                (None, _) => "safetensors",
            };
            lines.push(format!("{program} checkpoint export {dir} {exported} --to {form}"));
        }
        let (file, given) = self.args.config.again(&place);
        let path = quoted_path(&file);
        let other = if self.imported() { None } else { self.other_layout(&file, given) };
        if let Some(more) = other {
            // Each key is set once.
            let key = |set: &String| set.split('=').next().unwrap_or_default().trim().to_owned();
            let new: Vec<String> = more.iter().map(key).collect();
            let mut sets = given.to_vec();
            sets.retain(|set| !new.contains(&key(set)));
            sets.extend(more);
            lines.push(format!("{program} train {path}{}", set_arguments(&sets)));
        }
        self.say(&format!("\nnext, try:\n  {}", lines.join("\n  ")));
    }

    /// Settings for another grid of ranks that this config allows.
    fn other_layout(&self, file: &Path, given: &[String]) -> Option<Vec<String>> {
        let parallel = &self.run.loaded.config.parallel;
        let world = self.run.loaded.config.world_size();
        let grids = [(1, world), (world, 1), (2, 2), (2, 1), (1, 2)];
        let other = grids.into_iter().filter(|grid| *grid != (parallel.tensor, parallel.data));
        other.into_iter().find_map(|(tensor, data)| {
            let mut more =
                vec![format!("parallel.tensor={tensor}"), format!("parallel.data={data}")];
            if matches!(self.run.loaded.config.device, DeviceConfig::Cpu { .. }) {
                more.push(format!("device.count={}", tensor * data));
            }
            let sets = [given, &more[..]].concat();
            let config = ConfigArgs { config: file.to_owned(), sets };
            config.load(&self.run.built.machine).ok().map(|_| more)
        })
    }
}

/// Says where a run continues that is interrupted after `step`.
fn back(step: u64, saved: Option<u64>) -> String {
    match saved {
        Some(step) => format!("--resume goes on after step {step}"),
        None if step == 0 => "nothing is lost: --resume starts at step 1".into(),
        None => "there is no checkpoint of it to go on from".into(),
    }
}
