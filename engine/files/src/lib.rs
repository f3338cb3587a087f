//! Opening, writing and naming of files. Every other crate opens, creates, reads and renames files
//! through this crate; the lint `disallowed-methods` refuses other ways.

pub mod directory;
pub mod durable;
pub mod foreign_text;
pub mod held;
pub mod hub;
pub mod input;
pub mod json;
pub mod names;
pub mod output;
pub mod path_text;
pub mod private;
pub mod regular_file;
pub mod shell;
pub mod utc;

/// Version of onebox, with the commit of a release build if the commit is known.
pub const VERSION: &str = env!("ONEBOX_VERSION");
