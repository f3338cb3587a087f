//! Collectives on NVLink and PCIe, and copies on one link.

use super::{near, pair, rank_of, tensors};
use crate::sim::cost::{nominal_link, nvlink_sum_share};
use crate::sim::{Hardware, Seat, link_share, record, simulate, sums_over_pcie};
use device::{Group, Lane, Op, Reduction};

/// `ranks` GPUs of compute capability `sm` with a link of 30 GB/s each, and NVLink of `nvlink`.
fn gpus(sm: u32, ranks: usize, nvlink: f64) -> Hardware {
    let mut hardware = pair();
    hardware.gpu.sm = sm;
    hardware.gpu.memory = 1e15;
    hardware.links = vec![30e9; ranks];
    let seat = hardware.seats[0].clone();
    hardware.seats = (0..ranks).map(|rank| Seat { links: vec![rank], ..seat.clone() }).collect();
    let between = |a: usize, b: usize| if a == b { 0.0 } else { nvlink };
    hardware.nvlink = (0..ranks).map(|a| (0..ranks).map(|b| between(a, b)).collect()).collect();
    hardware
}

/// Seconds of a sum or a gather of `bytes` over all GPUs.
fn seconds(hardware: &Hardware, bytes: usize, is_sum: bool) -> f64 {
    let (plan, [x], _) = tensors(bytes);
    let ranks = hardware.seats.len();
    let program = record(rank_of(1, ranks), &plan, false, |d| {
        d.begin_step(1);
        let (group, reduce) = (Group::Dp, Reduction::Sum);
        let op =
            if is_sum { Op::AllReduce { x, group, reduce } } else { Op::AllGather { x, group } };
        d.submit(Lane::DpComm, op);
        d.sync_all()
    });
    simulate(program.unwrap(), hardware, 1, ranks, true).busy(0, Lane::DpComm)
}

#[test]
fn collectives_on_nvlink_are_as_fast_as_their_generation_and_number_of_ranks() {
    let bytes = 256 << 20;
    for (sm, ranks, is_sum, share, start) in [
        (80, 2, false, 0.50, 37e-6),
        (80, 8, true, 0.75, 85e-6),
        (90, 2, false, 0.57, 23e-6),
        (90, 4, true, 0.78, 27e-6),
        (90, 8, true, 1.01, 57e-6),
        (100, 8, false, 0.78, 58e-6),
        // GPUs without own rates.
        (70, 4, false, 0.87, 12e-6 + 3.0 * 2e-6),
    ] {
        let rounds = if is_sum { 2.0 } else { 1.0 };
        let crossing = rounds * (ranks - 1) as f64 / ranks as f64 * f64::from(bytes);
        let got = seconds(&gpus(sm, ranks, 300e9), bytes as usize, is_sum);
        near(got, start + crossing / (300e9 * share));
    }
    // A short one has the library's other protocol: it starts sooner, and is half as fast.
    let short = 1 << 20;
    near(
        seconds(&gpus(90, 8, 450e9), short, true),
        17e-6 + 1.75 * short as f64 / (0.5 * 1.01 * 450e9),
    );
    assert_eq!([nvlink_sum_share(90, 8), nvlink_sum_share(70, 8)], [1.01, 0.87]);
}

#[test]
fn sums_over_pcie_are_as_fast_as_the_box_says_or_a_share_of_a_link() {
    let bytes = 1 << 28;
    for (ranks, share) in [(2, 0.6), (4, 0.4), (8, 0.3)] {
        let crossing = 2.0 * (ranks - 1) as f64 / ranks as f64 * f64::from(bytes);
        let start = 12e-6 + 2e-6 * (ranks - 1) as f64;
        let mut hardware = gpus(89, ranks, 0.0);
        near(seconds(&hardware, bytes as usize, true), start + crossing / (share * 30e9));
        assert_eq!(sums_over_pcie(&hardware, 1, ranks), Some((ranks, share * 30e9)));
        hardware.pcie_sums = 2e9;
        near(seconds(&hardware, bytes as usize, true), start + crossing / 2e9);
        // No sum is faster than copies.
        hardware.pcie_sums = 40e9;
        near(seconds(&hardware, bytes as usize, true), start + crossing / (0.78 * 30e9));
    }
    assert_eq!(sums_over_pcie(&gpus(90, 4, 450e9), 1, 4), None);
    assert_eq!(sums_over_pcie(&gpus(89, 1, 0.0), 1, 1), None);
}

#[test]
fn a_fast_link_loses_by_copies_both_ways() {
    let bytes = 1 << 28;
    let both = |rate: f64| {
        let (plan, [x, y], host) = tensors(bytes);
        let program = record(rank_of(1, 1), &plan, false, |d| {
            d.begin_step(1);
            d.submit(Lane::H2d, Op::Copy { src: host, dst: x });
            d.submit(Lane::D2h, Op::Copy { src: y, dst: host });
            d.sync_all()
        });
        let mut hardware = gpus(80, 1, 0.0);
        (hardware.links, hardware.nodes) = (vec![rate], vec![1e15]);
        simulate(program.unwrap(), &hardware, 1, 1, true).step_seconds()
    };
    let alone = |rate: f64| bytes as f64 / (rate * link_share(rate));
    for (rate, loss) in [(15e9, 1.0), (30e9, 2.0 / 1.57), (60e9, 2.0 / 1.57)] {
        let (got, want) = (both(rate), alone(rate) * loss);
        assert!((got / want - 1.0).abs() < 0.01, "{rate}: {got} is not {want}");
    }
    // A measured rate is what a simulation uses.
    for measured in [12e9, 24e9, 26e9, 50e9, 55e9] {
        let nominal = nominal_link(measured);
        near(nominal * link_share(nominal), measured);
    }
}
