//! `onebox plan --search`: what [`crate::predict::search`] found, in words, or as JSON.

use super::exit::{Failed, code};
use super::largest::at_most;
use super::simulate::{failed, seconds};
use super::{print, print_json};
use crate::config::Loaded;
use crate::predict::changes::arguments;
use crate::predict::remedies::largest;
use crate::predict::search::{Found, Layout, search};
use crate::report::progress::si;
use std::fmt::Write as _;
use topology::{counted, format_bytes};

pub(super) fn run(loaded: &Loaded, gpus: Option<usize>, json: bool) -> Result<(), Failed> {
    let found = search(loaded, gpus).map_err(failed)?;
    if json {
        print_json(&found)?;
    } else {
        print(&text(loaded, &found, gpus.is_some()))?;
    }
    if found.layouts.is_empty() { Err(Failed::silent(code::DOES_NOT_FIT)) } else { Ok(()) }
}

/// `asked`: the user names the number of GPUs.
fn text(loaded: &Loaded, found: &Found, asked: bool) -> String {
    let Found { name, box_name, gpus, enumerated, fit, .. } = found;
    let mut out = format!("{name} on {box_name}: simulated, not measured\n");
    if let (0, Some(why)) = (*fit, &found.no_layout) {
        return out + why + "\n";
    }
    let _ = write!(out, "{} on {}, {fit} fit", counted(enumerated, "layout"), counted(gpus, "GPU"));
    if *fit == 0 {
        let largest = largest(loaded, asked.then_some(*gpus));
        return out + "\nno layout fits\n" + &at_most(loaded, largest.as_ref(), &[]) + "\n";
    }
    let _ = writeln!(
        out,
        "; {} skipped: another layout does the same with less work{}\nscreened {} and {} (optimizer's share on the GPUs, first \
         forward passes together, share updated ahead) with a shortened step, then simulated the best {} in full (the shortened step was within \
         {:.1} %)",
        found.set_aside,
        match found.left_out {
            0 => String::new(),
            out => format!(", {out} left out"),
        },
        counted(found.simulated_briefly, "layout"),
        counted(found.choices, "variant"),
        found.simulated_in_full,
        100.0 * found.brief_error,
    );
    match found.given {
        Some(given) => {
            let _ = writeln!(
                out,
                "the config as it is: place {}, {}tok/s simulated",
                given.rank,
                si(given.tokens_per_second)
            );
        }
        None if loaded.config.world_size() != *gpus && asked => {
            let own = counted(loaded.config.world_size(), "GPU");
            let _ = writeln!(out, "the config as it is takes {own}");
        }
        None => out += "the config as it is does not fit\n",
    }
    let best = found.layouts.first().map_or(0.0, |layout| layout.tokens_per_second);
    for (index, layout) in found.layouts.iter().enumerate() {
        let _ = write!(out, "\n{}", entry(index + 1, layout, best));
    }
    out
}

fn entry(number: usize, layout: &Layout, best: f64) -> String {
    let Layout { tensor, data, micro, micro_batches, words, .. } = layout;
    let mut out =
        format!("{number}. TP {tensor} x DP {data}, micro {micro} x {micro_batches}, {words}\n");
    let sets = match layout.sets[..] {
        [] => "the config as it is".to_owned(),
        _ => arguments(&layout.sets),
    };
    let most = layout.fullest_node();
    let _ = writeln!(out, "   {sets}");
    let _ = writeln!(
        out,
        "   {}tok/s ({:+.1} %), a step in {}{}; {:.1} TFLOPS per GPU as run, {:.1} of the model\n   {} on each GPU, {} \
         on the fullest node",
        si(layout.tokens_per_second),
        100.0 * (layout.tokens_per_second / best - 1.0),
        seconds(layout.step_seconds),
        if layout.extrapolated { " (extrapolated)" } else { "" },
        layout.hardware_tflops_per_gpu,
        layout.model_tflops_per_gpu,
        format_bytes(layout.gpu_bytes),
        format_bytes(most),
    );
    if number > 1 {
        let _ = writeln!(out, "   {}", why(layout));
    }
    out
}

fn why(layout: &Layout) -> String {
    if layout.loses_by.is_empty() {
        return "as fast, with more changes".into();
    }
    let parts =
        layout.loses_by.iter().map(|(what, share)| format!("{what} {:+.1} %", 100.0 * share));
    format!("loses by: {}", parts.collect::<Vec<_>>().join(", "))
}
