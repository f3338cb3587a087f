//! `libcuda.so.1`: devices and contexts, memory, copies, streams, events, modules.

mod context;
mod copies;
mod device;
mod error_text;
pub(crate) mod events;
pub(crate) mod memory;
pub(crate) mod modules;
mod pinned;
mod streams;
