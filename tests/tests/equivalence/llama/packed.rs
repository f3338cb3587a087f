//! Samples of several documents. Each document has the same results as alone in its sample, in the
//! forward and the backward pass.

use super::{
    Fixture, LAYOUTS as ALL, MASKED_B, MODELS, ON_GPUS, PassInputs, PassResult, SEED, V,
    assert_steps, fp32, grid, load, pass, pretrained, theirs, worst,
};
use config::Packing;
use data::{Corpus, Dataset};
use device::Dtype;
use layout::build::shape;
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor_parallel::{
    ActivationTiers, Architecture, CheckpointHome, DecoderShape, Recompute, TierCounts,
};

/// Number of tokens of a sample.
const T: usize = 12;
/// Number of samples, divisible by all numbers of replicas.
const B: usize = 6;
/// Tokens of each document, by sample. The last of several documents is padding.
const LENGTHS: [&[usize]; B] = [&[5, 3, 4], &[12], &[1, 7, 2, 2], &[6, 6], &[4, 4, 4], &[2, 9, 1]];

/// Layouts: (tensor, data, sequence, recompute).
const LAYOUTS: [(usize, usize, bool, Recompute); 6] = [
    (1, 1, false, Recompute::None),
    (2, 1, false, Recompute::Block),
    (2, 1, true, Recompute::None),
    (1, 3, false, Recompute::Block),
    (2, 2, true, Recompute::Block),
    (2, 1, true, Recompute::Selective),
];

/// A model with its parameters.
struct Model {
    name: &'static str,
    fixture: Fixture,
}

fn models() -> Vec<Model> {
    let mut gpt2 = Fixture::default();
    gpt2.add(include_bytes!("../../../fixtures/gpt2-tiny.safetensors"));
    let llama = |name| Model { name, fixture: load(name) };
    let gpt2 = Model { name: "gpt2", fixture: gpt2 };
    let llamas = ["llama3", "qwen3", "qwen3-moe", "gpt-oss", "qwen3-5", "qwen3-next"].map(llama);
    std::iter::once(gpt2).chain(llamas).collect()
}

impl Model {
    fn shape(
        &self,
        (tp, dp, sequence, recompute): (usize, usize, bool, Recompute),
    ) -> DecoderShape {
        if self.name != "gpt2" {
            let mut sets = grid((tp, dp, sequence));
            sets.push(format!("recompute={recompute:?}"));
            return shape(&fp32(self.name, &sets, 0));
        }
        DecoderShape {
            architecture: Architecture::GPT2,
            layers: 2,
            kinds: vec![tensor_parallel::LayerKind::PLAIN],
            layer_kinds: vec![0; 2],
            hidden: 32,
            heads: 4,
            kv_heads: 4,
            head_dim: 8,
            seq_len: T,
            vocab: V,
            ffn_hidden: 4 * 32,
            experts: None,
            delta: None,
            micro_batch: B / dp,
            tp_size: tp,
            sequence,
            recompute,
            tiers: ActivationTiers::NONE,
            partition_checkpoints: false,
            checkpoint_home: CheckpointHome::Device,
            checkpoint_slots: 1,
            ring: tensor_parallel::Ring::NONE,
            head_rows: 1024,
            dtype: Dtype::F32,
            fp8: false,
            partial_dtype: Dtype::F32,
            dropout: 0.0,
            init_std: 0.0,
            trained: Default::default(),
        }
    }

    fn pass(&self, shape: &DecoderShape, dp: usize, batch: &Batch) -> PassResult {
        let name =
            |ours: &str| if self.name == "gpt2" { ours.into() } else { theirs(self.name, ours) };
        let Batch { tokens, targets, starts } = batch;
        let param = &|ours: &str| self.fixture.get(&name(ours));
        pass(shape, dp, &PassInputs { tokens, targets, starts: starts.as_deref(), param })
    }
}

/// Tokens, targets and document starts, each B T numbers.
#[derive(Clone, Default)]
struct Batch {
    tokens: Vec<f64>,
    targets: Vec<f64>,
    starts: Option<Vec<f64>>,
}

/// Place of the document in its sample, its tokens and its targets.
type Document = (usize, Vec<f64>, Vec<f64>);

/// Documents of each sample. Targets of the padding and targets divisible by 3 do not count.
fn documents() -> Vec<Vec<Document>> {
    let mut n = 0usize;
    let mut one = |place: usize, length: usize, is_padding: bool| {
        let mut next = || {
            n += 1;
            (n * n * 31 + 7 * n) % V
        };
        let tokens = (0..length).map(|_| next() as f64).collect();
        let counts = |target: usize| {
            if is_padding || target.is_multiple_of(3) { -1.0 } else { target as f64 }
        };
        (place, tokens, (0..length).map(|_| counts(next())).collect())
    };
    let mut sample = |lengths: &&[usize]| {
        let last = lengths.len() - 1;
        lengths.iter().enumerate().map(|(i, n)| one(i, *n, i == last && last > 0)).collect()
    };
    LENGTHS.iter().map(&mut sample).collect()
}

/// Batch with several documents in a sample.
fn packed(samples: &[Vec<Document>]) -> Batch {
    let (mut batch, mut all) = (Batch::default(), Vec::new());
    for (_, tokens, targets) in samples.iter().flatten() {
        let start = (batch.tokens.len() % T) as f64;
        all.extend(std::iter::repeat_n(start, tokens.len()));
        batch.tokens.extend(tokens);
        batch.targets.extend(targets);
    }
    Batch { starts: Some(all), ..batch }
}

/// Batch with each document alone at the start of a sample, and padding after it.
fn alone(samples: &[Vec<Document>]) -> Batch {
    let mut batch = Batch::default();
    for (_, tokens, targets) in samples.iter().flatten() {
        let padding = T - tokens.len();
        batch.tokens.extend(tokens.iter().chain(&vec![0.0; padding]));
        batch.targets.extend(targets.iter().chain(&vec![-1.0; padding]));
    }
    batch
}

/// Logits of the documents, one after another, from a batch with each document alone.
fn of_documents(logits: &[f64], samples: &[Vec<Document>]) -> Vec<f64> {
    let documents = samples.iter().flatten().enumerate();
    let own =
        |(i, (_, tokens, _)): (usize, &Document)| logits[i * T * V..][..tokens.len() * V].to_vec();
    documents.flat_map(own).collect()
}

fn scaled(grads: BTreeMap<String, Vec<f64>>, by: f64) -> BTreeMap<String, Vec<f64>> {
    grads.into_iter().map(|(name, g)| (name, g.iter().map(|x| x * by).collect())).collect()
}

#[test]
fn logits_loss_and_gradients_of_documents_side_by_side_are_those_of_each_alone() {
    for model in models() {
        let samples = documents();
        let count = samples.iter().flatten().count();
        let shape =
            DecoderShape { micro_batch: count, ..model.shape((1, 1, false, Recompute::None)) };
        let PassResult { logits, loss, grads, .. } = model.pass(&shape, 1, &alone(&samples));
        let want = of_documents(&logits, &samples);
        let (want_loss, want_grads) = (loss * count as f64, scaled(grads, count as f64));
        for layout in LAYOUTS {
            let (shape, run) = (model.shape(layout), format!("{} {layout:?}", model.name));
            let PassResult { logits, loss, grads, .. } =
                model.pass(&shape, layout.1, &packed(&samples));
            let difference = worst(&logits, &want);
            assert!(difference < 5e-6, "{run}: logits are {difference:e} apart");
            let difference = (loss * B as f64 - want_loss).abs();
            assert!(difference < 1e-6 * want_loss, "{run}: the loss is {difference:e} off");
            assert_eq!(grads.len(), want_grads.len());
            for (name, grad) in scaled(grads, B as f64) {
                let want = &want_grads[&name];
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let (difference, most) = (worst(&grad, want), 5e-6 * size);
                // An expert without tokens has no gradient.
                assert!(difference <= most, "{run}: {name} is {difference:e} apart of {size:e}");
            }
        }
    }
}

#[test]
fn a_document_changes_no_bit_of_the_logits_of_others() {
    for model in models() {
        let samples = documents();
        let mut changed = samples.clone();
        for (_, tokens, _) in changed.iter_mut().flatten().filter(|(place, ..)| *place == 1) {
            tokens.iter_mut().for_each(|token| *token = (*token + 5.0) % V as f64);
        }
        for layout in LAYOUTS {
            let shape = model.shape(layout);
            let [one, other] = [&samples, &changed]
                .map(|samples| model.pass(&shape, layout.1, &packed(samples)).logits);
            let rows = one.chunks(V).zip(other.chunks(V));
            let of =
                samples.iter().flatten().flat_map(|(place, tokens, _)| vec![*place; tokens.len()]);
            for ((one, other), place) in rows.zip(of) {
                assert_eq!(one == other, place != 1, "{} {layout:?}: document {place}", model.name);
            }
        }
    }
}

/// Cuts a sample of T + 1 tokens and T targets into documents. Targets below 0 do not count.
pub(crate) fn cut(tokens: &[f64], targets: &[f64], starts: &[f64]) -> Vec<data::Document> {
    let ends = |at: &usize| *at == T || starts[*at] == *at as f64;
    let places: Vec<usize> = (0..=T).filter(ends).collect();
    let document = |ends: &[usize]| data::Document {
        tokens: tokens[ends[0]..=ends[1]].iter().map(|token| *token as u32).collect(),
        counted: [false]
            .into_iter()
            .chain(targets[ends[0]..ends[1]].iter().map(|t| *t >= 0.0))
            .collect(),
    };
    places.windows(2).map(document).collect()
}

/// Trains packed samples of masked documents with the engine. PyTorch trains each document in a
/// sample of its own.
#[test]
fn ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout() {
    let on_gpus = std::env::var_os(ON_GPUS).is_some();
    let of_gpus = ["llama3", "gpt-oss", "qwen3-5-moe"];
    for (number, model) in if on_gpus { &of_gpus[..] } else { &MODELS[..] }.iter().enumerate() {
        let (fixture, from) = (load(model), pretrained(model));
        let tokens = fixture.get("masked.train.tokens").chunks(T + 1);
        let targets = fixture.get("masked.train.targets").chunks(T);
        let starts = fixture.get("packed.train.starts").chunks(T);
        let samples: Vec<_> =
            tokens.zip(targets).zip(starts).map(|((t, wanted), s)| cut(t, wanted, s)).collect();
        assert!(samples.iter().filter(|documents| documents.len() > 2).count() > 100);
        // Sample n of the run is sample n of the fixture. Each sample is full, so that packing does
        // not change it.
        let validation = samples[0].clone();
        let data = Corpus::of_documents(&samples.concat(), &validation, T, true);
        assert_eq!(data.num_train_samples(), samples.len());
        let mut in_place = samples.clone();
        for (n, documents) in samples.iter().enumerate() {
            in_place[data.shuffled(SEED, n as u64)].clone_from(documents);
        }
        let data =
            Arc::new(Dataset::from(Corpus::of_documents(&in_place.concat(), &validation, T, true)));
        // The quick selection: one rank, data-parallel ranks, and a grid with sequence parallelism; models
        // after the first take these in turn.
        let quick = [ALL[0], ALL[3], ALL[4]];
        let layouts = match on_gpus {
            true => &quick[2..],
            false if tests::compare::full() => &ALL[..],
            false if number == 0 => &quick[..],
            false => &quick[number % 3..][..1],
        };
        let micros = [2, 4].into_iter().cycle().skip(number / 3);
        for (layout, micro) in layouts.iter().zip(micros) {
            let mut sets = grid(*layout);
            sets.retain(|set| !set.starts_with("batch.micro"));
            sets.extend([format!("batch.micro={micro}"), format!("batch.global={MASKED_B}")]);
            sets.push("data.order=Shuffled".into());
            if micro == 2 {
                sets.push("recompute=Block".into());
            }
            if on_gpus {
                sets.retain(|set| !set.starts_with("device"));
                sets.push("device=Cuda".into());
            }
            let mut config = fp32(model, &sets, SEED);
            // Only a config with a format of documents can set this packing.
            config.data.packing = Packing::Documents;
            let want = ["losses", "norms"].map(|of| fixture.get(&format!("packed.train.{of}")));
            assert_steps(&config, (&from, &data), want, &format!("{model} {sets:?}"));
        }
    }
}

/// Blocks with several documents in a sample keep activations at any place.
#[test]
fn tiers_change_no_bit_of_documents_side_by_side() {
    let one = TierCounts { device: 1, host: 0 };
    let tiers = [
        ActivationTiers { attention: one, mlp: TierCounts { device: 0, host: 2 } },
        ActivationTiers { attention: TierCounts { device: 0, host: 1 }, mlp: one },
        ActivationTiers { attention: TierCounts::NONE, mlp: one },
        ActivationTiers { attention: one, mlp: TierCounts::NONE },
    ];
    for model in models() {
        let samples = documents();
        for layout in LAYOUTS.into_iter().filter(|layout| layout.3 == Recompute::Block) {
            let shape = model.shape(layout);
            let want = model.pass(&shape, layout.1, &packed(&samples));
            for tiers in tiers {
                let shape = DecoderShape { tiers, ..shape.clone() };
                let found = model.pass(&shape, layout.1, &packed(&samples));
                let what = format!("{} {layout:?} {tiers:?}", model.name);
                assert_eq!(want.logits, found.logits, "{what}");
                assert_eq!(want.loss.to_bits(), found.loss.to_bits(), "{what}");
                assert_eq!(want.grads, found.grads, "{what}");
            }
        }
    }
}
