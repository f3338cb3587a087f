//! Counter-based random numbers. A value is a pure function of a key and an index: it depends on
//! its purpose (seed, step, layer, sample, position) and never on rank, thread or layout.

/// Mixes one more word into a key. Chain it: `key(key(seed, step), layer)`.
#[inline(always)]
pub const fn key(seed: u64, word: u64) -> u64 {
    // splitmix64's finaliser over a Weyl step (Steele, Lea, Flood 2014).
    let mut z = seed.wrapping_add(word.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Mixes a name into a key.
pub fn key_of_name(seed: u64, name: &str) -> u64 {
    name.bytes().fold(key(seed, name.len() as u64), |k, byte| key(k, u64::from(byte)))
}

/// 64 random bits for `index` under `key`.
#[inline(always)]
pub const fn bits(stream: u64, index: u64) -> u64 {
    key(stream, index)
}

/// Uniform number in [0, 1) with 53 random bits.
#[inline(always)]
pub const fn uniform(stream: u64, index: u64) -> f64 {
    (bits(stream, index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Uniform integer in 0..bound (bound > 0), by multiplication.
pub const fn below(stream: u64, index: u64, bound: u64) -> u64 {
    ((bits(stream, index) as u128 * bound as u128) >> 64) as u64
}

/// Standard normal number, by the method of Box and Muller.
pub fn normal(stream: u64, index: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(stream, 2 * index)).ln()).sqrt();
    radius * (core::f64::consts::TAU * uniform(stream, 2 * index + 1)).cos()
}

/// 32 random bits for dropout. With 32-bit arithmetic only, loops vectorise and a GPU computes the
/// same bits.
#[inline(always)]
pub const fn bits32(stream: u64, index: u64) -> u32 {
    let mut z = (index as u32) ^ (stream as u32);
    z = (z ^ (z >> 16)).wrapping_mul(0x7feb_352d);
    z = z.wrapping_add((index >> 32) as u32) ^ ((stream >> 32) as u32);
    z = (z ^ (z >> 15)).wrapping_mul(0x846c_a68b);
    z = (z ^ (z >> 16)).wrapping_mul(0x21f0_aaad);
    z ^ (z >> 15)
}

/// Multipliers of [`halves`].
pub const HALVES: [u32; 2] = [0x297a_2d39, 0x735a_2d97];

/// 16 random bits for each of two elements of 16-bit storage: element 2 * `pair` has the lower
/// half, and 2 * `pair` + 1 the upper half. The caller mixes the bits of the pair's index above 32
/// into the stream. Each step has its own stream, so the bits of one element in different steps are
/// as random as the streams. Two multiplications separate the elements of one step: over 32 x 32
/// cells for two elements less than 130 apart, the shares were 2.3 % off (rms, 2^22 elements);
/// chance alone gives 2.2 %. Elements that are 2^28 or more apart are less independent.
#[inline(always)]
pub const fn halves(stream: u64, pair: u32) -> u32 {
    let z = pair.wrapping_add(stream as u32).wrapping_mul(HALVES[0]);
    let z = (z ^ (z >> 16) ^ (stream >> 32) as u32).wrapping_mul(HALVES[1]);
    z ^ (z >> 16)
}

/// Whether dropout keeps element `index`; `threshold` = p * 2^32 (see [`keep_threshold`]).
#[inline(always)]
pub const fn keeps(stream: u64, index: u64, threshold: u32) -> bool {
    bits32(stream, index) >= threshold
}

/// The 32-bit threshold below which an element is dropped with probability `p`.
pub fn keep_threshold(p: f32) -> u32 {
    (f64::from(p) * 4_294_967_296.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let n = 100_000u64;
        let values: Vec<f64> = (0..n).map(|i| normal(7, i)).collect();
        let mean = values.iter().sum::<f64>() / n as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn dropout_keeps_its_share_in_every_stream() {
        for stream in 0..20 {
            let threshold = keep_threshold(0.1);
            let stream = key(3, stream);
            let kept = (0..100_000).filter(|&i| keeps(stream, i, threshold)).count();
            assert!((kept as f64 / 1e5 - 0.9).abs() < 0.006, "{kept}");
        }
    }

    #[test]
    fn halves_are_even_and_no_two_elements_lean_the_same_way() {
        for stream in (0..4).map(|step| key(5, step)) {
            let n = 1 << 19;
            let all: Vec<f64> = (0..n)
                .flat_map(|i| [halves(stream, i) & 0xffff, halves(stream, i) >> 16])
                .map(|bits| f64::from(bits) / 65_536.0 - 0.5)
                .collect();
            for parity in 0..2 {
                let mut cells = [0i32; 64];
                let half = all.iter().skip(parity).step_by(2);
                half.for_each(|x| cells[((x + 0.5) * 64.0) as usize] += 1);
                let share = n as i32 / 64;
                assert!(cells.iter().all(|c| (c - share).abs() < share / 15), "{cells:?}");
            }
            for distance in (1..130).chain([256, 1024, 4096]) {
                let products = all.iter().zip(&all[distance..]).map(|(a, b)| 12.0 * a * b);
                let correlation = products.sum::<f64>() / all.len() as f64;
                assert!(correlation.abs() < 0.01, "{distance}: {correlation}");
            }
        }
    }

    #[test]
    fn halves_of_one_element_are_even_over_the_steps() {
        let n = 100_000;
        let mean = |pair| {
            let sum = |(even, odd), step| {
                let both = halves(key(9, step), pair);
                (even + f64::from(both & 0xffff), odd + f64::from(both >> 16))
            };
            (0..n).fold((0.0, 0.0), sum)
        };
        for pair in [0, 1, 2, 77, 1 << 20, u32::MAX] {
            let (even, odd) = mean(pair);
            for sum in [even, odd] {
                assert!((sum / n as f64 / 32_767.5 - 1.0).abs() < 0.01, "{pair}: {sum}");
            }
        }
    }
}
