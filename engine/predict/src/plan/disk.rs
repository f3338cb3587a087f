//! Disk space of a run: kept checkpoints, the checkpoint that is being written, weights, and copies
//! of small files.

use checkpoint::disk_space::{checkpoint_bytes, free};
use config::{Config, DeviceConfig, WeightsPolicy};
use engine::memory::saved_states;
use files::names::{CHECKPOINTS, FILES};
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use topology::format_bytes;

/// Disk space of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Bytes of a checkpoint; 0 if none is saved.
    pub checkpoint: u64,
    /// Number of checkpoints on the disk at most: the kept ones and the one that is being written.
    pub checkpoints: u64,
    /// Bytes of the weights at the end; 0 if none are written.
    pub weights: u64,
    /// Upper bound of the bytes of the tokenizer and of the files copied from the model's folder.
    pub files: u64,
    /// Upper bound of all bytes of the run.
    pub most: u64,
    /// Free bytes of the run directory's file system; `None` if it is on another machine or
    /// unknown.
    pub free: Option<u64>,
    /// Free bytes for checkpoints, if their folder links to another file system.
    pub free_for_checkpoints: Option<u64>,
    /// Bytes of earlier checkpoints in the directory, which this run resumes from or removes.
    pub held: u64,
    /// Bytes of earlier checkpoints that may be removed before the first save: all but the newest.
    pub spare: u64,
}

impl Disk {
    /// Disk space of a run with `parameters` in the directory `run`, which need not exist.
    pub fn new(config: &Config, parameters: u64, run: &Path) -> Self {
        let train = &config.train;
        let checkpoint = match train.saves() {
            true => checkpoint_bytes(4 * saved_states(config) as u64 * parameters),
            false => 0,
        };
        let kept = train.checkpoint_keep as u64 + u64::from(train.keep_best);
        let checkpoints = (kept + 1).min(train.steps);
        let weights = if train.weights == WeightsPolicy::Never { 0 } else { 4 * parameters };
        let files = files(config);
        let most = checkpoint.saturating_mul(checkpoints).saturating_add(weights + files);
        let here = !matches!(config.device, DeviceConfig::Sim { .. });
        let (run, folder) = (existing(run), existing(&run.join(CHECKPOINTS)));
        let device = |path: &Path| path.metadata().map(|found| found.dev()).ok();
        let is_other_disk = here && device(&run) != device(&folder);
        let free_for_checkpoints = is_other_disk.then(|| free(&folder).ok()).flatten();
        let free = here.then(|| free(&run).ok()).flatten();
        let (held, spare) = (0, 0);
        Self {
            checkpoint,
            checkpoints,
            weights,
            files,
            most,
            free,
            free_for_checkpoints,
            held,
            spare,
        }
    }

    /// Adds earlier checkpoints of the sizes `found`, oldest first. All but the newest may be
    /// removed, or all if the earlier run is `removed` first.
    #[must_use]
    pub fn holding(self, found: &[u64], removed: bool) -> Self {
        let held = found.iter().sum();
        let newest = found.last().copied().unwrap_or(0);
        Self { held, spare: if removed { held } else { held - newest }, ..self }
    }

    /// Describes the disk space; `None` if the run writes nothing.
    pub fn words(&self) -> Option<String> {
        if self.most == 0 {
            return None;
        }
        let size = format_bytes;
        let weights = match self.weights {
            0 => String::new(),
            weights => format!("weights {}", size(weights)),
        };
        let checkpoints = match (self.checkpoint, self.checkpoints) {
            (0, _) => String::new(),
            (bytes, 1) => format!("a checkpoint of {}", size(bytes)),
            (bytes, n) => format!(
                "{n} checkpoints of {} ({} kept, and one while it is written)",
                size(bytes),
                n - 1
            ),
        };
        let files = match self.files {
            0 => String::new(),
            files => format!("files of the tokenizer and the model's folder {}", size(files)),
        };
        let what: Vec<String> =
            [checkpoints, weights, files].into_iter().filter(|words| !words.is_empty()).collect();
        let free = match (self.free, self.free_for_checkpoints) {
            (Some(free), Some(of_checkpoints)) => {
                format!(
                    "; {} free, {} on the disk of the checkpoints",
                    size(free),
                    size(of_checkpoints)
                )
            }
            (free, _) => free.map_or(String::new(), |free| format!("; {} free", size(free))),
        };
        Some(format!("disk: {} at most: {}{free}", size(self.most), what.join(", ")))
    }

    /// Error if the disk has no room for a checkpoint, or for the weights if none is saved.
    pub fn refusal(&self) -> Option<String> {
        let free = self.free_for_checkpoints.filter(|_| self.checkpoint > 0).or(self.free)?;
        let room = free.saturating_add(self.spare);
        let (first, what, remedy) = match self.checkpoint {
            0 => (self.weights, "the weights take", ""),
            bytes => {
                let remedy =
                    "; without any other rhythm, train.checkpoint_overhead=None saves none";
                (bytes, "a checkpoint takes", remedy)
            }
        };
        (first > room).then(|| {
            let disk = if self.is_apart() { "disk of the checkpoints" } else { "disk" };
            format!(
                "no room on the {disk}: {what} {}, and {} are free; free some, or give a --run-dir on another disk{remedy}",
                format_bytes(first),
                format_bytes(room)
            )
        })
    }

    /// Warning if the disk may get full.
    pub fn shortage(&self) -> Option<String> {
        let other_files = self.weights + self.files;
        let disks = match self.free_for_checkpoints {
            Some(of_checkpoints) if self.is_apart() => {
                let own = self.free.map(|free| ("disk", other_files, free));
                let of_them = (
                    "disk of the checkpoints",
                    self.most - other_files,
                    of_checkpoints.saturating_add(self.held),
                );
                [own, Some(of_them)]
            }
            _ => [self.free.map(|free| ("disk", self.most, free.saturating_add(self.held))), None],
        };
        let (disk, takes, room) =
            disks.into_iter().flatten().find(|(_, takes, room)| takes > room)?;
        let saved = match self.checkpoint {
            0 => "",
            _ => {
                "; where a checkpoint finds no room, the oldest ones are removed first, and the newest stays; weights that find \
                 none can be exported from a checkpoint"
            }
        };
        Some(format!(
            "the {disk} may get full: the run takes {} of it, and {} are free{saved}",
            format_bytes(takes),
            format_bytes(room)
        ))
    }

    /// Whether checkpoints are on another file system than the other files.
    const fn is_apart(&self) -> bool {
        self.checkpoint > 0 && self.free_for_checkpoints.is_some()
    }
}

/// Bytes of the copied files: the tokenizer, and the model's files whether or not they match.
fn files(config: &Config) -> u64 {
    let bytes = |path: &Path| path.metadata().map_or(0, |found| found.len());
    let tokenizer = config.data.tokenizer.as_ref().map_or(0, |path| bytes(Path::new(path)));
    let folder = config.model.from.as_ref().map(Path::new);
    let folder =
        folder.map(|from| if from.is_dir() { from } else { from.parent().unwrap_or(from) });
    let of_folder = |folder: &Path| FILES.iter().map(|name| bytes(&folder.join(name))).sum::<u64>();
    tokenizer + folder.map_or(0, of_folder)
}

/// `path`, or its nearest existing ancestor directory.
fn existing(path: &Path) -> PathBuf {
    let here = Path::new(".");
    let found = path.ancestors().find(|path| path.is_dir());
    found.filter(|path| !path.as_os_str().is_empty()).unwrap_or(here).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(sets: &[&str], free: Option<u64>) -> Disk {
        const RON: &str = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16), data: (train: \"x\"), train: (steps: 9))";
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let config = config::load_str(RON, "a.ron", Path::new("."), &sets).unwrap().config;
        Disk { free, ..Disk::new(&config, 1_000_000, Path::new("nowhere/at/all")) }
    }

    #[test]
    fn a_run_takes_those_it_keeps_one_more_and_its_weights() {
        let by_default = disk(&[], None);
        assert_eq!((by_default.checkpoint, by_default.checkpoints), (13_200_000, 3));
        assert_eq!((by_default.weights, by_default.most), (4_000_000, 43_600_000));
        let words = by_default.words().unwrap();
        assert!(words.contains("3 checkpoints of 12.59 MiB (2 kept, and one while"), "{words}");
        assert!(words.contains("weights 3.81 MiB"), "{words}");
        let late =
            disk(&["offload.update=Delayed(after_step: 1)", "train.checkpoint_keep=4"], None);
        assert_eq!((late.checkpoint, late.checkpoints), (17_600_000, 5));
        let best = disk(&["train.keep_best=true", "train.eval_every=2"], None);
        assert_eq!(best.checkpoints, 4, "the best may be another one than the newest two");
        let none = disk(&["train.checkpoint_overhead=None"], None);
        assert_eq!((none.checkpoint, none.most), (0, 4_000_000));
        assert_eq!(disk(&["train.weights=Never"], None).most, 39_600_000);
        let here = std::env::current_dir().unwrap().join("not/there");
        assert!(free(&existing(&here)).is_ok());
    }

    #[test]
    fn what_a_run_keeps_of_the_folder_of_its_model_takes_room() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
        for name in ["config.json", "tokenizer.json", "generation_config.json"] {
            std::fs::copy(model.join(name), at(name)).unwrap();
        }
        std::fs::write(at("model.safetensors"), "not copied").unwrap();
        let size = |name: &str| at(name).metadata().unwrap().len();
        let ron = "(model: (from: \".\"), data: (train: \"x\", format: Auto), train: (steps: 9))";
        let config = config::load_str(ron, "a.ron", folder.path(), &[]).unwrap().config;
        let disk = Disk::new(&config, 1000, &at("run"));
        let kept = size("config.json") + size("tokenizer.json") + size("generation_config.json");
        // The run also has its own tokenizer file.
        assert_eq!(disk.files, kept + size("tokenizer.json"));
        assert_eq!(disk.most, 3 * disk.checkpoint + disk.weights + disk.files);
        assert!(disk.words().unwrap().contains("files of the tokenizer"), "{:?}", disk.words());
    }

    #[test]
    fn without_room_for_the_first_it_is_refused_and_without_room_for_all_warned() {
        assert_eq!((disk(&[], None).refusal(), disk(&[], None).shortage()), (None, None));
        let enough = disk(&[], Some(43_600_000));
        assert_eq!((enough.refusal(), enough.shortage()), (None, None));
        let some = disk(&[], Some(20_000_000));
        assert_eq!(some.refusal(), None);
        assert!(some.shortage().unwrap().contains("takes 41.58 MiB of it, and 19.07 MiB are free"));
        let none = disk(&[], Some(13_000_000));
        let why = none.refusal().unwrap();
        assert!(why.contains("12.59 MiB") && why.contains("12.40 MiB are free"), "{why}");
        // Older checkpoints may be removed first, but not the newest.
        assert_eq!(none.clone().holding(&[300_000, 300_000], false).refusal(), None);
        assert!(none.clone().holding(&[300_000], false).refusal().is_some());
        assert_eq!(none.holding(&[300_000], true).refusal(), None);
        let weights = disk(&["train.checkpoint_overhead=None"], Some(3_999_999));
        assert!(weights.refusal().unwrap().contains("the weights take 3.81 MiB"));
    }
}
