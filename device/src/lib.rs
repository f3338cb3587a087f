//! What one GPU can do, and the backends that do it.
//!
//! **Operations are data, memory belongs to the plan.** A [`Tensor`] is an address in a planned arena; an [`Op`]
//! names tensors; [`Device::submit`] puts ops on [`Lane`]s, [`Event`]s order lanes, and a hazard check refuses
//! what is not ordered. Behind [`Device`] stands an executor: [`cpu`] runs virtual GPUs with real arithmetic,
//! [`cuda`] real ones.

pub mod cpu;
pub mod cuda;
mod error;
pub mod numerics;
mod op;
pub mod random;
mod ranks;
pub mod sim;
mod submit;
mod tensor;
mod view;

pub use error::{Error, Hazard, OutOfMemory, Site};
pub use op::{Dropout, Group, Heads, Mode, Op, Reduce, Rule, VocabShard};
pub use ranks::crew::{Crew, Pieces};
pub use ranks::memory::HostPlace;
pub use ranks::panics;
pub use ranks::shared::HostWork;
pub use ranks::trace::{Span, Trace};
pub use ranks::world::World;
pub use submit::device::{Activity, Device, Rank};
pub(crate) use submit::device::{Admitted, Executor};
pub use submit::lane::{Event, LANES, Lane};
pub use submit::task::{HostContext, HostOp, HostTask};
pub use submit::{recorder, warm};
pub use tensor::{Arena, Dtype, Entry, Plan, Tensor};
pub use view::{BLOCK, Element, View, ViewMut};
