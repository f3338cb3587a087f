//! Tests of other targets that cover pairs of features.

use super::feature_names::{ADAPTERS, DELTA, FROZEN, GATED, SIGMOID, SINKS};

/// A test of another target, whose expected values are those of transformers or PyTorch, or slopes
/// of the loss.
#[derive(Debug)]
pub(super) struct NamedTest {
    /// Names of both features.
    pub(super) pair: [&'static str; 2],
    /// Path of the source from the root of the repository.
    pub(super) file: &'static str,
    /// Name of the test's function.
    pub(super) function: &'static str,
    /// Words that the function has if it uses both features.
    pub(super) words: [&'static str; 2],
}

/// Pairs that tests of other targets cover. `MODELS` there has models with windows, with layers
/// without rotary positions, with experts of each kind, with sinks of attention, with gated delta nets,
/// and with gated shared experts beside them.
pub(super) static TESTS: [NamedTest; 35] = [
    NamedTest {
        pair: [GATED, ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: [ADAPTERS, DELTA],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "ten_adamw_steps_on_documents_beside_frozen_tensors_are_those_of_pytorch",
        words: ["Packing::Documents", "frozen"],
    },
    NamedTest {
        pair: ["padded documents", FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "ten_adamw_steps_on_documents_beside_frozen_tensors_are_those_of_pytorch",
        words: ["case.masked", "frozen"],
    },
    NamedTest {
        pair: ["layer kinds", FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: ["experts", FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: [SIGMOID, FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: [SINKS, FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: [FROZEN, DELTA],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: [GATED, FROZEN],
        file: "tests/tests/equivalence/frozen.rs",
        function: "gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "frozen"],
    },
    NamedTest {
        pair: ["packed documents", "layer kinds"],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", "layer kinds"],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", "experts"],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", "experts"],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", DELTA],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", DELTA],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "ten_adamw_steps_of_adapters_on_documents_are_those_of_peft",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "ten_adamw_steps_of_adapters_on_documents_are_those_of_peft",
        words: ["masked", "MODELS"],
    },
    NamedTest {
        pair: ["layer kinds", ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: ["experts", ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: [SIGMOID, ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: [SINKS, ADAPTERS],
        file: "tests/tests/equivalence/adapters.rs",
        function: "logits_loss_and_every_gradient_are_those_of_peft_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: ["layer kinds", "experts"],
        file: "tests/tests/equivalence/experts.rs",
        function: "the_gradients_of_experts_are_the_slopes_of_the_loss",
        words: ["KINDS", "THREE_OF_EIGHT"],
    },
    NamedTest {
        pair: ["layer kinds", SIGMOID],
        file: "tests/tests/equivalence/experts.rs",
        function: "the_gradients_of_experts_are_the_slopes_of_the_loss",
        words: ["KINDS", "SHARED"],
    },
    NamedTest {
        pair: ["layer kinds", SINKS],
        file: "tests/tests/equivalence/experts.rs",
        function: "the_gradients_of_experts_are_the_slopes_of_the_loss",
        words: ["KINDS", "BIASED"],
    },
    NamedTest {
        pair: ["packed documents", SIGMOID],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", SIGMOID],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", SINKS],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", SINKS],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["experts", DELTA],
        file: "tests/tests/equivalence/llama.rs",
        function: "logits_loss_and_every_gradient_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: [GATED, DELTA],
        file: "tests/tests/equivalence/llama.rs",
        function: "logits_loss_and_every_gradient_are_those_of_transformers_on_every_layout",
        words: ["pass(&shape", "MODELS"],
    },
    NamedTest {
        pair: ["packed documents", GATED],
        file: "tests/tests/equivalence/llama/packed.rs",
        function: "ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
        words: ["Packing::Documents", "MODELS"],
    },
    NamedTest {
        pair: ["padded documents", GATED],
        file: "tests/tests/equivalence/llama.rs",
        function: "ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout",
        words: ["Corpus::of_documents", "MODELS"],
    },
    NamedTest {
        pair: ["layer kinds", "generate"],
        file: "tests/tests/equivalence/llama.rs",
        function: "the_next_token_of_a_folder_is_that_of_transformers",
        words: ["next_logits", "MODELS"],
    },
    NamedTest {
        pair: ["layer kinds", "export"],
        file: "tests/tests/equivalence/llama.rs",
        function: "a_folder_goes_back_as_it_came",
        words: ["ModelExport", "MODELS"],
    },
];
