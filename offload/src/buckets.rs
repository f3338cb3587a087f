//! Device buffers of gradients that segments share: buckets, and sums over micro-batches.

use crate::spec::{BucketSharing, GradAccumulation, OptimizerSpec, SegmentSpec};
use device::{Arena, Dtype, Plan, Tensor};

/// A buffer for the gradients of a segment, or for their sums over micro-batches; see
/// [`BucketSharing`].
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Memory of the bucket; a segment uses its first elements.
    pub tensor: Tensor,
    /// Number of the bucket among all buckets, or among all sums.
    pub(crate) number: usize,
}

impl Bucket {
    /// The bucket of a segment without trained parameters: no elements.
    pub(crate) const fn none(params: Tensor) -> Self {
        Self { tensor: params.slice(0..0), number: usize::MAX }
    }
}

/// Plans the buckets of every segment. Returns them and the number of distinct buckets.
pub(crate) fn plan_buckets(plan: &mut Plan, segments: &[SegmentSpec]) -> (Vec<Vec<Bucket>>, usize) {
    let storage = segments.first().map_or(Dtype::F32, |s| s.params.dtype());
    let mut num_buckets = 0;
    let mut bucket = |name: String, len: usize| {
        let at = (Arena::Device, "gradient buckets");
        num_buckets += 1;
        Bucket { tensor: plan.tensor(at, name, storage, (1, len)), number: num_buckets - 1 }
    };
    let of = |kind| segments.iter().filter(move |s| s.bucket == kind && s.trained > 0);
    let longest = |kind| of(kind).map(|s| s.trained).max().unwrap_or(0);
    let turns: Vec<Bucket> = (0..of(BucketSharing::Alternating).count().min(2))
        .map(|i| bucket(format!("bucket.{i}"), longest(BucketSharing::Alternating)))
        .collect();
    let mut shared = None;
    let one = |s: &SegmentSpec| match s.bucket {
        _ if s.trained == 0 => Vec::new(),
        BucketSharing::Own => vec![bucket(format!("{}.bucket", s.name), s.trained)],
        BucketSharing::PerSlot(count) => {
            (0..count).map(|i| bucket(format!("{}.bucket.{i}", s.name), s.trained)).collect()
        }
        BucketSharing::Alternating => turns.clone(),
        BucketSharing::Shared => vec![*shared.get_or_insert_with(|| {
            let names: Vec<&str> = of(BucketSharing::Shared).map(|s| &*s.name).collect();
            bucket(format!("{}.bucket", names.join("+")), longest(BucketSharing::Shared))
        })],
    };
    let buckets = segments.iter().map(one).collect();
    (buckets, num_buckets)
}

/// Plans the sums over micro-batches, which segments share as they share buckets. Returns them and
/// the number of distinct sums.
pub(crate) fn plan_sums(
    plan: &mut Plan,
    spec: &OptimizerSpec,
    segments: &[SegmentSpec],
) -> (Vec<Option<Bucket>>, usize) {
    if spec.accumulation != GradAccumulation::Shared {
        return (vec![None; segments.len()], 0);
    }
    let mut num_sums = 0;
    let mut sum = |name: &str, len: usize| {
        let at = (Arena::Device, "gradient sums");
        let tensor = plan.tensor(at, format!("{name}.sum"), Dtype::F32, (1, len / spec.dp_size));
        num_sums += 1;
        Bucket { tensor, number: num_sums - 1 }
    };
    let of = |kind| segments.iter().filter(move |s| s.bucket == kind && s.trained > 0);
    let longest = |kind| of(kind).map(|s| s.trained).max().unwrap_or(0);
    let count = of(BucketSharing::Alternating).count().min(2);
    let turns: Vec<Bucket> = (0..count)
        .map(|i| sum(&format!("turn.{i}"), longest(BucketSharing::Alternating)))
        .collect();
    let mut shared = None;
    let one = |(index, s): (usize, &SegmentSpec)| {
        if s.trained == 0 {
            return None;
        }
        Some(match s.bucket {
            BucketSharing::Own | BucketSharing::PerSlot(_) => sum(&s.name, s.trained),
            BucketSharing::Alternating => turns[index % turns.len()],
            BucketSharing::Shared => {
                *shared.get_or_insert_with(|| sum("tables", longest(BucketSharing::Shared)))
            }
        })
    };
    let sums = segments.iter().enumerate().map(one).collect();
    (sums, num_sums)
}
