//! Rules between the keys of the data, and between the data and the model.

use super::checks::Checks;
use super::model_folder::tokenizer_remedy;
use super::reading::Violation;
use super::{ChatTargets, ControlTokens, DataConfig, DataFormat, Packing, TrainConfig, in_line};
use topology::counted;

impl Checks<'_> {
    pub(super) fn byte_tokens(&self) -> Option<Violation> {
        let vocab = self.config.model.vocab;
        let bytes = self.config.data.format.is_bytes();
        (bytes && self.config.data.tokenizer.is_none() && vocab < 256).then(|| Violation {
            message: format!("{vocab} tokens are too few for bytes, of which there are 256"),
            help: "use 256 or more, or leave it out; or use the format `U16`, `U32` or `Megatron`"
                .into(),
            values: vec![
                ("model.vocab", counted(vocab, "token")),
                ("data.format", "one token per byte".into()),
            ],
        })
    }

    pub(super) fn rows_without_tokenizer(&self) -> Option<Violation> {
        let data = &self.config.data;
        // The rule names the folder even if there is none: for a refused folder, or a name that is not
        // found, a missing tokenizer is not reported.
        let folder = match self.config.model.from {
            Some(_) => "without a tokenizer.json",
            None => "no folder with a tokenizer.json",
        };
        let values = [
            ("data.format", "the files hold rows of text"),
            ("data.tokenizer", "nothing makes tokens of it"),
            ("model.from", folder),
        ];
        (data.tokenizer.is_none() && data.format.is_rows()).then(|| Violation {
            message: "rows of text need a tokenizer".into(),
            help: tokenizer_remedy(&self.config.model),
            values: values.map(|(key, meaning)| (key, meaning.into())).into(),
        })
    }

    pub(super) fn packing_of_another_format(&self) -> Option<Violation> {
        let DataConfig { format, packing, .. } = &self.config.data;
        let (message, help) = match (format, packing) {
            (DataFormat::Chat, Packing::Windows) => (
                "a window would cut chats anywhere",
                "leave `data.packing` out, or set it to `Documents`",
            ),
            (format, Packing::None | Packing::Documents) if !format.has_documents() => (
                "these files do not say where documents begin",
                "leave `data.packing` out, or set `data.format` to `Jsonl`, `Chat` or `Megatron`",
            ),
            _ => return None,
        };
        Some(Violation {
            message: message.into(),
            help: help.into(),
            values: vec![("data.format", in_line(format)), ("data.packing", in_line(packing))],
        })
    }

    pub(super) fn truncate_of_windows(&self) -> Option<Violation> {
        let DataConfig { format, packing, truncate, .. } = &self.config.data;
        (*truncate && *packing == Packing::Windows).then(|| Violation {
            message: "windows take all tokens: no document is too long for one".into(),
            help: match format.has_documents() {
                true => "leave `data.truncate` out, or set `data.packing` to `Documents` or `None`",
                false => "leave `data.truncate` out",
            }
            .into(),
            values: vec![
                ("data.truncate", "cuts documents".into()),
                ("data.packing", "windows of all documents side by side".into()),
            ],
        })
    }

    pub(super) fn system_of_no_chats(&self) -> Option<Violation> {
        let DataConfig { format, system, .. } = &self.config.data;
        (!system.is_empty() && *format != DataFormat::Chat).then(|| Violation {
            message: "only the rows of `Chat` have messages; tokens of prepared chats are made, with the first message that they had then".into(),
            help: "leave `data.system` out, or set `data.format` to `Chat`".into(),
            values: vec![
                ("data.system", "the first message of each chat".into()),
                ("data.format", in_line(format)),
            ],
        })
    }

    pub(super) fn columns_of_no_chats(&self) -> Option<Violation> {
        let DataConfig { format, columns, .. } = &self.config.data;
        (!columns.is_empty() && *format != DataFormat::Chat).then(|| Violation {
            message: match format {
                DataFormat::Jsonl { .. } => "rows of `Jsonl` have one column, which `data.format` names".into(),
                _ => "these files have no columns".into(),
            },
            help: "leave `data.columns` out, or set `data.format` to `Chat`, or to `Jsonl(text: \"NAME\")` for texts".into(),
            values: vec![
                ("data.columns", "columns of chats".into()),
                ("data.format", in_line(format)),
            ],
        })
    }

    pub(super) fn targets_of_no_chats(&self) -> Option<Violation> {
        let DataConfig { format, targets, .. } = &self.config.data;
        (*targets != ChatTargets::Answers && *format != DataFormat::Chat).then(|| Violation {
            message: match format {
                DataFormat::Megatron => {
                    "tokens of prepared chats are made, with the targets that they had then".into()
                }
                _ => "only chats have answers; every token of other data is a target".into(),
            },
            help: "leave `data.targets` out, or set `data.format` to `Chat`".into(),
            values: vec![("data.targets", in_line(targets)), ("data.format", in_line(format))],
        })
    }

    pub(super) fn control_tokens_of_no_rows(&self) -> Option<Violation> {
        let DataConfig { format, control_tokens, .. } = &self.config.data;
        (*control_tokens == ControlTokens::Parsed && !format.is_rows()).then(|| Violation {
            message: match format.is_bytes() {
                true => "files of plain text are always parsed".into(),
                false => "these files hold tokens, in which control tokens are what they were made"
                    .into(),
            },
            help: "leave `data.control_tokens` out, or set `data.format` to `Jsonl` or `Chat`"
                .into(),
            values: vec![
                ("data.control_tokens", "for the texts of rows".into()),
                ("data.format", in_line(format)),
            ],
        })
    }

    pub(super) fn steps_and_epochs(&self) -> Option<Violation> {
        let TrainConfig { steps, epochs, .. } = self.config.train;
        let epochs = epochs.filter(|_| !self.config.train.is_unread())?;
        Some(Violation {
            message: "a run has steps or epochs, not both".into(),
            help: "leave one of them out".into(),
            values: vec![
                ("train.steps", counted(steps, "step")),
                ("train.epochs", format!("{epochs} epochs")),
            ],
        })
    }
}
