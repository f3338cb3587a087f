//! Checks the settings by the loss of step 1, which is known before the model has learned anything.

use config::{Config, DataFormat};

/// Maximum distance in nats of random weights' loss from ln(vocabulary), without wide logits.
const MARGIN: f64 = 1.0;
/// The usual `init_std`.
const STD: f64 = 0.02;
/// Nats per token above which a trained model knows neither the text nor its single words.
const UNKNOWN: f64 = 5.0;

/// Warning if `loss`, the loss of step 1, does not match the initial weights.
pub(super) fn warning(config: &Config, imported: bool, loss: f64) -> Option<String> {
    if imported { of_imported(config, loss) } else { of_random(config, loss) }
}

fn of_random(config: &Config, loss: f64) -> Option<String> {
    let model = &config.model;
    let expected = (model.vocab as f64).ln();
    // Variance of the logits (normed states times rows of the head); half of it adds to the loss.
    let spread = model.hidden as f64 * STD.powi(2);
    if (expected - MARGIN..=expected + MARGIN + spread).contains(&loss) {
        return None;
    }
    Some(format!(
        "warning: the loss of step 1 is {loss:.4}. Random weights know nothing, which is ln({}) = {expected:.4}. Look at \
         model.init_std ({:?}), and at the device: `--set precision=Fp32`, and `--set device=Cpu` for a small model, should give \
         the same loss",
        model.vocab, model.init_std
    ))
}

fn of_imported(config: &Config, loss: f64) -> Option<String> {
    // A loss that is not a number gives a warning too.
    if loss <= UNKNOWN {
        return None;
    }
    let data = &config.data;
    let tokens = match (&data.tokenizer, &data.format) {
        (tokenizer, DataFormat::U16 | DataFormat::U32 | DataFormat::Megatron) => {
            let named = tokenizer.as_ref().map(|path| format!(", as {path} must be"));
            format!(
                "data.format ({:?}) must be that of the files, and their tokens must come from the model's tokenizer{}",
                data.format,
                named.unwrap_or_default()
            )
        }
        (Some(tokenizer), _) => format!("the tokenizer {tokenizer} must be the model's"),
        (None, _) => {
            "without data.tokenizer each byte is a token, and the model must have been trained so"
                .into()
        }
    };
    Some(format!(
        "warning: the loss of step 1 is {loss:.4}, as if the model had not been trained on such text: below {UNKNOWN} is usual. \
         Look at the tokens: {tokens}. In a chat the template must be the model's, too"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use std::path::Path;

    fn of(sets: &[&str], imported: bool, loss: f64) -> Option<String> {
        let least = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16), train: (steps: 10))";
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let loaded = load_str(least, "test.ron", Path::new("/"), &sets).unwrap();
        warning(&loaded.config, imported, loss)
    }

    #[test]
    fn random_weights_give_about_the_logarithm_of_the_vocabulary() {
        for loss in [5.0, 5.5452, 6.2] {
            assert_eq!(of(&[], false, loss), None, "{loss}");
        }
        for loss in [3.0, 7.0, f64::NAN, f64::INFINITY] {
            let text = of(&[], false, loss).unwrap();
            assert!(
                text.contains("ln(256) = 5.5452") && text.contains("init_std (0.02)"),
                "{text}"
            );
        }
        // A large model's logits spread.
        let large = ["model.hidden=8192", "model.vocab=128256"];
        assert_eq!(of(&large, false, 13.4), None);
        assert!(of(&large, false, 10.5).is_some());
    }

    #[test]
    fn a_trained_model_that_does_not_know_the_text_names_what_makes_tokens() {
        assert_eq!(of(&[], true, 4.9), None);
        assert!(of(&[], true, 5.1).unwrap().contains("each byte is a token"));
        assert!(of(&["data.format=U32"], true, f64::NAN).is_some());
        assert!(of(&["data.format=U32"], true, 9.0).unwrap().contains("data.format (U32)"));
        let both = ["data.format=U32", "data.tokenizer=\"/a/tokenizer.json\""];
        let text = of(&both, true, 9.0).unwrap();
        assert!(text.contains("(U32)") && text.contains("as /a/tokenizer.json must be"), "{text}");
        let with = of(&["data.tokenizer=\"/a/tokenizer.json\""], true, 9.0).unwrap();
        assert!(with.contains("the tokenizer /a/tokenizer.json"), "{with}");
    }
}
