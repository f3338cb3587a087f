//! Copies and cores that compete for the memory channels of one node.

use super::*;

/// Seconds of a copy of four ranks on one link, while cores could fill the node's channels.
fn beside_cores(lane: Lane) -> f64 {
    let (mut plan, n) = (Plan::default(), 1 << 20);
    let mut host = |name: &str, n| plan.tensor((Arena::Pinned, "p"), name, Dtype::F32, (1, n));
    let (staging, states) = (host("staging", n), host("states", 64 * n));
    let dev = plan.tensor((Arena::Device, "p"), "dev", Dtype::F32, (1, n));
    let program = record(rank_of(1, 4), &Arc::new(plan), |d| {
        d.write(staging, &|_| 0.0)?;
        d.write(states, &|_| 0.0)?;
        d.submit(Lane::H2d, Op::Copy { src: staging, dst: dev });
        d.sync_all()?;
        d.begin_step(1);
        d.submit(Lane::Host, host_op(states));
        let (src, dst) = if lane == Lane::H2d { (staging, dev) } else { (dev, staging) };
        d.submit(lane, Op::Copy { src, dst });
        d.sync_all()
    })
    .unwrap();
    let seat = Seat { cores: 10.0, ..pair().seats[0].clone() };
    let hardware =
        Hardware { seats: vec![seat; 4], dp_size: 4, nvlink: vec![vec![0.0; 4]; 4], ..pair() };
    simulate(program, &hardware, 1, 4, true).busy(0, lane)
}

#[test]
fn copies_down_keep_half_of_their_speed_beside_busy_cores() {
    let bytes = 4.0 * f64::from(1 << 20);
    // Four copies share a link of 7.8 GB/s, and each hides the starts of the others.
    let down = beside_cores(Lane::D2h) / (bytes / (0.5 * 7.8e9 / 4.0));
    let up = beside_cores(Lane::H2d) / (bytes / (7.8e9 / 4.0));
    assert!((down - 1.0).abs() < 0.005 && (up - 1.0).abs() < 0.005, "{down} {up}");
}
