//! Where tokens come from.

use serde::Serialize;

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

/// In which order a run takes its samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum DataOrder {
    /// Epochs: each has every window of `seq_len` tokens once, in an order of its own.
    Shuffled,
    /// Every sample starts anywhere, as chance has it.
    Random,
}

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataConfig {
    /// File, directory or glob, made absolute (relative to the config file, or to the working
    /// directory from `--set`).
    /// Empty when the config leaves it out (then `train` asks for it; `plan` does not need it).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub train: String,
    /// The same; absent: the last `validation_fraction` of `train`.
    pub validation: Option<String>,
    /// Default `Auto`.
    pub format: DataFormat,
    /// `tokenizer.json` for text, made absolute like the others; absent: a byte is a token. With `Auto` and `Bytes` only.
    pub tokenizer: Option<String>,
    /// (0, 0.5], default 0.1.
    pub validation_fraction: f32,
    /// `None` with `Chat`; default `Windows`.
    pub packing: Packing,
    /// Default false.
    pub truncate: bool,
    /// Empty by default: none.
    pub system: String,
    /// Default `Shuffled`; `Random` in a run of a version that did not know the key.
    pub order: DataOrder,
}
