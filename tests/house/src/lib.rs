//! Measures how the source of the workspace is built: lines of code, circles between modules, names of types, tuple
//! arguments, documentation comments. `scripts/house` prints the figures, and the tidy test bounds them.

pub mod circles;
pub mod lines;
pub mod names;
pub mod prose;
pub mod tuples;
mod words;
pub mod workspace;
