//! The manifest of a checkpoint: one line of JSON and the hash of that line. Files have numbers
//! instead of names, so that no path in a manifest can lead out of the directory.

use super::header::is_name;
use super::span::{Span, cover};
use crate::evaluations::EvaluationHistory;
use crate::rollback::RollbackHistory;
use config::{Config, Precision};
use data::{Dataset, Identity};
use device::cuda::MatmulChoices;
use files::foreign_text::{foreign, reason};
use offload::control;
use serde::{Deserialize, Serialize};
use topology::counted;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Format version that this onebox writes and reads.
pub(crate) const FORMAT: u32 = 1;
/// Name of the manifest file in the directory of a checkpoint.
pub const MANIFEST: &str = "MANIFEST";
/// Longest manifest that is read, in bytes.
pub const LONGEST: u64 = 256 << 20;
/// Digits of a hash in hexadecimal.
const DIGITS: usize = 32;
/// Names of the states, in the order of [`offload::OwnedRun::states`]. A file's entries are named
/// TENSOR.STATE. The gradient is stored only if the update is delayed to the next step.
pub const STATES: [&str; 4] = ["master", "momentum", "variance", "gradient"];
/// Words of the control block that a delayed update reads: its decision.
const DECISION: [usize; 5] = [
    control::SKIP,
    control::FACTOR,
    control::LR,
    control::MOMENTUM_CORRECTION,
    control::VARIANCE_CORRECTION,
];

/// The states that are saved of every tensor; `is_delayed` adds the gradient of a delayed update.
pub fn states(is_delayed: bool) -> &'static [&'static str] {
    &STATES[..3 + usize::from(is_delayed)]
}

/// A 128-bit xxh3 hash in lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hash(String);

impl Hash {
    /// The digits of the hash.
    pub fn digits(&self) -> &str {
        &self.0
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(format!("{:032x}", xxh3_128(bytes)))
    }

    pub(crate) fn end(hasher: &Xxh3Default) -> Self {
        Self(format!("{:032x}", hasher.digest128()))
    }

    /// The first digits, to compare hashes by eye. Other characters of a forged file are removed.
    pub fn short(&self) -> String {
        self.0.chars().filter(char::is_ascii_hexdigit).take(8).collect()
    }
}

/// The content of a manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the checkpoint format.
    pub(crate) format: u32,
    /// Version of the program that wrote the checkpoint.
    pub(crate) onebox: String,
    /// Number of finished steps. The samples, the dropout and the learning rate of later steps are
    /// functions of the seed, the config and this number.
    pub step: u64,
    /// Number of trained tokens.
    pub tokens: u64,
    /// The run's rollbacks, which determine the samples together with the seed.
    #[serde(default, rename = "detours", skip_serializing_if = "RollbackHistory::is_empty")]
    pub rollback_history: RollbackHistory,
    /// Number of steps skipped in a row, up to and including this step.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_in_a_row: u64,
    /// The evaluations up to this step, if the run compares them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluations: Option<EvaluationHistory>,
    /// The algorithms of matmuls that the run has chosen by the clock, as
    /// [`MatmulChoices::lines`]; empty if it takes the library's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matmuls: Vec<String>,
    /// The part of the control block that is not a function of the step.
    pub control: Control,
    /// Identity of the training data.
    pub(crate) data: DataIdentity,
    /// Hash of the weights over which the run trains adapters, as
    /// [`PretrainedWeights::hash`](crate::hugging_face::PretrainedWeights::hash).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Hash>,
    /// The resolved config, in RON.
    pub config: String,
    /// The ranks' files, by number.
    pub(crate) files: Vec<FileEntry>,
    /// The tensors, in the order of the model.
    pub tensors: Vec<TensorEntry>,
}

/// The state of the decisions: see [`offload::control`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Control {
    /// Whether the run uses a loss scale.
    pub scaled: bool,
    applied: u64,
    skipped: u64,
    loss_scale: f64,
    good_steps: u64,
    hysteresis_left: i64,
    /// The decision for an update that is delayed to the next step, as bits of F64.
    #[serde(default, rename = "late", skip_serializing_if = "Option::is_none")]
    delayed: Option<[u64; 5]>,
    /// The fraction of recent steps that were clipped or skipped, as bits of F64; `None` means 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    clipped: Option<u64>,
}

/// Size of a data set and hashes of its tokens, which manifests of earlier versions lack.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DataIdentity {
    tokens: usize,
    #[serde(rename = "held_out_windows")]
    validation_windows: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    train_hash: Option<Hash>,
    #[serde(default, rename = "held_out_hash", skip_serializing_if = "Option::is_none")]
    validation_hash: Option<Hash>,
}

/// The file of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    /// Size of the whole file, in bytes.
    pub(crate) bytes: u64,
    /// Hash of the header.
    pub(crate) header: Hash,
}

/// A whole tensor and the ranges that store it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name of the tensor, such as `h.0.attn.qkv.weight`.
    pub name: String,
    /// Rows and columns; a vector has one column.
    pub shape: [usize; 2],
    /// The stored ranges, by file, in the order within the file.
    pub(crate) ranges: Vec<RangeEntry>,
}

/// A range of a tensor in a file, with a hash for each state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RangeEntry {
    pub(crate) file: usize,
    pub(crate) span: Span,
    /// Hash of the range, for each state.
    pub(crate) hash: Vec<Hash>,
}

impl Control {
    /// Reads the control block `words`. `is_delayed`: whether this decision's update is delayed.
    pub fn of(words: &[f64; control::WORDS], scaled: bool, is_delayed: bool) -> Self {
        Self {
            delayed: is_delayed.then(|| DECISION.map(|word| words[word].to_bits())),
            scaled,
            applied: words[control::APPLIED] as u64,
            skipped: words[control::SKIPPED] as u64,
            loss_scale: words[control::LOSS_SCALE],
            good_steps: words[control::GOOD_STEPS] as u64,
            hysteresis_left: words[control::HYSTERESIS_LEFT] as i64,
            clipped: (words[control::CLIP_RATE] != 0.0)
                .then(|| words[control::CLIP_RATE].to_bits()),
        }
    }

    /// The control block after `step`: the stored words, and the words of `initial` for all others,
    /// which the next decision sets before they are read. The loss scale comes with `initial` if
    /// only one of the two runs is `scaled`.
    pub(crate) fn words(
        &self,
        step: u64,
        scaled: bool,
        initial: &[f64; control::WORDS],
    ) -> [f64; control::WORDS] {
        let mut words = *initial;
        words[control::STEP] = step as f64;
        words[control::APPLIED] = self.applied as f64;
        words[control::SKIPPED] = self.skipped as f64;
        words[control::CLIP_RATE] = self.clipped.map_or(0.0, f64::from_bits);
        for (word, bits) in DECISION.into_iter().zip(self.delayed.into_iter().flatten()) {
            words[word] = f64::from_bits(bits);
        }
        if self.scaled == scaled {
            words[control::LOSS_SCALE] = self.loss_scale;
            words[control::GOOD_STEPS] = self.good_steps as f64;
            words[control::HYSTERESIS_LEFT] = self.hysteresis_left as f64;
        }
        words
    }
}

impl std::fmt::Display for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { applied, skipped, loss_scale, .. } = self;
        write!(f, "{applied} updates applied, {skipped} skipped")?;
        if self.scaled { write!(f, ", loss scale {loss_scale}") } else { Ok(()) }
    }
}

impl DataIdentity {
    pub(crate) fn of(data: &Dataset) -> Self {
        let Identity { train, validation } = data.identity();
        let hash = |hash: u128| Some(Hash(format!("{hash:032x}")));
        Self {
            tokens: data.num_tokens(),
            validation_windows: data.num_eval_windows(),
            train_hash: hash(train),
            validation_hash: hash(validation),
        }
    }

    /// Hashes of the training set and the validation set, if both are known.
    pub(crate) fn hashes(&self) -> Option<[&Hash; 2]> {
        Some([self.train_hash.as_ref()?, self.validation_hash.as_ref()?])
    }

    /// Whether both identify the same data: by hashes, or by sizes if one of them has no hashes.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        // Token counts include skipped documents, which no hash covers, so hashes have priority.
        let same = match self.hashes().zip(other.hashes()) {
            Some((one, other)) => one == other,
            None => self.tokens == other.tokens,
        };
        same && self.validation_windows == other.validation_windows
    }
}

impl std::fmt::Display for DataIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let windows = counted(self.validation_windows, "validation window");
        write!(f, "{} tokens, {windows}", self.tokens)?;
        let Some([train, validation]) = self.hashes() else { return Ok(()) };
        write!(f, ", xxh3 {} and {}", train.short(), validation.short())
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
const fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Manifest {
    /// A manifest of step 0, without tensors and files.
    pub fn new(config: &Config, data: &Dataset) -> Self {
        Self {
            format: FORMAT,
            onebox: env!("CARGO_PKG_VERSION").into(),
            step: 0,
            tokens: 0,
            rollback_history: RollbackHistory::default(),
            skipped_in_a_row: 0,
            evaluations: None,
            matmuls: Vec::new(),
            control: Control::of(
                &[0.0; control::WORDS],
                config.precision == Precision::Fp16,
                false,
            ),
            data: DataIdentity::of(data),
            base: None,
            config: config.to_ron(),
            files: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// The algorithms of matmuls that the run has chosen by the clock.
    ///
    /// # Errors
    /// The first line that is damaged; the manifest of a file has none.
    pub fn matmul_choices(&self) -> Result<Option<MatmulChoices>, String> {
        if self.matmuls.is_empty() {
            return Ok(None);
        }
        MatmulChoices::of_lines(self.matmuls.iter().map(String::as_str)).map(Some)
    }

    /// Whether an update is delayed to the next step.
    pub(crate) const fn has_late_update(&self) -> bool {
        self.control.delayed.is_some()
    }

    /// Names of the states of every tensor.
    pub(crate) fn states(&self) -> &'static [&'static str] {
        states(self.has_late_update())
    }

    pub(crate) fn encode(&self) -> serde_json::Result<Vec<u8>> {
        Ok(Self::seal(&serde_json::to_vec(self)?))
    }

    /// Appends the hash that ends a manifest.
    pub(crate) fn seal(json: &[u8]) -> Vec<u8> {
        let Hash(hash) = Hash::of(json);
        [json, format!("\n{hash}\n").as_bytes()].concat()
    }

    /// Parses a manifest, and checks its hash and the consistency of its values.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let split = bytes.len().checked_sub(DIGITS + 2).ok_or("it is cut short")?;
        let (json, hash) = bytes.split_at(split);
        if hash != format!("\n{}\n", Hash::of(json).0).as_bytes() {
            return Err("it does not have the hash that it ends with".into());
        }
        let version: Version = serde_json::from_slice(json).map_err(|e| reason(e).to_string())?;
        if version.format != FORMAT {
            let Version { format, onebox } = version;
            return Err(format!(
                "it has format {format}, written by onebox {}; this is onebox {}, which reads format {FORMAT}",
                foreign(onebox),
                env!("CARGO_PKG_VERSION")
            ));
        }
        let manifest: Self = serde_json::from_slice(json).map_err(|e| reason(e).to_string())?;
        manifest.check().map(|()| manifest)
    }

    fn check(&self) -> Result<(), String> {
        let scale = self.control.loss_scale;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(format!("its loss scale is {scale}"));
        }
        self.evaluations.map_or(Ok(()), |evaluations| evaluations.check(self.step))?;
        self.matmul_choices().map_err(|why| format!("its choices of matmuls: {why}"))?;
        let mut seen = std::collections::BTreeSet::new();
        for tensor in &self.tensors {
            let name = foreign(&tensor.name);
            if !is_name(&tensor.name) || !seen.insert(&tensor.name) {
                return Err(format!("`{name}` is no tensor's name, or stands there twice"));
            }
            let len = tensor.shape[0].checked_mul(tensor.shape[1]);
            let len = len.filter(|len| (1..1 << 56).contains(len));
            let len = len.ok_or_else(|| format!("`{name}` has a shape that cannot be"))?;
            let states = self.states().len();
            let possible = |r: &RangeEntry| {
                r.file < self.files.len() && r.span.is_within(len) && r.hash.len() == states
            };
            if !tensor.ranges.iter().all(possible) {
                return Err(format!(
                    "`{name}` has a range that lies outside of it, in no file, or lacks a hash"
                ));
            }
            let sum =
                tensor.ranges.iter().try_fold(0, |sum: usize, r| sum.checked_add(r.span.len()));
            if sum != Some(len) || !tensor.ranges.is_sorted_by_key(|r| r.file) {
                return Err(format!("`{name}` is not whole"));
            }
        }
        Ok(())
    }

    /// Checks that every element of every tensor is in exactly one range. The check uses memory for
    /// each run, so call it only after the files with these elements were found.
    pub(crate) fn check_cover(&self) -> Result<(), String> {
        let whole = |t: &&TensorEntry| !cover(t.ranges.iter().map(|r| &r.span), t.num_elements());
        let broken = self.tensors.iter().find(whole);
        broken.map_or(Ok(()), |t| Err(format!("`{}` has elements twice, and others never", t.name)))
    }
}

impl TensorEntry {
    /// Number of elements of the whole tensor.
    pub const fn num_elements(&self) -> usize {
        self.shape[0] * self.shape[1]
    }

    /// Numbers of the files that hold parts of the tensor.
    pub fn files(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.ranges.iter().map(|range| range.file).collect();
        files.dedup();
        files
    }
}

/// The fields that name the version of a manifest of any format.
#[derive(Deserialize)]
struct Version {
    format: u32,
    #[serde(default)]
    onebox: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"format":1,"onebox":"0.0.0","step":2,"tokens":64,"control":{"scaled":true,"applied":2,"skipped":0,"loss_scale":65536.0,"good_steps":2,"hysteresis_left":-3},"data":{"tokens":900,"held_out_windows":4},"config":"()","files":[{"bytes":80,"header":"00"}],"tensors":[{"name":"wte.weight","shape":[2,3],"ranges":[{"file":0,"span":{"start":0,"run":2,"stride":3,"count":2},"hash":["a","b","c"]},{"file":0,"span":{"start":2,"run":1,"stride":3,"count":2},"hash":["a","b","c"]}]}]}"#;

    fn sealed(json: &str) -> Vec<u8> {
        format!("{json}\n{}\n", Hash::of(json.as_bytes()).0).into_bytes()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let manifest = Manifest::decode(&sealed(GOOD)).unwrap();
        assert_eq!(manifest.encode().unwrap(), sealed(GOOD));
        manifest.check_cover().unwrap();
        let mut initial = [0.0; control::WORDS];
        initial[control::LOSS_SCALE] = 1.0;
        let words = manifest.control.words(2, true, &initial);
        assert_eq!([words[control::LOSS_SCALE], words[control::HYSTERESIS_LEFT]], [65536.0, -3.0]);
        let words = manifest.control.words(2, false, &initial);
        assert_eq!([words[control::LOSS_SCALE], words[control::APPLIED]], [1.0, 2.0]);
    }

    #[test]
    fn choices_of_matmuls_are_read_back_and_damaged_ones_are_refused() {
        assert_eq!(Manifest::decode(&sealed(GOOD)).unwrap().matmul_choices(), Ok(None));
        let with = |line: &str| {
            let lines = format!("\"matmuls\":[\"a GPU\",\"{line}\"],\"control\"");
            sealed(&GOOD.replace("\"control\"", &lines))
        };
        let good = with("Bf16 8x8 256, Gelu = apart");
        let manifest = Manifest::decode(&good).unwrap();
        let choices = manifest.matmul_choices().unwrap().unwrap();
        assert_eq!((choices.machine(), choices.len()), ("a GPU", 1));
        assert_eq!(manifest.encode().unwrap(), good);
        let why = Manifest::decode(&with("Bf16 8x8 256 = 12")).unwrap_err();
        assert!(why.contains("its choices of matmuls: line 2"), "{why}");
    }

    #[test]
    fn a_manifest_with_any_byte_flipped_is_refused() {
        let good = sealed(GOOD);
        for i in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[i] ^= 1 << bit;
                assert!(Manifest::decode(&bytes).is_err(), "bit {bit} of byte {i}");
            }
            assert!(Manifest::decode(&good[..i]).is_err(), "{i} bytes");
        }
    }

    #[test]
    fn hostile_manifests_are_refused_though_their_hash_is_right() {
        let of_format_2 = GOOD.replace("\"format\":1", "\"format\":2");
        let why = Manifest::decode(&sealed(&of_format_2)).unwrap_err();
        assert!(why.contains("format 2") && why.contains("reads format 1"), "{why}");
        for (from, to) in [
            ("\"file\":0", "\"file\":1"),
            ("\"file\":0", "\"file\":-1"),
            ("\"file\":0", "\"file\":\"../../etc/passwd\""),
            ("wte.weight", "../wte"),
            ("wte.weight", "/etc/passwd"),
            ("\"step\":2", "\"step\":2,\"step\":3"),
            ("\"step\":2", "\"step\":2,\"exec\":\"rm\""),
            ("\"start\":2", "\"start\":3"),
            ("\"count\":2", "\"count\":18446744073709551615"),
            ("\"stride\":3", "\"stride\":0"),
            ("\"shape\":[2,3]", "\"shape\":[4294967296,4294967296]"),
            ("\"shape\":[2,3]", "\"shape\":[0,3]"),
            ("\"shape\":[2,3]", "\"shape\":[2,4]"),
            ("65536.0", "-1.0"),
            ("65536.0", "null"),
            ("[\"a\",\"b\",\"c\"]", "[\"a\",\"b\"]"),
            ("\"hysteresis_left\":-3", "\"hysteresis_left\":-3,\"late\":[0,1,2,3,4]"),
        ] {
            let json = GOOD.replacen(from, to, 1);
            assert!(json != GOOD && Manifest::decode(&sealed(&json)).is_err(), "{to}");
        }
        let tensor = &GOOD[GOOD.find("{\"name\"").unwrap()..GOOD.len() - 2];
        let twice = GOOD.replace(tensor, &format!("{tensor},{tensor}"));
        assert!(Manifest::decode(&sealed(&twice)).unwrap_err().contains("twice"));
        let deep = GOOD.replace("\"()\"", &"[".repeat(100_000));
        assert!(Manifest::decode(&sealed(&deep)).is_err());
        let doubled = GOOD.replace("\"start\":2,\"run\":1", "\"start\":1,\"run\":1");
        assert!(Manifest::decode(&sealed(&doubled)).unwrap().check_cover().is_err());
    }
}
