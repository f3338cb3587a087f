//! Times letters between the processes of a run, which the simulator takes its figures from (`src/sim/cost/across.rs`):
//! `cargo build --release -p device --features mpi --example letters`, then `mpirun -n 2 target/release/examples/letters`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use std::time::{Duration, Instant};

const EXCHANGES: usize = 3000;
const ROUNDS: usize = 15;
const LETTERS: usize = 20_000;

fn main() -> Result<(), String> {
    let processes = device::mpi::join(Duration::from_secs(60))?;
    // A letter goes each way, and wakes a thread there.
    let mut way = Vec::with_capacity(EXCHANGES);
    for _ in 0..EXCHANGES {
        let began = Instant::now();
        processes.exchange("way", Vec::new())?;
        way.push(began.elapsed().as_secs_f64() * 1e6);
    }
    // The thread for MPI sends these letters and takes as many.
    let mut each = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        processes.exchange("begin", Vec::new())?;
        let began = Instant::now();
        (0..LETTERS).for_each(|_| processes.beat());
        processes.exchange("end", Vec::new())?;
        let letters = 2 * LETTERS * (processes.count() - 1);
        each.push(began.elapsed().as_secs_f64() * 1e6 / letters.max(1) as f64);
    }
    way.sort_by(f64::total_cmp);
    each.sort_by(f64::total_cmp);
    println!(
        "process {}: until a letter has come, median of {EXCHANGES}: {:.1} us; each letter sent or taken, median of {ROUNDS}: {:.2} us",
        processes.me(),
        way[EXCHANGES / 2],
        each[ROUNDS / 2]
    );
    let left = processes.part(0);
    processes.close(left.map(|_| 1));
    Ok(())
}
