//! Shares resources among the ops that use them at the same time.

/// An op in progress, on all ranks of a class at once.
pub(super) struct Flow<'a> {
    /// (class of resources, the share of one resource that all members take) at full speed.
    pub(super) load: &'a [(usize, f64)],
    /// The share that one member takes of its most used resource, at full speed.
    pub(super) dominant: f64,
    /// Speed relative to running alone, from 0 to 1.
    pub(super) speed: f64,
}

/// Sets the speed of every flow by progressive filling. All flows get the same share of the
/// resource that they use most (dominant resource fairness, Ghodsi et al., NSDI 2011; on one link
/// this is max-min fairness). No flow is faster than alone, and a flow could only be faster at the
/// cost of a flow with less.
///
/// `left` and `grows` are scratch by resource: the free rate, and the growth of its use.
pub(super) fn share(flows: &mut [Flow<'_>], left: &mut [f64], grows: &mut [f64]) {
    left.fill(1.0);
    for flow in flows.iter_mut() {
        flow.speed = 1.0;
        flow.load.iter().for_each(|&(resource, load)| left[resource] -= load);
    }
    if left.iter().all(|left| *left >= -1e-12) {
        return;
    }
    left.fill(1.0);
    let mut open: Vec<usize> = (0..flows.len()).collect();
    let mut level = 0.0f64;
    flows.iter_mut().for_each(|flow| flow.speed = 0.0);
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

/// Speed gained per unit of level. A flow with a small dominant share gains much.
fn growth(flow: &Flow<'_>) -> f64 {
    1.0 / flow.dominant.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(loads: &[&'static [(usize, f64)]]) -> Vec<f64> {
        let dominant = |load: &[(usize, f64)]| load.iter().map(|&(_, l)| l).fold(0.0, f64::max);
        let flow =
            |load: &&'static [(usize, f64)]| Flow { load, dominant: dominant(load), speed: 0.0 };
        let mut flows: Vec<Flow<'_>> = loads.iter().map(flow).collect();
        let (mut left, mut grows) = (vec![0.0; 4], vec![0.0; 4]);
        share(&mut flows, &mut left, &mut grows);
        flows.iter().map(|flow| flow.speed).collect()
    }

    fn close(got: &[f64], want: &[f64]) {
        let same = got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(same && got.len() == want.len(), "{got:?} is not {want:?}");
    }

    #[test]
    fn what_nobody_else_wants_is_had_whole() {
        close(&speeds(&[&[(0, 1.0)], &[(1, 0.7)], &[]]), &[1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_full_link_is_shared_evenly_and_a_small_flow_keeps_its_speed() {
        close(&speeds(&[&[(0, 1.0)], &[(0, 1.0)]]), &[0.5, 0.5]);
        // Three flows want the whole resource and one wants a tenth: the small one is not slowed
        // down.
        let small = speeds(&[&[(0, 1.0)], &[(0, 1.0)], &[(0, 1.0)], &[(0, 0.1)]]);
        close(&small, &[0.3, 0.3, 0.3, 1.0]);
    }

    #[test]
    fn what_one_flow_cannot_use_goes_to_the_others() {
        // Resource 1, which the first two flows share, limits the first to half. The third gets the
        // rest of resource 0.
        let got = speeds(&[&[(0, 1.0), (1, 1.0)], &[(1, 1.0)], &[(0, 0.5)]]);
        close(&got, &[0.5, 0.5, 1.0]);
    }
}
