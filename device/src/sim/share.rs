//! Shares resources among the ops that use them at the same time.

/// Share of its speed that a copy from a GPU keeps while cores could fill the channels of its node. Beside cores that read and
/// write, devices that write to memory kept half of their speed or more, and devices that read kept all of it: measured on Xeons
/// of two generations (Vuppalapati et al., Understanding the Host Network, SIGCOMM 2024, section 2.2 and Figure 3).
const KEPT: f64 = 0.5;

/// The rounds until levels stand still are few. After so many the speeds are lowered until all fit.
const MOST_ROUNDS: usize = 200;
const SWINGS_FROM: usize = 10;

/// Who uses memory channels. It matters where cores and copies want the same ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    /// A device, but not one that writes to the host.
    #[default]
    Device,
    /// A copy from a GPU.
    Down,
    /// Cores of the host.
    Cores,
}

/// The use of a resource by an op; of one of a class of resources by an op that all ranks of a class do at once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Use {
    pub(super) resource: usize,
    /// The share of it that the op takes at full speed.
    pub(super) load: f64,
    /// The parts of it that the op gets where it is scarce.
    pub(super) weight: f64,
}

/// An op in progress, on all ranks of a class at once.
pub(super) struct Flow<'a> {
    pub(super) uses: &'a [Use],
    pub(super) side: Side,
    /// Speed relative to running alone, from 0 to 1.
    pub(super) speed: f64,
}

/// Scratch of [`share`] by resource.
pub(super) struct Scratch {
    /// The size of a part of each resource.
    level: Vec<f64>,
    /// (want, weight) of the users of one resource.
    wants: Vec<(f64, f64)>,
    /// What is wanted of each resource.
    loads: Vec<f64>,
}

impl Scratch {
    pub(super) fn new(resources: usize) -> Self {
        let by_resource = || vec![0.0; resources];
        Self { level: by_resource(), wants: Vec::new(), loads: by_resource() }
    }
}

/// Sets the speed of every flow. A resource gives its users parts by their weights, and none more than it wants; an op is as fast
/// as the scarcest of its resources lets it be (bottleneck max fairness, Bonald and Roberts, SIGMETRICS 2015; on one link this is
/// max-min fairness). Where cores want more of a resource than is left, copies from GPUs give up to half of their speed for them.
pub(super) fn share(flows: &mut [Flow<'_>], scratch: &mut Scratch) {
    flows.iter_mut().for_each(|flow| flow.speed = 1.0);
    if fits(flows, &mut scratch.loads) {
        return;
    }
    lower(flows, scratch);
    if give_way(flows, &mut scratch.loads) {
        lower(flows, scratch);
    }
}

/// Whether no resource is wanted more than whole at these speeds. `loads`: what is wanted of each.
fn fits(flows: &[Flow<'_>], loads: &mut [f64]) -> bool {
    loads.fill(0.0);
    for flow in flows {
        flow.uses.iter().for_each(|used| loads[used.resource] += used.load * flow.speed);
    }
    loads.iter().all(|load| *load <= 1.0 + 1e-12)
}

/// Lowers speeds to what the levels of all resources let.
fn lower(flows: &mut [Flow<'_>], scratch: &mut Scratch) {
    let Scratch { level, wants, loads } = scratch;
    level.fill(f64::INFINITY);
    // The speed that the levels of all resources but one let.
    let speed = |flow: &Flow<'_>, level: &[f64], but: usize| {
        let others = flow.uses.iter().filter(|used| used.resource != but);
        others.map(|used| level[used.resource] * used.weight / used.load).fold(flow.speed, f64::min)
    };
    for round in 0..MOST_ROUNDS {
        let mut moved = false;
        for resource in 0..level.len() {
            wants.clear();
            for flow in flows.iter() {
                if let Some(used) = flow.uses.iter().find(|used| used.resource == resource) {
                    wants.push((used.load * speed(flow, level, resource), used.weight));
                }
            }
            let mut now = level_of(wants);
            let before = level[resource];
            // Levels that swing around a value come to it by halves.
            if round >= SWINGS_FROM && now.is_finite() && before.is_finite() {
                now = f64::midpoint(now, before);
            }
            // Both may be infinite.
            moved |= !(now == before || (now - before).abs() < 1e-12);
            level[resource] = now;
        }
        if !moved {
            break;
        }
    }
    flows.iter_mut().for_each(|flow| flow.speed = speed(flow, level, usize::MAX));
    if !fits(flows, loads) {
        let most = loads.iter().copied().fold(1.0, f64::max);
        flows.iter_mut().for_each(|flow| flow.speed /= most);
    }
}

/// The size of a part so that the users, with (want, weight) each, take the whole resource; infinite if all can have what they
/// want.
fn level_of(wants: &mut [(f64, f64)]) -> f64 {
    if wants.iter().map(|(want, _)| want).sum::<f64>() <= 1.0 {
        return f64::INFINITY;
    }
    wants.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let (mut parts, mut left) = (wants.iter().map(|(_, weight)| weight).sum::<f64>(), 1.0);
    for &(want, weight) in wants.iter() {
        if want * parts >= left * weight {
            break;
        }
        (left, parts) = (left - want, parts - weight);
    }
    left / parts
}

/// Takes from copies from GPUs what cores want beside them, but leaves them [`KEPT`] of their speeds, and gives cores the chance of
/// full speed. Whether there is such a case.
fn give_way(flows: &mut [Flow<'_>], loads: &mut [f64]) -> bool {
    let of = |side: Side| move |flow: &&mut Flow<'_>| flow.side == side;
    let slow = |flow: &Flow<'_>| flow.side == Side::Cores && flow.speed < 1.0 - 1e-9;
    if !flows.iter().any(slow) || !flows.iter().any(|flow| flow.side == Side::Down) {
        return false;
    }
    flows.iter_mut().filter(of(Side::Cores)).for_each(|flow| flow.speed = 1.0);
    fits(flows, loads);
    let mut down = vec![0.0; loads.len()];
    let mut by_cores = vec![false; loads.len()];
    for flow in flows.iter() {
        for used in flow.uses {
            down[used.resource] +=
                if flow.side == Side::Down { used.load * flow.speed } else { 0.0 };
            by_cores[used.resource] |= flow.side == Side::Cores;
        }
    }
    for flow in flows.iter_mut().filter(of(Side::Down)) {
        let kept = flow.uses.iter().filter(|used| by_cores[used.resource]).map(|used| {
            let (all, down) = (loads[used.resource], down[used.resource]);
            ((1.0 - (all - down)) / down).clamp(KEPT, 1.0)
        });
        flow.speed *= kept.fold(1.0, f64::min);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of ops that use resources: (resource, load), with equal weights.
    fn speeds(flows: &[(Side, &[(usize, f64)])]) -> Vec<f64> {
        let of = |&(resource, load): &(usize, f64)| Use { resource, load, weight: 1.0 };
        let uses: Vec<Vec<Use>> =
            flows.iter().map(|(_, loads)| loads.iter().map(of).collect()).collect();
        let sides = flows.iter().map(|(side, _)| *side);
        let flow = |(side, uses)| Flow { uses, side, speed: 0.0 };
        let mut flows: Vec<Flow<'_>> =
            sides.zip(uses.iter().map(Vec::as_slice)).map(flow).collect();
        share(&mut flows, &mut Scratch::new(4));
        flows.iter().map(|flow| flow.speed).collect()
    }

    fn of_devices(loads: &[&[(usize, f64)]]) -> Vec<f64> {
        speeds(&loads.iter().map(|loads| (Side::Device, *loads)).collect::<Vec<_>>())
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
        // Three flows want the whole resource and one wants a tenth: the small one is not slowed
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
    fn a_flow_that_is_fast_elsewhere_gets_no_less_here() {
        // Four copies fill a link of theirs, and want little of the channels that a fifth flow could fill.
        let copy: &[(usize, f64)] = &[(0, 1.0), (1, 0.12)];
        close(&of_devices(&[copy, copy, copy, copy, &[(1, 1.0)]]), &[0.25, 0.25, 0.25, 0.25, 0.88]);
    }

    #[test]
    fn beside_cores_a_copy_down_keeps_half_of_its_speed_and_one_up_all() {
        // One Xeon of the measurement: copies of 14 GB/s, cores that could fill channels of 40 GB/s.
        let (copy, cores): (&[_], &[_]) = (&[(0, 1.0), (1, 0.35)], &[(1, 1.0)]);
        close(&speeds(&[(Side::Down, copy), (Side::Cores, cores)]), &[0.5, 0.825]);
        close(&speeds(&[(Side::Device, copy), (Side::Cores, cores)]), &[1.0, 0.65]);
        // Cores that want a little more than is left take no more than that.
        close(&speeds(&[(Side::Down, copy), (Side::Cores, &[(1, 0.72)])]), &[0.8, 1.0]);
    }

    /// Speeds of flows of any loads: nothing is used more than whole, and a slow flow has a full resource of which no
    /// other takes more for its weight.
    #[test]
    fn each_slow_flow_has_a_bottleneck() {
        let mut state = 7u64;
        let mut roll = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % end
        };
        for case in 0..2000 {
            let uses: Vec<Vec<Use>> = (0..1 + roll(8))
                .map(|_| {
                    let mut uses = Vec::new();
                    for resource in 0..4 {
                        if roll(2) == 0 {
                            let weight = (1 + roll(4)) as f64;
                            let load = weight * (1 + roll(100)) as f64 / 100.0;
                            uses.push(Use { resource, load, weight });
                        }
                    }
                    uses
                })
                .collect();
            let flow = |uses| Flow { uses, side: Side::Device, speed: 0.0 };
            let mut flows: Vec<Flow<'_>> = uses.iter().map(|uses| flow(uses)).collect();
            share(&mut flows, &mut Scratch::new(4));
            let taken = |resource: usize| {
                let of = |flow: &Flow<'_>| {
                    let used = flow.uses.iter().find(|used| used.resource == resource);
                    used.map_or([0.0; 2], |used| {
                        [used.load * flow.speed, used.load * flow.speed / used.weight]
                    })
                };
                flows
                    .iter()
                    .map(of)
                    .fold([0.0f64; 2], |[sum, most], [load, each]| [sum + load, most.max(each)])
            };
            for flow in &flows {
                let bottleneck = flow.uses.iter().any(|used| {
                    let ([sum, most], each) =
                        (taken(used.resource), used.load * flow.speed / used.weight);
                    (sum - 1.0).abs() < 1e-6 && each > most - 1e-6
                });
                assert!((0.0..=1.0).contains(&flow.speed), "case {case}");
                assert!(flow.speed > 1.0 - 1e-6 || bottleneck, "case {case}: {}", flow.speed);
            }
            (0..4).for_each(|resource| assert!(taken(resource)[0] < 1.0 + 1e-9, "case {case}"));
        }
    }
}
