//! The rate of matmuls in a box with which a simulation has the time of measured matmuls. The
//! simulator takes more than the operations into account, such as tiles and gaps between kernels; a rate
//! that was divided out by hand would count these twice.

use crate::boxes;
use crate::sim::{self, Program};
use crate::simulate::SimulateError;
use config::{BoxConfig, Config, load_str};
use device::{Device, Error, Plan, Rank};
use std::path::Path;
use std::sync::Arc;
use topology::HostBytes;

/// Largest relative difference between the simulated and the measured time.
const EXACT: f64 = 1e-4;

/// Most simulations.
const MOST: usize = 100;

/// Largest rate, in 10^12 operations per second. A larger one means that the simulated time does not
/// depend on the rate.
const LARGEST: f64 = 1e5;

/// Type of the operands of matmuls: which key of a box has their rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandWidth {
    /// 16 bits: `gpu.gemm_tflops`.
    Half,
    /// 32 bits: `gpu.fp32_tflops`.
    Full,
}

/// Value of the key of `width`, in 10^12 operations per second, with which the ops that `submit` gives to a
/// device with `plan` take `seconds` on one GPU of the box `described`. `None`: they take longer at any rate.
///
/// # Errors
/// Returns an error if the box lacks another rate, or if the ops do not pass their own checks.
pub fn product_rate(
    described: &BoxConfig,
    width: OperandWidth,
    plan: &Arc<Plan>,
    seconds: f64,
    submit: impl FnOnce(&Device) -> Result<(), Error>,
) -> Result<Option<f64>, SimulateError> {
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let program = sim::record(rank, plan, true, |dev| {
        dev.begin_step(1);
        submit(dev)?;
        dev.sync_all()
    })?;
    let config = lone_rank();
    let mut rate = 1.0;
    for _ in 0..MOST {
        let took = simulated(&config, described, width, &program, rate)?;
        if (took / seconds - 1.0).abs() < EXACT {
            return Ok(Some(rate));
        }
        rate *= took / seconds;
        if !(rate.is_finite() && rate < LARGEST) {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Seconds of `program` with a rate of matmuls.
fn simulated(
    config: &Config,
    described: &BoxConfig,
    width: OperandWidth,
    program: &Program,
    rate: f64,
) -> Result<f64, SimulateError> {
    let mut with_rate = described.clone();
    match width {
        OperandWidth::Half => with_rate.gpu.gemm_tflops = rate as f32,
        OperandWidth::Full => with_rate.gpu.fp32_tflops = rate as f32,
    }
    let hardware = boxes::hardware(config, &with_rate, HostBytes::default())?;
    Ok(sim::simulate(program.clone(), &hardware, 1, 1, true).step_seconds())
}

/// A config of one rank. Nothing of its model is simulated.
fn lone_rank() -> Config {
    let ron = "(model: (layers: 1, hidden: 8, heads: 1, seq_len: 8), train: (steps: 1))";
    let loaded = load_str(ron, "a lone rank", Path::new(""), &[]);
    loaded.map_or_else(|e| unreachable!("the config of a lone rank: {e}"), |loaded| loaded.config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_box;
    use device::{Arena, Dtype, Lane, Op, Tensor};

    /// A plan of a matmul of these sizes in bf16, and its operands and result.
    fn planned(m: usize, n: usize, k: usize) -> (Arc<Plan>, [Tensor; 3]) {
        let mut plan = Plan::default();
        let tensors = [("a", (m, k)), ("b", (k, n)), ("c", (m, n))].map(|(name, shape)| {
            plan.tensor((Arena::Device, "of the test"), name, Dtype::Bf16, shape)
        });
        (Arc::new(plan), tensors)
    }

    #[test]
    fn a_simulation_with_the_rate_takes_as_long_as_was_measured() {
        let described = load_box(Path::new("h200-256gib")).unwrap();
        let (plan, [a, b, c]) = planned(4096, 4096, 4096);
        let submit = |dev: &Device| {
            [a, b].into_iter().try_for_each(|t| dev.write(t, &|_| 0.0))?;
            for _ in 0..3 {
                dev.submit(Lane::Compute, Op::product(a, b, c));
            }
            Ok(())
        };
        // Three products at 500 TFLOPS, all told.
        let seconds = 3.0 * 2.0 * 4096f64.powi(3) / 5e14;
        let rate = product_rate(&described, OperandWidth::Half, &plan, seconds, submit).unwrap();
        let rate = rate.unwrap();
        // Tiles, starts and ends take a part of the time, so the key is larger.
        assert!(rate > 500.0 && rate < 700.0, "{rate}");
        let program =
            sim::record(Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 }, &plan, true, |dev| {
                dev.begin_step(1);
                submit(dev)?;
                dev.sync_all()
            });
        let half = OperandWidth::Half;
        let took = simulated(&lone_rank(), &described, half, &program.unwrap(), rate).unwrap();
        assert!((took / seconds - 1.0).abs() < 1e-3, "{took} for {seconds}");
    }

    #[test]
    fn a_time_that_no_rate_reaches_has_no_rate() {
        let described = load_box(Path::new("h200-256gib")).unwrap();
        let (plan, [a, b, c]) = planned(128, 128, 128);
        let submit = |dev: &Device| {
            [a, b].into_iter().try_for_each(|t| dev.write(t, &|_| 0.0))?;
            dev.submit(Lane::Compute, Op::product(a, b, c));
            Ok(())
        };
        // The gap between kernels alone is longer.
        let rate = product_rate(&described, OperandWidth::Half, &plan, 1e-9, submit).unwrap();
        assert_eq!(rate, None);
    }
}
