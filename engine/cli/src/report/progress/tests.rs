//! Tests of the lines of a run.

use super::*;
use std::sync::{Arc, Mutex};

const LINE: StepLine = StepLine {
    step: 120,
    steps: 400,
    epoch: None,
    loss: 2.4312,
    grad_norm: 0.83,
    loss_scale: Some(65536.0),
    lr: 1.9e-3,
    tokens_per_second: 12_300.0,
    flops_per_second: 8.1e9,
    device_memory: (43_201_331, 256 << 20),
    overlap: Some(0.63),
    skipped: 0,
    speculation: None,
    eta_seconds: 42.0,
};

/// Text of each write.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().push(String::from_utf8(bytes.to_vec()).unwrap());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Steps whose lines were written.
fn steps(log: &Log) -> Vec<u64> {
    let step = |line: &String| line.split(['/', ' ']).find_map(|word| word.parse().ok()).unwrap();
    log.0.lock().unwrap().iter().map(step).collect()
}

fn evaluation(step: u64, loss: f64, whole: bool) -> EvalLine<'static> {
    EvalLine { step, steps: 400, loss, whole, sets: &[] }
}

fn format_line(line: &StepLine) -> String {
    fitted(line, usize::MAX)
}

fn piped() -> (Progress, Log) {
    let log = Log::default();
    (Progress::to_writer(Box::new(log.clone())), log)
}

#[test]
fn a_line_has_all_fields_in_their_order() {
    assert_eq!(
        format_line(&LINE),
        "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s  \
         8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap 63%  skipped 0  eta 0:42"
    );
}

#[test]
fn a_line_says_what_became_of_updates_ahead_of_the_decision() {
    let line = format_line(&StepLine { epoch: Some(0.3), speculation: Some([110, 7, 3]), ..LINE });
    assert!(line.starts_with("step   120/400  epoch 0.30  loss 2.4312  norm"), "{line}");
    let end = "skipped 0  ahead 110 committed 7 redone 3 not tried  eta 0:42";
    assert!(line.ends_with(end), "{line}");
}

#[test]
fn a_terminal_gets_the_fields_that_fit_it() {
    let line = |width| fitted(&LINE, width);
    assert_eq!(line(149), format_line(&LINE));
    assert_eq!(
        line(140),
        "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s  \
         8.1 GFLOP/s (model)  mem 41.2/256 MiB  eta 0:42"
    );
    assert_eq!(
        line(80),
        "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  12.3 ktok/s  eta 0:42"
    );
    assert_eq!([line(30), line(7)], ["step   120/400  loss 2.4312", "step   "]);
    let skipped = fitted(&StepLine { skipped: 3, ..LINE }, 60);
    assert_eq!(skipped, "step   120/400  loss 2.4312  skipped 3  eta 0:42");
    for width in 0..200 {
        let shown = status(ProgressCount { done: 120, of: 400 }, width, |left| fitted(&LINE, left));
        assert!(shown.chars().count() <= width && line(width).len() <= width, "{shown}");
    }
    let shown = status(ProgressCount { done: 120, of: 400 }, 80, |left| fitted(&LINE, left));
    assert_eq!(
        shown,
        "███░░░░░░░  30%  step   120/400  loss 2.4312  norm 0.83  12.3 ktok/s  eta 0:42"
    );
}

#[test]
fn a_broken_loss_is_seen_and_missing_values_are_dashes() {
    let line = StepLine {
        loss: f32::NAN,
        grad_norm: f32::INFINITY,
        loss_scale: None,
        tokens_per_second: f64::NAN,
        overlap: None,
        eta_seconds: f64::INFINITY,
        ..LINE
    };
    assert_eq!(
        format_line(&line),
        "step   120/400  loss nan  norm inf  lr 1.9e-3  scale -  nan tok/s  \
         8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap -  skipped 0  eta -"
    );
}

#[test]
fn rates_take_the_prefix_that_leaves_three_digits() {
    for (value, text) in [
        (0.0, "0.0 "),
        (999.9, "999.9 "),
        (999.96, "1.0 k"),
        (1.25e6, "1.2 M"),
        (9.8e12, "9.8 T"),
        (2.1e15, "2.1 P"),
        (5e19, "50000.0 P"),
    ] {
        assert_eq!(si(value), text);
    }
}

#[test]
fn memory_is_in_the_unit_of_the_limit() {
    assert_eq!(memory(24_589_934_592, 34_037_983_641), "22.9/31.7 GiB");
    assert_eq!(memory(512 << 20, 1 << 30), "0.5/1 GiB");
    assert_eq!(memory(42 << 20, 1 << 30), "42 MiB/1 GiB");
    assert_eq!(memory(1536, 1 << 16), "1.5/64 KiB");
    assert_eq!(memory(0, 0), "0/0 B");
}

#[test]
fn times_have_hours_only_when_needed() {
    for (seconds, text) in [
        (0.0, "0:00"),
        (59.6, "1:00"),
        (3599.0, "59:59"),
        (93_784.0, "26:03:04"),
        (f64::NAN, "-"),
        (-1.0, "-"),
    ] {
        assert_eq!(clock(seconds), text);
    }
}

#[test]
fn small_and_large_norms_keep_their_digits() {
    for (value, text) in [(0.0, "0.00"), (0.004, "4.0e-3"), (99.5, "99.50"), (3e7, "3.0e7")] {
        assert_eq!(norm(value), text);
    }
}

#[test]
fn plain_lines_are_at_even_distances_whatever_the_time() {
    let now = Instant::now();
    for (from, to, all, shown) in [
        (1, 6, 6, vec![1, 2, 3, 4, 5, 6]),
        (1, 21, 1000, vec![1, 5, 10, 15, 20, 21]),
        (237, 250, 1500, vec![237, 240, 250]),
        (1, 301, 1_000_000, vec![1, 100, 200, 300, 301]),
        (995, 1001, 1001, vec![995, 1000, 1001]),
    ] {
        let (mut progress, log) = piped();
        for step in from..=to {
            let now = now + Duration::from_millis(step * step);
            progress.step_at(&StepLine { step, steps: all, ..LINE }, now);
        }
        progress.finish();
        progress.finish();
        assert_eq!(steps(&log), shown, "{from} to {to} of {all}");
        assert!(log.0.lock().unwrap().iter().all(|line| line.ends_with('\n')));
    }
}

#[test]
fn a_run_has_at_most_two_hundred_lines_until_they_are_a_hundred_steps_apart() {
    for (steps, distance) in [(1, 1), (200, 1), (201, 2), (400, 2), (1500, 10), (20_000, 100)] {
        assert_eq!(line_distance(steps), distance, "{steps}");
    }
    assert_eq!(line_distance(3_000_000), 100);
    assert!((101..10_000).all(|steps| (80..=200).contains(&(steps / line_distance(steps)))));
}

#[test]
fn a_plain_line_has_means_of_the_steps_since_the_last_and_only_fields_with_a_value() {
    let (mut progress, log) = piped();
    let bare = StepLine { loss_scale: None, overlap: None, steps: 400, ..LINE };
    let step = |step, loss, tokens_per_second| {
        let flops_per_second = 1e6 * tokens_per_second;
        StepLine { step, loss, tokens_per_second, flops_per_second, ..bare }
    };
    for line in [step(1, 4.0, 100.0), step(2, 3.0, 100.0), step(3, 2.0, 300.0)] {
        progress.step(&line);
    }
    progress.step(&StepLine { skipped: 1, ..step(4, 1.0, 100.0) });
    assert_eq!(
        *log.0.lock().unwrap(),
        [
            "step     1/400  loss 4.0000  norm 0.83  lr 1.9e-3  100.0 tok/s  100.0 MFLOP/s (model)  \
             mem 41.2/256 MiB  eta 0:42\n",
            "step     2/400  loss 3.0000  norm 0.83  lr 1.9e-3  100.0 tok/s  100.0 MFLOP/s (model)  \
             mem 41.2/256 MiB  eta 0:42\n",
            // Two steps of as many tokens, one three times as fast.
            "step     4/400  loss 1.5000  norm 0.83  lr 1.9e-3  150.0 tok/s  150.0 MFLOP/s (model)  \
             mem 41.2/256 MiB  skipped 1  eta 0:42\n",
        ]
    );
    progress.step(&StepLine { loss: f32::NAN, ..step(5, 1.0, 100.0) });
    progress.step(&step(6, 1.0, 100.0));
    let lines = log.0.lock().unwrap();
    assert!(lines.last().unwrap().contains("loss nan"), "a broken loss is seen: {lines:?}");
}

#[test]
fn an_evaluation_is_one_line_and_changes_no_distance() {
    let ((mut progress, log), now) = (piped(), Instant::now());
    for step in 1..=11 {
        progress.step_at(&StepLine { step, steps: 1000, ..LINE }, now);
        if step == 8 {
            let steps = ProgressCount { done: 8, of: 1000 };
            for done in 1..=100 {
                let now = now + Duration::from_secs(done);
                progress.evaluating_at(steps, ProgressCount { done, of: 200 }, now);
            }
            progress.eval(&EvalLine { steps: 1000, ..evaluation(8, 2.5, false) }, "");
        }
    }
    progress.finish();
    assert_eq!(steps(&log), [1, 5, 8, 10, 11]);
    assert_eq!(log.0.lock().unwrap()[2], "eval     8/1000  loss 2.5000  over a part\n");
}

#[test]
fn nothing_is_shown_when_quiet_and_a_closed_stream_is_ignored() {
    struct ClosedStream;
    impl Write for ClosedStream {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }
    let closed = Progress::to_writer(Box::new(ClosedStream));
    for mut progress in [closed, Progress::on_stderr(true)] {
        progress.step(&LINE);
        progress.eval(&evaluation(120, f64::NAN, false), "");
        progress.evaluating(ProgressCount { done: 120, of: 400 }, ProgressCount { done: 1, of: 2 });
        progress.message("text");
        progress.finish();
    }
}
