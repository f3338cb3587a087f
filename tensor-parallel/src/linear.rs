//! The three matmuls of a linear: forward, input gradient and weight gradient. They use the model's
//! type, or fp8 with current scaling per tensor: E4M3 for inputs and weights, E5M2 for gradients
//! (arXiv 2209.05433).

use crate::adapter::Adapter;
use crate::shape::DecoderShape;
use device::{Arena, Device, Dtype, Epilogue, Lane::Compute, MAXIMA, Op, Plan, Tensor};

/// Transient operands of fp8 matmuls; all linears share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fp8Operands {
    input: Tensor,       // E4m3, (B T) by the widest input; also transposed
    weight: Tensor,      // E4m3, the longest weight; also transposed
    gradient: Tensor,    // E5m2, (B T) by the widest output
    transposed: Tensor,  // the same transposed
    maxima: Tensor,      // F32, largest magnitudes of the gradient
    scales: [Tensor; 3], // F32, of input, weight, gradient
}

/// Tensors of a linear's fp8 matmuls: largest magnitudes of the forward pass, and shared operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fp8Linear {
    input: Tensor,
    weight: Tensor,
    operands: Fp8Operands,
}

/// A linear, y = x weight' (+ bias), with its adapters and the operands of its fp8 matmuls, if any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) weight: Tensor, // (n, k)
    pub(crate) adapter: Option<Adapter>,
    pub(crate) fp8: Option<Fp8Linear>,
}

/// The gradients of a linear.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearGrads {
    /// (n, k); a frozen weight's gradient has no elements.
    pub(crate) weight: Tensor,
    /// (n): sums of the columns of the output's gradient.
    pub(crate) bias: Option<Tensor>,
    pub(crate) adapter: Option<Adapter>,
}

impl Fp8Operands {
    /// Plans the operands, if the model has fp8 matmuls.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Option<Self> {
        if !shape.fp8 {
            return None;
        }
        let (tokens, c, heads) = (shape.tokens(), shape.hidden, shape.heads_width());
        let (qkv, inner, ffn) =
            (shape.qkv_width(), shape.inner_width(), shape.ffn_hidden / shape.tp_size);
        let widest_output = qkv.max(inner).max(c);
        let mut one = |name: &str, dtype, len| {
            plan.tensor((Arena::Device, "transients"), format!("fp8.{name}"), dtype, (1, len))
        };
        Some(Self {
            input: one("input", Dtype::E4m3, tokens * c.max(heads).max(ffn)),
            weight: one("weight", Dtype::E4m3, c * qkv.max(inner).max(heads).max(ffn)),
            gradient: one("gradient", Dtype::E5m2, tokens * widest_output),
            transposed: one("transposed_gradient", Dtype::E5m2, tokens * widest_output),
            maxima: one("gradient_maxima", Dtype::F32, MAXIMA),
            scales: ["input", "weight", "gradient"]
                .map(|name| one(&format!("{name}_scale"), Dtype::F32, 1)),
        })
    }

    /// Plans the largest magnitudes of a linear's input and weight.
    pub(crate) fn linear(self, plan: &mut Plan, name: &str) -> Fp8Linear {
        let [input, weight] = ["input", "weight"].map(|of| {
            let name = format!("{name}.{of}_maxima");
            plan.tensor((Arena::Device, "activations"), name, Dtype::F32, (1, MAXIMA))
        });
        Fp8Linear { input, weight, operands: self }
    }
}

impl Fp8Linear {
    /// Largest magnitudes of the forward pass: of the input and of the weight.
    pub(crate) const fn maxima(self) -> [Tensor; 2] {
        [self.input, self.weight]
    }

    /// Rounds x to fp8 in the shared operand `to`; `turn` transposes it.
    fn round(
        dev: &Device,
        x: Tensor,
        maxima: Tensor,
        to: Tensor,
        scale: Tensor,
        turn: bool,
    ) -> Tensor {
        let (m, n) = x.shape();
        let (rows, cols) = if turn { (n, m) } else { (m, n) };
        let to = to.slice(0..m * n).reshape(rows, cols);
        let (y, transposed) = if turn { (None, Some(to)) } else { (Some(to), None) };
        dev.submit(Compute, Op::Quantize { x, maxima, y, transposed, scale });
        to
    }
}

impl Linear {
    /// Computes the largest magnitudes of the input x and of the weight, which the other calls use.
    #[track_caller]
    pub(crate) fn observe(self, dev: &Device, x: Tensor) {
        if let Some(Fp8Linear { input, weight, .. }) = self.fp8 {
            dev.submit(Compute, Op::Maxima { x, maxima: input });
            dev.submit(Compute, Op::Maxima { x: self.weight, maxima: weight });
        }
    }

    /// Computes y (m, n) = x (m, k) weight' + bias of an [observed](Self::observe) x, and the
    /// epilogue.
    #[track_caller]
    pub(crate) fn forward(
        self,
        dev: &Device,
        x: Tensor,
        y: Tensor,
        epilogue: Epilogue,
        bias: Option<Tensor>,
    ) {
        let Some(adapter) = self.adapter else {
            return self.base_forward(dev, x, y, epilogue, bias);
        };
        self.base_forward(dev, x, y, Epilogue::None, bias);
        adapter.forward(dev, x, [Some(y), None, None]);
        follow(dev, epilogue, x, y);
    }

    /// [`forward`](Self::forward) without adapters.
    #[track_caller]
    fn base_forward(
        self,
        dev: &Device,
        x: Tensor,
        y: Tensor,
        epilogue: Epilogue,
        bias: Option<Tensor>,
    ) {
        let Some(Fp8Linear { input, weight, operands: fp8 }) = self.fp8 else {
            let (b, add) = (self.weight.t(), false);
            dev.submit(Compute, Op::Gemm { a: x, b, c: y, bias, add, epilogue });
            return;
        };
        let [of_x, of_weight, _] = fp8.scales;
        let a = Fp8Linear::round(dev, x, input, fp8.input, of_x, false);
        let b = Fp8Linear::round(dev, self.weight, weight, fp8.weight, of_weight, false).t();
        dev.submit(Compute, Op::ScaledGemm { a, b, c: y, bias, scales: [of_x, of_weight] });
        follow(dev, epilogue, x, y);
    }

    /// Computes d_x (m, k) = d (m, n) weight, then the epilogue.
    #[track_caller]
    pub(crate) fn input_gradient(self, dev: &Device, d: Tensor, d_x: Tensor, epilogue: Epilogue) {
        let Some(adapter) = self.adapter else {
            return self.base_input_gradient(dev, d, d_x, epilogue);
        };
        self.base_input_gradient(dev, d, d_x, Epilogue::None);
        adapter.input_gradient(dev, [Some(d), None, None], d_x);
        follow(dev, epilogue, d, d_x);
    }

    /// [`input_gradient`](Self::input_gradient) without adapters.
    #[track_caller]
    fn base_input_gradient(self, dev: &Device, d: Tensor, d_x: Tensor, epilogue: Epilogue) {
        let Some(Fp8Linear { weight, operands: fp8, .. }) = self.fp8 else {
            dev.submit(Compute, Op::product_with(d, self.weight, d_x, epilogue));
            return;
        };
        let ((m, n), [_, of_weight, of_d]) = (d.shape(), fp8.scales);
        let a = fp8.gradient.slice(0..m * n).reshape(m, n);
        let transposed = Some(fp8.transposed.slice(0..m * n).reshape(n, m));
        // The transposed copy is for the weight gradient's matmul.
        let maxima = fp8.maxima;
        dev.submit(Compute, Op::Maxima { x: d, maxima });
        dev.submit(Compute, Op::Quantize { x: d, maxima, y: Some(a), transposed, scale: of_d });
        let b = Fp8Linear::round(dev, self.weight, weight, fp8.weight, of_weight, true).t();
        dev.submit(Compute, Op::ScaledGemm { a, b, c: d_x, bias: None, scales: [of_d, of_weight] });
        follow(dev, epilogue, d, d_x);
    }

    /// Computes `grads` from d (m, n) and x (m, k): d_weight (n, k) = d' x. Call it after
    /// [`input_gradient`](Self::input_gradient) of the same d, before that of another d.
    #[track_caller]
    pub(crate) fn weight_gradient(self, dev: &Device, d: Tensor, x: Tensor, grads: LinearGrads) {
        let LinearGrads { weight: d_weight, bias, adapter } = grads;
        if let (Some(adapter), Some(grads)) = (self.adapter, adapter) {
            adapter.weight_gradient(dev, [Some(d), None, None], x, grads);
        }
        let sums = Epilogue::row_sums(bias);
        if d_weight.is_empty() {
            return follow(dev, sums, d.t(), d_weight);
        }
        let Some(Fp8Linear { input, operands: fp8, .. }) = self.fp8 else {
            dev.submit(Compute, Op::product_with(d.t(), x, d_weight, sums));
            return;
        };
        let ((m, n), [of_x, _, of_d]) = (d.shape(), fp8.scales);
        let a = fp8.transposed.slice(0..m * n).reshape(n, m);
        let b = Fp8Linear::round(dev, x, input, fp8.input, of_x, true).t();
        dev.submit(Compute, Op::ScaledGemm { a, b, c: d_weight, bias: None, scales: [of_d, of_x] });
        follow(dev, sums, d.t(), d_weight);
    }
}

/// Runs the epilogue of an fp8 matmul as a separate op, on operands before their rounding to fp8.
#[track_caller]
fn follow(dev: &Device, epilogue: Epilogue, a: Tensor, c: Tensor) {
    epilogue.separate_op(a, c).into_iter().for_each(|op| dev.submit(Compute, op));
}
