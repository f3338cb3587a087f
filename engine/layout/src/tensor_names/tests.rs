//! Tests with the names of each class.

use super::*;

/// Numbers of heads: 6 of queries, 3 of keys of a gated delta net.
const HEADS: HeadCounts = HeadCounts { queries: 6, delta_keys: 3 };
const LIKE_LLAMA: Names =
    Names::Llama { norms: NormPlace::Before, fused: &[], heads: HEADS, experts: None };

#[test]
fn names_are_those_of_transformers() {
    for (ours, theirs, transposed) in [
        ("wte", "wte.weight", false),
        ("h.3.ln_1.bias", "h.3.ln_1.bias", false),
        ("h.3.attn.qkv.weight", "h.3.attn.c_attn.weight", true),
        ("h.3.attn.qkv.bias", "h.3.attn.c_attn.bias", false),
        ("h.11.attn.proj.weight", "h.11.attn.c_proj.weight", true),
        ("h.11.mlp.fc.weight", "h.11.mlp.c_fc.weight", true),
        ("h.11.mlp.proj.bias", "h.11.mlp.c_proj.bias", false),
        ("ln_f.weight", "ln_f.weight", false),
    ] {
        assert_eq!(Names::Gpt2.foreign(ours), (theirs.to_owned(), transposed));
    }
    for (ours, theirs) in [
        ("wte", "model.embed_tokens.weight"),
        ("h.3.ln_1.weight", "model.layers.3.input_layernorm.weight"),
        ("h.3.attn.q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("h.3.attn.k.bias", "model.layers.3.self_attn.k_proj.bias"),
        ("h.3.attn.k_norm.weight", "model.layers.3.self_attn.k_norm.weight"),
        ("h.11.attn.proj.weight", "model.layers.11.self_attn.o_proj.weight"),
        ("h.11.ln_2.weight", "model.layers.11.post_attention_layernorm.weight"),
        ("h.11.mlp.gate.weight", "model.layers.11.mlp.gate_proj.weight"),
        ("h.11.mlp.proj.weight", "model.layers.11.mlp.down_proj.weight"),
        ("ln_f.weight", "model.norm.weight"),
        ("head", "lm_head.weight"),
    ] {
        assert_eq!(LIKE_LLAMA.whole(ours), theirs);
        assert!(!LIKE_LLAMA.foreign(ours).1);
        assert_eq!(LIKE_LLAMA.joined(ours), [ours]);
    }
}

/// Source: the classes of Gemma 2 and 3, and of OLMo 2 and 3, in transformers 5.24.
#[test]
fn norms_have_the_names_of_their_places() {
    let [around, after] = [NormPlace::Around, NormPlace::After].map(|norms| Names::Llama {
        norms,
        fused: &[],
        heads: HEADS,
        experts: None,
    });
    for (names, ours, theirs) in [
        (around, "h.1.ln_1.weight", "layers.1.input_layernorm.weight"),
        (around, "h.1.ln_1_post.weight", "layers.1.post_attention_layernorm.weight"),
        (around, "h.1.ln_2.weight", "layers.1.pre_feedforward_layernorm.weight"),
        (around, "h.1.ln_2_post.weight", "layers.1.post_feedforward_layernorm.weight"),
        (around, "h.1.attn.q_norm.weight", "layers.1.self_attn.q_norm.weight"),
        (after, "h.1.ln_1_post.weight", "layers.1.post_attention_layernorm.weight"),
        (after, "h.1.ln_2_post.weight", "layers.1.post_feedforward_layernorm.weight"),
        (after, "h.1.attn.k_norm.weight", "layers.1.self_attn.k_norm.weight"),
    ] {
        assert_eq!(names.foreign(ours).0, theirs);
    }
}

/// Source: the class of Phi-3 in transformers 5.24.
#[test]
fn fused_projections_are_rows_of_one_tensor() {
    let fused =
        Names::Llama { norms: NormPlace::Before, fused: &OF_PHI3, heads: HEADS, experts: None };
    let qkv = ["h.2.attn.q.weight", "h.2.attn.k.weight", "h.2.attn.v.weight"];
    for ours in qkv {
        assert_eq!(fused.whole(ours), "model.layers.2.self_attn.qkv_proj.weight");
        assert_eq!(fused.joined(ours), qkv);
    }
    let inner = ["h.2.mlp.gate.weight", "h.2.mlp.up.weight"];
    for ours in inner {
        assert_eq!(fused.whole(ours), "model.layers.2.mlp.gate_up_proj.weight");
        assert_eq!(fused.joined(ours), inner);
    }
    for (ours, theirs) in [
        ("h.2.attn.proj.weight", "model.layers.2.self_attn.o_proj.weight"),
        ("h.2.mlp.proj.weight", "model.layers.2.mlp.down_proj.weight"),
        ("h.2.ln_2.weight", "model.layers.2.post_attention_layernorm.weight"),
    ] {
        assert_eq!(fused.whole(ours), theirs);
        assert_eq!(fused.joined(ours), [ours]);
    }
}

/// Source: the conversions of version 5.24 of transformers for `qwen2_moe` and `mixtral`.
#[test]
fn experts_have_tensors_of_their_own_or_one_for_all() {
    let of = |form| Names::Llama {
        norms: NormPlace::Before,
        fused: &[],
        heads: HEADS,
        experts: Some(ExpertNames { form, count: 2, gates_shared: false }),
    };
    let [single, mixtral, fused] =
        [ExpertForm::Single, ExpertForm::Mixtral, ExpertForm::Fused].map(of);
    for (ours, [of_single, of_mixtral, of_fused]) in [
        (
            "h.3.moe.router.weight",
            ["mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.gate.weight"],
        ),
        (
            "h.3.moe.experts.1.gate.weight",
            [
                "mlp.experts.1.gate_proj.weight",
                "block_sparse_moe.experts.1.w1.weight",
                "mlp.experts.gate_up_proj",
            ],
        ),
        (
            "h.3.moe.experts.1.up.weight",
            [
                "mlp.experts.1.up_proj.weight",
                "block_sparse_moe.experts.1.w3.weight",
                "mlp.experts.gate_up_proj",
            ],
        ),
        (
            "h.3.moe.experts.0.proj.weight",
            [
                "mlp.experts.0.down_proj.weight",
                "block_sparse_moe.experts.0.w2.weight",
                "mlp.experts.down_proj",
            ],
        ),
        // A layer without experts.
        ("h.3.mlp.gate.weight", ["mlp.gate_proj.weight"; 3]),
        ("h.3.ln_2.weight", ["post_attention_layernorm.weight"; 3]),
    ] {
        for (names, theirs) in [(single, of_single), (mixtral, of_mixtral), (fused, of_fused)] {
            assert_eq!(names.whole(ours), format!("model.layers.3.{theirs}"));
            assert_eq!(is_stack(&names.foreign(ours).0), !theirs.ends_with(".weight"));
        }
        for names in [single, mixtral] {
            assert_eq!(names.joined(ours), [ours]);
            assert_eq!(names.stack_place(ours), None);
        }
    }
    assert_eq!(fused.joined("h.3.moe.router.weight"), ["h.3.moe.router.weight"]);
    let inner = [
        "h.3.moe.experts.0.gate.weight",
        "h.3.moe.experts.0.up.weight",
        "h.3.moe.experts.1.gate.weight",
        "h.3.moe.experts.1.up.weight",
    ];
    for (number, ours) in inner.into_iter().enumerate() {
        assert_eq!(fused.joined(ours), inner);
        let (expert, part) = (number / 2, number % 2);
        let place = StackPlace { experts: 2, parts: 2, expert, part, interleaved: false };
        assert_eq!(fused.stack_place(ours), Some(place));
    }
    let outer = ["h.3.moe.experts.0.proj.weight", "h.3.moe.experts.1.proj.weight"];
    for (expert, ours) in outer.into_iter().enumerate() {
        assert_eq!(fused.joined(ours), outer);
        let place = StackPlace { experts: 2, parts: 1, expert, part: 0, interleaved: false };
        assert_eq!(fused.stack_place(ours), Some(place));
    }
}

/// Source: the conversions of version 5.24 of transformers for the classes around a decoder.
#[test]
fn the_decoder_of_a_wrapper_has_a_prefix_of_old_and_of_new_files() {
    let (table, query) = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight");
    for (name, bare) in [
        ("language_model.model.embed_tokens.weight", Some(table)),
        ("model.language_model.embed_tokens.weight", Some(table)),
        ("language_model.embed_tokens.weight", Some(table)),
        ("model.language_model.model.embed_tokens.weight", Some(table)),
        ("module.model.language_model.layers.0.self_attn.q_proj.weight", Some(query)),
        ("language_model.lm_head.weight", Some(HEAD)),
        ("lm_head.weight", Some(HEAD)),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("model.vision_tower.transformer.layers.0.attention.q_proj.weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("multi_modal_projector.mm_input_projection_weight", None),
        ("mtp.layers.0.input_layernorm.weight", None),
    ] {
        assert_eq!(bare_in_wrapper(name).as_deref(), bare, "{name}");
    }
}

#[test]
fn wrappers_put_no_other_name_before_a_tensor() {
    let (embedding, query) = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight");
    for (name, want) in [
        ("model.embed_tokens.weight", embedding),
        ("embed_tokens.weight", embedding),
        ("_orig_mod.model.embed_tokens.weight", embedding),
        ("module.module._orig_mod.model.embed_tokens.weight", embedding),
        ("base_model.model.model.embed_tokens.weight", embedding),
        ("base_model.model.base_model.model.module.model.embed_tokens.weight", embedding),
        ("model.model.embed_tokens.weight", embedding),
        ("model._orig_mod.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight", query),
        ("_fsdp_wrapped_module.model.layers.0.self_attn.module.q_proj.weight", query),
        ("module.lm_head.weight", HEAD),
        ("base_model.model.lm_head.weight", HEAD),
        ("module.transformer.wte.weight", "wte.weight"),
        // Other names do not change.
        ("student.model.embed_tokens.weight", "student.model.embed_tokens.weight"),
        ("modules.embed_tokens.weight", "modules.embed_tokens.weight"),
    ] {
        assert_eq!(bare(name), want, "{name}");
    }
}

#[test]
fn only_left_overs_of_layers_that_are_there_are_left_out() {
    let gpt2 = |name| Names::Gpt2.is_left_over(name, 2);
    assert!(gpt2("h.0.attn.bias") && gpt2("h.1.attn.masked_bias"));
    assert!(!gpt2("h.2.attn.bias") && !gpt2("h.0.mlp.bias"));
    assert!(!gpt2("h.-1.attn.bias") && !gpt2("attn.bias"));
    assert!(LIKE_LLAMA.is_left_over("layers.1.self_attn.rotary_emb.inv_freq", 2));
    assert!(!LIKE_LLAMA.is_left_over("layers.2.self_attn.rotary_emb.inv_freq", 2));
}

/// Source: the names of Qwen3_5ForCausalLM in transformers 5.24.
#[test]
fn parts_of_a_gated_delta_net_are_rows_of_joined_tensors() {
    let qwen =
        Names::Llama { norms: NormPlace::Before, fused: &OF_QWEN35, heads: HEADS, experts: None };
    for (ours, theirs, joined) in [
        ("h.2.delta.k.weight", "layers.2.linear_attn.in_proj_qkv.weight", 3),
        ("h.2.delta.conv_v.weight", "layers.2.linear_attn.conv1d.weight", 3),
        ("h.2.delta.z.weight", "layers.2.linear_attn.in_proj_z.weight", 1),
        ("h.2.delta.b.weight", "layers.2.linear_attn.in_proj_b.weight", 1),
        ("h.2.delta.a.weight", "layers.2.linear_attn.in_proj_a.weight", 1),
        ("h.2.delta.a_log", "layers.2.linear_attn.A_log", 1),
        ("h.2.delta.dt_bias", "layers.2.linear_attn.dt_bias", 1),
        ("h.2.delta.norm.weight", "layers.2.linear_attn.norm.weight", 1),
        ("h.2.delta.proj.weight", "layers.2.linear_attn.out_proj.weight", 1),
        ("h.3.attn.q.weight", "layers.3.self_attn.q_proj.weight", 2),
        ("h.3.attn.gate.weight", "layers.3.self_attn.q_proj.weight", 2),
        ("h.3.attn.q_norm.weight", "layers.3.self_attn.q_norm.weight", 1),
    ] {
        assert_eq!(qwen.foreign(ours), (theirs.into(), false), "{ours}");
        assert_eq!(qwen.joined(ours).len(), joined, "{ours}");
        let runs = if theirs.contains("self_attn.q_proj") { 6 } else { 1 };
        assert_eq!(qwen.runs_of(ours), runs, "{ours}");
        assert_eq!(qwen.has_middle(ours), theirs.contains("conv1d"), "{ours}");
    }
}

/// Source: the names of Qwen3NextForCausalLM in transformers 5.24.
#[test]
fn projections_of_a_qwen_next_alternate_by_heads_of_keys() {
    let form = ExpertForm::Single;
    let next = Names::Llama {
        norms: NormPlace::Before,
        fused: &OF_QWEN3_NEXT,
        heads: HEADS,
        experts: Some(ExpertNames { form, count: 2, gates_shared: true }),
    };
    for (ours, theirs, joined, runs) in [
        ("h.2.delta.q.weight", "layers.2.linear_attn.in_proj_qkvz.weight", 4, 3),
        ("h.2.delta.z.weight", "layers.2.linear_attn.in_proj_qkvz.weight", 4, 3),
        ("h.2.delta.b.weight", "layers.2.linear_attn.in_proj_ba.weight", 2, 3),
        ("h.2.delta.a.weight", "layers.2.linear_attn.in_proj_ba.weight", 2, 3),
        ("h.2.delta.conv_v.weight", "layers.2.linear_attn.conv1d.weight", 3, 1),
        ("h.2.delta.proj.weight", "layers.2.linear_attn.out_proj.weight", 1, 1),
        ("h.3.attn.gate.weight", "layers.3.self_attn.q_proj.weight", 2, 6),
        ("h.3.moe.router.weight", "layers.3.mlp.gate.weight", 1, 1),
        ("h.3.moe.shared.gate.weight", "layers.3.mlp.shared_expert.gate_proj.weight", 1, 1),
        ("h.3.moe.shared.proj.weight", "layers.3.mlp.shared_expert.down_proj.weight", 1, 1),
        ("h.3.moe.shared.output_gate.weight", "layers.3.mlp.shared_expert_gate.weight", 1, 1),
    ] {
        assert_eq!(next.foreign(ours), (theirs.into(), false), "{ours}");
        assert_eq!(next.joined(ours).len(), joined, "{ours}");
        assert_eq!(next.runs_of(ours), runs, "{ours}");
    }
}
