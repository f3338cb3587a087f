//! A decoder (GPT-2, Llama, Gemma and similar models) split over the tensor-parallel ranks as in
//! Megatron-LM (arXiv 1909.08053, section 3), with the forward and backward pass of each part.
//!
//! Layers get a [`device::Device`] and handles; they submit ops and return. There is no graph: the
//! backward pass is written by hand. This crate does not depend on the use of the gradients.
//!
//! Letters: B samples of a micro-batch, T tokens of a sample, C hidden, H heads, K heads of keys
//! and values, D elements of a head, F inner width of the MLP, V padded vocabulary, L layers, t
//! ranks of the tensor-parallel group; E experts of a layer, k experts of a token, I inner width of
//! an expert, R = B T k pairs of a token and an expert. `rows` = B T, or B T / t if sequence parallelism (arXiv
//! 2205.05198) splits the tokens.
//!
//! Read in this order:
//!
//! 1. `shape`, `experts_shape`, `delta_shape`: the sizes of a model and of a pass; `params`: layout and split of
//!    parameters;
//! 2. `decoder`: the whole model, which the step calls segment by segment;
//! 3. `block`: attention and MLP between norms, forward and backward; `branch`: buffers of both
//!    halves;
//! 4. `attention`, `rotary`, `delta_net`, `delta_scratch`, `mlp`, `experts`, `norm`: the parts of a block; `mixer`: attention or
//!    a gated delta net; `mlp_layer`: an MLP or experts; `expert_loads`: counts of their tokens; `shared_expert`: an MLP
//!    beside experts; `router_correction` and `correction_values`:
//!    numbers that change only the choice of experts; `linear`: the matmuls with its weights;
//!    `adapter`: low-rank adapters of linears;
//! 5. `region`: the collectives inside a layer;
//! 6. `embedding`, `loss`: the first and the last layer, split over the vocabulary;
//! 7. `activation_checkpoints`: saved inputs of blocks for recomputation, and their place;
//!    `activation_tiers`, `block_activations` and `host_activations`: blocks that keep their
//!    activations on the device or on the host, and the copies;
//! 8. `kv_cache`: keys and values of earlier tokens, for generation.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod activation_checkpoints;
mod activation_tiers;
mod adapter;
mod adapter_shape;
mod attention;
mod attention_sinks;
mod attention_sums;
mod block;
mod block_activations;
mod block_form;
mod branch;
mod correction_values;
mod decoder;
mod delta_net;
mod delta_scratch;
mod delta_shape;
mod embedding;
mod expert_adapters;
mod expert_biases;
mod expert_loads;
mod experts;
mod experts_scratch;
mod experts_shape;
mod frozen_params;
mod host_activations;
mod kv_cache;
mod linear;
mod loss;
mod mixer;
mod mlp;
mod mlp_layer;
mod norm;
mod parameter_counts;
mod params;
mod region;
mod rotary;
mod router_correction;
mod shape;
mod shared_expert;
mod shared_gate;
mod trained_params;

pub use activation_tiers::{ActivationTiers, Tier, TierCounts};
pub use adapter_shape::{AdapterShape, AdapterTargets, FACTORS, linears_of_factor};
pub use decoder::{Decoder, HeadBuckets, SegmentRole};
pub use delta_shape::DeltaShape;
pub use frozen_params::{FrozenParams, frozen_unit};
pub use host_activations::ActivationCopies;
pub use kv_cache::{KvCache, NewTokens};
pub use loss::LossTensors;
pub use params::{Init, Param, Run, SegmentLayout, Split};
pub use rotary::{Rope, RopeScaling};
pub use shape::{
    Architecture, Balance, BatchTensors, CheckpointHome, DecoderShape, ExpertsShape, LayerKind,
    MicrobatchContext, NormPlace, QkNorm, Recompute, Ring, SigmoidShape, head_rows,
};
pub use trained_params::TrainedParams;
