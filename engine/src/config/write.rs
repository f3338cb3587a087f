//! A [`Config`] as RON that [`load`](super::load()) reads as the same config.

use std::fmt::Write as _;

use super::bytes::format_bytes;
use super::fields::Named;
use super::value::{float_text, quoted};
use super::{Config, DeviceConfig, Placement, UpdateMode};

impl Config {
    /// Every key with its value, one per line, in RON. Paths are absolute, so that the text means
    /// the same wherever it is put; only `data.train` is left out where there is none.
    pub fn to_ron(&self) -> String {
        let mut out = String::from("(\n");
        entry(&mut out, 1, "name", &quoted(&self.name));
        entry(&mut out, 1, "device", &device(&self.device));
        section(&mut out, "model", &self.model_entries());
        section(&mut out, "parallel", &self.parallel_entries());
        entry(&mut out, 1, "precision", self.precision.name());
        section(&mut out, "loss_scale", &self.loss_scale_entries());
        section(&mut out, "offload", &self.offload_entries());
        section(&mut out, "optimizer", &self.optimizer_entries());
        section(&mut out, "schedule", &self.schedule_entries());
        section(&mut out, "batch", &self.batch_entries());
        entry(&mut out, 1, "recompute", self.recompute.name());
        let partition = self.partition_checkpoints.to_string();
        entry(&mut out, 1, "partition_checkpoints", &partition);
        entry(&mut out, 1, "host_checkpoints", &self.host_checkpoints.to_string());
        section(&mut out, "data", &self.data_entries());
        section(&mut out, "train", &self.train_entries());
        section(&mut out, "sample", &self.sample_entries());
        out.push_str(")\n");
        out
    }

    fn model_entries(&self) -> Entries {
        let m = &self.model;
        vec![
            ("layers", m.layers.to_string()),
            ("hidden", m.hidden.to_string()),
            ("heads", m.heads.to_string()),
            ("seq_len", m.seq_len.to_string()),
            ("vocab", m.vocab.to_string()),
            ("ffn_hidden", m.ffn_hidden.to_string()),
            ("dropout", float_text(m.dropout)),
            ("init_std", float_text(m.init_std)),
        ]
    }

    fn parallel_entries(&self) -> Entries {
        let p = &self.parallel;
        vec![
            ("tensor", p.tensor.to_string()),
            ("data", p.data.to_string()),
            ("sequence", p.sequence.to_string()),
            ("reduce_fp32", p.reduce_fp32.to_string()),
        ]
    }

    fn loss_scale_entries(&self) -> Entries {
        let s = &self.loss_scale;
        vec![
            ("initial", float_text(s.initial)),
            ("window", s.window.to_string()),
            ("hysteresis", s.hysteresis.to_string()),
            ("floor", float_text(s.floor)),
        ]
    }

    fn offload_entries(&self) -> Entries {
        let o = &self.offload;
        vec![
            ("optimizer", placement_text(o.optimizer)),
            ("update", update_text(o.update)),
            ("transfer", o.transfer.name().into()),
            ("accumulate", o.accumulate.name().into()),
            ("moments", o.moments.name().into()),
            ("master", o.master.name().into()),
            ("bucket_elements", o.bucket_elements.to_string()),
            ("tile_elements", o.tile_elements.to_string()),
            ("lookahead", o.lookahead.to_string()),
            ("keep_gradients", o.keep_gradients.to_string()),
            ("first_forward", o.first_forward.to_string()),
            ("sockets", o.sockets.name().into()),
        ]
    }

    fn optimizer_entries(&self) -> Entries {
        let o = &self.optimizer;
        vec![
            ("kind", o.kind.name().into()),
            ("lr", float_text(o.lr)),
            ("beta1", float_text(o.beta1)),
            ("beta2", float_text(o.beta2)),
            ("eps", float_text(o.eps)),
            ("weight_decay", float_text(o.weight_decay)),
            ("clip", optional(o.clip)),
        ]
    }

    fn schedule_entries(&self) -> Entries {
        let s = &self.schedule;
        vec![
            ("kind", s.kind.name().into()),
            ("warmup_steps", s.warmup_steps.to_string()),
            ("decay_steps", s.decay_steps.to_string()),
            ("min_lr", float_text(s.min_lr)),
        ]
    }

    fn batch_entries(&self) -> Entries {
        vec![("micro", self.batch.micro.to_string()), ("global", self.batch.global.to_string())]
    }

    fn data_entries(&self) -> Entries {
        let d = &self.data;
        let train = (!d.train.is_empty()).then(|| ("train", quoted(&d.train)));
        let path = |path: &Option<String>| path.as_deref().map_or_else(|| "None".into(), quoted);
        let rest = [
            ("validation", path(&d.validation)),
            ("tokenizer", path(&d.tokenizer)),
            ("format", d.format.name().into()),
            ("validation_fraction", float_text(d.validation_fraction)),
        ];
        train.into_iter().chain(rest).collect()
    }

    fn train_entries(&self) -> Entries {
        let t = &self.train;
        vec![
            ("steps", t.steps.to_string()),
            ("eval_every", t.eval_every.to_string()),
            ("eval_batches", t.eval_batches.map_or_else(|| "None".into(), |n| n.to_string())),
            ("checkpoint_every", t.checkpoint_every.to_string()),
            ("checkpoint_minutes", optional(t.checkpoint_minutes)),
            ("checkpoint_overhead", optional(t.checkpoint_overhead)),
            ("checkpoint_writer", t.checkpoint_writer.name().into()),
            ("checkpoint_keep", t.checkpoint_keep.to_string()),
            ("weights", t.weights.name().into()),
            ("stop_after_skipped", t.stop_after_skipped.to_string()),
            ("rollbacks", t.rollbacks.to_string()),
            ("seed", t.seed.to_string()),
        ]
    }

    fn sample_entries(&self) -> Entries {
        let s = &self.sample;
        vec![
            ("prompt", quoted(&s.prompt)),
            ("tokens", s.tokens.to_string()),
            ("temperature", float_text(s.temperature)),
        ]
    }
}

fn optional(number: Option<f32>) -> String {
    number.map_or_else(|| "None".into(), float_text)
}

type Entries = Vec<(&'static str, String)>;

fn entry(out: &mut String, depth: usize, key: &str, value: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{}{key}: {value},", "    ".repeat(depth));
}

fn section(out: &mut String, name: &str, entries: &Entries) {
    let _ = writeln!(out, "    {name}: (");
    for (key, value) in entries {
        entry(out, 2, key, value);
    }
    out.push_str("    ),\n");
}

fn device(device: &DeviceConfig) -> String {
    match device {
        DeviceConfig::Cpu { count, memory, threads } => {
            let memory = quoted(&format_bytes(*memory));
            let threads = threads.map_or_else(|| "None".into(), |n| n.to_string());
            format!("Cpu(count: {count}, memory: {memory}, threads: {threads})")
        }
        DeviceConfig::Cuda => "Cuda".into(),
        DeviceConfig::Sim { path, .. } => format!("Sim(box: {})", quoted(&path.to_string_lossy())),
    }
}

/// The value of `offload.optimizer`.
pub(crate) fn placement_text(placement: Placement) -> String {
    match placement {
        Placement::Host => "Host".into(),
        Placement::Device => "Device".into(),
        Placement::Split { device_fraction } => {
            format!("Split(device_fraction: {})", float_text(device_fraction))
        }
    }
}

/// The value of `offload.update`.
pub(crate) fn update_text(update: UpdateMode) -> String {
    match update {
        UpdateMode::Serial => "Serial".into(),
        UpdateMode::Overlapped => "Overlapped".into(),
        UpdateMode::Delayed { after_step } => format!("Delayed(after_step: {after_step})"),
    }
}
