//! `onebox bench adam`, `gemm` and `collective`: what the cores and the memory of this machine do.

use super::super::{CommandError, FailWith, SimdArg, code, print_as, say};
use crate::bench::{self, Collective, Product, Row, cases};
use serde::Serialize;
use std::fmt::Write as _;
use topology::{cores, counted};

#[derive(Debug, clap::Args)]
pub(in crate::commands) struct AdamArgs {
    /// Parameters; 52 bytes of memory each, in four kinds of states
    #[arg(long, default_value_t = 50_000_000, value_parser = clap::value_parser!(u64).range(1..=1 << 36))]
    params: u64,
    /// Kernel threads [default: all cores]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// Passes over all parameters of which medians are taken; fewer where they take long
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Only the four kinds of states, by the best instructions
    #[arg(long)]
    states_only: bool,
    #[command(flatten)]
    simd: SimdArg,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(in crate::commands) struct GemmArgs {
    /// Kernel threads [default: all cores]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(in crate::commands) struct CollectiveArgs {
    /// Virtual GPUs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=256))]
    ranks: u16,
    /// MiB of each one's buffer
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    mib: u32,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Rows<T> {
    rows: Vec<T>,
}

/// A remark on shares that no machine has.
fn above(shares: impl IntoIterator<Item = f64>) -> &'static str {
    if shares.into_iter().all(|share| share <= 1.0) {
        return "";
    }
    "a share above 100 %: the ceiling was measured in another moment than the work, and on a machine that does more, or with\n\
     buffers that caches hold, both vary. Measure again with the machine idle, and with more data\n"
}

fn threads(asked: Option<u16>) -> usize {
    asked.map_or_else(cores, usize::from)
}

pub(super) fn adam(args: &AdamArgs) -> Result<(), CommandError> {
    let params = args.params as usize;
    let only = args.simd.choose()?;
    let mut rows = Vec::new();
    let cases = cases(threads(args.threads), only, args.states_only);
    for in_turn in cases.chunk_by(|a, b| (a.threads, a.small_pages) == (b.threads, b.small_pages)) {
        for case in in_turn {
            let pages = if case.small_pages { "4 KiB" } else { "2 MiB" };
            let state = case.state_name();
            let (path, threads) = (case.path, case.threads);
            let threads = counted(threads, "thread");
            say(&format!("measuring: {path}, {state}, {threads}, pages of {pages}"));
        }
        rows.extend(bench::adam(in_turn, params, usize::from(args.rounds)).fail_with(code::RANK)?);
    }
    let rows = Rows { rows };
    print_as(args.json, &rows, || adam_text(&rows.rows))
}

fn adam_text(rows: &[Row]) -> String {
    let mut out = String::from(
        "path      state       threads  page KiB  bytes/param    Mparam/s      GB/s   ceiling   share\n",
    );
    for r in rows {
        let _ = writeln!(
            out,
            "{:<9} {:<11} {:>7} {:>9} {:>12} {:>11.1} {:>9.2} {:>9.2} {:>6.1}%",
            r.path,
            r.state,
            r.threads,
            r.page_kib,
            r.bytes_per_param,
            r.params_per_s / 1e6,
            r.gb_per_s,
            r.ceiling_gb_per_s,
            100.0 * r.share_of_ceiling
        );
    }
    out + "ceiling: the same loads and stores without arithmetic, in turn with the update; medians; rows of the same\n\
           threads and pages are measured in turn\n"
        + above(rows.iter().map(|r| r.share_of_ceiling))
}

pub(super) fn gemm(args: &GemmArgs) -> Result<(), CommandError> {
    let rows = Rows { rows: bench::products(threads(args.threads)).fail_with(code::RANK)? };
    print_as(args.json, &rows, || gemm_text(&rows.rows))
}

fn gemm_text(rows: &[Product]) -> String {
    let mut out = String::from("type      m      k      n  threads  GFLOP/s  ceiling   share\n");
    for r in rows {
        let _ = writeln!(
            out,
            "{:<5} {:>5} {:>6} {:>6} {:>8} {:>8.1} {:>8.1} {:>6.1}%",
            r.dtype,
            r.m,
            r.k,
            r.n,
            r.threads,
            r.gflops,
            r.ceiling_gflops,
            100.0 * r.share_of_ceiling
        );
    }
    let remark = above(rows.iter().map(|r| r.share_of_ceiling));
    out + "ceiling: fp32 fused multiply-adds in registers, in turn with the product; medians\n"
        + remark
}

pub(super) fn collective(args: &CollectiveArgs) -> Result<(), CommandError> {
    let bytes = u64::from(args.mib) << 20;
    let rows = bench::collectives(usize::from(args.ranks), bytes).fail_with(code::RANK)?;
    let rows = Rows { rows };
    print_as(args.json, &rows, || collective_text(&rows.rows))
}

fn collective_text(rows: &[Collective]) -> String {
    let mut out = String::from("op              ranks       MiB      GB/s    memcpy   share\n");
    for r in rows {
        let _ = writeln!(
            out,
            "{:<15} {:>5} {:>9} {:>9.2} {:>9.2} {:>6.1}%",
            r.op,
            r.ranks,
            r.bytes >> 20,
            r.gb_per_s,
            r.memcpy_gb_per_s,
            100.0 * r.share_of_memcpy
        );
    }
    let remark = above(rows.iter().map(|r| r.share_of_memcpy));
    out + "GB/s: a rank's buffer over the time; memcpy: a plain copy by one thread\n" + remark
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_share_above_its_ceiling_is_remarked_on() {
        assert_eq!(super::above([0.4, 1.0]), "");
        assert!(
            super::above([0.4, 1.47]).starts_with("a share above 100 %: the ceiling was measured")
        );
    }
}
