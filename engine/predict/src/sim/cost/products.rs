//! The time of a matmul: whole rounds of tiles on the multiprocessors of a GPU.

use super::WIDE_SHARE;
use crate::sim::hardware::Gpu;
use crate::sim::program::Work;
use config::LoadDistribution;
use device::GroupedForm;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Rows and columns of the tile that a multiprocessor computes, and its speed: a smaller tile fetches
/// more operands for each sum. A library chooses the fastest tile for a shape.
const TILES: [(f64, f64, f64); 8] = [
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.97),
    (256.0, 64.0, 0.93),
    (64.0, 256.0, 0.93),
    (128.0, 64.0, 0.88),
    (64.0, 128.0, 0.88),
    (64.0, 64.0, 0.75),
];

/// Numbers of parts into which the terms of the sums may be split, for more tiles.
const SPLITS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0];

/// Least number of terms of a part.
const LEAST_PART: f64 = 256.0;

/// Factor on the time if parts of sums are written, read and added.
const SPLIT_SUMS: f64 = 1.03;

/// Terms of a tile's sums that take as long as writing the tile and fetching its first operands, for
/// 16-bit operands. This time does not depend on the rate of the sums.
const GEMM_DEPTH: f64 = 128.0;

/// Tile of the one kernel that is assumed in comparisons with the figures of 2020.
const TILE_2020: f64 = 128.0;

/// Rate of fp8 matmuls relative to 16-bit matmuls, with tiles counted: mamf-finder's best are 1.77
/// on an H100 and 1.83 on an H200, and onebox's own shapes on an H200 have 1.96; data sheets say 2.
/// No measurement of sm_89 and sm_120 is known, so they get the same rate.
const FP8_RATE: f64 = 1.9;

/// The same on sm_100: 1.97 (mamf-finder, B200).
const FP8_RATE_100: f64 = 1.97;

/// Seconds of a matmul of (m, k) and (k, n).
pub(super) fn seconds(gpu: &Gpu, work: &Work, m: usize, n: usize, k: usize) -> f64 {
    let faster = match (work.name, gpu.sm) {
        ("scaled_gemm", 100..=119) => FP8_RATE_100,
        ("scaled_gemm", _) => FP8_RATE,
        _ => 1.0,
    };
    work.flops / (rate(gpu, work) * faster * filled(gpu, [m, n, k], GEMM_DEPTH * faster))
}

/// Rows, columns and speed of the tiles of grouped matmuls, for 16-bit and for 32-bit operands: their
/// kernels have one tile each.
const GROUPED_TILES: [[f64; 3]; 2] = [[128.0, 128.0, 0.97], [64.0, 64.0, 0.75]];

/// Seconds of the matmuls of `experts` matrices of `shape`, with `rows` rows that are divided between
/// them by the GPU's `expert_load`. A tile takes as long as the same tile of an ordinary matmul. That
/// is an assumption: the kernels of grouped matmuls have not been timed.
pub(super) fn grouped_seconds(
    gpu: &Gpu,
    work: &Work,
    form: GroupedForm,
    rows: usize,
    experts: usize,
    shape: (usize, usize),
) -> f64 {
    let tile = GROUPED_TILES[usize::from(work.wide)];
    let each = rows_of_experts(gpu.expert_load, rows, experts);
    let terms = grouped_terms(gpu.processors, tile, form, &each, shape);
    2.0 * terms * gpu.processors as f64 / rate(gpu, work)
}

/// Rows of each of `experts` experts that have `rows` rows together. A division leaves less than a row,
/// which a later expert gets.
fn rows_of_experts(load: LoadDistribution, rows: usize, experts: usize) -> Vec<usize> {
    let weight = |expert: usize| match load {
        LoadDistribution::Even => 1.0,
        LoadDistribution::Skewed => 1.0 / (expert as f64).sqrt(),
    };
    let total: f64 = (1..=experts).map(weight).sum();
    let (mut sum, mut before) = (0.0, 0);
    let own = |expert: usize| {
        sum += weight(expert);
        let end = if expert == experts { rows } else { (rows as f64 * sum / total) as usize };
        let own = end - before;
        before = end;
        own
    };
    (1..=experts).map(own).collect()
}

/// Multiplications with additions that take a multiprocessor as long as the whole grouped matmul.
/// `rows`: rows of each expert.
///
/// Each expert has tiles of its own, so the last tile of its rows may have few rows. If experts have no
/// rows, they have no tiles, but for their gradients, which are sums over the rows. A multiprocessor
/// takes the next tile when it is idle.
fn grouped_terms(
    processors: usize,
    [height, width, speed]: [f64; 3],
    form: GroupedForm,
    rows: &[usize],
    shape: (usize, usize),
) -> f64 {
    let (n, k) = (shape.0 as f64, shape.1 as f64);
    let columns = |of: f64| (of / width).ceil();
    let rounds = |columns: f64| {
        let tiles: f64 = rows.iter().map(|rows| (*rows as f64 / height).ceil() * columns).sum();
        (tiles / processors as f64).ceil()
    };
    let terms = match form {
        GroupedForm::Forward => rounds(columns(n)) * (k + GEMM_DEPTH),
        GroupedForm::InputGradient => rounds(columns(k)) * (n + GEMM_DEPTH),
        GroupedForm::WeightGradient => {
            let tiles = (n / height).ceil() * columns(k);
            match rows {
                // Whole rounds, without a look at each tile.
                [first, others @ ..] if others.iter().all(|other| other == first) => {
                    let rounds = (rows.len() as f64 * tiles / processors as f64).ceil();
                    rounds * (*first as f64 + GEMM_DEPTH)
                }
                _ => {
                    let terms = rows.iter().map(|rows| *rows as u64 + GEMM_DEPTH as u64);
                    last_tile(processors, tiles as usize, terms) as f64
                }
            }
        }
    };
    terms * height * width / speed
}

/// Terms after which the last tile is done, if each of some matrices has `tiles` tiles with as many
/// terms as `terms` says.
fn last_tile(processors: usize, tiles: usize, terms: impl Iterator<Item = u64>) -> u64 {
    let mut idle: BinaryHeap<Reverse<u64>> = (0..processors).map(|_| Reverse(0)).collect();
    let mut last = 0;
    for terms in terms {
        for _ in 0..tiles {
            let Some(mut first) = idle.peek_mut() else {
                unreachable!("a GPU has multiprocessors")
            };
            first.0 += terms;
            last = last.max(first.0);
        }
    }
    last
}

/// Multiplications and additions per second of large matmuls with 16-bit or fp32 operands.
pub(super) fn rate(gpu: &Gpu, work: &Work) -> f64 {
    if work.wide { gpu.flops_32 * WIDE_SHARE } else { gpu.flops_16 }
}

/// Fraction of its rate that a GPU reaches in a matmul of (m, k) and (k, n): the last round of tiles
/// may be short, and each tile has a start and an end as long as `depth` terms of its sums.
fn filled(gpu: &Gpu, shape: [usize; 3], depth: f64) -> f64 {
    let [m, n, k] = shape.map(|x| x as f64);
    let processors = gpu.processors as f64;
    if gpu.as_of_2020.is_some() {
        let tiles = (m / TILE_2020).ceil() * (n / TILE_2020).ceil();
        let rounds = (tiles / processors).ceil();
        let whole = m / TILE_2020 * (n / TILE_2020) / (rounds * processors);
        return whole.min(1.0) * k / (k + depth);
    }
    let terms = |(rows, columns, speed): (f64, f64, f64), parts: f64| {
        let rounds = ((m / rows).ceil() * (n / columns).ceil() * parts / processors).ceil();
        let added = if parts > 1.0 { SPLIT_SUMS } else { 1.0 };
        rounds * rows * columns * (k / parts + depth) * added / speed
    };
    let parts = SPLITS.into_iter().filter(|parts| *parts == 1.0 || k / parts >= LEAST_PART);
    let all = parts.flat_map(|parts| TILES.into_iter().map(move |tile| terms(tile, parts)));
    m * n * k / (processors * all.fold(f64::INFINITY, f64::min))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Era2020;

    /// A GPU of `processors` multiprocessors.
    fn gpu(processors: usize) -> Gpu {
        Gpu {
            flops_16: 1.0,
            flops_32: 1.0,
            memory: 1.0,
            processors,
            sm: 80,
            attention: crate::sim::AttentionKernels::Own,
            expert_load: LoadDistribution::Even,
            as_of_2020: None,
        }
    }

    fn share(processors: usize, m: usize, n: usize, k: usize) -> f64 {
        filled(&gpu(processors), [m, n, k], GEMM_DEPTH)
    }

    #[test]
    fn a_product_fills_a_gpu_when_its_tiles_fill_every_round() {
        // 80 tiles of 256 x 128 fill 80 processors. With one tile more, smaller tiles and parts of sums
        // leave less idle than a second round of large ones, which would fill half.
        let one = share(80, 256 * 80, 128, 1 << 20);
        assert!((one - 1.0).abs() < 1e-3, "{one}");
        let two = share(80, 256 * 81, 128, 1 << 20);
        assert!(two > 0.9 && two < 1.0 / SPLIT_SUMS, "{two}");
        assert!(share(80, 1, 1, 1024) < 1e-4);
        // A tile's start and end are as long as 128 terms.
        assert!((share(80, 256 * 80, 128, 128) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn tiles_of_a_grouped_matmul_belong_to_one_expert() {
        use GroupedForm::{Forward, InputGradient, WeightGradient};
        let (n, k, tile) = (256usize, 1024usize, [128.0, 128.0, 1.0]);
        let rounds = |form: GroupedForm, rows: usize, experts: usize| {
            let terms = match form {
                Forward => k,
                InputGradient => n,
                WeightGradient => rows / experts,
            };
            let one = 128.0 * 128.0 * (terms as f64 + GEMM_DEPTH);
            let each = rows_of_experts(LoadDistribution::Even, rows, experts);
            grouped_terms(80, tile, form, &each, (n, k)) / one
        };
        // 8 experts of 640 rows have 5 tiles of rows and 2 of columns each: one round of 80. One row
        // more for each is a sixth tile: a second round.
        assert_eq!(rounds(Forward, 8 * 640, 8), 1.0);
        assert_eq!(rounds(Forward, 8 * 641, 8), 2.0);
        // The same rows with 128 experts of 40 rows: 128 tiles of rows, 256 in all.
        assert_eq!(rounds(Forward, 8 * 640, 128), 4.0);
        // The input has 8 tiles of columns.
        assert_eq!(rounds(InputGradient, 8 * 640, 8), 4.0);
        // Each gradient has 2 x 8 tiles, however many rows are summed.
        assert_eq!(rounds(WeightGradient, 8 * 640, 8), 2.0);
        assert_eq!(rounds(WeightGradient, 8 * 8, 8), 2.0);
        // 16 rows are those of at most 16 of 128 experts.
        assert_eq!(rounds(Forward, 16, 128), 1.0);
        assert_eq!(rounds(WeightGradient, 16 * 128, 128), 26.0);
    }

    #[test]
    fn a_skewed_load_has_more_tiles_and_longer_ones() {
        use GroupedForm::{Forward, InputGradient, WeightGradient};
        use LoadDistribution::{Even, Skewed};
        // 1, 0.7071, 0.5774 and 0.5 of 2.7845.
        assert_eq!(rows_of_experts(Skewed, 1000, 4), [359, 254, 207, 180]);
        assert_eq!(rows_of_experts(Even, 1002, 4), [250, 251, 250, 251]);
        for (rows, experts) in [(0, 3), (5, 8), (32_768, 128)] {
            for load in [Even, Skewed] {
                let each = rows_of_experts(load, rows, experts);
                assert_eq!((each.len(), each.iter().sum::<usize>()), (experts, rows));
            }
        }
        // One processor: the terms of all tiles one after another.
        let tiles = |load, form| {
            let each = rows_of_experts(load, 1000, 4);
            grouped_terms(1, [128.0, 128.0, 1.0], form, &each, (128, 256)) / (128.0 * 128.0)
        };
        // 2 tiles of rows for each expert, or 3 for the first.
        assert_eq!(tiles(Even, Forward), 8.0 * (256.0 + GEMM_DEPTH));
        assert_eq!(tiles(Skewed, Forward), 9.0 * (256.0 + GEMM_DEPTH));
        assert_eq!(tiles(Skewed, InputGradient), 18.0 * (128.0 + GEMM_DEPTH));
        assert_eq!(tiles(Skewed, WeightGradient), 2.0 * (1000.0 + 4.0 * GEMM_DEPTH));
        // A processor for each tile: the longest decides.
        let each = rows_of_experts(Skewed, 1000, 4);
        let longest = grouped_terms(8, [128.0, 128.0, 1.0], WeightGradient, &each, (128, 256));
        assert_eq!(longest / (128.0 * 128.0), 359.0 + GEMM_DEPTH);
    }

    /// A micro-batch of 4096 tokens of Qwen3-30B-A3B: 32,768 rows, 128 experts.
    #[test]
    fn tiles_of_qwen3_30b_a3b_for_an_even_and_a_skewed_load() {
        let tiles = |load| -> usize {
            let each = rows_of_experts(load, 8 * 4096, 128);
            each.iter().map(|rows| rows.div_ceil(128)).sum()
        };
        assert_eq!(tiles(LoadDistribution::Even), 256);
        assert_eq!(tiles(LoadDistribution::Skewed), 334);
    }

    #[test]
    fn long_sums_of_few_tiles_are_split() {
        // 16 tiles of 256 x 256: one part keeps 32 of 128 processors busy, four keep all.
        let narrow = share(128, 1024, 1024, 1 << 16);
        assert!((narrow - 1.0 / 1.03).abs() < 0.01, "{narrow}");
        // Parts of short sums would be shorter than 256 terms.
        let short = share(128, 512, 512, 511);
        let (rows, columns, speed) = TILES[7];
        let alone = 512.0 * 512.0 / (128.0 * rows * columns) * speed * 511.0 / (511.0 + 128.0);
        assert!((short - alone).abs() < 1e-9, "{short} {alone}");
    }

    #[test]
    fn the_figures_of_2020_have_one_tile() {
        let of_2020 = Gpu { as_of_2020: Some(Era2020::without(&[])), ..gpu(80) };
        let two = filled(&of_2020, [128 * 81, 128, 1 << 20], GEMM_DEPTH);
        assert!((two - 81.0 / 160.0).abs() < 1e-3, "{two}");
    }
}
