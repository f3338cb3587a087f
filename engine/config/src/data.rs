//! Where tokens come from.

use serde::{Serialize, Serializer};

/// How bytes of the files become tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum DataFormat {
    /// Text, one token per byte or what `tokenizer` makes of it. A file that seems to be something else is refused.
    Auto,
    /// The same for files of any kind.
    Bytes,
    /// Little-endian 16-bit tokens.
    U16,
    /// Little-endian 32-bit tokens.
    U32,
    /// Token files of Megatron, each with its index beside it, which says what the tokens are.
    Megatron,
    /// JSON lines: each is an object with a text.
    Jsonl {
        /// The key of the text.
        text: String,
    },
    /// JSON lines: each is a chat, of which only the assistant's answers count.
    Chat,
}

impl DataFormat {
    /// Whether files hold text, or bytes taken as such, and not tokens.
    pub const fn is_bytes(&self) -> bool {
        matches!(self, Self::Auto | Self::Bytes)
    }

    /// Whether files are JSON lines.
    pub const fn is_rows(&self) -> bool {
        matches!(self, Self::Jsonl { .. } | Self::Chat)
    }

    /// Whether files say where documents begin.
    pub const fn has_documents(&self) -> bool {
        self.is_rows() || matches!(self, Self::Megatron)
    }

    /// Whether a file or a row holds a text that a tokenizer can take.
    pub const fn is_text(&self) -> bool {
        self.is_bytes() || self.is_rows()
    }

    /// Bytes of a token in the files; with a tokenizer, of a piece of text. None: an index says it.
    pub const fn width(&self) -> Option<usize> {
        match self {
            Self::Auto | Self::Bytes | Self::Jsonl { .. } | Self::Chat => Some(1),
            Self::U16 => Some(2),
            Self::U32 => Some(4),
            Self::Megatron => None,
        }
    }
}

/// The kind of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Packing {
    /// A window of `seq_len` tokens of all documents side by side.
    Windows,
    /// Documents side by side, each of which sees itself alone, and padding behind them.
    Documents,
    /// A document, and padding behind it.
    None,
}

/// What the text of a control token is in a text that no chat template makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ControlTokens {
    /// Text, which controls nothing.
    Text,
    /// The token.
    Parsed,
}

/// In which order a run takes its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum DataOrder {
    /// Epochs: each has every window of `seq_len` tokens once, in an order of its own.
    Shuffled,
    /// Every sample starts anywhere, as chance has it.
    Random,
}

/// A data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// Its name in reports; absent: that of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// File, directory or glob, made absolute (relative to the config file, or to the working
    /// directory from `--set`).
    pub path: String,
    /// Its share of the samples, by the sum of all weights. Default 1.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: f32,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    clippy::float_cmp,
    reason = "serde calls it; 1 is exact"
)]
fn is_one(weight: &f32) -> bool {
    *weight == 1.0
}

/// Data sets. None: the config leaves them out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sources(pub Vec<Source>);

impl Sources {
    /// One of all that a text names.
    pub fn one(path: String) -> Self {
        Self(vec![Source { name: None, path, weight: 1.0 }])
    }

    /// Whether the config leaves them out.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their paths.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|source| source.path.as_str())
    }
}

impl Serialize for Sources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [] => serializer.serialize_none(),
            // Alone it has no weight.
            [Source { name: None, path, .. }] => serializer.serialize_str(path),
            all => all.serialize(serializer),
        }
    }
}

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// Empty when the config leaves it out (then `train` asks for it; `plan` does not need it).
    #[serde(skip_serializing_if = "Sources::is_empty")]
    pub train: Sources,
    /// Empty: the last `validation_fraction` of each data set of `train`.
    pub validation: Sources,
    /// Default `Auto`.
    pub format: DataFormat,
    /// `tokenizer.json` for text, made absolute like the others; absent: a byte is a token. Of files of tokens the one that made them.
    pub tokenizer: Option<String>,
    /// (0, 0.5], default 0.1.
    pub validation_fraction: f32,
    /// `None` with `Chat`; default `Windows`.
    pub packing: Packing,
    /// Default false.
    pub truncate: bool,
    /// Empty by default: none.
    pub system: String,
    /// Of `Jsonl`, and of `prompt` and `completion` of `Chat` that are texts. Default `Text`.
    pub control_tokens: ControlTokens,
    /// Default `Shuffled`; `Random` in a run of a version that did not know the key.
    pub order: DataOrder,
}
