//! Answers to values of other trainers, and lists of names in words.

/// Values of other trainers that onebox lacks: names in lower case, one name among the values of
/// the key of onebox, and the answer.
const VALUE_ANSWERS: [ValueAnswer; 7] = [
    ValueAnswer {
        names: &[
            "adamw8bit",
            "adamwbnb8bit",
            "pagedadamw8bit",
            "adam8bit",
            "ademamix8bit",
            "bnb8bit",
            "adamwtorch8bit",
            "adamwtorch4bit",
            "aoadamw8bit",
            "aoadamw4bit",
            "aoadamwfp8",
        ],
        among: "AdamW",
        answer: "onebox has no 8-bit moments: `AdamW` with `offload.moments: Bf16` stores them in 2 bytes instead of 4",
    },
    ValueAnswer {
        names: &["pagedadamw", "pagedadamw32bit", "cpuadam", "deepspeedcpuadam"],
        among: "AdamW",
        answer: "write `AdamW`: with `offload.optimizer: Host` its states are in host memory",
    },
    ValueAnswer {
        names: &[
            "adafactor",
            "lion",
            "muon",
            "lamb",
            "adagrad",
            "sophia",
            "schedulefree",
            "shampoo",
            "lion8bit",
            "lion32bit",
            "pagedlion8bit",
            "pagedlion32bit",
            "rmsprop",
            "rmspropbnb",
            "rmspropbnb8bit",
            "rmspropbnb32bit",
            "ademamix",
            "pagedademamix8bit",
            "pagedademamix32bit",
            "lomo",
            "adalomo",
            "grokadamw",
            "stableadamw",
            "schedulefreeadamw",
            "schedulefreeradam",
            "schedulefreesgd",
            "galoreadamw",
            "galoreadamw8bit",
            "galoreadafactor",
            "apolloadamw",
            "apolloadamwlayerwise",
            "adoptadamw",
            "camepytorch",
        ],
        among: "AdamW",
        answer: "onebox does not have this optimizer: write `AdamW` or `Sgd`",
    },
    ValueAnswer {
        names: &[
            "polynomial",
            "cosinewithrestarts",
            "reduceonplateau",
            "reducelronplateau",
            "onecycle",
            "rex",
        ],
        among: "Cosine",
        answer: "onebox does not have this curve: write `Cosine`, `Linear`, `Constant`, `Wsd` or `InverseSqrt`",
    },
    ValueAnswer {
        names: &["qlora", "qalora"],
        among: "Lora",
        answer: "onebox has no quantized weights: `Lora(rank: 16, alpha: 32)` trains adapters over 16-bit weights, which \
                 `offload.parameters: Host` keeps in host memory",
    },
    ValueAnswer {
        names: &["rslora"],
        among: "Lora",
        answer: "write `Lora(rank: 16, alpha: 32, rank_stabilized: true)`",
    },
    ValueAnswer {
        names: &[
            "dora",
            "adalora",
            "longlora",
            "oft",
            "boft",
            "loha",
            "lokr",
            "vera",
            "ia3",
            "llamaadapter",
        ],
        among: "Lora",
        answer: "onebox does not have this adapter: write `Lora(rank: 16, alpha: 32)`",
    },
];

/// Answer to values of other trainers.
struct ValueAnswer {
    names: &'static [&'static str],
    among: &'static str,
    answer: &'static str,
}

/// Answer to the value `typed` of another trainer. `names` are the names of the key's values in
/// onebox.
pub(crate) fn value_answer<'a>(
    typed: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'static str> {
    let typed = typed.replace(['-', '_'], "").to_lowercase();
    let names: Vec<&str> = names.into_iter().collect();
    let all =
        |answer: &&ValueAnswer| answer.names.contains(&&*typed) && names.contains(&answer.among);
    VALUE_ANSWERS.iter().find(all).map(|found| found.answer)
}

/// Lists names in words: `` `a`, `b` or `c` ``.
pub(crate) fn ticked(names: &[&str]) -> String {
    let ticked: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match ticked.as_slice() {
        [] => String::new(),
        [only] => only.clone(),
        [init @ .., last] => format!("{} or {last}", init.join(", ")),
    }
}
