//! Failures on demand: `FAKECUDA_FAIL`.

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use crate::sync::complain;

#[derive(Debug)]
struct Failure {
    kind: String,
    at: u64,
    device: Option<usize>,
    seen: AtomicU64,
}

/// Failures that `FAKECUDA_FAIL` demands, read at the first call.
static FAILURES: LazyLock<Vec<Failure>> = LazyLock::new(|| {
    let list = std::env::var("FAKECUDA_FAIL").unwrap_or_default();
    list.split(',').filter(|item| !item.trim().is_empty()).filter_map(parse).collect()
});

fn parse(item: &str) -> Option<Failure> {
    let parsed = item.trim().split_once(':').and_then(|(kind, rest)| {
        let (at, device) = match rest.split_once('@') {
            Some((at, device)) => (at, Some(device.parse().ok()?)),
            None => (rest, None),
        };
        Some(Failure { kind: kind.into(), at: at.parse().ok()?, device, seen: AtomicU64::new(0) })
    });
    if parsed.is_none() {
        complain(&format!("FAKECUDA_FAIL: cannot read {item:?}, expected kind:N or kind:N@device"));
    }
    parsed
}

/// Counts an occurrence of `kind` on `device`; true if this occurrence must fail.
pub(crate) fn fails(kind: &str, device: usize) -> bool {
    let mut hit = false;
    for failure in FAILURES.iter() {
        if failure.kind == kind && failure.device.is_none_or(|only| only == device) {
            hit |= failure.seen.fetch_add(1, SeqCst) + 1 == failure.at;
        }
    }
    hit
}

/// Whether occurrence number `count` of `kind` must fail, for counters that the caller keeps.
pub(crate) fn fails_at(kind: &str, count: u64) -> bool {
    FAILURES.iter().any(|failure| failure.kind == kind && failure.at == count)
}
