//! `onebox bench adam`, `gemm` and `collective`: measurements of this machine's cores and memory.

use super::super::{CommandError, Failable, SimdArg, code, print_as, say};
use crate::bench::{self, Collective, Product, Row, cases};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use topology::{cores, counted};

#[derive(Debug, clap::Args)]
pub(in crate::commands) struct AdamArgs {
    /// Number of parameters; each needs 98 bytes of memory, or 52 with --states-only
    #[arg(long, default_value_t = 50_000_000, value_parser = clap::value_parser!(u64).range(1..=1 << 36))]
    params: u64,
    /// Number of kernel threads [default: all cores]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// Number of passes over all parameters in each median; fewer if they take long
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Measure only the four kinds of states, with the best SIMD instructions
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
    /// Number of kernel threads [default: all cores]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(in crate::commands) struct CollectiveArgs {
    /// Number of virtual GPUs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=256))]
    ranks: u16,
    /// MiB of each virtual GPU's buffer
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    mib: u32,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

/// Document that `--json` prints.
#[derive(Serialize)]
struct Rows<T> {
    rows: Vec<T>,
}

/// Remark on shares above 100 %; empty if there are none.
fn above(shares: impl IntoIterator<Item = f64>) -> &'static str {
    if shares.into_iter().all(|share| share <= 1.0) {
        return "";
    }
    "a share above 100 %: the ceiling was measured in another moment than the work, and on a machine that does more, or with\n\
     buffers that caches hold, both vary. Measure again with the machine idle, and with more data\n"
}

fn threads(requested: Option<u16>) -> usize {
    requested.map_or_else(cores, usize::from)
}

pub(super) fn adam(args: &AdamArgs) -> Result<(), CommandError> {
    let params = args.params as usize;
    let only = args.simd.choose()?;
    let mut rows = Vec::new();
    let cases = cases(threads(args.threads), only, args.states_only);
    for in_turn in cases.chunk_by(|a, b| (a.threads, a.small_pages) == (b.threads, b.small_pages)) {
        for case in in_turn {
            let pages = if case.small_pages { "4 KiB" } else { "2 MiB" };
            let (path, state) = (case.path, case.state_name());
            let threads = counted(case.threads, "thread");
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
    for row in rows {
        let Row { path, state, threads, page_kib, bytes_per_param, gb_per_s, .. } = row;
        let (params, share) = (row.params_per_s / 1e6, 100.0 * row.share_of_ceiling);
        let ceiling = row.ceiling_gb_per_s;
        let _ = writeln!(
            out,
            "{path:<9} {state:<11} {threads:>7} {page_kib:>9} {bytes_per_param:>12} {params:>11.1} {gb_per_s:>9.2} {ceiling:>9.2} {share:>6.1}%"
        );
    }
    let loops: BTreeSet<&str> = rows.iter().map(|row| row.ceiling_loop.as_str()).collect();
    let loops = loops.into_iter().collect::<Vec<_>>().join("; ");
    let triads = rows.iter().filter_map(|row| row.triad_gb_per_s).fold(0.0, f64::max);
    let _ = writeln!(
        out,
        "ceiling: the same loads and stores without arithmetic, in turn with the update; medians; rows of the same\n\
         threads and pages are measured in turn; by the fastest loop: {loops}\n\
         STREAM (triad) reaches {triads:.2} GB/s here"
    );
    out + above(rows.iter().map(|r| r.share_of_ceiling))
}

pub(super) fn gemm(args: &GemmArgs) -> Result<(), CommandError> {
    let rows = Rows { rows: bench::products(threads(args.threads)).fail_with(code::RANK)? };
    print_as(args.json, &rows, || gemm_text(&rows.rows))
}

fn gemm_text(rows: &[Product]) -> String {
    let mut out = String::from("type      m      k      n  threads  GFLOP/s  ceiling   share\n");
    for Product { m, n, k, dtype, threads, gflops, ceiling_gflops, share_of_ceiling } in rows {
        let share = 100.0 * share_of_ceiling;
        let _ = writeln!(
            out,
            "{dtype:<5} {m:>5} {k:>6} {n:>6} {threads:>8} {gflops:>8.1} {ceiling_gflops:>8.1} {share:>6.1}%"
        );
    }
    let remark = above(rows.iter().map(|r| r.share_of_ceiling));
    out + "ceiling: fp32 fused multiply-adds in registers, in turn with the product; medians\n"
        + remark
}

pub(super) fn collective(args: &CollectiveArgs) -> Result<(), CommandError> {
    let bytes = u64::from(args.mib) << 20;
    let rows = bench::collectives(usize::from(args.ranks), bytes);
    let rows = Rows { rows: rows.fail_with(code::RANK)? };
    print_as(args.json, &rows, || collective_text(&rows.rows))
}

fn collective_text(rows: &[Collective]) -> String {
    let mut out = String::from("op              ranks       MiB      GB/s    memcpy   share\n");
    for Collective { op, ranks, bytes, gb_per_s, memcpy_gb_per_s, share_of_memcpy } in rows {
        let (mib, share) = (bytes >> 20, 100.0 * share_of_memcpy);
        let _ = writeln!(
            out,
            "{op:<15} {ranks:>5} {mib:>9} {gb_per_s:>9.2} {memcpy_gb_per_s:>9.2} {share:>6.1}%"
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
