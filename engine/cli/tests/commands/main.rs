//! Output, refusals and exit codes of each command, at a terminal and in a pipe.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod boxes;
mod choosing;
mod conversations;
mod golden;
mod gpu_check;
mod install;
mod messages;
mod outside;
mod pages;
mod terminal;
mod threads;
