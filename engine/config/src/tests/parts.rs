//! Tests of the keys that choose the parts of a decoder.

use super::refusals::refuses;
use super::*;

#[test]
fn every_part_is_read_and_comes_back() {
    let config = config(PARTS, &[]);
    let m = &config.model;
    assert_eq!((m.layer_pattern.as_str(), m.window), ("WWF", Some(32)));
    assert_eq!((m.gate, m.norm_place), (Gate::Gelu, NormPlace::Around));
    assert_eq!((m.attention_scale, m.score_cap, m.logit_cap), (Some(0.5), Some(50.0), Some(30.0)));
    assert_eq!((m.embedding_scale, m.residual_scale, m.logit_scale), (8.0, 0.22, 0.0625));
    assert_eq!((m.rope.rotated_elements(16), m.window_rope.rotated_elements(16)), (12, 16));
    let RopeScaling::LongRope { long_factors, .. } = &m.rope.scaling else { panic!() };
    assert_eq!(*long_factors, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let RopeScaling::Yarn { beta_slow, truncate, attention_factor, .. } = m.window_rope.scaling
    else {
        panic!()
    };
    assert_eq!((beta_slow, truncate, attention_factor), (1.0, false, None));
    let experts = m.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.per_token, experts.ffn_hidden), (6, 3, 24));
    assert_eq!((experts.normalize, &experts.dense_layers[..]), (false, &[0, 4][..]));
    assert_eq!(experts.balance, Balance::Megatron { factor: 0.01 });
    let text = config.to_ron();
    assert_eq!(tests::config(&text, &[]), config, "{text}");
    // A norm over all heads has no gains around 1.
    let config = tests::config(PARTS, &["model.qk_norm_width=true", "model.norm_offset=false"]);
    assert!(config.model.qk_norm_width);
    assert_eq!(tests::config(&config.to_ron(), &[]), config);
}

#[test]
fn a_llama_without_these_keys_has_the_parts_that_it_always_had() {
    let m = config(LEAST, &["model.family=Llama", "model.rope.theta=5e5"]).model;
    assert_eq!((m.layer_pattern.as_str(), m.window, m.gate), ("F", None, Gate::Silu));
    assert_eq!((m.norm_place, m.norm_offset, m.qk_norm_width), (NormPlace::Before, false, false));
    assert_eq!((m.attention_scale, m.score_cap, m.logit_cap), (None, None, None));
    assert_eq!((m.embedding_scale, m.residual_scale, m.logit_scale), (1.0, 1.0, 1.0));
    // Windowed layers rotate as the others do, unless the config says otherwise.
    assert_eq!((&m.window_rope, m.rope.rotated_share), (&m.rope, 1.0));
}

#[test]
fn parts_that_do_not_fit_together() {
    let llama = |sets: &[&'static str]| [&["model.family=Llama"][..], sets].concat();
    refuses(
        &llama(&["model.layer_pattern=WF"]),
        "model.layer_pattern",
        &["layers with a window need its length", "set `model.window`"],
    );
    refuses(
        &llama(&["model.window=8"]),
        "model.window",
        &["no layer has the window of 8 tokens", "write `W` in `model.layer_pattern`"],
    );
    refuses(
        &llama(&["model.window_rope.theta=7"]),
        "model.window_rope",
        &["`model.window_rope` is for such layers"],
    );
    refuses(
        &llama(&["model.qk_norm_width=true"]),
        "model.qk_norm_width",
        &["a norm that is not there", "set `model.qk_norm` to `true`"],
    );
    refuses(
        &llama(&["model.qk_norm=true", "model.qk_norm_width=true", "model.norm_offset=true"]),
        "model.qk_norm_width",
        &["by its gain alone", "leave `model.qk_norm_width` or `model.norm_offset` out"],
    );
    refuses(
        &llama(&["model.qk_norm=true", "model.layer_pattern=FN"]),
        "model.qk_norm",
        &["layers `N` do not rotate", "write no `N` in `model.layer_pattern`"],
    );
    for place in ["model.norm_place=Around", "model.norm_place=After"] {
        refuses(
            &llama(&["model.proj_bias=true", place]),
            "model.proj_bias",
            &["no bias before a norm", "set `model.norm_place` to `Before`"],
        );
    }
    // A head of LEAST has 8 elements.
    refuses(
        &llama(&["model.rope.rotated_share=0.4"]),
        "model.rope.rotated_share",
        &["3 elements of a head rotate, which have no two halves"],
    );
    refuses(
        &llama(&[
            "model.rope.scaling=LongRope(factor: 2.0, original_seq_len: 8, short_factors: [1.0], long_factors: [1, 1, 1, 1])",
        ]),
        "model.rope.scaling.short_factors",
        &["1 factor for 4 pairs of rotated elements", "write 4 factors"],
    );
    refuses(
        &llama(&["model.rope.scaling=Yarn(factor: 2.0, original_seq_len: 8, beta_fast: 1.0)"]),
        "model.rope.scaling.beta_slow",
        &["low frequencies begin above high ones", "use a `beta_fast` above `beta_slow`"],
    );
    refuses(
        &llama(&["model.rope=(theta: 1.0, scaling: Yarn(factor: 2.0, original_seq_len: 8))"]),
        "model.rope.theta",
        &["YaRN needs a base of rotary positions above 1"],
    );
    // The positions of windowed layers have the same rules.
    let windowed = ["model.layer_pattern=W", "model.window=4"];
    let scaling =
        "model.window_rope.scaling=Yarn(factor: 2.0, original_seq_len: 8, beta_fast: 1.0)";
    refuses(
        &llama(&[&windowed[..], &[scaling]].concat()),
        "model.window_rope.scaling.beta_slow",
        &["low frequencies begin above high ones"],
    );
}

#[test]
fn a_gpt2_has_none_of_the_parts_of_later_families() {
    for (set, key) in [
        ("model.layer_pattern=N", "model.layer_pattern"),
        ("model.norm_offset=true", "model.norm_offset"),
        ("model.norm_place=Around", "model.norm_place"),
        ("model.gate=Gelu", "model.gate"),
        ("model.attention_scale=0.5", "model.attention_scale"),
        ("model.score_cap=50", "model.score_cap"),
        ("model.logit_cap=30", "model.logit_cap"),
        ("model.embedding_scale=8", "model.embedding_scale"),
        ("model.residual_scale=0.5", "model.residual_scale"),
        ("model.logit_scale=0.5", "model.logit_scale"),
        ("model.experts=(count: 4, per_token: 2, ffn_hidden: 8)", "model.experts"),
    ] {
        refuses(&[set], key, &["a GPT-2 is not made like that", "set `model.family` to `Llama`"]);
        config(LEAST, &["model.family=Llama", set]);
    }
}

#[test]
fn experts_are_a_section_or_none() {
    let llama = |sets: &[&'static str]| [&["model.family=Llama"][..], sets].concat();
    let experts = |sets: &[&'static str]| config(LEAST, &llama(sets)).model.experts;
    assert_eq!(experts(&[]), None);
    assert_eq!(experts(&["model.experts=None"]), None);
    let keys = ["model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn_hidden=8"];
    let expected = ExpertsConfig {
        count: 4,
        per_token: 2,
        ffn_hidden: 8,
        normalize: true,
        scoring: ScoreRule::Softmax,
        shared_hidden: 0,
        shared_gate: false,
        biases: false,
        dense_layers: Vec::new(),
        balance: Balance::Off,
    };
    assert_eq!(experts(&keys), Some(expected.clone()));
    refuses(
        &llama(&[
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, scoring: Sigmoid(groups: 3))",
        ]),
        "model.experts.scoring.groups",
        &["4 experts do not form 3 groups", "a divisor of half"],
    );
    refuses(
        &llama(&[
            "model.experts=(count: 8, per_token: 2, ffn_hidden: 8, scoring: Sigmoid(groups: 2, kept_groups: 3))",
        ]),
        "model.experts.scoring.kept_groups",
        &["3 of 2 groups cannot be chosen"],
    );
    refuses(
        &llama(&[
            "model.experts=(count: 8, per_token: 3, ffn_hidden: 8, scoring: Sigmoid(groups: 4))",
        ]),
        "model.experts.scoring.kept_groups",
        &["a token cannot have 3 experts from 1 group of 2", "at least 2"],
    );
    refuses(
        &llama(&[
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, scoring: Sigmoid, balance: Megatron(factor: 0.1))",
        ]),
        "model.experts.balance",
        &["sigmoids are none"],
    );
    refuses(
        &llama(&[
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, shared_hidden: 9)",
            "parallel.tensor=2",
        ]),
        "model.experts.shared_hidden",
        &["9 channels"],
    );
    refuses(
        &llama(&["model.experts=(count: 4, per_token: 2, ffn_hidden: 8, shared_gate: true)"]),
        "model.experts.shared_gate",
        &["there is no shared expert whose output the gate could multiply"],
    );
    refuses(
        &llama(&["model.attention_sinks=true"]),
        "model.attention_sinks",
        &["no model has attention sinks and no experts"],
    );
    refuses(
        &llama(&["model.gate=ClampedSilu"]),
        "model.gate",
        &["no model has gates with a limit and no experts"],
    );
    let limited = "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, biases: true)";
    let limited =
        llama(&[limited, "model.gate=ClampedSilu(limit: 0.5)", "model.attention_sinks=true"]);
    let m = config(LEAST, &limited).model;
    assert_eq!(m.gate, Gate::ClampedSilu { slope: 1.702, limit: 0.5 });
    assert!(m.attention_sinks && m.experts.is_some_and(|experts| experts.biases));
    let whole = ["model.experts=(count: 4, per_token: 2, ffn_hidden: 8)"];
    assert_eq!(experts(&whole), Some(expected.clone()));
    let some = ["model.experts=Some((count: 4, per_token: 2, ffn_hidden: 8))"];
    assert_eq!(experts(&some), Some(expected));
    refuses(&llama(&["model.experts=8"]), "model.experts", &["`model.experts` is a section"]);
    refuses(&llama(&keys[..2]), "model.experts.ffn_hidden", &["required and missing"]);
    let with = |more: &[&'static str]| llama(&[&keys[..], more].concat());
    refuses(
        &with(&["model.experts.per_token=5"]),
        "model.experts.per_token",
        &["5 different experts of 4 experts", "at most 4"],
    );
    refuses(
        &with(&["model.experts.dense_layers=[9]"]),
        "model.experts.dense_layers",
        &["there is no layer 9"],
    );
    refuses(
        &with(&["model.experts.dense_layers=[0, 1]", "model.layers=2"]),
        "model.experts.dense_layers",
        &["no layer has experts"],
    );
    refuses(
        &with(&["model.experts.dense_layers=0"]),
        "model.experts.dense_layers",
        &["expected a list of whole numbers", "[0, 3]"],
    );
    refuses(
        &with(&["model.experts.ffn_hidden=9", "parallel.tensor=2"]),
        "model.experts.ffn_hidden",
        &["9 = 4 x 2 + 1", "8 or 10"],
    );
    refuses(
        &with(&["model.experts.ffn_hidden=12", "model.hidden=64", "device=Cuda"]),
        "model.experts.ffn_hidden",
        &["in multiples of 8: 12 channels of a rank are none"],
    );
    refuses(
        &with(&["precision=Fp8", "model.head_dim=16"]),
        "precision",
        &["no fp8 matmuls of experts"],
    );
    refuses(
        &with(&["precision=Fp16", "model.experts.balance=HuggingFace(factor: 0.001)"]),
        "model.experts.balance",
        &["by the loss scale of `Fp16`"],
    );
    refuses(
        &with(&["model.experts.balance=HuggingFace"]),
        "model.experts.balance.factor",
        &["required and missing"],
    );
}

#[test]
fn lists_of_factors_are_read_or_refused_with_their_key() {
    let with = |lists: &str| {
        let set = format!("model.rope.scaling=LongRope(factor: 2.0, original_seq_len: 8, {lists})");
        loaded(LEAST, &["model.family=Llama", &set]).map(|loaded| loaded.config.model.rope.scaling)
    };
    let scaling = with("short_factors: [1, 1, 1, 1], long_factors: [1, 1.5, 2, 4]").unwrap();
    let RopeScaling::LongRope { long_factors, .. } = scaling else { panic!() };
    assert_eq!(long_factors, [1.0, 1.5, 2.0, 4.0]);
    for (lists, message) in [
        ("short_factors: [1, 1, 1, 1]", "model.rope.scaling.long_factors"),
        (
            "short_factors: 1, long_factors: [1, 1, 1, 1]",
            "expected a list of numbers, found the number 1",
        ),
        ("short_factors: [0, 1, 1, 1], long_factors: [1, 1, 1, 1]", "must be a number from 0.01"),
        ("short_factors: [x, 1, 1, 1], long_factors: [1, 1, 1, 1]", "expected a number, found `x`"),
    ] {
        let why = with(lists).unwrap_err().to_string();
        assert!(why.contains(message), "{lists}: {why}");
    }
}
