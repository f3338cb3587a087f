//! Reads the metrics of runs for a report.

use config::{LoadedConfig, load_stored};
use engine::metrics::LONGEST_METRICS;
use engine::run::Difference;
use files::names::{CONFIG, METRICS};
use files::{input, regular_file};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Metrics of one run.
#[derive(Debug, Default)]
pub(crate) struct Curves {
    pub(crate) name: String,
    pub(crate) steps: Vec<Step>,
    pub(crate) evals: Vec<Eval>,
    /// Steps whose checkpoint could not be saved, with the reason.
    pub(crate) not_saved: Vec<(u64, String)>,
    /// Steps that ran twice with different bits, and the places where some ranks saw a difference.
    pub(crate) differs: Vec<(u64, Vec<Difference>)>,
    /// Last step and hash of the states, if the run is done.
    pub(crate) end: Option<(u64, String)>,
    /// Number of complete lines that could not be read.
    pub(crate) damaged: usize,
    /// Config, if it can be read; another version may have written it.
    pub(crate) config: Option<Box<LoadedConfig>>,
}

/// Line of a step. A value that was not finite is `None`; earlier versions wrote no memory.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(crate) struct Step {
    pub(crate) step: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) grad_norm: Option<f64>,
    pub(crate) loss_scale: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) step_seconds: Option<f64>,
    pub(crate) tokens_per_second: Option<f64>,
    #[serde(default)]
    pub(crate) skipped: bool,
    #[serde(default)]
    pub(crate) tokens: u64,
    pub(crate) device_memory: Option<f64>,
    pub(crate) host_memory: Option<f64>,
    #[serde(rename = "ahead")]
    pub(crate) speculation: Option<SpeculationOutcome>,
    pub(crate) targets: Option<u64>,
    pub(crate) documents: Option<u64>,
    pub(crate) padding: Option<f64>,
    pub(crate) verified: Option<bool>,
    pub(crate) largest_expert_share: Option<f64>,
    pub(crate) dead_experts: Option<u64>,
    pub(crate) balance_loss: Option<f64>,
}

/// Outcome of a step's speculative updates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SpeculationOutcome {
    No,
    Committed,
    Redone,
}

impl SpeculationOutcome {
    /// Name of the outcome in the metrics.
    const fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Committed => "committed",
            Self::Redone => "redone",
        }
    }
}

/// Line of an evaluation.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Eval {
    pub(crate) step: u64,
    pub(crate) loss: Option<f64>,
    /// Loss of each data set, if there are several.
    #[serde(default)]
    pub(crate) sets: BTreeMap<String, Option<f64>>,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line {
    Step(Step),
    Eval(Eval),
    #[serde(rename = "checkpoint_failed")]
    NotSaved {
        step: u64,
        error: String,
    },
    Differs {
        step: u64,
        places: Vec<Difference>,
    },
    End {
        step: u64,
        state_hash: String,
    },
    /// Line of a later version.
    #[serde(other)]
    Unknown,
}

/// Maximum bytes of a line; a longer line is damaged.
const LONGEST: u64 = 1 << 20;

impl Curves {
    /// Reads the run in `dir`. An incomplete last line is ignored: it may still be being written.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn read(dir: &Path, name: String) -> io::Result<Self> {
        let mut curves = Self { name, ..Self::default() };
        let file = regular_file::read(&dir.join(METRICS))?;
        input::check_length(&file, LONGEST_METRICS)?;
        let mut file = BufReader::new(file);
        let mut line = Vec::new();
        let mut rest_of_long = false;
        loop {
            line.clear();
            if file.by_ref().take(LONGEST).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let whole = line.ends_with(b"\n");
            match std::mem::replace(&mut rest_of_long, !whole) {
                true => {}
                false if whole => curves.take(&line),
                // A line of this length is damaged; its other pieces are skipped.
                false if line.len() as u64 == LONGEST => curves.damaged += 1,
                false => {}
            }
        }
        // Curves are shown even without a config.
        let config = input::own_bytes(&dir.join(CONFIG), LONGEST);
        let config = config.ok().and_then(|bytes| String::from_utf8(bytes).ok());
        curves.config = config.and_then(|ron| load_stored(&ron, &[]).ok()).map(Box::new);
        Ok(curves)
    }

    fn take(&mut self, line: &[u8]) {
        match serde_json::from_slice(line) {
            Ok(Line::Step(step)) => self.steps.push(step),
            Ok(Line::Eval(eval)) => self.evals.push(eval),
            Ok(Line::NotSaved { step, error }) => self.not_saved.push((step, error)),
            Ok(Line::Differs { step, places }) => self.differs.push((step, places)),
            Ok(Line::End { step, state_hash }) => self.end = Some((step, state_hash)),
            Ok(Line::Unknown) => {}
            Err(_) => self.damaged += 1,
        }
    }

    /// Ranges of successive skipped steps, as first and last.
    pub(crate) fn skipped(&self) -> Vec<(u64, u64)> {
        ranges(self.steps.iter().filter(|step| step.skipped).map(|step| step.step))
    }

    /// Number of steps by speculative update: committed, redone, not tried; `None` without such
    /// updates.
    pub(crate) fn speculation_counts(&self) -> Option<[usize; 3]> {
        use SpeculationOutcome::{Committed, No, Redone};
        let of = |what| self.steps.iter().filter(|step| step.speculation == Some(what)).count();
        let all = [Committed, Redone, No].map(of);
        (all != [0; 3]).then_some(all)
    }

    /// Step and loss of the evaluation with the lowest loss.
    pub(crate) fn best(&self) -> Option<(u64, f64)> {
        let finite = self.evals.iter().filter_map(|eval| Some((eval.step, eval.loss?)));
        finite.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Ranges of successive numbers, as first and last.
pub(crate) fn ranges(numbers: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}

/// Columns of the table as CSV.
pub(crate) const CSV: &str = "run,kind,step,tokens,loss,grad_norm,lr,loss_scale,step_seconds,tokens_per_second,skipped,device_memory,host_memory,ahead,targets,documents,padding,verified,largest_expert_share,dead_experts,balance_loss\n";

/// Text of a value; empty if there is none.
fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// Returns a row for each step and evaluation; a missing or non-finite value is empty.
pub(crate) fn csv(runs: &[Curves]) -> String {
    let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    // Empty cells after the loss.
    let rest = ",".repeat(CSV.matches(',').count() - 4);
    let mut out = CSV.to_owned();
    for run in runs {
        let name = quoted(&run.name);
        let mut evals = run.evals.iter().peekable();
        let mut eval_rows = |out: &mut String, until: u64| {
            while let Some(eval) = evals.next_if(|eval| eval.step < until) {
                out.push_str(&format!("{name},eval,{},,{}{rest}\n", eval.step, shown(eval.loss)));
                for (set, loss) in &eval.sets {
                    let kind = quoted(&format!("eval/{set}"));
                    let (step, loss) = (eval.step, shown(*loss));
                    out.push_str(&format!("{name},{kind},{step},,{loss}{rest}\n"));
                }
            }
        };
        for step in &run.steps {
            eval_rows(&mut out, step.step);
            let cells = [
                step.step.to_string(),
                step.tokens.to_string(),
                shown(step.loss),
                shown(step.grad_norm),
                shown(step.lr),
                shown(step.loss_scale),
                shown(step.step_seconds),
                shown(step.tokens_per_second),
                step.skipped.to_string(),
                shown(step.device_memory),
                shown(step.host_memory),
                shown(step.speculation.map(SpeculationOutcome::name)),
                shown(step.targets),
                shown(step.documents),
                shown(step.padding),
                shown(step.verified),
                shown(step.largest_expert_share),
                shown(step.dead_experts),
                shown(step.balance_loss),
            ];
            out.push_str(&format!("{name},step,{}\n", cells.join(",")));
        }
        eval_rows(&mut out, u64::MAX);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(lines: &str) -> Curves {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(METRICS), lines).unwrap();
        Curves::read(folder.path(), "a,b".into()).unwrap()
    }

    const STEP: &str = r#"{"kind":"step","step":1,"loss":5.5,"grad_norm":null,"loss_scale":1.0,"lr":0.001,"step_seconds":0.5,"tokens_per_second":100.0,"skipped":true,"tokens":50,"skipped_total":1}"#;

    #[test]
    fn a_torn_last_line_and_a_damaged_one_cost_no_other() {
        let eval = r#"{"kind":"eval","step":1,"loss":5.25,"whole":true}"#;
        let later = r#"{"kind":"weather","step":1,"rain":true}"#;
        let long = "x".repeat(3 * LONGEST as usize);
        let text = format!(
            "{STEP}\n{{\"kind\n{long}\n{eval}\n{later}\n{{\"kind\":\"end\",\"step\":1,\"st"
        );
        let run = read(&text);
        assert_eq!((run.steps.len(), run.evals.len(), run.damaged), (1, 1, 2));
        assert!(run.end.is_none() && run.config.is_none());
        assert_eq!((run.skipped(), run.best()), (vec![(1, 1)], Some((1, 5.25))));
        let done =
            read(&format!("{STEP}\n{{\"kind\":\"end\",\"step\":1,\"state_hash\":\"00\"}}\n"));
        assert_eq!(done.end, Some((1, "00".to_owned())));
    }

    #[test]
    fn what_became_of_updates_ahead_is_counted_and_a_column() {
        let with =
            |speculation: &str| STEP.replace('}', &format!(",\"ahead\":\"{speculation}\"}}\n"));
        let lines = ["committed", "redone", "committed", "no"].map(with).concat();
        let run = read(&(lines + STEP + "\n"));
        assert_eq!(
            (run.speculation_counts(), run.steps.len(), run.damaged),
            (Some([2, 1, 1]), 5, 0)
        );
        let csv = csv(&[run]);
        let column = csv.lines().map(|row| row.rsplit(',').nth(7).unwrap());
        assert!(column.eq(["ahead", "committed", "redone", "committed", "no", ""]), "{csv}");
        assert_eq!(read(&(STEP.to_owned() + "\n")).speculation_counts(), None);
    }

    #[test]
    fn targets_documents_padding_and_verified_steps_are_columns() {
        let of_documents = r#","targets":40,"documents":3,"padding":0.25,"verified":true}"#;
        let csv = csv(&[read(&(STEP.replace('}', of_documents) + "\n"))]);
        assert!(csv.ends_with(",,40,3,0.25,true,,,\n"), "{csv}");
        let columns =
            ",targets,documents,padding,verified,largest_expert_share,dead_experts,balance_loss\n";
        assert!(csv.starts_with(CSV) && CSV.ends_with(columns));
    }

    #[test]
    fn the_load_of_experts_is_three_columns() {
        let load = r#","expert_tokens":[0,4],"largest_expert_share":0.5,"dead_experts":3,"balance_loss":1.25}"#;
        let csv = csv(&[read(&(STEP.replace('}', load) + "\n"))]);
        assert!(csv.ends_with(",,,,,0.5,3,1.25\n"), "{csv}");
    }

    #[test]
    fn rows_are_in_the_order_of_the_run_and_what_is_not_there_is_empty() {
        let eval =
            |step| format!("{{\"kind\":\"eval\",\"step\":{step},\"loss\":null,\"whole\":true}}\n");
        let run = read(&format!("{}{STEP}\n{}", eval(0), eval(1)));
        let rows = [
            "\"a,b\",eval,0,,,,,,,,,,,,,,,,,,\n",
            "\"a,b\",step,1,50,5.5,,0.001,1,0.5,100,true,,,,,,,,,,\n",
            "\"a,b\",eval,1,,,,,,,,,,,,,,,,,,\n",
        ];
        assert_eq!(csv(&[run]), CSV.to_owned() + &rows.concat());
        assert!(rows.iter().all(|row| row.matches(',').count() == CSV.matches(',').count() + 1));
    }
}
