//! Parts of an op that the compiler does not demand: a check of its shapes, a comparison of its
//! kernel with the cpu kernel, a rate in a measured box, and a time by `gpu-check`. An op without
//! one of these parts is listed here.

use std::collections::BTreeSet;

/// Ops without a check of shapes: any shape fits, or the shards of the only tensor decide.
const ANY_SHAPE: &[&str] = &["Zero", "ReduceScatter", "AllGather", "Broadcast"];
/// Ops without a measured rate by name: they have other rates, or do as much work as an average op.
const NOT_MEASURED: &[&str] = &[
    "Gemm",
    "ScaledGemm",
    "Maxima",
    "Quantize",
    "Attention",
    "AttentionBackward",
    "AttentionSinks",
    "AttentionSinksBackward",
    "CachedAttention",
    "LastColumns",
    "WidthNormSums",
    "WidthNorm",
    "WidthNormBackwardSums",
    "WidthNormBackward",
    "ColumnDropout",
    "CapLogits",
    "CrossEntropyLoss",
    "Route",
    "RouteBackward",
    "SortByExpert",
    "GatherRows",
    "GroupedGemm",
    "AddExpertBiases",
    "ExpertBiasesBackward",
    "CombineExperts",
    "CombineExpertsBackward",
    "ExpertLoad",
    "BalanceLoss",
    "Convolution",
    "ConvolutionBackward",
    "DeltaGates",
    "DeltaGatesBackward",
    "DeltaRule",
    "DeltaRuleBackward",
    "GatedNorm",
    "GatedNormBackward",
    "SigmoidGate",
    "SigmoidGateBackward",
    "Zero",
    "ChunkSquares",
    "Broadcast",
];
/// Ops without a time by `gpu-check`: they are a small part of a step, or timed as another op.
const NOT_TIMED: &[&str] = &[
    "Embedding",
    "EmbeddingBackward",
    "AddPositions",
    "PositionsBackward",
    "AttentionSinks",
    "AttentionSinksBackward",
    "CachedAttention",
    "LastColumns",
    "Dropout",
    "ColumnDropout",
    "CrossEntropyLoss",
    "Route",
    "RouteBackward",
    "SortByExpert",
    "AddExpertBiases",
    "ExpertBiasesBackward",
    "ExpertLoad",
    "BalanceLoss",
    "DeltaGates",
    "DeltaGatesBackward",
    "Zero",
];

/// Texts that name the parts of each op.
struct Sources {
    /// Source of `Op::name`.
    names: String,
    /// Sources of the check of an op.
    checks: String,
    /// Sources of the kernel launches.
    launches: String,
    /// Sources of the comparisons of GPU kernels with cpu kernels.
    compared: String,
    /// Source of the cases of `gpu-check`.
    timed: String,
    /// Names of measured ops.
    measured: BTreeSet<String>,
}

impl Sources {
    fn read() -> Self {
        let read = |path: &str| super::read(&super::root().join(path));
        let launches = super::files(&super::root().join("device/src/cuda/launch"), &[".rs"]);
        let keys = config::box_keys().into_iter();
        let measured =
            keys.filter_map(|key| Some(key.name.split_once(".gb_per_s_16.")?.1.to_owned()));
        let after = |path: &str, start: &str| {
            let source = read(path);
            let (_, checks) = source.split_once(start).expect("the check of an op");
            checks.split("#[cfg(test)]").next().unwrap_or(checks).to_owned()
        };
        Self {
            names: read("device/src/op/name.rs"),
            checks: after("device/src/op/check.rs", "fn check(")
                + &after("device/src/op/delta.rs", "fn check_delta(")
                + &after("device/src/op/experts.rs", "fn check_experts("),
            launches: launches.iter().map(|path| super::read(path)).collect(),
            compared: read("tests/fake-cuda/tests/kernels.rs")
                + &read("tests/fake-cuda/tests/kernels/attention.rs")
                + &read("tests/fake-cuda/tests/kernels/norms.rs")
                + &read("tests/fake-cuda/tests/kernels/delta.rs")
                + &read("tests/fake-cuda/tests/kernels/experts.rs")
                + &read("tests/fake-cuda/tests/kernels/products/fp8.rs"),
            timed: read("tests/fake-cuda/tests/probes/ops.rs")
                + &read("tests/fake-cuda/tests/probes/delta.rs")
                + &read("tests/fake-cuda/tests/probes/experts.rs"),
            measured: measured.collect(),
        }
    }

    /// Variant and name of each op.
    fn ops(&self) -> Vec<(&str, &str)> {
        let pairs = self.names.lines().filter_map(|line| {
            let (variant, name) =
                line.trim().strip_prefix("Self::")?.split_once(" { .. } => \"")?;
            Some((variant, name.strip_suffix("\",")?))
        });
        pairs.collect()
    }

    /// Missing parts of ops, and exceptions for parts that exist.
    fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut ask = |variant: &str, has: bool, without: &[&str], what: &str| {
            let excused = without.contains(&variant);
            if !has && !excused {
                found.push(format!("{variant} has no {what}"));
            } else if has && excused {
                found.push(format!("{variant} has {what}: tests/tests/tidy/ops.rs excuses it"));
            }
        };
        for (variant, name) in self.ops() {
            let is_in = |text: &str| text.contains(&format!("::{variant} {{"));
            ask(
                variant,
                is_in(&self.checks),
                ANY_SHAPE,
                "shapes in device/src/op (check.rs, delta.rs, experts.rs)",
            );
            let measured = self.measured.contains(name);
            ask(
                variant,
                measured,
                NOT_MEASURED,
                "name in MEASURED_OPS of engine/config/src/box_schema.rs",
            );
            if is_in(&self.launches) {
                ask(
                    variant,
                    is_in(&self.compared),
                    &[],
                    "comparison in tests/fake-cuda/tests/kernels.rs",
                );
                ask(
                    variant,
                    is_in(&self.timed),
                    NOT_TIMED,
                    "case in tests/fake-cuda/tests/probes/ops.rs",
                );
            }
        }
        found
    }
}

#[test]
fn every_op_is_checked_compared_measured_and_timed() {
    let sources = Sources::read();
    assert!(sources.ops().len() > 30, "{:?}", sources.ops());
    let problems = sources.problems();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn an_op_that_is_only_named_and_launched_is_found() {
    let mut sources = Sources::read();
    sources.names.push_str("            Self::Planted { .. } => \"planted\",\n");
    sources.launches.push_str("Op::Planted { x } =>");
    let wants =
        ["shapes", "name", "comparison", "case"].map(|what| format!("Planted has no {what} in "));
    let mut problems = sources.problems();
    problems.retain(|problem| problem.starts_with("Planted"));
    assert_eq!(problems.len(), 4, "{problems:?}");
    for (problem, want) in problems.iter().zip(wants) {
        assert!(problem.starts_with(&want), "{problem}");
    }
    sources.measured.insert("zero".to_owned());
    assert!(sources.problems().iter().any(|problem| problem.starts_with("Zero has name")));
}
