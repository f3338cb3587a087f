//! Predictions before a run: memory by [`plan`], time by [`simulate`], and layouts by [`search`].
//! Each runs the real step on a device that only counts ops or keeps a virtual clock.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod bound;
pub mod boxes;
pub mod calibrate;
pub mod changes;
pub mod choose;
pub mod plan;
pub mod product_rate;
pub mod range;
pub mod remedies;
mod schedules;
pub mod search;
pub mod shortage;
pub mod sim;
pub mod simulate;
mod variants;

pub use choose::choose;
pub use schedules::schedules;
pub use variants::States;
