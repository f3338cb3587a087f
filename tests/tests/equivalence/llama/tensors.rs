//! Tensors of the fixtures, and their names in transformers.

use super::folder;
use safetensors::SafeTensors;
use tests::pass::Fixture;

/// Names of a block's norms: (onebox, transformers), a name before its prefix.
const LLAMA_NORMS: [(&str, &str); 2] =
    [("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")];
const GEMMA_NORMS: [(&str, &str); 4] = [
    ("ln_1_post", "post_attention_layernorm"),
    ("ln_2_post", "post_feedforward_layernorm"),
    ("ln_1", "input_layernorm"),
    ("ln_2", "pre_feedforward_layernorm"),
];

/// Number of experts of a layer of `model`.
pub(crate) fn experts_of(model: &str) -> usize {
    if ["mixtral", "qwen3-5-moe", "qwen3-next"].contains(&model) { 6 } else { 8 }
}

/// Part of the names of the expert that no token chooses (`IDLE`).
pub(crate) const IDLE: &str = "moe.experts.4.";

/// End of the name of what changes only the choice of experts, and has no gradient.
pub(crate) const CORRECTION: &str = "router.correction";

/// The model whose experts have biases, transposed matrices, and alternating gates and ups; its channels
/// and the inner width of an expert.
const INTERLEAVED: (&str, usize, usize) = ("gpt-oss", 32, 48);

/// Whether layers of `model` have gated delta nets.
pub(crate) fn has_delta_nets(model: &str) -> bool {
    ["qwen3-5", "qwen3-5-moe", "qwen3-next"].contains(&model)
}

/// Name in transformers of a linear of a gated MLP.
fn linear(ours: &str) -> String {
    let (linear, own) = ours.rsplit_once('.').unwrap();
    let name = linear.strip_suffix("proj").map_or(linear.to_owned(), |of| format!("{of}down"));
    format!("{name}_proj.{own}")
}

/// Name in transformers of the tensor `ours` of `model`. A matrix of an expert has its own name, as
/// in a folder with one tensor for each.
pub(crate) fn theirs(model: &str, ours: &str) -> String {
    if let Some((layer, part)) = ours.split_once(".moe.") {
        let layer = layer.replacen("h.", "model.layers.", 1);
        let Some(part) = part.strip_prefix("experts.") else {
            if part == CORRECTION {
                return format!("{layer}.mlp.gate.e_score_correction_bias");
            }
            if model == INTERLEAVED.0 {
                assert!(["router.weight", "router.bias"].contains(&part));
                return format!("{layer}.mlp.{part}");
            }
            let Some(part) = part.strip_prefix("shared.") else {
                assert_eq!(part, "router.weight");
                return format!("{layer}.mlp.gate.weight");
            };
            if part == "output_gate.weight" {
                return format!("{layer}.mlp.shared_expert_gate.weight");
            }
            let end = if has_delta_nets(model) { "" } else { "s" };
            return format!("{layer}.mlp.shared_expert{end}.{}", linear(part));
        };
        return format!("{layer}.mlp.experts.{}", linear(part));
    }
    if has_delta_nets(model)
        && let Some(name) = theirs_of_qwen(ours)
    {
        return name;
    }
    let name = match ours {
        "wte" => return "model.embed_tokens.weight".into(),
        "head" => return "lm_head.weight".into(),
        "ln_f.weight" => return "model.norm.weight".into(),
        _ => ours.replacen("h.", "model.layers.", 1),
    };
    let gemma = model.starts_with("gemma") || ["olmo2", "olmo3"].contains(&model);
    let norms = if gemma { &GEMMA_NORMS[..] } else { &LLAMA_NORMS[..] };
    let name = norms.iter().fold(name, |name, (ours, theirs)| name.replace(ours, theirs));
    let name = name.replace("mlp.proj", "mlp.down").replace("attn.proj", "attn.o");
    let mut parts: Vec<String> = name.split('.').map(str::to_owned).collect();
    if parts[3] == "attn" {
        parts[3] = "self_attn".into();
    }
    if ["q", "k", "v", "o", "gate", "up", "down"].contains(&parts[4].as_str()) {
        parts[4] += "_proj";
    }
    parts.join(".")
}

/// Tensors of all safetensors files of a model's folder.
pub(crate) fn load(model: &str) -> Fixture {
    let mut all = Fixture::default();
    for entry in std::fs::read_dir(folder(model)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            all.add(&std::fs::read(path).unwrap());
        }
    }
    if has_delta_nets(model) {
        split_qwen(&mut all);
    }
    split_joined(&mut all);
    split_stacks(&mut all, model);
    all
}

/// Adds the matrices of each expert of `model` under their names.
pub(crate) fn split_stacks(all: &mut Fixture, model: &str) {
    if alternates(model) {
        split_interleaved(all, experts_of(model));
    } else {
        split_experts(all, experts_of(model));
    }
}

/// Whether rows of gates and ups alternate in the tensor of all experts.
pub(crate) fn alternates(model: &str) -> bool {
    model == INTERLEAVED.0
}

/// Whether a name is that of the tensor of all experts of a layer.
pub(crate) fn is_stack(name: &str) -> bool {
    let name = name.trim_end_matches("_bias");
    [".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"].iter().any(|end| name.ends_with(end))
}

/// Adds the matrices and the biases of each expert: gates and ups alternate in the last dimension, and
/// matrices (E, C, 2 I) and (E, I, C) are transposed.
fn split_interleaved(all: &mut Fixture, count: usize) {
    let (_, channels, inner) = INTERLEAVED;
    let stacks: Vec<String> = all.0.keys().filter(|name| is_stack(name)).cloned().collect();
    for name in stacks {
        let values = all.0[&name].clone();
        let (layer, stack) = name.rsplit_once('.').unwrap();
        let (stack, own) = match stack.strip_suffix("_bias") {
            Some(stack) => (stack, "bias"),
            None => (stack, "weight"),
        };
        let (parts, rows): (&[&str], usize) = match stack {
            "gate_up_proj" => (&["gate_proj", "up_proj"], inner),
            _ => (&["down_proj"], channels),
        };
        for (expert, values) in values.chunks(values.len() / count).enumerate() {
            for (number, part) in parts.iter().enumerate() {
                let row = |row: usize| {
                    values.iter().skip(row * parts.len() + number).step_by(parts.len() * rows)
                };
                let matrix = (0..rows).flat_map(row).copied().collect();
                all.0.insert(format!("{layer}.{expert}.{part}.{own}"), matrix);
            }
        }
    }
}

/// Adds the matrices of each expert under their names: of the tensors of all experts of a layer,
/// the gates, the ups and the projections back, and those that Mixtral calls otherwise.
fn split_experts(all: &mut Fixture, count: usize) {
    let stacks: Vec<String> = all.0.keys().filter(|name| is_stack(name)).cloned().collect();
    for name in stacks {
        let values = all.0[&name].clone();
        for (expert, own) in values.chunks(values.len() / count).enumerate() {
            let parts: &[&str] = match name.ends_with("gate_up_proj") {
                true => &["gate_proj", "up_proj"],
                false => &["down_proj"],
            };
            for (part, own) in parts.iter().zip(own.chunks(own.len() / parts.len())) {
                let (layer, _) = name.rsplit_once('.').unwrap();
                all.0.insert(format!("{layer}.{expert}.{part}.weight"), own.to_vec());
            }
        }
    }
    let old: Vec<String> =
        all.0.keys().filter(|name| name.contains(".block_sparse_moe.")).cloned().collect();
    for name in old {
        let names = [("block_sparse_moe", "mlp"), (".w1.", ".gate_proj."), (".w3.", ".up_proj.")];
        let names = names.into_iter().chain([(".w2.", ".down_proj.")]);
        let new = names.fold(name.clone(), |name, (old, new)| name.replace(old, new));
        let values = all.0[&name].clone();
        all.0.insert(new, values);
    }
}

/// Adds the parts of tensors that Phi-3 stores as one: q, k, v with 6, 2, 2 heads, and gate, up.
fn split_joined(all: &mut Fixture) {
    const JOINED: [(&str, &[(&str, usize)]); 2] = [
        ("qkv_proj", &[("q_proj", 6), ("k_proj", 2), ("v_proj", 2)]),
        ("gate_up_proj", &[("gate_proj", 1), ("up_proj", 1)]),
    ];
    for (joined, parts) in JOINED {
        let found: Vec<String> =
            all.0.keys().filter(|name| name.contains(joined) && !is_stack(name)).cloned().collect();
        let all_rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        for name in found {
            let values = all.0[&name].clone();
            let mut left = &values[..];
            for (part, rows) in parts {
                let (own, rest) = left.split_at(values.len() * rows / all_rows);
                all.0.insert(name.replace(joined, part), own.to_vec());
                left = rest;
            }
        }
    }
}

/// Name of a parameter of a gated delta net in transformers, or of queries and gates of the output. Parts
/// of joined tensors have the names of `split_qwen`.
fn theirs_of_qwen(ours: &str) -> Option<String> {
    let name = ours.replacen("h.", "model.layers.", 1);
    if let Some((layer, part)) = name.split_once(".delta.") {
        let part = match part {
            "a_log" => "A_log",
            "z.weight" => "in_proj_z.weight",
            "b.weight" => "in_proj_b.weight",
            "a.weight" => "in_proj_a.weight",
            "proj.weight" => "out_proj.weight",
            part => part,
        };
        return Some(format!("{layer}.linear_attn.{part}"));
    }
    let (layer, part) = name.split_once(".attn.")?;
    let part = ["q.weight", "gate.weight"].into_iter().find(|own| *own == part)?;
    Some(format!("{layer}.self_attn.{part}"))
}

/// Whether a tensor of a model with gated delta nets holds several parameters of onebox.
pub(crate) fn is_joined_in_qwen(name: &str) -> bool {
    ["in_proj_qkv", "in_proj_ba", "conv1d", "q_proj"].iter().any(|joined| name.contains(joined))
}

/// Adds the parts of the joined tensors of a tiny model with gated delta nets: 48 rows of queries, 48 of
/// keys and 72 of values, and the queries and gates of 6 heads, which alternate. Projections of a
/// Qwen3-Next alternate by 6 heads of keys: 8 rows of queries, 8 of keys, 12 of values and 12 of gates of
/// the output; and 2 of step sizes and 2 of decays.
pub(crate) fn split_qwen(all: &mut Fixture) {
    let is_split = |name: &&String| is_joined_in_qwen(name) && !name.starts_with("merged.");
    let joined: Vec<String> = all.0.keys().filter(is_split).cloned().collect();
    for name in joined {
        let values = all.0[&name].clone();
        let mut add = |joined: &str, part: &str, own: Vec<f64>| {
            all.0.insert(name.replace(joined, part), own);
        };
        // Parts of one tensor have one first factor, which has the name of the first part.
        if name.contains("lora_A") {
            add(if name.contains("q_proj") { "q_proj" } else { "in_proj_qkv" }, "q", values);
            continue;
        }
        if name.contains("q_proj") {
            let half = |which: usize| -> Vec<f64> {
                values.chunks(values.len() / 12).skip(which).step_by(2).flatten().copied().collect()
            };
            add("q_proj", "q", half(0));
            add("q_proj", "gate", half(1));
            continue;
        }
        let of_heads = [("q", 0..8), ("k", 8..16), ("v", 16..28), ("in_proj_z", 28..40)];
        let of_gates = [("in_proj_b", 0..2), ("in_proj_a", 2..4)];
        let alternating = [("in_proj_qkvz", &of_heads[..]), ("in_proj_ba", &of_gates)];
        if let Some((joined, parts)) = alternating.iter().find(|(joined, _)| name.contains(joined))
        {
            let rows = parts.last().unwrap().1.end;
            let head = values.len() / 6;
            for (part, own) in parts.iter().cloned() {
                let own = own.start * head / rows..own.end * head / rows;
                let of_head = |head: &[f64]| head[own.clone()].to_vec();
                add(joined, part, values.chunks(head).flat_map(of_head).collect());
            }
            continue;
        }
        let row = values.len() / 168;
        for (part, rows) in [("q", 0..48), ("k", 48..96), ("v", 96..168)] {
            let own = values[rows.start * row..rows.end * row].to_vec();
            match name.contains("conv1d") {
                true => add("conv1d", &format!("conv_{part}"), own),
                false => add("in_proj_qkv", part, own),
            }
        }
    }
}

/// Name of the gradient that transformers computes of all experts of a layer, for a matrix of one.
pub(crate) fn stack_of(theirs: &str) -> Option<String> {
    let (layer, rest) = theirs.split_once(".mlp.experts.")?;
    let stack = if rest.contains("down_proj") { "down_proj" } else { "gate_up_proj" };
    let end = if rest.ends_with("bias") { "_bias" } else { "" };
    Some(format!("grad.{layer}.mlp.experts.{stack}{end}"))
}

/// Names of the tensors in a model's folder, in their order.
pub(super) fn names_of_weights(model: &str) -> Vec<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder(model)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            names.extend(file.names().into_iter().map(str::to_owned));
        }
    }
    names.sort();
    names
}
