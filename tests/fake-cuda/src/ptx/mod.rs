//! An interpreter of PTX, the text into which NVRTC compiles a kernel. It runs the compiled kernels
//! on machines without a GPU, sees every access, and reports faults that a GPU would hide.
//!
//! A grid runs block after block, and a block's warps run one after another from barrier to
//! barrier. The lanes of a warp run in lockstep. After a branch that separates them, they
//! reconverge at the immediate post-dominator. This order has no effect on the reports: races
//! follow from the rules of the memory model (see [`FaultKind::Race`]).
//!
//! Arithmetic follows the PTX manual: `rn` operations round as IEEE 754 demands, and only `fma`
//! fuses. If the manual gives a bound instead of bits, the interpreter computes one allowed result:
//!
//! | instruction | here | on a GPU |
//! |---|---|---|
//! | `ex2.approx.ftz.f32` | the host's `exp2`, subnormals become 0 | within 2 ulp |
//! | `rcp.approx.ftz.f32` | the quotient rounded towards 0, subnormals become 0 | within 1 ulp |
//! | `rcp.approx.ftz.f64` | the quotient without its lower 32 bits | the same precision |
//! | `mma` | fp32 products and sums in order of k, each rounded | unspecified order and width |
//!
//! A copy by `cp.async` is under way until its thread has waited for the copy. Before that wait,
//! its bytes may not be read or written, and their source may not be written. Instructions that no
//! kernel uses are refused by name.

mod alu;
mod block_state;
mod builder;
mod copies;
mod count;
mod decode;
mod fault;
mod flow;
mod kernel;
mod launch;
mod lines;
mod memory;
mod module;
mod op;
mod parse;
mod shadow;
mod step;
mod tensor;
mod text;
mod warp;

pub use block_state::Run;
pub use count::{Counts, Unit};
pub use fault::{Fault, FaultKind};
pub use kernel::Kernel;
pub use launch::Shape;
pub use memory::Memory;
pub use module::Module;
