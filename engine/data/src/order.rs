//! The order of samples: epochs without replacement. The place of a sample is a function of the
//! seed and the sample's number in the run, so a resumed run needs no replay.

use device::random;

/// Key of the order of samples under the seed of a run.
const ORDER: u64 = 0x6f72_6465;
/// Rounds of the permutation.
const ROUNDS: u64 = 12;

/// The element, out of `count`, for sample `number` of a run: every epoch uses each element once.
pub(crate) fn shuffled(seed: u64, number: u64, count: u64) -> u64 {
    assert!(count > 0, "an epoch has samples");
    let epoch = random::key(random::key(seed, ORDER), number / count);
    permuted(epoch, number % count, count)
}

/// A permutation of `0..count`: a Feistel network over the next power of 4, repeated until the
/// result is below `count` (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
fn permuted(key: u64, index: u64, count: u64) -> u64 {
    let half = (u64::BITS - (count - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut at = index;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for round in 0..ROUNDS {
            let mixed = random::bits(random::key(key, round), right) & mask;
            (left, right) = (right, left ^ mixed);
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_each_element_once_and_an_order_of_its_own() {
        for count in (1..=70).chain([255, 256, 257, 1000, 4096, 5000]) {
            let epoch = |seed: u64, epoch: u64| -> Vec<u64> {
                (0..count).map(|i| shuffled(seed, epoch * count + i, count)).collect()
            };
            let orders = [epoch(7, 0), epoch(7, 1), epoch(8, 0)];
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>(), "of {count}");
            }
            if count >= 8 {
                assert!(orders[0] != orders[1] && orders[0] != orders[2], "of {count}");
            }
        }
    }

    #[test]
    fn each_element_comes_first_and_after_each_other_about_equally_often() {
        const COUNT: usize = 13;
        let (mut first, mut pairs) = ([0u32; COUNT], [[0u32; COUNT]; COUNT]);
        let epochs = 13_000;
        for epoch in 0..epochs {
            let at = |i: u64| shuffled(1, epoch * COUNT as u64 + i, COUNT as u64) as usize;
            first[at(0)] += 1;
            pairs[at(5)][at(6)] += 1;
        }
        assert!(first.iter().all(|n| (850..1150).contains(n)), "{first:?}");
        let of_pairs = pairs.iter().enumerate().flat_map(|(a, row)| {
            row.iter().enumerate().filter(move |(b, _)| a != *b).map(|(_, n)| *n)
        });
        let wrong: Vec<u32> = of_pairs.filter(|n| !(45..125).contains(n)).collect();
        assert!(wrong.is_empty(), "83 are expected: {wrong:?}");
    }
}
