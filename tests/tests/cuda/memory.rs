//! The largest models of a small GPU: the planned bytes, and the bytes that the driver allocates.

use super::{on_cuda, try_run};
use config::Config;
use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{Arena, Communicator, Dtype, Plan, Rank, ViewMut};
use engine::run::RunOptions;
use predict::plan::{Report, memory_report};
use std::sync::Arc;
use std::time::Duration;
use tests::{lay_out, tiny};

/// Bytes of the matmul workspace on each GPU: a large part of such a small GPU.
const WORKSPACE: u64 = 32 << 20;

/// Bytes of host memory: 1.6 times the GPU memory without the workspace.
fn host() -> u64 {
    let gpu = std::env::var("FAKECUDA_MEMORY").expect("set by the test");
    (gpu.parse::<u64>().expect("a number") - WORKSPACE) * 8 / 5
}

/// Adapters over weights that are on the host.
const ADAPTERS: &[&str] = &["adapter=Lora(rank: 2)", "offload.parameters=Host"];
/// Frozen MLPs that are on the host.
const FROZEN: &[&str] = &["optimizer.frozen=[\"*.mlp.*\"]", "offload.parameters=Host"];

fn config(optimizer: &str, layers: usize, more: &[&str]) -> Config {
    let (optimizer, layers) =
        (format!("offload.optimizer={optimizer}"), format!("model.layers={layers}"));
    let hidden = if host() > 100_000_000 { "model.hidden=128" } else { "model.hidden=64" };
    let sets = [
        &optimizer,
        &layers,
        hidden,
        "precision=Bf16",
        "recompute=Block",
        "offload.bucket_elements=50000",
        "offload.tile_elements=50000",
        "batch.micro=1",
        "batch.global=2",
        "train.steps=1",
        "train.checkpoint_overhead=None",
    ];
    on_cuda(tiny(&[&sets[..], more].concat()))
}

fn planned(optimizer: &str, layers: usize, more: &[&str]) -> Report {
    let config = config(optimizer, layers, more);
    memory_report(&config, &lay_out(&config))
}

/// Number of blocks of the deepest model that fits both memories.
fn deepest(optimizer: &str, more: &[&str]) -> usize {
    let fits = |layers: &usize| {
        let plan = planned(optimizer, *layers, more);
        plan.fits && plan.host_per_rank.bytes <= host()
    };
    (1..1000).take_while(fits).last().expect("not even one block")
}

fn within_two_percent(what: &str, allocated: u64, planned: u64) {
    println!("{what}: {allocated} allocated, {planned} planned");
    assert!(planned.abs_diff(allocated) <= planned / 50, "{what}: {allocated} against {planned}");
}

/// Weights that are written in several pieces are at the right places, in each type.
pub(super) fn weights_are_written_in_pieces() {
    // In fp32 this is two pieces of 1 MiB, and 77 elements.
    const N: usize = (2 << 20) / 4 + 77;
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let mut plan = Plan::default();
    let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    let all = types.map(|dtype| plan.tensor((Arena::Device, "test"), "weights", dtype, (1, N)));
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::InProcess,
        attention: AttentionLibrary::Own,
        matmuls: MatmulSelection::Heuristic,
        scratch: 0,
        work: device::HostWork::default(),
        programs: &[],
        warm_up: Arc::default(),
    };
    let world = Communicator::new(1, 1, Duration::from_secs(60));
    let dev = cuda::open(rank, &Arc::new(plan), &world, &options).unwrap();
    // Each value is exact in 8 bits, and differs from the value one piece earlier.
    let value = |i: usize| (i * 7 + i / 1000) as f32 % 251.0;
    for tensor in all {
        let fill = |first: usize, views: &mut [ViewMut<'_>]| {
            for view in views {
                (0..view.len()).for_each(|i| view.store(i, &[value(first + i)]));
            }
            Ok(())
        };
        dev.write_runs(&[tensor], &fill).unwrap();
    }
    for tensor in all {
        let mut read = vec![0.0; N];
        dev.read(tensor, &mut read).unwrap();
        let wrong = (0..N).find(|i| read[*i] as f32 != value(*i));
        assert_eq!(wrong, None, "{:?}", tensor.dtype());
    }
    dev.finish().unwrap();
}

pub(super) fn is_allocated_as_planned() {
    let mut parameters = Vec::new();
    // The order matters, because the driver reports the peak of all runs so far.
    for (optimizer, more) in
        [("Host", &[][..]), ("Device", &[]), ("Host", ADAPTERS), ("Host", FROZEN)]
    {
        let layers = deepest(optimizer, more);
        let plan = planned(optimizer, layers, more);
        println!("{optimizer}: {layers} blocks, {} parameters", plan.parameters);
        let pinned = fake_cuda::stats().expect("the fake driver").pinned_bytes;
        let ran = try_run(&config(optimizer, layers, more), &RunOptions::default());
        assert!(ran.unwrap_or_else(|e| panic!("{e}")).steps[0].loss.is_finite());
        let peak = fake_cuda::memory_use(0).expect("the fake driver").peak;
        let pinned = fake_cuda::stats().expect("the fake driver").pinned_bytes - pinned;
        within_two_percent("GPU", peak, plan.gpu.bytes);
        if plan.host_per_rank.bytes > 1 << 20 {
            let config = config(optimizer, layers, more);
            let copied = cuda::pinned_bytes(&lay_out(&config).plan);
            let states_are_small = !more.is_empty();
            assert!(
                states_are_small || copied < plan.host_per_rank.bytes / 2,
                "states are not pinned"
            );
            assert_eq!(pinned, copied, "bytes of host memory that are pinned");
        }
        if more.is_empty() {
            parameters.push(plan.parameters);
        } else {
            let shape = layout::build::shape(&config(optimizer, layers, more));
            let trained = shape.trained_parameters() as f64;
            let frozen = plan.parameters as f64 - if more == FROZEN { trained } else { 0.0 };
            // A trained parameter has its weight, its gradient, its master and two moments.
            let of_frozen = plan.host_per_rank.bytes as f64 - 18.0 * trained;
            println!("{:.3} bytes of the host for each frozen parameter", of_frozen / frozen);
            assert!(of_frozen < 2.1 * frozen);
        }
        let more = planned(optimizer, layers + 1, more);
        let words = &more.binding.words;
        println!("{words}");
        assert!(more.host_per_rank.bytes > host() || !more.fits && words.contains("MiB wanted"));
    }
    // A parameter needs 18 bytes: of host memory, or of GPU memory with the optimizer there.
    assert!(18 * parameters[0] <= host() && 20 * parameters[0] > host(), "{parameters:?}");
    assert!(2 * parameters[0] > 3 * parameters[1], "{parameters:?}");
}
