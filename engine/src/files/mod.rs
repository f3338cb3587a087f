//! Files: how they are opened, written and named.

pub(crate) mod directory;
pub(crate) mod durable;
pub(crate) mod held;
pub(crate) mod json;
pub(crate) mod names;
pub(crate) mod output;
pub(crate) mod own;
pub(crate) mod sealed;
pub(crate) mod shown;
pub(crate) mod utc;
