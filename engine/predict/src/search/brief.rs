//! A step from a few of its micro-batches: how long, and how much of it waits for the host.

use crate::sim::Timeline;
use crate::simulate::{SimulateError, simulate_unchecked};
use config::{Config, ParameterPlace, Recompute};
use device::Lane;
use engine::dry_run::with_micro_batches;
use layout::build::{RankLayout, lay_out, vertical_width};

/// Fewest micro-batches of the first of two simulations; all behind those of the second are like its last.
const FEW: usize = 2;

/// Seconds of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brief {
    /// All of it.
    pub(crate) seconds: f64,
    /// It waits for work of the host, copies and data-parallel collectives.
    pub(super) exposed: f64,
    /// The host works.
    pub(super) host: f64,
    /// The GPU computes.
    pub(super) compute: f64,
    /// A forward pass of a micro-batch takes, as a share of its operations.
    pub(super) forward: f64,
}

impl Brief {
    /// Of `config`, whose handles are `built`.
    ///
    /// # Errors
    /// As [`simulate_unchecked`].
    pub(crate) fn of(config: &Config, built: &RankLayout) -> Result<Self, SimulateError> {
        // The first passes that go together are no further ones.
        let few = match vertical_width(config) {
            1 => FEW,
            together => together + 1,
        };
        // Few of them hide no parameters on their way up that many hide.
        let streams = config.offload.parameters == ParameterPlace::Host;
        if streams || built.micro_batches <= few + 1 {
            return Ok(Self::played(config, built, &simulate_unchecked(config, built)?));
        }
        let of = |micro_batches| -> Result<Self, SimulateError> {
            let config = with_micro_batches(config, built, micro_batches);
            let built = lay_out(&config, &built.machine);
            Ok(Self::played(&config, &built, &simulate_unchecked(&config, &built)?))
        };
        let (less, more) = (of(few)?, of(few + 1)?);
        let line = |a: f64, b: f64| a + (b - a) * (built.micro_batches - few) as f64;
        Ok(Self {
            seconds: line(less.seconds, more.seconds),
            exposed: line(less.exposed, more.exposed),
            host: line(less.host, more.host),
            compute: line(less.compute, more.compute),
            forward: more.forward,
        })
    }

    fn played(config: &Config, built: &RankLayout, timeline: &Timeline) -> Self {
        let path = timeline.critical_path();
        // Kernels that wait for their submission do not wait for the host's work.
        let computes =
            |lane: Option<Lane>| matches!(lane, None | Some(Lane::Compute | Lane::TpComm));
        let exposed = path.iter().filter(|(lane, ..)| !computes(*lane)).map(|(.., s)| s).sum();
        let compute = timeline.busy(0, Lane::Compute);
        // Backward twice a forward pass, and that once more where it is recomputed.
        let passes = if config.recompute == Recompute::Block { 4 } else { 3 };
        let busy = compute + timeline.busy(0, Lane::TpComm);
        Self {
            seconds: timeline.step_seconds(),
            exposed,
            host: timeline.busy(0, Lane::Host),
            compute,
            forward: busy / (passes * built.micro_batches) as f64,
        }
    }

    /// Share of the step in which it waits for work of the host, copies and data-parallel collectives.
    pub(crate) fn waits(&self) -> f64 {
        self.exposed / self.seconds
    }

    /// Share of the host's work for which the step waits, at most 1.
    pub(crate) fn waited_share(&self) -> f64 {
        self.exposed / self.host.max(self.exposed)
    }

    /// The step can hardly be faster, wherever the update is and whatever it hides behind.
    pub(super) const fn floor(&self) -> f64 {
        (self.seconds - self.exposed).max(self.compute)
    }
}
