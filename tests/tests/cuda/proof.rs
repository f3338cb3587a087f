//! The start-up proof: a right GPU passes with every kind of model and layout, and once only.

use super::{on_a_real_gpu, on_cuda, under_fake};
use config::Packing;
use engine::proof::StartupProof;
use tests::{machine, tiny};

/// Cases that a child process runs.
pub(super) const CASES: &[(&str, fn())] = &[
    ("proof_layouts", || agree(LAYOUTS)),
    ("proof_models", || agree(MODELS)),
    ("proof_volta", || agree(&[&["precision=Fp16"], &["precision=Fp16", "parallel.tensor=2"]])),
    ("proof_hopper", || agree(HOPPER)),
    ("proof_documents", documents_agree),
];

const LAYOUTS: &[&[&str]] = &[
    &["precision=Fp32"],
    &["precision=Fp32", "parallel.tensor=2"],
    &["precision=Fp16"],
    &["precision=Bf16", "model.dropout=0.1", "parallel.tensor=4"],
    &["precision=Bf16", "recompute=Selective"],
    &["precision=Bf16", "recompute=Block", "parallel.tensor=2", "parallel.sequence=true"],
    &["precision=Bf16", "parallel.tensor=2", "parallel.data=2", "parallel.reduce_fp32=true"],
];

const MODELS: &[&[&str]] = &[
    &["precision=Bf16", "model.family=Llama", "model.kv_heads=2"],
    // Two ranks share each head of keys and values.
    &["precision=Bf16", "model.family=Llama", "model.kv_heads=2", "parallel.tensor=4"],
    &["precision=Fp32", "model.family=Llama", "model.qk_norm=true", "model.qkv_bias=true"],
    &["precision=Bf16", "model.family=Llama", "model.tied=true", "parallel.tensor=2"],
    &["precision=Bf16", "adapter=Lora(rank: 4, dropout: 0.1)", "parallel.tensor=2"],
    // The first block has no adapter.
    &[
        "precision=Fp32",
        "model.family=Llama",
        "model.layer_pattern=FD",
        "model.delta_net=(key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 3)",
        "adapter=Lora(rank: 4, targets: [\"in_proj_qkv\"])",
    ],
    // The vocabulary has padding, and samples are longer than those of the proof.
    &["precision=Bf16", "model.vocab=257", "model.seq_len=200"],
];

const HOPPER: &[&[&str]] = &[
    &["precision=Fp8", "model.heads=2"],
    &["precision=Fp8", "model.heads=2", "model.family=Llama", "parallel.tensor=2"],
    &["precision=Bf16", "attention=Cudnn", "model.seq_len=70"],
];

/// Each config passes its proof, and has the verdict afterwards.
fn agree(configs: &[&[&str]]) {
    for sets in configs {
        let config = on_cuda(tiny(sets));
        let look = || {
            let proof = StartupProof::look(&config, machine(), None);
            proof.unwrap_or_else(|why| panic!("{sets:?}: {why}"))
        };
        let Some(proof) = look() else {
            // Earlier runs of the test have left their verdicts.
            assert!(on_a_real_gpu(), "{sets:?}: no verdict is known");
            continue;
        };
        let summary = proof.run().unwrap_or_else(|e| panic!("{sets:?}: {e}"));
        println!("{sets:?}: {summary:?}");
        // Forward and backward, on every rank of a TP group.
        assert!(summary.ops >= 25 * config.parallel.tensor as u64, "{sets:?}: {summary:?}");
        assert!(look().is_none(), "{sets:?}: the verdict is kept");
    }
}

/// Samples of several documents have other kernels of attention and another verdict.
fn documents_agree() {
    agree(&[&["precision=Bf16"]]);
    let mut config = on_cuda(tiny(&["precision=Bf16"]));
    config.data.packing = Packing::Documents;
    let proof = StartupProof::look(&config, machine(), None).expect("GPUs");
    assert!(proof.is_some() || on_a_real_gpu(), "no verdict is known");
    proof.iter().for_each(|proof| {
        proof.run().unwrap_or_else(|e| panic!("{e}"));
    });
}

#[test]
fn right_gpus_pass_the_proof_with_every_layout() {
    under_fake("proof_layouts", &[]);
}

#[test]
fn right_gpus_pass_the_proof_with_every_model() {
    under_fake("proof_models", &[]);
    under_fake("proof_documents", &[]);
}

#[test]
fn right_gpus_pass_the_proof_with_fp16_on_volta_and_fp8_and_cudnn_on_hopper() {
    under_fake("proof_volta", &[("FAKECUDA_SM", "70")]);
    under_fake("proof_hopper", &[("FAKECUDA_SM", "90")]);
}
