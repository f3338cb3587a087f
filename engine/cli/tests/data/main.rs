//! Data from rows, chats, tokenizers and token files to samples.

#[path = "../common/mod.rs"]
mod common;

mod chats;
mod containers;
mod data;
mod exchange;
mod prepare;
mod samples;
mod shapes;
mod token_files;
mod tokenizers;
