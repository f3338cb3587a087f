//! Losses, gradients and states, compared with other programs and formulas, and between layouts.

mod adapters;
mod bits;
mod chat_templates;
mod delta;
mod experts;
mod frozen;
mod hugging_face;
mod layouts;
mod llama;
mod narrow;
mod parity;
mod precision;
mod reduce;
mod steps;
mod streaming;
mod tiers;
