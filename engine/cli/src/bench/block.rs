//! Measures the matmuls of a block with its gradients under lasting load, as a training step has them: at
//! its limit of power, a GPU lowers its clock.

use super::{BenchPlace, MatmulShape, open};
use device::{Arena, Device, Dtype, Error, Lane, Op, Plan, Tensor, random};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of a block whose matmuls are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Width of the block.
    pub hidden: usize,
    /// Columns of queries, keys and values together.
    pub qkv: usize,
    /// Width of the MLP.
    pub ffn: usize,
}

/// Least number of rounds, even if the load is over.
const LEAST_ROUNDS: usize = 4;

/// Measured matmuls of a block.
#[derive(Clone, Debug)]
pub(super) struct BlockTimes {
    /// Seconds of the median round of the second half.
    pub(super) seconds: f64,
    /// Number of rounds in the median.
    pub(super) rounds: usize,
    /// Plan of the matmuls.
    pub(super) plan: Arc<Plan>,
    linears: [LinearTensors; 4],
}

/// Tensors of a linear: x (m, k), weight (n, k), y (m, n), and the gradients of x and of the weight.
#[derive(Clone, Copy, Debug)]
struct LinearTensors {
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    d_x: Tensor,
    d_weight: Tensor,
}

impl LinearTensors {
    /// Plans a linear. The gradients of all linears lie in `d_x` and `d_weight`.
    fn new(
        plan: &mut Plan,
        dtype: Dtype,
        MatmulShape { m, k, n }: MatmulShape,
        [d_x, d_weight]: [Tensor; 2],
    ) -> Self {
        let mut tensor = |name: String, shape| {
            plan.tensor((Arena::Device, "of the measurement"), name, dtype, shape)
        };
        Self {
            x: tensor(format!("x.{k}.{n}"), (m, k)),
            weight: tensor(format!("weight.{k}.{n}"), (n, k)),
            y: tensor(format!("y.{k}.{n}"), (m, n)),
            d_x: d_x.slice(0..m * k).reshape(m, k),
            d_weight: d_weight.slice(0..n * k).reshape(n, k),
        }
    }

    /// The forward matmul and both gradients, as `tensor_parallel::Linear` has them.
    fn submit(&self, dev: &Device) {
        let Self { x, weight, y, d_x, d_weight } = *self;
        dev.submit(Lane::Compute, Op::product(x, weight.t(), y));
        dev.submit(Lane::Compute, Op::product(y, weight, d_x));
        dev.submit(Lane::Compute, Op::product(y.t(), x, d_weight));
    }
}

impl BlockShape {
    /// Matmuls of the forward pass.
    const fn linears(self) -> [MatmulShape; 4] {
        let Self { tokens: m, hidden, qkv, ffn } = self;
        [
            MatmulShape { m, k: hidden, n: qkv },
            MatmulShape { m, k: hidden, n: hidden },
            MatmulShape { m, k: hidden, n: ffn },
            MatmulShape { m, k: ffn, n: hidden },
        ]
    }

    /// Operations of all matmuls, with their gradients.
    pub(super) fn flops(self) -> f64 {
        let of = |MatmulShape { m, k, n }: MatmulShape| 6.0 * (m * k * n) as f64;
        self.linears().into_iter().map(of).sum()
    }
}

impl BlockTimes {
    /// Measures the block's matmuls in `dtype` for the time `load`.
    ///
    /// # Errors
    /// There is no GPU or not enough memory, or the GPU fails.
    pub(super) fn measure(
        block: BlockShape,
        dtype: Dtype,
        load: Duration,
        place: &BenchPlace,
    ) -> Result<Self, Error> {
        let mut plan = Plan::default();
        let shapes = block.linears();
        let largest = |of: fn(&MatmulShape) -> usize| shapes.iter().map(of).max().unwrap_or(0);
        let gradients = [("d_x", largest(|s| s.m * s.k)), ("d_weight", largest(|s| s.n * s.k))];
        let gradients = gradients.map(|(name, len)| {
            plan.tensor((Arena::Device, "of the measurement"), name, dtype, (1, len))
        });
        let linears = shapes.map(|shape| LinearTensors::new(&mut plan, dtype, shape, gradients));
        let dev = open(plan.clone(), true, place)?;
        // Repeated numbers would take less power, and the clock would be higher.
        let values: Vec<f64> =
            (0..1 << 16).map(|i| random::below(7, i, 255) as f64 / 128.0 - 0.99).collect();
        for LinearTensors { x, weight, .. } in &linears {
            [*x, *weight].iter().try_for_each(|t| dev.write(*t, &|i| values[i % values.len()]))?;
        }
        let round = || {
            linears.iter().for_each(|linear| linear.submit(&dev));
            dev.sync_all()
        };
        // The first round loads the code.
        round()?;
        let (began, mut rounds) = (Instant::now(), Vec::new());
        while rounds.len() < LEAST_ROUNDS || began.elapsed() < load {
            let started = began.elapsed();
            round()?;
            rounds.push((started, (began.elapsed() - started).as_secs_f64()));
        }
        dev.finish()?;
        let second = second_half(&rounds);
        Ok(Self {
            seconds: super::median(&second),
            rounds: second.len(),
            plan: Arc::new(plan),
            linears,
        })
    }

    /// Submits the matmuls of a round to a device without values.
    ///
    /// # Errors
    /// The device refuses a tensor.
    pub(super) fn submit(&self, dev: &Device) -> Result<(), Error> {
        for linear @ LinearTensors { x, weight, .. } in &self.linears {
            dev.write(*x, &|_| 0.0)?;
            dev.write(*weight, &|_| 0.0)?;
            linear.submit(dev);
        }
        Ok(())
    }
}

/// Seconds of the rounds that began in the second half of the time. A round has its start and its seconds.
fn second_half(rounds: &[(Duration, f64)]) -> Vec<f64> {
    let half = rounds.last().map_or(Duration::ZERO, |(started, _)| *started / 2);
    let late = rounds.iter().filter(|(started, _)| *started >= half);
    late.map(|(_, seconds)| *seconds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rounds_of_the_second_half_count() {
        // Cold rounds are faster, and last for the first half of the time.
        let rounds: Vec<(Duration, f64)> = (0..10)
            .map(|i| (Duration::from_millis(100 * i), if i < 5 { 0.01 } else { 0.02 }))
            .collect();
        assert_eq!(second_half(&rounds), [0.02; 5]);
        assert_eq!(second_half(&rounds[..1]), [0.01]);
    }

    #[test]
    fn a_block_has_three_matmuls_for_each_linear() {
        let block = BlockShape { tokens: 2, hidden: 3, qkv: 4, ffn: 5 };
        assert_eq!(block.flops(), 6.0 * (2 * 3 * 4 + 2 * 3 * 3 + 2 * 2 * 3 * 5) as f64);
    }
}
