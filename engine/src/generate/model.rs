//! A model that reads tokens and predicts the next: the weights of a run, a checkpoint or a folder, on virtual GPU 0.

use super::{GenerateError, Trained};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::inspect::TensorSummary;
use crate::config::{Config, Family};
use crate::hugging_face::{Folder, Pretrained};
use crate::run::open::kernel_crew;
use crate::run::placement::cores;
use crate::train::build::{scratch_floats, shape};
use device::cpu::{self, CpuOptions, Lanes};
use device::{Arena, Device, Dtype, HostWork, Lane, Plan, Rank, Tensor, ViewMut, World};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tensor_parallel::{Cache, Gpt, GptShape, Keep, NewTokens};
use topology::available_memory;

/// A header longer than this is no header.
const LONGEST_HEADER: u64 = 1 << 26;
/// Elements of parameters that a thread reads at once.
const AT_ONCE: usize = 1 << 20;

/// A model ready to predict.
pub(super) struct Model {
    dev: Device,
    gpt: Gpt,
    /// Keys and values of the tokens that each sample has.
    cache: Cache,
    /// By sample: how many tokens are in the cache.
    held: Vec<usize>,
    tokens: Tensor,
    /// Most tokens that it sees.
    context: usize,
}

impl Model {
    /// For `samples` samples of `context` tokens, all at once.
    pub(super) fn open(
        config: &Config,
        trained: Trained<'_>,
        (context, samples): (usize, usize),
    ) -> Result<Self, GenerateError> {
        // The positions of a folder are read whole.
        let learned = config.model.family == Family::Gpt2;
        let whole = learned && matches!(trained, Trained::Folder(_));
        let context = if whole { config.model.seq_len } else { context };
        let shape = GptShape {
            seq_len: context,
            micro_batch: 1,
            tp_size: 1,
            sequence: false,
            recompute: true,
            partition_checkpoints: false,
            keep: Keep::Nothing,
            checkpoint_sets: 1,
            head_rows: samples,
            dtype: Dtype::F32,
            partial_dtype: Dtype::F32,
            dropout: 0.0,
            ..shape(config)
        };
        let mut plan = Plan::default();
        let gpt = Gpt::plan(&mut plan, &shape, 1);
        let cache = Cache::plan(&mut plan, &shape, samples);
        let at = (Arena::Device, "batches");
        let tokens = plan.tensor(at, "tokens", Dtype::I32, (1, context));
        let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
        let (crew, scratch) = (kernel_crew(cores(), None), scratch_floats(&shape));
        let threads = crew.as_ref().map_or(1, |crew| crew.threads());
        let (needed, free) =
            (plan.bytes(Arena::Device) + scratch.bytes(threads), available_memory());
        if needed > free {
            return Err(GenerateError::Memory { needed, free });
        }
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch,
            work: HostWork { crew, ..HostWork::default() },
        };
        let world = World::new(1, 1, Duration::from_secs(60));
        let dev = cpu::open(rank, &Arc::new(plan), &world, &options)?;
        gpt.write_constants(&dev)?;
        match trained {
            Trained::Weights(path) => load(&dev, &gpt, path)?,
            Trained::Checkpoint(from) => load_checkpoint(&dev, &gpt, from)?,
            Trained::Folder(from) => load_folder(&dev, &gpt, from)?,
        }
        Ok(Self { dev, gpt, cache, held: vec![0; samples], tokens, context })
    }

    /// Other texts follow: none of them goes on from what the cache has.
    pub(super) fn forget(&mut self) {
        self.held.fill(0);
    }

    /// Logits of the token behind each text, which is the sample's number and all its tokens: one or more, of which the last
    /// [`context`](Self::context) count. A text that has one token more than when it was last here costs that one.
    pub(super) fn next(
        &mut self,
        texts: &[(usize, &[i32])],
    ) -> Result<Vec<Vec<f64>>, GenerateError> {
        let mut all = vec![Vec::new(); texts.len()];
        let grown = |(sample, tokens): (usize, &[i32])| {
            let held = self.held[sample];
            held > 0 && tokens.len() == held + 1 && tokens.len() <= self.context
        };
        let (grown, others): (Vec<usize>, Vec<usize>) =
            (0..texts.len()).partition(|i| grown(texts[*i]));
        for i in others {
            let (sample, tokens) = texts[i];
            let last = &tokens[tokens.len().saturating_sub(self.context)..];
            let count = last.len();
            self.extend(&[NewTokens { sample, first: 0, count }], last)?;
            all[i] = self.logits(count - 1..count)?.remove(0);
            self.held[sample] = if last.len() == tokens.len() { count } else { 0 };
        }
        for some in grown.chunks(self.context) {
            let one = |i: &usize| NewTokens {
                sample: texts[*i].0,
                first: texts[*i].1.len() - 1,
                count: 1,
            };
            let new: Vec<NewTokens> = some.iter().map(one).collect();
            let tokens: Vec<i32> =
                some.iter().map(|i| texts[*i].1[texts[*i].1.len() - 1]).collect();
            self.extend(&new, &tokens)?;
            for (i, logits) in some.iter().zip(self.logits(0..some.len())?) {
                all[*i] = logits;
                self.held[texts[*i].0] += 1;
            }
        }
        Ok(all)
    }

    fn extend(&self, new: &[NewTokens], tokens: &[i32]) -> Result<(), GenerateError> {
        let batch = self.tokens.slice(0..tokens.len());
        self.dev.write(batch, &|i| f64::from(tokens[i]))?;
        self.gpt.extend(&self.dev, &self.cache, new, batch);
        Ok(())
    }

    /// Of some rows of what came last.
    fn logits(&self, rows: Range<usize>) -> Result<Vec<Vec<f64>>, GenerateError> {
        let count = rows.len();
        self.gpt.project_new(&self.dev, rows);
        self.dev.sync(self.dev.record(Lane::Compute))?;
        let columns = self.gpt.shape().vocab_per_rank();
        let mut all = vec![0.0; count * columns];
        self.dev.read(self.gpt.logits().rows(0..count), &mut all)?;
        let vocab = self.gpt.shape().vocab;
        let rows = all.chunks(columns).map(|row| &row[..vocab]);
        match rows.clone().flatten().find(|logit| !logit.is_finite()) {
            Some(logit) => Err(GenerateError::NotFinite(*logit)),
            None => Ok(rows.map(<[f64]>::to_vec).collect()),
        }
    }
}

/// Sets some values: the index of the first, and the values.
type Fill<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), GenerateError> + Sync + 'a;

/// Sets parameters by `fill`, on all kernel threads.
fn set(dev: &Device, params: Tensor, fill: &Fill<'_>) -> Result<(), GenerateError> {
    let failed = Mutex::new(None);
    dev.write_runs(&[params], &|first, views| {
        let [ViewMut::F32(values)] = views else { unreachable!("parameters are fp32") };
        for (i, some) in values.chunks_mut(AT_ONCE).enumerate() {
            if let Err(error) = fill(first + i * AT_ONCE, some) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                break;
            }
        }
        Ok(())
    })?;
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Reads every parameter of `gpt` from a folder of transformers.
fn load_folder(dev: &Device, gpt: &Gpt, from: &Path) -> Result<(), GenerateError> {
    let from = Pretrained::new(Folder::open(from)?, gpt)?;
    let source = from.of_rank(gpt, dev.rank());
    for (segment, layout) in gpt.segments().iter().enumerate() {
        let params = gpt.params(segment).slice(0..layout.len);
        set(dev, params, &|first, values| Ok(source.fill(segment, first, values)?))?;
    }
    Ok(())
}

/// Reads every parameter of `gpt` from a safetensors file; of one with more rows, the first ones.
fn load(dev: &Device, gpt: &Gpt, path: &Path) -> Result<(), GenerateError> {
    let unreadable = |source| GenerateError::Read { path: path.to_owned(), source };
    let wrong = |problem: String| GenerateError::Weights { path: path.to_owned(), problem };
    let file = File::open(path).map_err(unreadable)?;
    let (header, metadata) = header(&file).map_err(unreadable)?.map_err(wrong)?;
    for (index, layout) in gpt.segments().iter().enumerate() {
        for param in &layout.params {
            let name = &param.name;
            let info =
                metadata.info(name).ok_or_else(|| wrong(format!("it has no tensor `{name}`")))?;
            let (rows, cols) = param.global;
            let fits = match info.shape[..] {
                [r] => r == rows && cols == 1,
                [r, c] => c == cols && (r == rows || (r > rows && name == "wpe")),
                _ => false,
            };
            if !fits || info.dtype != safetensors::Dtype::F32 {
                let found = format!("{:?} {:?}", info.dtype, info.shape);
                return Err(wrong(format!("`{name}` is {found}, not F32 [{rows}, {cols}]")));
            }
            let at = header + info.data_offsets.0 as u64;
            set(dev, gpt.params(index).slice(param.range.clone()), &|first, values| {
                let mut bytes = vec![0; 4 * values.len()];
                let read = file.read_exact_at(&mut bytes, at + 4 * first as u64);
                read.map_err(|e| match e.kind() {
                    std::io::ErrorKind::UnexpectedEof => wrong("it is cut off".into()),
                    _ => unreadable(e),
                })?;
                let numbers = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                values.iter_mut().zip(numbers).for_each(|(value, x)| *value = x);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Reads every parameter of `gpt` from a checkpoint; of positions, the first ones.
fn load_checkpoint(dev: &Device, gpt: &Gpt, from: &Checkpoint) -> Result<(), GenerateError> {
    let wrong = |problem: String| GenerateError::Weights { path: from.path().to_owned(), problem };
    let tensors = from.tensors();
    for (index, layout) in gpt.segments().iter().enumerate() {
        for param in &layout.params {
            let (rows, cols) = param.global;
            let fits = |t: &TensorSummary| {
                let more = param.name == "wpe" && t.shape[0] > rows;
                t.name == param.name && t.shape[1] == cols && (t.shape[0] == rows || more)
            };
            let number = tensors.iter().position(fits);
            let absent = || wrong(format!("it has no `{}` [{rows}, {cols}]", param.name));
            let (number, reader) = (number.ok_or_else(absent)?, from.reader());
            set(dev, gpt.params(index).slice(param.range.clone()), &|first, values| {
                let read = reader.read((number, 0), first..first + values.len(), values);
                read.map_err(|e| wrong(e.to_string()))
            })?;
        }
    }
    Ok(())
}

/// Where data starts in a safetensors file, and what is where.
fn header(file: &File) -> std::io::Result<Result<(u64, Metadata), String>> {
    let mut length = [0; 8];
    if let Err(e) = file.read_exact_at(&mut length, 0) {
        return cut_off(e);
    }
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Ok(Err("not a safetensors file".into()));
    }
    let end = 8 + length;
    let mut bytes = vec![0; end as usize];
    if let Err(e) = file.read_exact_at(&mut bytes, 0) {
        return cut_off(e);
    }
    let parsed = serde_json::from_slice(&bytes[8..]).map_err(|e| e.to_string());
    Ok(parsed.map(|metadata| (end, metadata)))
}

/// A file that ends too soon is wrong; one that cannot be read is another matter.
fn cut_off<T>(error: std::io::Error) -> std::io::Result<Result<T, String>> {
    let wrong = error.kind() == std::io::ErrorKind::UnexpectedEof;
    if wrong { Ok(Err("it is cut off".into())) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_str;

    const FOLDERS: [&str; 6] = ["gpt2", "llama3", "llama-linear", "mistral", "qwen2", "qwen3"];

    fn open(name: &str, samples: usize) -> Model {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/fixtures/hf-{name}-tiny"));
        let ron = format!(
            "(model: (from: {folder:?}), device: Cpu, data: (train: \"x\", format: U16),
              train: (steps: 1))"
        );
        let config = load_str(&ron, "a.ron", Path::new("."), &[]).unwrap().config;
        Model::open(&config, Trained::Folder(&folder), (12, samples)).unwrap()
    }

    /// Of 61 tokens.
    fn text(seed: i32) -> Vec<i32> {
        (0..18).map(|i| (i * i * 7 + 11 * i + 5 * seed) % 61).collect()
    }

    #[test]
    fn a_token_more_has_the_logits_of_the_whole_text() {
        for name in FOLDERS {
            let (mut grown, mut whole) = (open(name, 1), open(name, 1));
            let text = text(1);
            let room = grown.context;
            assert!(room < text.len(), "{name}: first tokens fall away, and all others move");
            for end in 3..=text.len() {
                let next = |model: &mut Model| model.next(&[(0, &text[..end])]).unwrap().remove(0);
                whole.forget();
                let (got, want) = (next(&mut grown), next(&mut whole));
                assert_eq!(grown.held[0], if end <= room { end } else { 0 });
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let apart = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
                assert!(apart < 2e-6 * size, "{name}: {apart:e} of {size:e} behind {end} tokens");
            }
        }
    }

    #[test]
    fn texts_beside_each_other_change_no_bit() {
        for name in ["gpt2", "qwen3"] {
            let (mut together, mut alone) = (open(name, 3), open(name, 1));
            let texts = [text(1), text(2), text(3)];
            let lengths = |step: usize| [2 + step, 5 + step, 9 + step];
            let mut alike: Vec<Vec<Vec<f64>>> = Vec::new();
            for step in 0..4 {
                let some = [0, 1, 2].map(|i| (i, &texts[i][..lengths(step)[i]]));
                alike.push(together.next(&some).unwrap());
            }
            for (i, text) in texts.iter().enumerate() {
                alone.forget();
                for (step, all) in alike.iter().enumerate() {
                    let one = alone.next(&[(0, &text[..lengths(step)[i]])]).unwrap();
                    assert!(one[0] == all[i], "{name}: text {i}, step {step}");
                }
            }
        }
    }
}
