//! Keys of the data: files, their format, and the samples.

use super::columns::ChatColumns;
use super::declare::{choice, section};
use super::reading::{Entries, Interval, KeyDefault};
use super::sources::Sources;
use serde::Serialize;

section! {
    /// Files of the data, their format, and the samples.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct DataConfig, read(s, beside_model: Option<String>) {
        /// Training data: a file, a directory or a glob, or a list of several with their shares of
        /// the samples. A path is relative to the config file, or in `--set` to the working
        /// directory. `onebox train` needs this key; `onebox plan` does not.
        #[serde(skip_serializing_if = "Sources::is_empty")]
        train: Sources = sources(Entries::Weighed), resume: Experiment;
        /// Validation set: a file, a directory or a glob, or a list of several, each with its own
        /// loss. None: the last `data.validation_fraction` of the training data.
        validation: Sources = sources(Entries::Named), resume: Experiment;
        /// Format of the data files. `Auto`: text; a file that seems to be something else is
        /// refused. `Bytes`: files of any kind. `U16`, `U32`: little-endian token files.
        /// `Megatron`: a `.bin` file with its `.idx` file, named by either file or by their common
        /// part. `Jsonl`: JSON lines with a text in each. `Chat`: rows with `messages`, or `prompt`
        /// and `completion`, or `instruction` and `output`; only answers are targets, unless
        /// `data.targets` says otherwise.
        format: DataFormat = choice(KeyDefault::Default(DataFormat::Auto)), resume: Experiment;
        /// Path of a `tokenizer.json`, or of its folder, that makes tokens of text. None: a byte is
        /// a token; `Jsonl` and `Chat` need a tokenizer. With `data.format` `U16`, `U32` and
        /// `Megatron` it is the tokenizer that made the tokens; the run keeps it for `generate`,
        /// `export` and `data show`. If the key is left out, the folder of `model.from` gives its
        /// tokenizer. If that folder has none, onebox refuses to train its weights on bytes, unless
        /// the config says `None`.
        tokenizer: Option<String> = path(tokenizer(beside_model)), resume: Experiment;
        /// Share of `data.train` that is the validation set if `data.validation` is None.
        validation_fraction: f32 = float(Interval::above(0.0, 0.5), KeyDefault::Default(0.1)), resume: Experiment;
        /// Contents of a sample. `Windows`: `model.seq_len` tokens of the joined documents.
        /// `Documents`: several documents of `Jsonl`, `Chat` or `Megatron`, each of which attends
        /// only to itself, then padding. `None`: one document, then padding. The default of `Chat`
        /// is `None`; `Chat` does not allow `Windows`.
        packing: Packing = choice(match format {
            DataFormat::Chat => KeyDefault::Derived(Packing::None, "chats are samples", &["data.format"]),
            _ => KeyDefault::Default(Packing::Windows),
        }), resume: Experiment;
        /// Whether a document of more than `model.seq_len` + 1 tokens is cut to this length, with
        /// `data.packing` `Documents` or `None`. `false`: onebox leaves out such documents and
        /// reports their number; but `packing: Documents` divides them if the format is `Jsonl` or
        /// `Megatron`. Not allowed with `Windows`.
        truncate: bool = flag(KeyDefault::Default(false)), resume: Experiment;
        /// Names of the columns of `data.format: Chat`, if they differ from the names of onebox:
        /// `messages` (and `role` and `content` in a message), or `prompt` and `completion`, or
        /// `instruction`, `input`, `output` and `history`; and `system` and `tools`. onebox refuses
        /// a row without a column that this key names. None: each column has the name in onebox, or
        /// another usual name.
        columns: ChatColumns = columns(), resume: Experiment;
        /// Tokens of `data.format: Chat` that the loss counts. `Answers`: what the assistant says.
        /// `LastAnswer`: only the last answer of a chat. `All`: every token of the text. A message
        /// with `train: false` or `weight: 0` never counts.
        targets: ChatTargets = choice(KeyDefault::Default(ChatTargets::Answers)), resume: Experiment;
        /// System message that begins each chat without a system message, with `data.format: Chat`.
        /// Empty: no message.
        system: String = text(KeyDefault::Default(String::new()), |_| Ok(())), resume: Experiment;
        /// Meaning of the text of a control token, such as `<|im_end|>`, in texts of `Jsonl`, and
        /// in a `prompt` and `completion` of `Chat` that are texts. `Text`: the text controls
        /// nothing. `Parsed`: the text is the token, for chats that a template has rendered; a text
        /// that ends with a control token gets no other end. Messages of `Chat` are always text;
        /// files of plain text are always parsed.
        control_tokens: ControlTokens = choice(KeyDefault::Default(ControlTokens::Text)), resume: Experiment;

        // Versions without this key had only `Random`.
        let usual = if s.reader.stored { DataOrder::Random } else { DataOrder::Shuffled };
        /// Order of the samples. `Shuffled`: epochs; each epoch has every sample once, in its own
        /// order. `Random`: each sample is drawn at random, and a window starts at any token.
        order: DataOrder = choice(KeyDefault::Default(usual)), resume: Experiment;
    }
}

/// Default of `data.tokenizer`.
fn tokenizer(beside_model: Option<String>) -> KeyDefault<Option<String>> {
    let found = |path| KeyDefault::Derived(Some(path), "beside config.json", &["model.from"]);
    beside_model.map_or(KeyDefault::Default(None), found)
}

choice! {
    /// Format of the data files: how their bytes become tokens.
    #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
    pub enum DataFormat {
        /// Text: a token is a byte, or a token of `tokenizer`. A file that seems to be something
        /// else is refused.
        Auto,
        /// As `Auto`, but also for a file that seems not to be text.
        Bytes,
        /// Little-endian 16-bit tokens.
        U16,
        /// Little-endian 32-bit tokens.
        U32,
        /// Token files of Megatron, each with an index file that gives the type of the tokens.
        Megatron,
        /// JSON lines: each line is an object with a text.
        Jsonl["(text: \"text\")"] {
            /// Key of the text in each object of the JSON lines.
            text: String = text(KeyDefault::Default("text".into()), |_| Ok(()));
        },
        /// Rows that are chats or pairs of a question and an answer.
        Chat,
    }
}

impl DataFormat {
    /// Whether a file holds one text, or plain bytes, and not tokens.
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

    /// Whether a file or a row holds text for a tokenizer.
    pub const fn is_text(&self) -> bool {
        self.is_bytes() || self.is_rows()
    }

    /// Bytes of a token in the files; 1 for text. None: the index of the files has the number.
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
    /// Contents of a sample.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Packing {
        /// A window of `seq_len` tokens of the joined documents.
        Windows,
        /// Several documents, each of which attends only to itself, then padding.
        Documents,
        /// One document, then padding.
        None,
    }
}

choice! {
    /// Tokens of a chat that the loss counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ChatTargets {
        /// All answers of the assistant.
        Answers,
        /// The last answer of the assistant.
        LastAnswer,
        /// Every token of the text.
        All,
    }
}

choice! {
    /// Meaning of the text of a control token in a text that no chat template makes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ControlTokens {
        /// The text controls nothing.
        Text,
        /// The text is the control token.
        Parsed,
    }
}

choice! {
    /// Order of the samples of a run.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum DataOrder {
        /// Epochs: each epoch has every window of `seq_len` tokens once, in its own order.
        Shuffled,
        /// Every sample starts at a random token.
        Random,
    }
}
