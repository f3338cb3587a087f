//! An update that reads the old states and writes the new states to other arrays.

use super::{Rule, Update, update};
use device::numerics::lanes::stream;
use device::{View, ViewMut};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use pulp::bytemuck::{cast_slice, cast_slice_mut};

/// An update that does not overwrite the old states.
#[derive(Debug)]
pub(crate) struct OutOfPlaceUpdate<'a> {
    /// Upper halves of split masters.
    pub(crate) upper: UpperHalves<'a>,
    /// The update, with the arrays of the old and the new states.
    pub(crate) update: Update<'a>,
}

/// Action for the upper halves of split masters: the parameters, which have only one array.
#[derive(Debug)]
pub(crate) enum UpperHalves<'a> {
    /// Nothing: the masters are not split, or no later update needs the old upper halves.
    Stay,
    /// The update first saves the upper halves here.
    Keep(&'a mut [bf16]),
    /// An earlier update changed the upper halves; they are first restored from here.
    Restore(&'a [bf16]),
}

/// Applies the update. A skipped step sets only the parameters, from the old masters; the new
/// states are nonsense.
///
/// # Errors
/// As [`update`]; also if the upper halves do not match or the old states are missing.
pub(crate) fn update_out_of_place(request: OutOfPlaceUpdate<'_>) -> Result<(), String> {
    let OutOfPlaceUpdate { mut upper, update: mut new } = request;
    let n = new.grad.len();
    if !upper.fits(&new.states[0], n) {
        return Err(format!("{n} gradients, upper halves of other lengths or of whole masters"));
    }
    let Some([_, momentum, variance]) = new.old else {
        return Err("an update apart from its old states has none".into());
    };
    upper.before(&mut new.param);
    if let Rule::Sgd { .. } = new.rule {
        // SGD has no moments; it keeps the moments of an earlier rule.
        moved(momentum, new.states[1].reborrow());
        moved(variance, new.states[2].reborrow());
    }
    update(new)
}

/// The loads and stores of [`update_out_of_place`] without its arithmetic, for 16-bit gradients and
/// parameters. The states are nonsense after a run.
pub(crate) fn traffic_out_of_place(request: OutOfPlaceUpdate<'_>) {
    let OutOfPlaceUpdate { mut upper, update } = request;
    let Update { grad, states, old, mut param, .. } = update;
    upper.before(&mut param);
    let states = old.into_iter().flatten().zip(states);
    states.chain([(grad, param)]).for_each(|(from, to)| moved(from, to));
}

impl OutOfPlaceUpdate<'_> {
    /// Two updates, split at element `mid`.
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        let (first, second) = self.update.split_at(mid);
        let (left, right) = self.upper.split_at(mid);
        (Self { upper: left, update: first }, Self { upper: right, update: second })
    }
}

impl UpperHalves<'_> {
    /// Whether the saved upper halves, if any, are `n` and the masters are split.
    fn fits(&self, master: &ViewMut<'_>, n: usize) -> bool {
        match (self, master) {
            (Self::Stay, _) => true,
            (Self::Keep(saved), ViewMut::U16(_)) => saved.len() == n,
            (Self::Restore(saved), ViewMut::U16(_)) => saved.len() == n,
            _ => false,
        }
    }

    /// Saves or restores the parameters `param`.
    fn before(&mut self, param: &mut ViewMut<'_>) {
        match (self, param) {
            (Self::Keep(saved), ViewMut::Bf16(param)) => {
                stream(param.reinterpret_cast(), saved.reinterpret_cast_mut());
            }
            (Self::Restore(saved), ViewMut::Bf16(param)) => param.copy_from_slice(saved),
            _ => {}
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Stay => (Self::Stay, Self::Stay),
            Self::Keep(saved) => {
                let (first, second) = saved.split_at_mut(mid);
                (Self::Keep(first), Self::Keep(second))
            }
            Self::Restore(saved) => {
                let (first, second) = saved.split_at(mid);
                (Self::Restore(first), Self::Restore(second))
            }
        }
    }
}

/// Copies with stores that bypass the caches.
fn moved(from: View<'_>, to: ViewMut<'_>) {
    match (from, to) {
        (View::F32(from), ViewMut::F32(to)) => stream(cast_slice(from), cast_slice_mut(to)),
        (View::U16(from), ViewMut::U16(to)) => stream(from, to),
        (View::Bf16(from), ViewMut::Bf16(to)) => {
            stream(from.reinterpret_cast(), to.reinterpret_cast_mut());
        }
        _ => unreachable!("old and new states have the same types"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control;
    use crate::update::{Noise, NoiseRun, update_on};
    use device::numerics::SimdPath;
    use device::random;
    use half::bf16;

    const RULE: Rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

    fn drawn(seed: u64, n: usize) -> Vec<f32> {
        (0..n as u64).map(|i| random::below(seed, i, 1 << 20) as f32 / 1e6 + 1e-3).collect()
    }

    /// `front` elements precede the arrays, so that some arrays do not begin at a cache line: only
    /// stores of whole cache lines bypass the caches.
    #[test]
    fn it_is_the_update_in_place_by_all_instructions_at_any_length_and_place() {
        let mut words = [0.0; control::WORDS];
        words[control::STEP] = 3.0;
        words[control::LR] = 1e-2;
        words[control::FACTOR] = 0.5;
        words[control::MOMENTUM_CORRECTION] = 3.0;
        words[control::VARIANCE_CORRECTION] = 5.0;
        let runs = [NoiseRun { flat: 0..1 << 20, stream: 7, global: 5 }];
        for (n, front) in [(1, 0), (63, 0), (5_000, 0), (70_001, 0), (5_000, 3), (4_096, 16)] {
            let all = front + n;
            let grad: Vec<bf16> = drawn(1, all).into_iter().map(bf16::from_f32).collect();
            let old = drawn(2, all);
            let lower: Vec<u16> = old.iter().map(|x| x.to_bits() as u16).collect();
            let upper: Vec<bf16> = old.iter().map(|x| bf16::from_f32(*x)).collect();
            let wide = [drawn(3, all), drawn(4, all)];
            let narrow = wide.clone().map(|m| Vec::from_iter(m.into_iter().map(bf16::from_f32)));
            for (split, small) in [(false, false), (false, true), (true, false), (true, true)] {
                for path in SimdPath::available() {
                    let run = |is_out_of_place: bool| {
                        let (mut master, mut low, mut param) =
                            (old.clone(), lower.clone(), upper.clone());
                        let ([mut m, mut v], [mut small_m, mut small_v]) =
                            (wide.clone(), narrow.clone());
                        if is_out_of_place {
                            // An update that reads a new array would find NaN.
                            for x in [&mut master, &mut m, &mut v] {
                                x.fill(f32::NAN);
                            }
                            small_m.fill(bf16::NAN);
                            small_v.fill(bf16::NAN);
                            low.fill(12_345);
                        }
                        let from = [View::F32(&old), View::F32(&wide[0]), View::F32(&wide[1])];
                        let [mut from_master, mut from_m, mut from_v] = from;
                        if split {
                            from_master = View::U16(&lower);
                        }
                        if small {
                            (from_m, from_v) = (View::Bf16(&narrow[0]), View::Bf16(&narrow[1]));
                        }
                        let before = [from_master, from_m, from_v].map(|x| x.slice(front..all));
                        let update = Update {
                            rule: RULE,
                            control: &words,
                            grad: View::Bf16(&grad[front..]),
                            states: [
                                match split {
                                    true => ViewMut::U16(&mut low[front..]),
                                    false => ViewMut::F32(&mut master[front..]),
                                },
                                match small {
                                    true => ViewMut::Bf16(&mut small_m[front..]),
                                    false => ViewMut::F32(&mut m[front..]),
                                },
                                match small {
                                    true => ViewMut::Bf16(&mut small_v[front..]),
                                    false => ViewMut::F32(&mut v[front..]),
                                },
                            ],
                            old: is_out_of_place.then_some(before),
                            param: ViewMut::Bf16(&mut param[front..]),
                            decayed: n / 2,
                            noise: Noise { runs: &runs, start: 3 },
                            streams: false,
                        };
                        update_on(path, update).expect("types that go together");
                        let wide = if split { Vec::new() } else { master.split_off(front) };
                        let moments = match small {
                            true => {
                                [small_m, small_v].map(|x| x.reinterpret_cast()[front..].to_vec())
                            }
                            false => [Vec::new(), Vec::new()],
                        };
                        let fp32 =
                            if small { Vec::new() } else { [&m[front..], &v[front..]].concat() };
                        let bits = [wide, fp32].concat().into_iter().map(f32::to_bits);
                        let low = if split { low[front..].to_vec() } else { Vec::new() };
                        let halves = [low, param.reinterpret_cast()[front..].to_vec()].concat();
                        (bits.collect::<Vec<_>>(), moments, halves)
                    };
                    assert!(
                        run(false) == run(true),
                        "{n} from {front}, {split} {small} {}",
                        path.name()
                    );
                }
            }
        }
    }
}
