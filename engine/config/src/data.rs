//! Where tokens come from.

use super::declare::{choice, section};
use super::reading::{Entries, Interval, KeyDefault};
use super::sources::Sources;
use serde::Serialize;

section! {
    /// Where tokens come from.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct DataConfig, read(s, beside_model: Option<String>) {
        /// File, directory or glob to train on, or several with their shares of the samples. Relative to the config
        /// file; in `--set` to the working directory. `train` needs it, `plan` does not.
        #[serde(skip_serializing_if = "Sources::is_empty")]
        train: Sources = sources(Entries::Weighed), resume: Experiment;
        /// The same for evaluations; each of several has a loss of its own. None: the last `validation_fraction` of `train`.
        validation: Sources = sources(Entries::Named), resume: Experiment;
        /// `Auto`: text, and a file that seems to be something else is refused. `Bytes`: files of any kind. `U16`,
        /// `U32`: little-endian token files. `Megatron`: a `.bin` with its `.idx` beside it, by either name or by what
        /// the names have in common. `Jsonl`: JSON lines with a text each. `Chat`: JSON lines with `messages` each, or
        /// `prompt` and `completion`; only answers count.
        format: DataFormat = choice(KeyDefault::Default(DataFormat::Auto)), resume: Experiment;
        /// A `tokenizer.json` for text, or the folder of one. None: a byte is a token. With `format` `U16`, `U32` and
        /// `Megatron` the one that made the tokens, which the run keeps for `generate`, `export` and `data show`. With
        /// `model.from` the one of its folder where this is left out; where that has none, text is refused for its
        /// weights unless the `None` is written.
        tokenizer: Option<String> = path(tokenizer(beside_model)), resume: Experiment;
        /// Share of `train` that is held out where there is no `validation`.
        validation_fraction: f32 = float(Interval::above(0.0, 0.5), KeyDefault::Default(0.1)), resume: Experiment;
        /// The sample. `Windows`: `model.seq_len` tokens of all documents side by side. `Documents`: documents of
        /// `Jsonl`, `Chat` or `Megatron` side by side, each of which sees itself alone. `None`: one of them, and
        /// padding behind it.
        packing: Packing = choice(match format {
            DataFormat::Chat => KeyDefault::Derived(Packing::None, "chats are samples", &["data.format"]),
            _ => KeyDefault::Default(Packing::Windows),
        }), resume: Experiment;
        /// With `packing: Documents` and `None`, a document of more than `model.seq_len` + 1 tokens is cut there.
        /// `false`: it is left out, and counted; one of `Jsonl` or `Megatron` with `packing: Documents` is divided.
        truncate: bool = flag(KeyDefault::Default(false)), resume: Experiment;
        /// With `Chat`, the first message of each chat that has none of the system. Empty: none.
        system: String = text(KeyDefault::Default(String::new()), |_| Ok(())), resume: Experiment;
        /// What the text of a control token, such as `<|im_end|>`, is in the texts of `Jsonl`, and in `prompt` and
        /// `completion` of `Chat` where these are texts. `Text`: text, which controls nothing. `Parsed`: the token, for
        /// chats that a template has rendered; a text that ends with a control token gets no other end. Messages of
        /// `Chat` are always text; files of plain text are always parsed.
        control_tokens: ControlTokens = choice(KeyDefault::Default(ControlTokens::Text)), resume: Experiment;

        // Versions without the key knew nothing else.
        let usual = if s.reader.stored { DataOrder::Random } else { DataOrder::Shuffled };
        /// `Shuffled`: epochs, each of which has every window of `model.seq_len` tokens once. `Random`: each sample
        /// starts anywhere.
        order: DataOrder = choice(KeyDefault::Default(usual)), resume: Experiment;
    }
}

/// The default of `data.tokenizer`.
fn tokenizer(beside_model: Option<String>) -> KeyDefault<Option<String>> {
    let found = |path| KeyDefault::Derived(Some(path), "beside config.json", &["model.from"]);
    beside_model.map_or(KeyDefault::Default(None), found)
}

choice! {
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
        Jsonl["(text: \"text\")"] {
            /// The key of the text in a row.
            text: String = text(KeyDefault::Default("text".into()), |_| Ok(()));
        },
        /// JSON lines: each is a chat, of which only the assistant's answers count.
        Chat,
    }
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

choice! {
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
}

choice! {
    /// What the text of a control token is in a text that no chat template makes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ControlTokens {
        /// Text, which controls nothing.
        Text,
        /// The token.
        Parsed,
    }
}

choice! {
    /// In which order a run takes its samples.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum DataOrder {
        /// Epochs: each has every window of `seq_len` tokens once, in an order of its own.
        Shuffled,
        /// Every sample starts anywhere, as chance has it.
        Random,
    }
}
