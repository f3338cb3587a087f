//! The update as tasks: of one tile on the host, and of a piece on the device. Unscaling, clipping,
//! weight decay, AdamW and the new 16-bit parameter are one pass over memory. The pass moves 28
//! bytes per parameter with 16-bit gradients and fp32 states.

use crate::control;
use crate::update::{
    Noise, OutOfPlaceUpdate, Rule, TileNoise, TrafficLoop, Update, traffic, update,
};
use device::cuda::Program;
use device::{
    DeviceTask, Divisible, Dtype, HostContext, HostTask, KernelArg, KernelCall, Mode, Tensor,
};
use std::sync::{Mutex, PoisonError};

/// Elements of each part into which a tile is cut for the rank's worker threads.
const UNIT: usize = 1 << 14;

/// The update of a run of owned parameters.
#[derive(Clone, Debug)]
pub struct AdamTile {
    /// The update rule.
    pub rule: Rule,
    /// The [control block](crate::control) with the step's decision.
    pub control: Tensor,
    /// The summed gradients.
    pub grad: Tensor,
    /// Masters in fp32; or, as `U16`, the lower halves of masters whose upper halves are `param`.
    pub master: Tensor,
    /// The first moments, in fp32 or bf16.
    pub momentum: Tensor,
    /// The second moments, in the type of the first ones.
    pub variance: Tensor,
    /// New parameters: the staging buffer of the upload, or the parameters on the device.
    pub param: Tensor,
    /// Number of leading elements with weight decay.
    pub decayed: usize,
    /// Random bits for the stochastic rounding of bf16 moments.
    pub noise: TileNoise,
}

impl AdamTile {
    /// Whether the upper halves of the masters are the parameters themselves.
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
        self.parallel_for_each(host, self.master.len() >= STREAMED, update)
    }
}

/// CUDA source of the kernels of this crate's tasks.
pub const PROGRAMS: &[Program] =
    &[Program { name: "update.cu", source: include_str!("kernels/update.cu") }];

/// The update of fp32 states on the device: the same pass, by a kernel on a real GPU.
#[derive(Debug)]
pub struct DeviceUpdate(
    /// All of its tensors are on the device.
    pub AdamTile,
);

impl HostTask for DeviceUpdate {
    fn name(&self) -> &'static str {
        "update"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.0.accesses(visit);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        // The same core reads the parameters next.
        self.0.parallel_for_each(host, false, update)
    }
}

impl DeviceTask for DeviceUpdate {
    fn check(&self) -> Result<(), String> {
        let AdamTile { control, grad, master, momentum, variance, param, .. } = &self.0;
        let states = [master, momentum, variance];
        let lengths = states.map(|t| t.len());
        if lengths.iter().any(|len| *len != grad.len()) || param.len() != grad.len() {
            let (n, params) = (grad.len(), param.len());
            return Err(format!("{n} gradients, {lengths:?} states, {params} parameters"));
        }
        if states.iter().any(|t| t.dtype() != Dtype::F32) {
            return Err("on the device all states are F32".into());
        }
        if control.dtype() != Dtype::F64 || control.len() < control::WORDS {
            return Err(format!("a control block of {} {:?}", control.len(), control.dtype()));
        }
        match [grad, param].into_iter().find(|t| !t.dtype().is_value()) {
            Some(t) => Err(format!("{:?} where F16, Bf16 or F32 belongs", t.dtype())),
            None => Ok(()),
        }
    }

    fn kernel(&self) -> KernelCall {
        let AdamTile { rule, control, grad, master, momentum, variance, param, decayed, .. } =
            &self.0;
        let (adamw, floats) = match *rule {
            Rule::AdamW { beta1, beta2, eps, weight_decay } => {
                (1, [beta1, beta2, eps, weight_decay])
            }
            Rule::Sgd { weight_decay } => (0, [0.0, 0.0, 0.0, weight_decay]),
        };
        let elements = grad.len();
        let tensors = [grad, master, momentum, variance, param, control];
        let types = KernelArg::Types(vec![*grad, *param]);
        let sizes = [adamw, elements as u64, *decayed as u64];
        let args = tensors.into_iter().map(|t| KernelArg::At(*t)).chain([types]);
        let args = args.chain(sizes.map(KernelArg::Int)).chain(floats.map(KernelArg::Float));
        KernelCall { name: "update", elements, args: args.collect() }
    }
}

/// The loads and stores of a tile without its arithmetic, to measure a lower bound of its time.
#[derive(Debug)]
pub struct TrafficTile {
    /// The tile; its states are nonsense after a run.
    pub tile: AdamTile,
    /// The loop over its traffic.
    pub by: TrafficLoop,
}

impl HostTask for TrafficTile {
    fn name(&self) -> &'static str {
        "traffic_tile"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        self.tile.accesses(visit);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        self.tile.parallel_for_each(host, true, |piece| {
            traffic(piece, self.by);
            Ok(())
        })
    }
}

impl AdamTile {
    fn parallel_for_each(
        &self,
        host: &mut HostContext<'_>,
        streams: bool,
        work: impl Fn(Update<'_>) -> Result<(), String> + Sync,
    ) -> Result<(), String> {
        let words = host.read_as::<f64>(self.control)?;
        let whole = self.whole(words, [self.master, self.momentum, self.variance], host)?;
        parallel_for(host, Update { streams, ..whole }, work)
    }

    /// The update by the words of a control block, with the given arrays of masters, first moments
    /// and second moments.
    pub(crate) fn whole<'a, 'host: 'a>(
        &'a self,
        words: &'a [f64],
        [master, momentum, variance]: [Tensor; 3],
        host: &mut HostContext<'host>,
    ) -> Result<Update<'a>, String> {
        Ok(Update {
            rule: self.rule,
            control: words,
            grad: host.read(self.grad)?,
            states: [host.write(master)?, host.write(momentum)?, host.write(variance)?],
            old: None,
            param: host.write(self.param)?,
            decayed: self.decayed,
            noise: Noise { runs: &self.noise.runs, start: self.noise.start },
            streams: self.master.len() >= STREAMED,
        })
    }
}

/// Distributes pieces of an update over the rank's kernel threads.
pub(crate) fn parallel_for<T: Divisible>(
    host: &HostContext<'_>,
    whole: T,
    work: impl Fn(T) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let outcome = Mutex::new(Ok(()));
    host.parallel_for(whole, &|piece| {
        if let Err(problem) = work(piece) {
            // Any of several errors will do: all have the same cause, the tile's types.
            *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(problem);
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Smallest number of parameters of a tile whose stores bypass the caches.
const STREAMED: usize = 1 << 18;

/// The update is elementwise, so the cut changes no bit.
impl Divisible for Update<'_> {
    fn units(&self) -> usize {
        self.grad.len().div_ceil(UNIT)
    }
    fn cut(self, units: usize) -> (Self, Self) {
        self.split_at(units * UNIT)
    }
}

/// The update is elementwise, so a cut into two parts changes no bit.
impl Divisible for OutOfPlaceUpdate<'_> {
    fn units(&self) -> usize {
        self.update.units()
    }
    fn cut(self, units: usize) -> (Self, Self) {
        self.split_at(units * UNIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
    use device::{
        Arena, Communicator, Device, DeviceOp, HostPlace, HostWork, Lane, Op, Plan, Rank,
        ThreadTeam,
    };
    use device::{View, ViewMut, random};
    use half::bf16;
    use std::sync::Arc;
    use std::time::Duration;

    const N: usize = 70_001;
    const RULE: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    /// Values in -1..1 that bf16 represents exactly.
    fn noise(seed: u64) -> Vec<f32> {
        (0..N as u64).map(|i| random::below(seed, i, 255) as f32 / 128.0 - 0.992_187_5).collect()
    }

    fn words() -> [f64; control::WORDS] {
        let mut words = [0.0; control::WORDS];
        words[control::LR] = 1e-2;
        words[control::FACTOR] = 0.5;
        words[control::MOMENTUM_CORRECTION] = 10.0;
        words[control::VARIANCE_CORRECTION] = 20.0;
        words
    }

    /// A virtual GPU with `threads` kernel threads, and an update of its tensors: bf16 gradients,
    /// states of type `states`.
    fn open(threads: usize, states: Dtype, words: usize) -> (Device, AdamTile) {
        let mut plan = Plan::default();
        let mut tensor = |name, dtype, n| plan.tensor((Arena::Device, "test"), name, dtype, (1, n));
        let tile = AdamTile {
            rule: RULE,
            control: tensor("control", Dtype::F64, words),
            grad: tensor("grad", Dtype::Bf16, N),
            master: tensor("master", states, N),
            momentum: tensor("momentum", states, N),
            variance: tensor("variance", states, N),
            param: tensor("param", Dtype::Bf16, N),
            decayed: 50_000,
            noise: TileNoise::none(),
        };
        let team =
            (threads > 1).then(|| Arc::new(ThreadTeam::new(threads, || ()).expect("threads")));
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::default(),
            work: HostWork { team, ..HostWork::default() },
        };
        let rank = Rank::all(1, 1).next().expect("one rank");
        let world = Communicator::new(1, 1, Duration::from_secs(10));
        (cpu::open(rank, &Arc::new(plan), &world, &options).expect("a virtual GPU"), tile)
    }

    fn submit(dev: &Device, tile: AdamTile) {
        dev.submit(Lane::Compute, Op::Task { task: DeviceOp::new(DeviceUpdate(tile)) });
    }

    #[test]
    fn on_a_virtual_gpu_it_is_the_update_with_any_number_of_threads() {
        let [grad, mut master, mut momentum, mut variance] = [1, 2, 3, 4].map(noise);
        variance.iter_mut().for_each(|x| *x *= *x);
        let start = [grad.clone(), master.clone(), momentum.clone(), variance.clone()];
        let grad: Vec<bf16> = grad.into_iter().map(bf16::from_f32).collect();
        let (words, mut param) = (words(), vec![bf16::ZERO; N]);
        update(Update {
            rule: RULE,
            control: &words,
            grad: View::Bf16(&grad),
            states: [
                ViewMut::F32(&mut master),
                ViewMut::F32(&mut momentum),
                ViewMut::F32(&mut variance),
            ],
            old: None,
            param: ViewMut::Bf16(&mut param),
            decayed: 50_000,
            noise: Noise { runs: &[], start: 0 },
            streams: true,
        })
        .expect("an update");
        let param: Vec<f32> = param.into_iter().map(bf16::to_f32).collect();
        for threads in [1, 3] {
            let (dev, tile) = open(threads, Dtype::F32, words.len());
            dev.write(tile.control, &|i| words[i]).expect("written");
            for (t, values) in
                [tile.grad, tile.master, tile.momentum, tile.variance].into_iter().zip(&start)
            {
                dev.write(t, &|i| f64::from(values[i])).expect("written");
            }
            let left = [tile.master, tile.momentum, tile.variance, tile.param];
            submit(&dev, tile);
            dev.sync_all().expect("it runs");
            for (t, want) in left.into_iter().zip([&master, &momentum, &variance, &param]) {
                let mut got = vec![0.0; N];
                dev.read_f32(t, &mut got).expect("read");
                assert!(got == *want, "{threads} threads");
            }
        }
    }

    #[test]
    fn on_the_device_a_short_control_block_and_small_states_are_refused() {
        for (states, words, why) in
            [(Dtype::F32, 3, "a control block of 3"), (Dtype::Bf16, 16, "all states are F32")]
        {
            let (dev, tile) = open(1, states, words);
            submit(&dev, tile);
            let problem = dev.sync_all().expect_err("refused").to_string();
            assert!(problem.contains(why), "{problem}");
        }
    }
}
