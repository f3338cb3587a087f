//! Measures the update on the host alone, with the tasks of a run. The update alternates with a
//! loop that loads and stores the same bytes without arithmetic, and with other states and
//! instructions. The loop is the fastest of several with different vector widths, kinds of stores
//! and prefetch distances. Because the measurements take turns, other load on the machine affects
//! all of them equally.

use super::node_memory::Node;
use super::triad::Triad;
use super::{median, open_on_host, timed};
use config::TILE_ELEMENTS as TILE;
use device::numerics::SimdPath;
use device::{Arena, Device, Dtype, Error, HostOp, Lane, Plan, Tensor, ThreadTeam};
use engine::run::devices::kernel_team;
use offload::{
    AdamTile, NoiseRun, Phase, Rule, SpeculationBuffers, SpeculativeTile, SpeculativeTraffic,
    Storage, TileNoise, TrafficLoop, TrafficTile, control,
};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// Seconds per case after which the measurement ends, even with fewer rounds than requested.
const ENOUGH: f64 = 20.0;

/// Settings of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// SIMD path of the update.
    pub path: SimdPath,
    /// Storage of the optimizer states.
    pub storage: Storage,
    /// Whether the update is speculative and writes second arrays of the states.
    pub speculative: bool,
    /// Number of kernel threads.
    pub threads: usize,
    /// Whether pages have 4 KiB instead of 2 MiB.
    pub small_pages: bool,
}

/// Result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the SIMD path.
    pub path: &'static str,
    /// Name of the state storage, see [`Case::state_name`].
    pub state: String,
    /// Number of kernel threads.
    pub threads: usize,
    /// Requested page size in KiB.
    pub page_kib: u32,
    /// Number of parameters.
    pub params: usize,
    /// Bytes read and written per parameter.
    pub bytes_per_param: f64,
    /// Seconds to update all parameters: the sum over tiles of each tile's median.
    pub seconds: f64,
    /// Median seconds of a pass over all tiles. It includes delays of single tiles.
    pub pass_seconds: f64,
    /// Parameters per second, from `seconds`.
    pub params_per_s: f64,
    /// 10^9 bytes per second, from `seconds`.
    pub gb_per_s: f64,
    /// 10^9 bytes per second of the same traffic without arithmetic, by the fastest loop.
    pub ceiling_gb_per_s: f64,
    /// The loop of the ceiling: vectors, stores, prefetches.
    pub ceiling_loop: String,
    /// 10^9 bytes per second of STREAM's triad on the same threads; `None` if no states are arrays of fp32.
    pub triad_gb_per_s: Option<f64>,
    /// Time of the traffic alone divided by the time of the update.
    pub share_of_ceiling: f64,
    /// Number of rounds in each median.
    pub rounds: usize,
}

impl Row {
    /// 10^9 bytes per second and thread, from `seconds`.
    pub(super) fn gb_per_s_and_thread(&self) -> f64 {
        self.gb_per_s / self.threads as f64
    }
}

impl Case {
    /// Name of the states, from `offload.master` and `offload.moments`; "ahead": speculative.
    pub fn state_name(&self) -> String {
        let Storage { moments, split_master } = self.storage;
        let name = match (split_master, moments) {
            (false, Dtype::Bf16) => "bf16",
            (true, Dtype::Bf16) => "split+bf16",
            (false, _) => "fp32",
            (true, _) => "split",
        };
        if self.speculative { format!("{name} ahead") } else { name.to_owned() }
    }
}

/// The cases to measure: each SIMD path with fp32 states, and then the best path with other states,
/// with speculative updates, with one thread, and with small pages. With `states_only`, only the
/// best path with each kind of state.
pub fn cases(threads: usize, only: Option<SimdPath>, states_only: bool) -> Vec<Case> {
    let mut paths = only.map_or_else(SimdPath::available, |path| vec![path]);
    if states_only {
        paths.truncate(1);
    }
    let storage = |moments, split_master| Storage { moments, split_master };
    let fp32 = Storage::default();
    let case = |path| Case { path, storage: fp32, speculative: false, threads, small_pages: false };
    let mut cases: Vec<Case> = paths.iter().copied().map(case).collect();
    let Some(best) = cases.first().copied() else { return cases };
    for (moments, split) in [(Dtype::F32, true), (Dtype::Bf16, false), (Dtype::Bf16, true)] {
        cases.push(Case { storage: storage(moments, split), ..best });
    }
    if states_only {
        return cases;
    }
    for storage in [fp32, storage(Dtype::Bf16, true)] {
        cases.push(Case { storage, speculative: true, ..best });
    }
    if threads > 1 {
        cases.push(Case { threads: 1, ..best });
    }
    cases.push(Case { small_pages: true, ..best });
    cases
}

/// The update of a tile, and the tile for the same traffic without arithmetic.
struct BenchTile {
    update: Arc<HostOp>,
    traffic: TileTraffic,
}

/// The tile of a kind of update, for its traffic without arithmetic.
enum TileTraffic {
    InPlace(Box<AdamTile>),
    /// A speculative update has only one loop, which copies past the caches.
    OutOfPlace(Box<SpeculativeTile>),
}

impl TileTraffic {
    /// The traffic by the loop `by`.
    fn op(&self, by: TrafficLoop) -> Arc<HostOp> {
        match self {
            Self::InPlace(tile) => HostOp::new(TrafficTile { tile: (**tile).clone(), by }),
            Self::OutOfPlace(tile) => HostOp::new(SpeculativeTraffic((**tile).clone())),
        }
    }
}

/// Number of tiles on which the loops are compared, and of passes over them; the first pass is not timed.
const SAMPLE: usize = 12;
const PASSES: usize = 3;

/// The fastest of `loops` over the traffic of `tiles`: the one with the least sum of each tile's fastest
/// pass. `run` runs a task and waits for it.
fn fastest_loop(
    loops: Vec<TrafficLoop>,
    tiles: &[BenchTile],
    run: &dyn Fn(&Arc<HostOp>) -> Result<(), Error>,
) -> Result<TrafficLoop, Error> {
    let sample = &tiles[..tiles.len().min(SAMPLE)];
    let mut fastest: Option<(f64, TrafficLoop)> = None;
    for by in loops {
        let ops: Vec<Arc<HostOp>> = sample.iter().map(|tile| tile.traffic.op(by)).collect();
        let mut least = vec![f64::INFINITY; ops.len()];
        for pass in 0..=PASSES {
            for (op, least) in ops.iter().zip(&mut least) {
                let seconds = timed(|| run(op))?;
                if pass > 0 {
                    *least = least.min(seconds);
                }
            }
        }
        let seconds: f64 = least.iter().sum();
        if fastest.is_none_or(|(fastest, _)| seconds < fastest) {
            fastest = Some((seconds, by));
        }
    }
    Ok(fastest.map_or_else(|| unreachable!("the portable path has loops"), |(_, by)| by))
}

/// Seconds of a case: of each tile with and without arithmetic, and of each pass over all tiles.
type Times = ([Vec<Vec<f64>>; 2], Vec<f64>);

/// Measures the update of `params` parameters in `cases`, `most` times or for some seconds. All
/// have the same threads and pages. They take turns at every tile, so other load affects all of
/// them.
///
/// # Errors
/// There is not enough memory, or this machine lacks a SIMD path.
pub fn adam(cases: &[Case], params: usize, most: usize) -> Result<Vec<Row>, Error> {
    let Some(one) = cases.first() else { return Ok(Vec::new()) };
    adam_on(kernel_team(one.threads, None), &Node::default(), cases, params, most)
}

/// Runs [`adam`] with `team` and with memory on `node`.
///
/// # Errors
/// Same as [`adam`].
pub(super) fn adam_on(
    team: Option<Arc<ThreadTeam>>,
    node: &Node,
    cases: &[Case],
    params: usize,
    most: usize,
) -> Result<Vec<Row>, Error> {
    let Some(one) = cases.first() else { return Ok(Vec::new()) };
    let site = std::panic::Location::caller();
    let refused = |problem| Error::Task { rank: 0, op: "adam_tile", site, problem };
    let (mut plan, mut states): (_, Vec<((Storage, bool), PlannedTiles)>) =
        (Plan::default(), Vec::new());
    // Cases of one kind share one set of states.
    let of_case = cases.iter().map(|Case { storage, speculative, .. }| {
        let kind = (*storage, *speculative);
        states.iter().position(|(have, _)| *have == kind).unwrap_or_else(|| {
            states.push((kind, tiles(&mut plan, *storage, *speculative, params)));
            states.len() - 1
        })
    });
    let of_case: Vec<usize> = of_case.collect();
    cases.iter().try_for_each(|case| case.path.choose().map_err(refused))?;
    let dev = open_on_host(plan, team, one.small_pages, node)?;
    let run = |op: &Arc<HostOp>| {
        dev.submit_host(op, 0);
        dev.sync(dev.record(Lane::Host))
    };
    let fill = |PlannedTiles { fills, .. }: &PlannedTiles| {
        fills.iter().try_for_each(|(tensor, value)| {
            dev.write(*tensor, &|i| value * (1.0 + (i % 251) as f64 / 251.0))
        })
    };
    for (_, planned) in &states {
        fill(planned)?;
        write_control(&dev, planned.control)?;
    }
    // STREAM works on the arrays of one of the states, and overwrites them.
    let wide = states.iter().find_map(|(_, planned)| Some((planned, planned.triad()?)));
    let triad = wide.as_ref().map(|(_, triad)| triad.gb_per_s(&run)).transpose()?;
    wide.map_or(Ok(()), |(planned, _)| fill(planned))?;
    let mut ceilings = Vec::new();
    for ((_, speculative), PlannedTiles { tiles, .. }) in &states {
        let mut loops = TrafficLoop::all();
        loops.truncate(if *speculative { 1 } else { loops.len() });
        let by = fastest_loop(loops, tiles, &run)?;
        let ops: Vec<Arc<HostOp>> = tiles.iter().map(|tile| tile.traffic.op(by)).collect();
        ceilings.push((by, ops));
    }
    let count = params.div_ceil(TILE);
    // Cases with the same states share tensors. At any moment they work on distant tiles, so that
    // none finds its tile in the caches after another case.
    let at = |turn: usize, nth: usize| (turn + nth * count / (2 * cases.len())) % count;
    let none = || ([vec![Vec::new(); count], vec![Vec::new(); count]], Vec::new());
    let mut times: Vec<Times> = cases.iter().map(|_| none()).collect();
    let (began, mut rounds) = (Instant::now(), 0);
    let enough = ENOUGH * cases.len() as f64;
    while rounds <= most && (rounds < 3 || began.elapsed().as_secs_f64() < enough) {
        let mut passes = vec![0.0; cases.len()];
        // The cases alternate tile by tile: a delay by other work then affects only a few tiles.
        for turn in 0..count {
            let cases = cases.iter().zip(&mut times).zip(&mut passes).enumerate();
            for (number, ((case, ([update, traffic], _)), pass)) in cases {
                case.path.choose().map_err(refused)?;
                let (_, PlannedTiles { tiles, .. }) = &states[of_case[number]];
                let (_, traffic_ops) = &ceilings[of_case[number]];
                let [tile, other] = [0, 1].map(|of| at(turn, 2 * number + of));
                let (first, second) =
                    (timed(|| run(&tiles[tile].update))?, timed(|| run(&traffic_ops[other]))?);
                *pass += first;
                update[tile].push(first);
                traffic[other].push(second);
            }
        }
        times.iter_mut().zip(passes).for_each(|((_, all), pass)| all.push(pass));
        rounds += 1;
    }
    dev.finish()?;
    // Sums each tile's median over all tiles, without the first round, which faults the memory in.
    let sum = |all: &[Vec<f64>]| all.iter().map(|tile| median(&tile[1..])).sum::<f64>();
    let rows = cases.iter().zip(&times).enumerate();
    let rows = rows.map(|(number, (case, ([update, traffic], passes)))| {
        let seconds = [sum(update), sum(traffic), median(&passes[1..])];
        let (by, _) = &ceilings[of_case[number]];
        let words = if case.speculative { "copies past the caches".into() } else { by.words() };
        Row {
            ceiling_loop: words,
            triad_gb_per_s: triad,
            ..row(*case, params, seconds, rounds - 1)
        }
    });
    Ok(rows.collect())
}

fn row(case: Case, params: usize, [seconds, traffic, pass]: [f64; 3], rounds: usize) -> Row {
    let moments = 4.0 * case.storage.moments.bytes() as f64;
    // Gradient read; master and parameter read and written; an unsplit parameter only written.
    let upper_halves = if case.speculative && case.storage.split_master { 2.0 } else { 0.0 };
    let bytes_per_param =
        2.0 + moments + upper_halves + if case.storage.split_master { 8.0 } else { 10.0 };
    let bytes = bytes_per_param * params as f64;
    Row {
        path: case.path.name(),
        state: case.state_name(),
        threads: case.threads,
        page_kib: if case.small_pages { 4 } else { 2048 },
        params,
        bytes_per_param,
        seconds,
        pass_seconds: pass,
        params_per_s: params as f64 / seconds,
        gb_per_s: bytes / seconds / 1e9,
        ceiling_gb_per_s: bytes / traffic / 1e9,
        ceiling_loop: String::new(),
        triad_gb_per_s: None,
        share_of_ceiling: traffic / seconds,
        rounds,
    }
}

/// Tiles of one kind of states.
struct PlannedTiles {
    tiles: Vec<BenchTile>,
    control: Tensor,
    /// Initial value of each tensor.
    fills: Vec<(Tensor, f64)>,
    /// Masters, and both moments.
    states: [Tensor; 3],
}

impl PlannedTiles {
    /// STREAM's triad over the states; `None` if they are not arrays of fp32.
    fn triad(&self) -> Option<Triad> {
        let is_wide = self.states.iter().all(|state| state.dtype() == Dtype::F32);
        let [b, c, to] = self.states;
        is_wide.then_some(Triad { b, c, to })
    }
}

/// Builds all tiles and the control block, with the initial value of each tensor.
fn tiles(plan: &mut Plan, storage: Storage, speculative: bool, params: usize) -> PlannedTiles {
    let mut tensor = |name: &str, dtype, len| {
        plan.tensor((Arena::Pinned, "of the measurement"), name, dtype, (1, len))
    };
    let lower = if storage.split_master { Dtype::U16 } else { Dtype::F32 };
    let control = tensor("control", Dtype::F64, control::WORDS);
    let grad = tensor("grad", Dtype::Bf16, params);
    let master = tensor("master", lower, params);
    let [momentum, variance] = ["m", "v"].map(|name| tensor(name, storage.moments, params));
    let param = tensor("param", Dtype::Bf16, params);
    let second = speculative.then(|| {
        let states = [
            ("master.second", lower),
            ("m.second", storage.moments),
            ("v.second", storage.moments),
        ];
        let states = states.map(|(name, dtype)| tensor(name, dtype, params));
        let upper = storage.split_master.then(|| tensor("upper", Dtype::Bf16, params));
        SpeculationBuffers {
            states,
            upper,
            factor: tensor("factors", Dtype::F64, params.div_ceil(TILE)),
            predicted: control,
        }
    });
    let noise: Arc<[_]> = match storage.moments {
        Dtype::Bf16 => [NoiseRun { flat: 0..params, stream: 1, global: 0 }].into(),
        _ => Arc::default(),
    };
    let tile = |at: usize| {
        let part = |t: Tensor| t.slice(at..(at + TILE).min(params));
        let tile = || AdamTile {
            rule: Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
            control,
            grad: part(grad),
            master: part(master),
            momentum: part(momentum),
            variance: part(variance),
            param: part(param),
            decayed: TILE.min(params - at),
            noise: TileNoise { runs: Arc::clone(&noise), start: at },
        };
        let Some(second) = &second else {
            let (update, traffic) = (HostOp::new(tile()), TileTraffic::InPlace(Box::new(tile())));
            return BenchTile { update, traffic };
        };
        let second = second.tile(&(at..(at + TILE).min(params)), at / TILE);
        let speculative =
            SpeculativeTile { tile: tile(), buffers: second, phase: Phase::Speculate };
        let update = HostOp::new(speculative.clone());
        BenchTile { update, traffic: TileTraffic::OutOfPlace(Box::new(speculative)) }
    };
    let all = (0..params).step_by(TILE).map(tile).collect();
    let second = second.iter().flat_map(|second| second.states.into_iter().chain(second.upper));
    let second = second.map(|array| (array, 1e-2)).collect::<Vec<_>>();
    let fills =
        vec![(grad, 1e-2), (master, 2e-2), (momentum, 1e-3), (variance, 1e-5), (param, 2e-2)];
    let (fills, states) = ([fills, second].concat(), [master, momentum, variance]);
    PlannedTiles { tiles: all, control, fills, states }
}

/// Writes the decision of the third step of a run.
fn write_control(dev: &Device, tensor: Tensor) -> Result<(), Error> {
    let mut words = [0.0; control::WORDS];
    words[control::STEP] = 3.0;
    words[control::FACTOR] = 0.5;
    words[control::LR] = 1e-5;
    words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - 0.9f64.powi(3));
    words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - 0.95f64.powi(3));
    dev.write(tensor, &|i| words[i])?;
    dev.sync(dev.record(Lane::Host))
}
