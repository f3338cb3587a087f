//! Losses, gradients and states against other programs, against formulas, and of each layout against one rank.

mod bits;
mod chat_templates;
mod hugging_face;
mod layouts;
mod llama;
mod narrow;
mod parity;
mod precision;
mod reduce;
mod steps;
mod streaming;
