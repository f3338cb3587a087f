//! A model that reads tokens and predicts the next: the weights of a run, a checkpoint or a folder, on the cores or a GPU.

use super::place::open;
use super::weights::{load, load_checkpoint, load_folder};
use super::{GenerateError, On, Trained};
use crate::config::{Config, Family, Precision};
use crate::layout::build::{dtype, shape};
use device::{Arena, Device, Dtype, Lane, Plan, Tensor};
use std::ops::Range;
use tensor_parallel::{Cache, Gpt, GptShape, Keep, NewTokens, Recompute};

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
        (on, precision): (On, Precision),
        (context, samples): (usize, usize),
    ) -> Result<Self, GenerateError> {
        // The positions of a folder are read whole.
        let learned = config.model.family == Family::Gpt2;
        let whole = learned && matches!(trained, Trained::Folder(_));
        let context = if whole { config.model.seq_len } else { context };
        let dtype = dtype(precision);
        let shape = GptShape {
            seq_len: context,
            micro_batch: 1,
            tp_size: 1,
            sequence: false,
            recompute: Recompute::Block,
            partition_checkpoints: false,
            keep: Keep::Nothing,
            checkpoint_sets: 1,
            ring: tensor_parallel::Ring::NONE,
            head_rows: samples,
            dtype,
            fp8: false,
            partial_dtype: dtype,
            dropout: 0.0,
            ..shape(config)
        };
        let mut plan = Plan::default();
        let gpt = Gpt::plan(&mut plan, &shape, 1);
        let cache = Cache::plan(&mut plan, &shape, samples);
        let at = (Arena::Device, "batches");
        let tokens = plan.tensor(at, "tokens", Dtype::I32, (1, context));
        let dev = open(config, plan, &shape, on)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_str;
    use std::path::Path;

    const FOLDERS: [&str; 6] = ["gpt2", "llama3", "llama-linear", "mistral", "qwen2", "qwen3"];

    fn open(name: &str, samples: usize) -> Model {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/fixtures/hf-{name}-tiny"));
        let ron = format!(
            "(model: (from: {folder:?}), device: Cpu, data: (train: \"x\", format: U16),
              train: (steps: 1))"
        );
        let config = load_str(&ron, "a.ron", Path::new("."), &[]).unwrap().config;
        let place = (On::Cores, Precision::Fp32);
        Model::open(&config, Trained::Folder(&folder), place, (12, samples)).unwrap()
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
