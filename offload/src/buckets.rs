//! Buffers of gradients on the device that segments share: buckets, and sums of micro-batches.

use crate::spec::{BucketSharing, GradAccumulation, OptimizerSpec, SegmentSpec};
use device::{Arena, Dtype, Plan, Tensor};

/// A buffer of the gradients of a segment, or of their sums over micro-batches; see [`BucketSharing`].
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Its memory, of which a segment takes the first elements.
    pub tensor: Tensor,
    /// Its number among all buckets, or among all sums.
    pub(crate) number: usize,
}

/// Plans the buckets of every segment, and says how many there are.
pub(crate) fn plan_buckets(plan: &mut Plan, segments: &[SegmentSpec]) -> (Vec<Vec<Bucket>>, usize) {
    let storage = segments.first().map_or(Dtype::F32, |s| s.params.dtype());
    let mut num_buckets = 0;
    let mut bucket = |name: String, len: usize| {
        let at = (Arena::Device, "gradient buckets");
        num_buckets += 1;
        Bucket { tensor: plan.tensor(at, name, storage, (1, len)), number: num_buckets - 1 }
    };
    let of = |kind| segments.iter().filter(move |s| s.bucket == kind);
    let longest = |kind| of(kind).map(|s| s.params.len()).max().unwrap_or(0);
    let turns: Vec<Bucket> = (0..of(BucketSharing::Alternating).count().min(2))
        .map(|i| bucket(format!("bucket.{i}"), longest(BucketSharing::Alternating)))
        .collect();
    let mut shared = None;
    let one = |s: &SegmentSpec| match s.bucket {
        BucketSharing::Own => vec![bucket(format!("{}.bucket", s.name), s.params.len())],
        BucketSharing::PerSlot(count) => {
            (0..count).map(|i| bucket(format!("{}.bucket.{i}", s.name), s.params.len())).collect()
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

/// Plans the sums of micro-batches that segments share, as they share buckets, and says how many there are.
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
    let of = |kind| segments.iter().filter(move |s| s.bucket == kind);
    let longest = |kind| of(kind).map(|s| s.params.len()).max().unwrap_or(0);
    let count = of(BucketSharing::Alternating).count().min(2);
    let turns: Vec<Bucket> = (0..count)
        .map(|i| sum(&format!("turn.{i}"), longest(BucketSharing::Alternating)))
        .collect();
    let mut shared = None;
    let one = |(index, s): (usize, &SegmentSpec)| {
        Some(match s.bucket {
            BucketSharing::Own | BucketSharing::PerSlot(_) => sum(&s.name, s.params.len()),
            BucketSharing::Alternating => turns[index % turns.len()],
            BucketSharing::Shared => {
                *shared.get_or_insert_with(|| sum("tables", longest(BucketSharing::Shared)))
            }
        })
    };
    let sums = segments.iter().enumerate().map(one).collect();
    (sums, num_sums)
}
