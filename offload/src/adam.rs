//! The update of one tile on the host: unscale, clip, weight decay, AdamW and the new 16-bit parameter in one
//! pass over memory: 28 bytes per parameter with 16-bit gradients.

use device::numerics::{States, update};
use device::{HostContext, HostTask, Mode, Rule, Tensor, View, ViewMut};

/// What a tile is cut into for the rank's worker threads.
const PIECE: usize = 1 << 15;

/// A run of owned parameters.
#[derive(Debug)]
pub(crate) struct AdamTile {
    pub(crate) rule: Rule,
    pub(crate) control: Tensor,
    pub(crate) grad: Tensor,
    pub(crate) master: Tensor,
    pub(crate) momentum: Tensor,
    pub(crate) variance: Tensor,
    pub(crate) param: Tensor,
    /// Leading elements that take weight decay.
    pub(crate) decayed: usize,
}

impl HostTask for AdamTile {
    fn name(&self) -> &'static str {
        "adam_tile"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.master);
        visit(Mode::Read, self.control);
        visit(Mode::Read, self.grad);
        visit(Mode::Update, self.momentum);
        visit(Mode::Update, self.variance);
        visit(Mode::Write, self.param);
    }
    fn flops(&self) -> f64 {
        15.0 * self.master.len() as f64
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let control = host.read_as::<f64>(self.control)?;
        let grad = host.read(self.grad)?;
        let states = States {
            master: host.write_as::<f32>(self.master)?,
            momentum: host.write_as::<f32>(self.momentum)?,
            variance: host.write_as::<f32>(self.variance)?,
        };
        let param = host.write(self.param)?;
        match host.pool() {
            None => update(self.rule, control, grad, states, param, self.decayed),
            Some(pool) => pool.install(|| self.split(control, grad, states, param, self.decayed)),
        }
        Ok(())
    }
}

impl AdamTile {
    /// Halves until the pieces are small; elementwise, so the cut changes no bit.
    fn split(
        &self,
        control: &[f64],
        grad: View<'_>,
        s: States<'_>,
        param: ViewMut<'_>,
        decayed: usize,
    ) {
        let n = s.master.len();
        if n <= PIECE {
            return update(self.rule, control, grad, s, param, decayed);
        }
        let mid = (n / 2).next_multiple_of(device::BLOCK);
        let (p, q) = s.master.split_at_mut(mid);
        let (m, k) = s.momentum.split_at_mut(mid);
        let (v, w) = s.variance.split_at_mut(mid);
        let (first, second) = param.split_at(mid);
        let left = States { master: p, momentum: m, variance: v };
        let right = States { master: q, momentum: k, variance: w };
        rayon::join(
            || self.split(control, grad.slice(0..mid), left, first, decayed.min(mid)),
            || self.split(control, grad.slice(mid..n), right, second, decayed.saturating_sub(mid)),
        );
    }
}
