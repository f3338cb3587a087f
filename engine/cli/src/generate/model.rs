//! A model that reads tokens and predicts the next: the weights of a run, a checkpoint or a folder,
//! on the cores or a GPU.

use super::compute_device::{ComputeDevice, open_on_cores, open_on_gpu};
use super::weights::{load, load_checkpoint, load_folder};
use super::{GenerateError, ModelSource, WeightSource};
use checkpoint::hugging_face::{Folder, PretrainedWeights};
use config::Config;
use data::progress::Progress;
use device::{Arena, Device, Dtype, Lane, Plan, Tensor};
use layout::build::{dtype, shape};
use layout::decoder_parts::{LayerKinds, architecture, layer_kinds};
use std::ops::Range;
use std::path::Path;
use tensor_parallel::{CheckpointHome, Decoder, DecoderShape, KvCache, NewTokens, Recompute};

/// The weights in the folder `from`, which has the frozen weights of a run; the run knows their hash as
/// `of_run`.
fn base(
    from: Option<&Path>,
    decoder: &Decoder,
    of_run: Option<&str>,
    progress: &dyn Progress,
) -> Result<PretrainedWeights, GenerateError> {
    let Some(from) = from.filter(|_| of_run.is_some()) else {
        return Err(GenerateError::NoBase);
    };
    let opened = Folder::open(from).and_then(|folder| PretrainedWeights::new(folder, decoder));
    let base = opened.map_err(GenerateError::Base)?;
    if of_run != Some(base.hash(progress).map_err(GenerateError::Base)?.digits()) {
        return Err(GenerateError::OtherBase(base.path().to_owned()));
    }
    Ok(base)
}

/// All tokens of a sample so far: one or more.
#[derive(Clone, Copy)]
pub(super) struct SampleTokens<'a> {
    /// Number of the sample.
    pub(super) sample: usize,
    pub(super) tokens: &'a [i32],
}

/// A model ready to predict.
pub(super) struct Model {
    dev: Device,
    decoder: Decoder,
    /// Keys and values of the tokens of each sample.
    cache: KvCache,
    /// For each sample, the number of tokens in the cache.
    cached: Vec<usize>,
    tokens: Tensor,
    /// Maximum number of tokens that the model sees.
    context: usize,
}

impl Model {
    /// Opens the model for several samples. It sees at most `context` tokens of each sample.
    pub(super) fn open(
        config: &Config,
        from: &ModelSource<'_>,
        context: usize,
        samples: usize,
    ) -> Result<Self, GenerateError> {
        let ModelSource { weights: trained, device: on, machine, precision, progress, .. } = *from;
        let of_run = shape(config);
        // Learned positions of a folder are read as a whole.
        let learned = of_run.architecture.learned_positions;
        let whole = learned && matches!(trained, WeightSource::Folder(_));
        let context = if whole { config.model.seq_len } else { context };
        let dtype = dtype(precision);
        // The length of the text decides the factors of LongRoPE, as in transformers.
        let LayerKinds { kinds, layer_kinds } = layer_kinds(&config.model, context);
        let shape = DecoderShape {
            // The type of the weights here may differ from that of the run.
            architecture: architecture(&config.model, dtype),
            kinds,
            layer_kinds,
            seq_len: context,
            micro_batch: 1,
            tp_size: 1,
            sequence: false,
            recompute: Recompute::Block,
            tiers: tensor_parallel::ActivationTiers::NONE,
            partition_checkpoints: false,
            checkpoint_home: CheckpointHome::None,
            checkpoint_slots: 1,
            ring: tensor_parallel::Ring::NONE,
            head_rows: samples,
            dtype,
            fp8: false,
            partial_dtype: dtype,
            dropout: 0.0,
            trained: of_run.trained.without_dropout(),
            ..of_run
        };
        let mut plan = Plan::default();
        let decoder = Decoder::plan(&mut plan, &shape, 1);
        let cache = KvCache::plan(&mut plan, &shape, samples);
        let at = (Arena::Device, "batches");
        let tokens = plan.tensor(at, "tokens", Dtype::I32, (1, context));
        let dev = match on {
            ComputeDevice::Cores => open_on_cores(plan, &shape, machine),
            ComputeDevice::Gpu => open_on_gpu(config, plan, &shape, machine),
        }?;
        decoder.write_constants(&dev)?;
        let parameters = decoder.shape().parameters();
        let reading = progress.begin("loading weights", size_of::<f32>() as u64 * parameters);
        let of_base = match trained {
            WeightSource::Weights(path) => load(&dev, &decoder, path, &*reading)?,
            WeightSource::Checkpoint(from) => {
                load_checkpoint(&dev, &decoder, from, &*reading)?;
                from.manifest().base.as_ref().map(|base| base.digits().to_owned())
            }
            WeightSource::Folder(from) => {
                let from = PretrainedWeights::new(Folder::open(from)?, &decoder)?;
                load_folder(&dev, &decoder, &from, &*reading)?;
                None
            }
        };
        if decoder.shape().has_frozen_params() {
            let folder = from.base.or_else(|| config.model.pretrained().map(Path::new));
            let base = base(folder, &decoder, of_base.as_deref(), progress)?;
            load_folder(&dev, &decoder, &base, &*reading)?;
        } else if from.base.is_some() {
            return Err(GenerateError::NothingFrozen);
        }
        drop(reading);
        Ok(Self { dev, decoder, cache, cached: vec![0; samples], tokens, context })
    }

    /// Empties the cache, before other texts.
    pub(super) fn forget(&mut self) {
        self.cached.fill(0);
    }

    /// Keeps at most the first `tokens` tokens of a sample in the cache; returns how many it holds.
    pub(super) fn keep(&mut self, sample: usize, tokens: usize) -> usize {
        self.cached[sample] = self.cached[sample].min(tokens);
        self.cached[sample]
    }

    /// Logits of the next token of each sample; only its last [`context`](Self::context) tokens
    /// count. Tokens of a sample that the cache holds are not computed again. A sample that has one
    /// token more than in the last call costs one row.
    pub(super) fn next(
        &mut self,
        texts: &[SampleTokens<'_>],
    ) -> Result<Vec<Vec<f64>>, GenerateError> {
        let mut all = vec![Vec::new(); texts.len()];
        let grown = |SampleTokens { sample, tokens }: SampleTokens<'_>| {
            let held = self.cached[sample];
            held > 0 && tokens.len() == held + 1 && tokens.len() <= self.context
        };
        let (grown, others): (Vec<usize>, Vec<usize>) =
            (0..texts.len()).partition(|i| grown(texts[*i]));
        for i in others {
            let SampleTokens { sample, tokens } = texts[i];
            let last = &tokens[tokens.len().saturating_sub(self.context)..];
            // If the first tokens fall away, all others have another position.
            let first = if last.len() == tokens.len() { self.cached[sample] } else { 0 };
            let count = last.len() - first;
            self.extend(&[NewTokens { sample, first, count }], &last[first..])?;
            all[i] = self.logits(count - 1..count)?.remove(0);
            self.cached[sample] = if last.len() == tokens.len() { last.len() } else { 0 };
        }
        for some in grown.chunks(self.context) {
            let one = |i: &usize| NewTokens {
                sample: texts[*i].sample,
                first: texts[*i].tokens.len() - 1,
                count: 1,
            };
            let new: Vec<NewTokens> = some.iter().map(one).collect();
            let tokens: Vec<i32> =
                some.iter().map(|i| texts[*i].tokens[texts[*i].tokens.len() - 1]).collect();
            self.extend(&new, &tokens)?;
            for (i, logits) in some.iter().zip(self.logits(0..some.len())?) {
                all[*i] = logits;
                self.cached[texts[*i].sample] += 1;
            }
        }
        Ok(all)
    }

    fn extend(&mut self, new: &[NewTokens], tokens: &[i32]) -> Result<(), GenerateError> {
        let batch = self.tokens.slice(0..tokens.len());
        self.dev.write(batch, &|i| f64::from(tokens[i]))?;
        self.decoder.extend(&self.dev, &mut self.cache, new, batch);
        Ok(())
    }

    /// Logits of the given rows of the last tokens.
    fn logits(&self, rows: Range<usize>) -> Result<Vec<Vec<f64>>, GenerateError> {
        let count = rows.len();
        self.decoder.project_new(&self.dev, rows);
        self.dev.sync(self.dev.record(Lane::Compute))?;
        let columns = self.decoder.shape().vocab_per_rank();
        let mut all = vec![0.0; count * columns];
        self.dev.read(self.decoder.logits().rows(0..count), &mut all)?;
        let vocab = self.decoder.shape().vocab;
        let rows = all.chunks(columns).map(|row| &row[..vocab]);
        match rows.clone().flatten().find(|logit| !logit.is_finite()) {
            Some(logit) => Err(GenerateError::NotFinite(*logit)),
            None => Ok(rows.map(<[f64]>::to_vec).collect()),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use config::load_str;
    use layout::LocalMachine;
    use std::path::{Path, PathBuf};

    const FOLDERS: [&str; 17] = [
        "gpt2",
        "llama3",
        "llama-linear",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "mistral-window",
        "olmo3",
        "smollm3",
        "phi3",
        "granite",
        "gpt-oss",
        "qwen3-5",
        "qwen3-5-moe",
        "qwen3-next",
    ];

    /// Folder of the model `name` of the fixtures, and a config of it.
    pub(in crate::generate) fn fixture(name: &str) -> (PathBuf, Config) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("../../tests/fixtures/hf-{name}-tiny"));
        let ron = format!(
            "(model: (from: {folder:?}), device: Cpu, data: (train: \"x\", format: U16),
              train: (steps: 1))"
        );
        let config = load_str(&ron, "a.ron", Path::new("."), &[]).unwrap().config;
        (folder, config)
    }

    fn open(name: &str, samples: usize) -> Model {
        open_for(name, samples, 12)
    }

    fn open_for(name: &str, samples: usize, context: usize) -> Model {
        let (folder, config) = fixture(name);
        let machine = LocalMachine::default();
        let from = ModelSource::on_cores(WeightSource::Folder(&folder), None, &machine);
        Model::open(&config, &from, context, samples).unwrap()
    }

    /// A text of 61 different tokens.
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
                let next = |model: &mut Model| {
                    let tokens = &text[..end];
                    model.next(&[SampleTokens { sample: 0, tokens }]).unwrap().remove(0)
                };
                whole.forget();
                let (got, want) = (next(&mut grown), next(&mut whole));
                assert_eq!(grown.cached[0], if end <= room { end } else { 0 });
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let difference =
                    got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
                assert!(
                    difference < 2e-6 * size,
                    "{name}: {difference:e} of {size:e} behind {end} tokens"
                );
            }
        }
    }

    /// The texts begin alike and then differ, as the prompts of a conversation do.
    #[test]
    fn a_text_that_begins_like_the_last_has_the_logits_of_the_whole_text() {
        for name in FOLDERS {
            let (mut kept, mut whole) = (open(name, 1), open(name, 1));
            let (one, mut other) = (text(1), text(1));
            other[7] = (other[7] + 1) % 61;
            for (tokens, alike) in [(&one[..9], 0), (&other[..11], 7), (&other[..5], 4)] {
                assert_eq!(kept.keep(0, alike), alike, "{name}");
                whole.forget();
                let next = |model: &mut Model| {
                    model.next(&[SampleTokens { sample: 0, tokens }]).unwrap().remove(0)
                };
                let (got, want) = (next(&mut kept), next(&mut whole));
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let difference =
                    got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
                assert!(
                    difference < 2e-6 * size,
                    "{name}: {difference:e} of {size:e} behind {alike} tokens"
                );
            }
        }
    }

    /// A text goes on from the states before its last chunk of 64 tokens, also behind a cut before and
    /// behind them.
    #[test]
    fn states_of_delta_nets_go_on_over_chunks() {
        let (mut grown, mut whole) = (open_for("qwen3-5", 2, 150), open_for("qwen3-5", 1, 150));
        let text: Vec<i32> = (0..150).map(|i| (i * i * 7 + 11 * i) % 61).collect();
        let ends = (60..=68).chain([70, 127, 128, 129, 130, 131, 50, 51, 64, 65, 149, 150, 140]);
        let mut before = 0;
        for end in ends {
            let tokens = &text[..end];
            for sample in [1, 0] {
                grown.keep(sample, end.min(before).saturating_sub(1));
            }
            let next = |model: &mut Model, sample| {
                model.next(&[SampleTokens { sample, tokens }]).unwrap().remove(0)
            };
            whole.forget();
            let (got, want) = (next(&mut grown, 1), next(&mut whole, 0));
            let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let difference = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(difference < 2e-6 * size, "{difference:e} of {size:e} behind {end} tokens");
            before = end;
        }
    }

    #[test]
    fn texts_beside_each_other_change_no_bit() {
        for name in ["gpt2", "qwen3", "qwen3-5"] {
            let (mut together, mut alone) = (open(name, 3), open(name, 1));
            let texts = [text(1), text(2), text(3)];
            let lengths = |step: usize| [2 + step, 5 + step, 9 + step];
            let mut alike: Vec<Vec<Vec<f64>>> = Vec::new();
            for step in 0..4 {
                let some = [0, 1, 2].map(|sample| {
                    let tokens = &texts[sample][..lengths(step)[sample]];
                    SampleTokens { sample, tokens }
                });
                alike.push(together.next(&some).unwrap());
            }
            for (i, text) in texts.iter().enumerate() {
                alone.forget();
                for (step, all) in alike.iter().enumerate() {
                    let tokens = &text[..lengths(step)[i]];
                    let one = alone.next(&[SampleTokens { sample: 0, tokens }]).unwrap();
                    assert!(one[0] == all[i], "{name}: text {i}, step {step}");
                }
            }
        }
    }
}
