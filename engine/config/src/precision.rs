//! Rules about precisions: GPUs and shapes must have matmuls of the precision. `checks` applies
//! these rules.

use super::checks::Checks;
use super::reading::Violation;
use super::{DeviceConfig, Precision};

/// First compute capability with bf16 matmuls.
const BF16_SINCE: u32 = 80;

/// Sizes of fp8 matmuls in cuBLASLt are multiples of this number.
const FP8_MULTIPLE: usize = 16;

impl Precision {
    /// Violation if `gpu`, which has compute capability `sm`, cannot train in this precision. 0 is
    /// an unknown capability and no violation.
    pub fn refusal(self, gpu: &str, sm: u32) -> Option<Violation> {
        let (since, products, instead) = match self {
            Self::Bf16 => {
                (BF16_SINCE, "bf16", "`precision: Fp16`, which has a loss scale, or `Fp32`")
            }
            Self::Fp8 => (device::FP8_SINCE, "fp8", "`precision: Bf16`"),
            Self::Fp16 | Self::Fp32 => return None,
        };
        (sm > 0 && sm < since).then(|| Violation {
            message: format!(
                "`{self:?}` needs sm_{since} or newer: {gpu} is sm_{sm}, which has no {products} products"
            ),
            help: format!("set {instead}"),
            values: vec![("precision", format!("{products} products"))],
        })
    }
}

impl Checks<'_> {
    /// Checks the precision on the GPUs of a described box.
    pub(super) fn precision(&self) -> Option<Violation> {
        let DeviceConfig::Sim { box_, .. } = &self.config.device else { return None };
        self.config.precision.refusal(&format!("each GPU of `{}`", box_.name), box_.gpu.sm)
    }

    pub(super) fn fp8_sizes(&self) -> Option<Violation> {
        if self.config.precision != Precision::Fp8 {
            return None;
        }
        let (model, ranks) = (&self.config.model, self.config.parallel.tensor);
        let tokens = self.config.batch.micro * model.seq_len;
        let sizes = [
            ("model.hidden", model.hidden, "columns of the model"),
            ("model.head_dim", model.head_dim, "columns of a head"),
            ("model.ffn_hidden", model.ffn_hidden / ranks, "columns of a rank's MLP"),
            ("batch.micro", tokens, "tokens of a micro-batch"),
        ];
        let odd = sizes.into_iter().find(|(_, size, _)| !size.is_multiple_of(FP8_MULTIPLE));
        odd.map(|(key, size, what)| Violation {
            message: format!(
                "products of fp8 have sizes in multiples of {FP8_MULTIPLE}: {size} {what} are none"
            ),
            help: format!("set `{key}` so that they are, or `precision: Bf16`"),
            values: vec![(key, format!("{size} {what}")), ("precision", "fp8 products".into())],
        })
    }
}
