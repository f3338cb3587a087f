//! Shares resources among the ops that use them at the same time.

/// Fraction of its speed that a copy from a GPU keeps while cores could fill its node's channels.
/// Next to busy cores, devices that write to memory kept at least half of their speed, and devices
/// that read kept all. Measured on Xeons of two generations, with devices that used up to a third
/// of the channels (Vuppalapati et al., Understanding the Host Network, SIGCOMM 2024, section 2.2
/// and Figure 3).
const KEPT: f64 = 0.5;

/// Largest fraction of the memory channels that copies keep while cores could use all channels.
const MOST_KEPT: f64 = 0.5;

/// The kind of an op as a user of memory channels. It decides how much copies yield to cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Side {
    /// A device, but not one that writes to the host.
    #[default]
    Device,
    /// A copy from a GPU.
    Down,
    /// Cores of the host.
    Cores,
}

/// An op in progress, on all ranks of a class at the same time.
pub(super) struct Flow<'a> {
    /// (class of resources, fraction of one resource that all members use) at full speed.
    pub(super) load: &'a [(usize, f64)],
    /// Fraction that one member uses of its most used resource, at full speed.
    pub(super) dominant: f64,
    pub(super) side: Side,
    /// Speed relative to running alone, from 0 to 1.
    pub(super) speed: f64,
}

/// Scratch of [`share`] by resource.
pub(super) struct Scratch {
    /// Free fraction of the resource.
    left: Vec<f64>,
    /// Growth of the used fraction per unit of level.
    grows: Vec<f64>,
    /// Fraction that the ops of each [`Side`] use or could use.
    by_side: Vec<[f64; 3]>,
}

impl Scratch {
    pub(super) fn new(resources: usize) -> Self {
        let by_resource = || vec![0.0; resources];
        Self { left: by_resource(), grows: by_resource(), by_side: vec![[0.0; 3]; resources] }
    }
}

/// Sets the speed of every flow. Cores share the memory channels after devices, which yield: copies
/// from GPUs down to [`KEPT`] of their speeds, all together to [`MOST_KEPT`] of the channels.
pub(super) fn share(flows: &mut [Flow<'_>], scratch: &mut Scratch) {
    scratch.left.fill(1.0);
    for flow in flows.iter_mut() {
        flow.speed = 1.0;
        flow.load.iter().for_each(|&(resource, load)| scratch.left[resource] -= load);
    }
    if scratch.left.iter().all(|left| *left >= -1e-12) {
        return;
    }
    scratch.left.fill(1.0);
    fill(flows, |side| side != Side::Cores, scratch);
    if flows.iter().any(|flow| flow.side == Side::Cores) {
        give_way(flows, scratch);
        fill(flows, |side| side == Side::Cores, scratch);
    }
}

/// Sets the speeds of the flows of `sides` by progressive filling. All get the same fraction of the
/// resource that they use most (dominant resource fairness, Ghodsi et al., NSDI 2011; on one link
/// max-min fairness). A flow is never faster than when it runs alone. It could become faster only
/// if a slower flow became even slower.
fn fill(flows: &mut [Flow<'_>], sides: impl Fn(Side) -> bool, scratch: &mut Scratch) {
    let Scratch { left, grows, .. } = scratch;
    let mut open: Vec<usize> = (0..flows.len()).filter(|&i| sides(flows[i].side)).collect();
    let mut level = 0.0f64;
    open.iter().for_each(|&i| flows[i].speed = 0.0);
    while !open.is_empty() {
        grows.fill(0.0);
        for &i in &open {
            let per_level = growth(&flows[i]);
            let load = flows[i].load.iter();
            load.for_each(|&(resource, load)| grows[resource] += load * per_level);
        }
        // The rise of the level until a resource is full or a flow is at full speed.
        let full = left.iter().zip(grows.iter()).filter(|(_, grows)| **grows > 0.0);
        let full = full.map(|(left, grows)| left.max(0.0) / grows);
        let fast = open.iter().map(|&i| 1.0 / growth(&flows[i]) - level);
        let rise = full.chain(fast).fold(f64::INFINITY, f64::min).max(0.0);
        level += rise;
        for &i in &open {
            flows[i].speed += rise * growth(&flows[i]);
        }
        left.iter_mut().zip(grows.iter()).for_each(|(left, grows)| *left -= rise * grows);
        open.retain(|&i| {
            let flow = &flows[i];
            let blocked = flow.load.iter().any(|&(resource, _)| left[resource] <= 1e-12);
            flow.speed < 1.0 - 1e-12 && !blocked
        });
    }
}

/// Speed that a flow gains per unit of level. A flow that uses only a small fraction of its most
/// used resource gains much.
fn growth(flow: &Flow<'_>) -> f64 {
    1.0 / flow.dominant.max(1e-9)
}

/// Slows copies down, within their limits, so that cores can run at full speed.
fn give_way(flows: &mut [Flow<'_>], scratch: &mut Scratch) {
    let Scratch { left, by_side, .. } = scratch;
    by_side.fill([0.0; 3]);
    for flow in flows.iter() {
        // Cores have no speed yet, so full speed is assumed.
        let speed = if flow.side == Side::Cores { 1.0 } else { flow.speed };
        for &(resource, load) in flow.load {
            by_side[resource][flow.side as usize] += load * speed;
        }
    }
    for flow in flows.iter_mut().filter(|flow| flow.side != Side::Cores) {
        let side = flow.side as usize;
        let kept = flow.load.iter().map(|&(resource, _)| kept(by_side[resource])[side]);
        let given = flow.speed * (1.0 - kept.fold(1.0, f64::min));
        flow.speed -= given;
        flow.load.iter().for_each(|&(resource, load)| left[resource] += given * load);
    }
}

/// Fractions of their speeds that devices and copies from GPUs keep on a resource. Devices use the
/// fraction `up`, copies from GPUs use `down`, and cores could use `cores`.
fn kept([up, down, cores]: [f64; 3]) -> [f64; 2] {
    if cores == 0.0 || up + down == 0.0 {
        return [1.0; 2];
    }
    let least = KEPT.mul_add(down, up);
    let taken = (1.0 - cores).max(least.min(MOST_KEPT)).min(up + down);
    if taken >= least {
        [1.0, if down == 0.0 { 1.0 } else { (taken - up) / down }]
    } else {
        [taken / least, KEPT * taken / least]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(of: &[(Side, &[(usize, f64)])]) -> Vec<f64> {
        let dominant = |load: &[(usize, f64)]| load.iter().map(|&(_, l)| l).fold(0.0, f64::max);
        let mut flows: Vec<Flow<'_>> = Vec::new();
        for &(side, load) in of {
            flows.push(Flow { load, dominant: dominant(load), side, speed: 0.0 });
        }
        share(&mut flows, &mut Scratch::new(4));
        flows.iter().map(|flow| flow.speed).collect()
    }

    fn of_devices(loads: &[&[(usize, f64)]]) -> Vec<f64> {
        speeds(&loads.iter().map(|load| (Side::Device, *load)).collect::<Vec<_>>())
    }

    fn close(got: &[f64], want: &[f64]) {
        let same = got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(same && got.len() == want.len(), "{got:?} is not {want:?}");
    }

    #[test]
    fn what_nobody_else_wants_is_had_whole() {
        close(&of_devices(&[&[(0, 1.0)], &[(1, 0.7)], &[]]), &[1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_full_link_is_shared_evenly_and_a_small_flow_keeps_its_speed() {
        close(&of_devices(&[&[(0, 1.0)], &[(0, 1.0)]]), &[0.5, 0.5]);
        // Three flows could use the whole resource and one a tenth: the small flow is not slowed
        // down.
        let small = of_devices(&[&[(0, 1.0)], &[(0, 1.0)], &[(0, 1.0)], &[(0, 0.1)]]);
        close(&small, &[0.3, 0.3, 0.3, 1.0]);
    }

    #[test]
    fn what_one_flow_cannot_use_goes_to_the_others() {
        // Resource 1, which the first two flows share, limits the first to half. The third gets the
        // rest of resource 0.
        let got = of_devices(&[&[(0, 1.0), (1, 1.0)], &[(1, 1.0)], &[(0, 0.5)]]);
        close(&got, &[0.5, 0.5, 1.0]);
    }

    #[test]
    fn beside_cores_a_copy_down_keeps_half_of_its_speed_and_one_up_all() {
        use Side::{Cores, Device as Up, Down};
        // A Xeon of the measurement: copies of 14 GB/s, cores that could fill channels of 40 GB/s.
        let (copy, cores): (&[_], &[_]) = (&[(0, 1.0), (1, 0.35)], &[(1, 1.0)]);
        close(&speeds(&[(Down, copy), (Cores, cores)]), &[0.5, 0.825]);
        close(&speeds(&[(Up, copy), (Cores, cores)]), &[1.0, 0.65]);
        // The number of ops does not matter.
        let many = speeds(&[(Down, copy), (Cores, cores), (Cores, cores), (Cores, cores)]);
        close(&many, &[0.5, 0.275, 0.275, 0.275]);
        // Cores that could use a little more than is free get exactly that.
        close(&speeds(&[(Down, copy), (Cores, &[(1, 0.72)])]), &[0.8, 1.0]);
        // Four copies share a link.
        let copies = [(Down, copy), (Down, copy), (Down, copy), (Down, copy), (Cores, cores)];
        close(&speeds(&copies), &[0.125, 0.125, 0.125, 0.125, 0.825]);
    }

    #[test]
    fn beside_cores_copies_keep_no_more_than_half_of_the_channels() {
        use Side::{Cores, Device as Up, Down};
        let (copy, cores): (&[_], &[_]) = (&[(0, 1.0), (1, 0.8)], &[(1, 1.0)]);
        close(&speeds(&[(Down, copy), (Cores, cores)]), &[0.5, 0.6]);
        close(&speeds(&[(Up, copy), (Cores, cores)]), &[0.625, 0.5]);
        // Without cores both have 0.625, and a half of the channels each.
        let other: &[_] = &[(2, 1.0), (1, 0.8)];
        let both = speeds(&[(Up, copy), (Down, other), (Cores, cores)]);
        close(&both, &[0.625 * 2.0 / 3.0, 0.625 / 3.0, 0.5]);
        // Cores that could use less leave more for copies.
        let both = speeds(&[(Up, copy), (Down, other), (Cores, &[(1, 0.1)])]);
        close(&both, &[0.625, 0.5, 1.0]);
    }
}
