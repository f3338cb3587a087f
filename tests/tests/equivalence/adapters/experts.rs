//! Factors of experts in the tensors of PEFT.

use tests::pass::Fixture;

/// Rank of the adapters of gpt-oss, whose rows of gates and ups alternate.
const RANK: usize = 2;

/// Values of the factor `name` of an expert: h.LAYER.moe.experts.EXPERT.MATRIX.FACTOR. Its tensor has
/// `prefix` before its name in PEFT. Of all `experts`, first factors of PEFT stand one below the other,
/// and columns of second factors are interleaved; rows of gates stand above those of ups,
/// or `alternates`. If gates and
/// the matrices back have adapters, those of gates are inside.
pub(super) fn factor(
    fixture: &Fixture,
    prefix: &str,
    name: &str,
    (experts, alternates): (usize, bool),
) -> Vec<f64> {
    let parts: Vec<&str> = name.split('.').collect();
    let ["h", layer, "moe", "experts", expert, matrix, factor] = parts[..] else {
        panic!("{name} is no factor of an expert");
    };
    let expert: usize = expert.parse().unwrap();
    let module = format!("base_model.model.model.layers.{layer}.mlp.experts");
    let inner = format!("{module}.base_layer.lora_A.weight");
    let has_both = fixture.0.contains_key(&inner);
    let module = if has_both && matrix != "proj" { format!("{module}.base_layer") } else { module };
    let end = factor.replace("lora_a", "lora_A").replace("lora_b", "lora_B");
    let whole = fixture.get(&format!("{prefix}{module}.{end}.weight"));
    if factor == "lora_a" {
        let own = whole.len() / experts;
        return whole[expert * own..(expert + 1) * own].to_vec();
    }
    let own: Vec<f64> = whole.iter().skip(expert).step_by(experts).copied().collect();
    let half = own.len() / 2;
    match (matrix, alternates) {
        ("gate" | "up", true) => {
            let rows = own.chunks(RANK).skip(usize::from(matrix == "up")).step_by(2);
            rows.flatten().copied().collect()
        }
        ("gate", false) => own[..half].to_vec(),
        ("up", false) => own[half..].to_vec(),
        _ => own,
    }
}
