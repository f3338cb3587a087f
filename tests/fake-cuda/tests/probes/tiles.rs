//! Copies as in the update: tiles that each wait for a word of the Host lane, and both directions
//! in parallel with matmuls.

use crate::rates::{fill, open, tensor};
use crate::small;
use device::{
    Arena, Device, Dtype, HostContext, HostOp, HostTask, Lane, Mode, Op, Plan, Pool, Tensor,
};
use std::sync::Arc;
use std::time::Instant;

/// Host op before a tile goes up: it writes the tile's first element.
#[derive(Debug)]
struct Touch(Tensor);

impl HostTask for Touch {
    fn name(&self) -> &'static str {
        "touch"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.0);
    }
    fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        host.write_as::<f32>(self.0)?[0] = arg as f32;
        Ok(())
    }
}

struct Rig {
    dev: Device,
    down: Tensor,
    up: Tensor,
    on_host: [Tensor; 2],
    product: [Tensor; 3],
}

/// Elements of a whole copy.
fn elements() -> usize {
    if small() { 1 << 12 } else { 256 << 20 }
}

fn rig() -> Rig {
    let (mut plan, n) = (Plan::default(), elements());
    let [up, down] = [(); 2].map(|()| tensor(&mut plan, Dtype::F32, (1, n)));
    let on_host = ["a", "b"].map(|name| {
        plan.tensor((Arena::Pinned, Pool::staging("staging")), name, Dtype::F32, (1, n))
    });
    let side = if small() { 16 } else { 4096 };
    let product = [(); 3].map(|()| tensor(&mut plan, Dtype::Bf16, (side, side)));
    let dev = open(plan);
    [product[0], product[1], down].iter().for_each(|t| fill(&dev, *t));
    dev.write(on_host[0], &|i| i as f64).unwrap();
    Rig { dev, down, up, on_host, product }
}

impl Rig {
    fn whole(&self, lane: Lane) {
        let (src, dst) = match lane {
            Lane::H2d => (self.on_host[0], self.up),
            _ => (self.down, self.on_host[1]),
        };
        self.dev.submit(lane, Op::Copy { src, dst });
    }

    /// Enqueues matmuls that run about as long as a copy of all elements.
    fn products(&self, count: usize) {
        let [a, b, c] = self.product;
        (0..count).for_each(|_| {
            self.dev.submit(Lane::Compute, Op::product(a, b, c));
        });
    }

    /// Copies all elements in tiles of `tile` elements, each after its own op of the Host lane.
    fn tiles(&self, tile: usize, tasks: &[Arc<HostOp>]) {
        for (i, task) in tasks.iter().enumerate() {
            self.dev.submit_host(task, 1);
            self.dev.follow(Lane::H2d, Lane::Host);
            let at = i * tile..(i + 1) * tile;
            let (src, dst) = (self.on_host[0].slice(at.clone()), self.up.slice(at));
            self.dev.submit(Lane::H2d, Op::Copy { src, dst });
        }
    }

    /// Measures the GB/s of `bytes` that `work` moves, after a first run that does not count.
    fn rate(&self, name: &str, bytes: usize, work: &dyn Fn()) {
        work();
        self.dev.sync_all().unwrap();
        let started = Instant::now();
        work();
        self.dev.sync_all().unwrap();
        let seconds = started.elapsed().as_secs_f64();
        eprintln!(
            "figure copy name={name} gb={:.2} seconds={seconds:.4}",
            bytes as f64 / seconds / 1e9
        );
    }
}

pub(crate) fn print() {
    let (rig, bytes) = (rig(), 4 * elements());
    rig.rate("up", bytes, &|| rig.whole(Lane::H2d));
    rig.rate("down", bytes, &|| rig.whole(Lane::D2h));
    for mib in [2, 8] {
        let tile = if small() { 256 * mib } else { (mib << 20) / 4 };
        let touch = |i: usize| HostOp::new(Touch(rig.on_host[0].slice(i * tile..(i + 1) * tile)));
        let tasks: Vec<_> = (0..elements() / tile).map(touch).collect();
        rig.rate(&format!("up-in-tiles-of-{mib}-MiB"), bytes, &|| rig.tiles(tile, &tasks));
    }
    let both = || [Lane::H2d, Lane::D2h].into_iter().for_each(|lane| rig.whole(lane));
    rig.rate("both", 2 * bytes, &both);
    let count = if small() { 2 } else { 120 };
    rig.rate("products-alone", 0, &|| rig.products(count));
    rig.rate("both-beside-products", 2 * bytes, &|| {
        rig.products(count);
        both();
    });
    rig.dev.finish().unwrap();
}
