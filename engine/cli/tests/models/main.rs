//! Folders of pretrained models, and generation.

#[path = "../common/mod.rs"]
mod common;

mod adapters;
mod folders;
mod frozen;
mod generation;
mod generation_on_gpus;
mod hub;
mod models;
mod tuning;
