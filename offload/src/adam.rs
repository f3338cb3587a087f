//! The update of one tile on the host: unscale, clip, weight decay, AdamW and the new 16-bit parameter in one
//! pass over memory: 28 bytes per parameter with 16-bit gradients and fp32 states.

use device::numerics::{Master, Noise, NoiseRun, States, Update, traffic, update};
use device::{Dtype, HostContext, HostTask, Mode, Pieces, Rule, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// What a tile is cut into for the rank's worker threads.
const PIECE: usize = 1 << 14;

/// A run of owned parameters.
#[derive(Debug)]
pub struct AdamTile {
    /// The rule.
    pub rule: Rule,
    /// The decision, host.
    pub control: Tensor,
    /// Summed gradients.
    pub grad: Tensor,
    /// fp32, or `U16`: the lower halves of parameters whose upper ones are `param`.
    pub master: Tensor,
    /// fp32 or bf16.
    pub momentum: Tensor,
    /// As the momentum.
    pub variance: Tensor,
    /// The new parameters, where the device copies them from.
    pub param: Tensor,
    /// Leading elements that take weight decay.
    pub decayed: usize,
    /// For bf16 moments: the segment's runs, and where in it this tile begins.
    pub noise: (Arc<[NoiseRun]>, usize),
}

impl AdamTile {
    /// The upper halves of the master weights are the parameters themselves.
    fn is_split(&self) -> bool {
        self.master.dtype() == Dtype::U16
    }
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
        visit(if self.is_split() { Mode::Update } else { Mode::Write }, self.param);
    }
    fn flops(&self) -> f64 {
        15.0 * self.master.len() as f64
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        self.each_piece(host, update)
    }
}

/// What a tile reads and writes without its arithmetic: what a tile could take at least.
#[derive(Debug)]
pub struct TrafficTile(
    /// The tile. Its states are nonsense afterwards.
    pub AdamTile,
);

impl HostTask for TrafficTile {
    fn name(&self) -> &'static str {
        "traffic_tile"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.0.accesses(visit);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        self.0.each_piece(host, |piece| {
            traffic(piece);
            Ok(())
        })
    }
}

impl AdamTile {
    fn each_piece(&self, host: &mut HostContext<'_>, work: Work) -> Result<(), String> {
        let whole = Update {
            rule: self.rule,
            control: host.read_as::<f64>(self.control)?,
            grad: host.read(self.grad)?,
            states: States {
                master: if self.is_split() {
                    Master::Lower(host.write_as::<u16>(self.master)?)
                } else {
                    Master::Whole(host.write_as::<f32>(self.master)?)
                },
                momentum: host.write(self.momentum)?,
                variance: host.write(self.variance)?,
            },
            param: host.write(self.param)?,
            decayed: self.decayed,
            noise: Noise { runs: &self.noise.0, start: self.noise.1 },
            streams: self.master.len() >= STREAMED,
        };
        let outcome = Mutex::new(Ok(()));
        host.share(Tile(whole), &|Tile(piece)| {
            if let Err(problem) = work(piece) {
                // Of several, any: what is wrong is the tile's types, so it is the same.
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(problem);
            }
        });
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// From so many elements on a tile's parameters would push more useful things out of the caches.
const STREAMED: usize = 1 << 18;

type Work = fn(Update<'_>) -> Result<(), String>;

/// An update in pieces; elementwise, so the cut changes no bit.
struct Tile<'a>(Update<'a>);

impl Pieces for Tile<'_> {
    fn units(&self) -> usize {
        self.0.grad.len().div_ceil(PIECE)
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let (first, rest) = self.0.split_at(units * PIECE);
        (Self(first), Self(rest))
    }
}
