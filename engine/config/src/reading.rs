//! Reads RON key by key and keeps the place of every value. Reports all errors together, each at
//! its place. This module knows no key of a config; `schema` has the keys.

mod bytes;
mod columns;
mod fields;
mod key;
mod other_tools;
mod reader;
mod report;
mod section;
pub(super) mod set;
mod source;
mod sources;
pub(super) mod suggest;
pub(super) mod tree;
mod value;
mod words;

pub use bytes::{format_bytes, parse_bytes};
pub(super) use key::Declaration;
pub use key::Key;
pub(super) use reader::ConfigReader;
pub(super) use report::{Complaint, ParseResult, Spot, short};
pub use report::{ConfigError, Problem, Violation};
pub(super) use section::{Choice, KeyDefault, MISSING, Section, described};
pub use set::BOX;
pub(super) use source::{ConfigSource, SourceKind, Span};
pub(super) use sources::Entries;
pub(super) use suggest::nearest;
pub(super) use tree::{Node, NodeKind};
pub(super) use value::{Interval, Item, float_text, grouped, is_name, name_of, quoted};
pub(super) use words::ticked;

use fields::absolute;
pub(super) use other_tools::{GivenValue, Refusal, answer, translation};
use reader::UnknownKey;
use report::SHOWN;
use suggest::meant;
use tree::{Field, join};
use words::value_answer;
