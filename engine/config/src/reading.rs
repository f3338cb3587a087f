//! A text of RON with the place of every value, read key by key; every error at once, each shown at its place. It knows
//! no key of a config: those stand in `schema`.

pub(super) mod bytes;
pub(super) mod fields;
pub(super) mod key;
pub(super) mod reader;
pub(super) mod report;
pub(super) mod section;
pub(super) mod set;
pub(super) mod source;
pub(super) mod sources;
pub(super) mod suggest;
pub(super) mod tree;
pub(super) mod value;
