//! What one GPU can do, and the backends that do it.
//!
//! **Operations are data, memory belongs to the plan.** A [`Tensor`] is an address in a planned arena; an [`Op`]
//! names tensors; [`Device::submit`] puts ops on [`Lane`]s, [`Event`]s order lanes, and a hazard check refuses
//! what is not ordered. Behind [`Device`] stands an executor: [`cpu`] runs virtual GPUs with real arithmetic,
//! [`cuda`] real ones.

mod bulk;
pub mod cpu;
mod crew;
pub mod cuda;
mod device;
mod error;
mod hazard;
mod host;
mod lane;
pub mod numerics;
mod op;
pub mod panics;
mod patience;
pub mod random;
pub mod recorder;
pub mod sim;
mod tensor;
mod view;
pub mod warm;

pub use crew::{Crew, Pieces};
pub use device::{Activity, Device, Rank};
pub(crate) use device::{Admitted, Executor};
pub use error::{Error, Hazard, OutOfMemory, Site};
pub use host::{HostContext, HostOp, HostTask};
pub use lane::{Event, LANES, Lane};
pub use op::{Dropout, Group, Heads, Mode, Op, Reduce, Rule, VocabShard};
pub use tensor::{Arena, Dtype, Entry, Plan, Tensor};
pub use view::{BLOCK, Element, View, ViewMut};
