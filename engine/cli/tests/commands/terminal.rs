//! The view of a person at a terminal, drawn as a terminal draws it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Lines of a terminal that wraps them again when its width changes, and its cursor.
pub(crate) struct Screen {
    width: usize,
    lines: Vec<Vec<char>>,
    column: usize,
    wraps: bool,
    /// Texts that went beyond the last column and were wrapped.
    broken: Vec<String>,
    pub(crate) bytes: Vec<u8>,
    seen: usize,
}

impl Screen {
    fn new(width: usize) -> Self {
        let (lines, bytes, broken) = (vec![Vec::new()], Vec::new(), Vec::new());
        Self { width, lines, column: 0, wraps: true, broken, bytes, seen: 0 }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let text = String::from_utf8_lossy(&self.bytes).into_owned();
        // An incomplete line is read again with the rest.
        let whole = text.rfind('\n').map_or(0, |at| at + 1).max(self.seen);
        let new = text[self.seen..whole].to_owned();
        self.seen = whole;
        let mut rest = new.chars();
        while let Some(c) = rest.next() {
            match c {
                '\r' => self.column = self.column.saturating_sub(1) / self.width * self.width,
                '\n' => self.lines.push(Vec::new()),
                '\u{1b}' => {
                    // An escape sequence ends with its first letter.
                    let mut order = String::new();
                    for c in rest.by_ref().skip(1) {
                        order.push(c);
                        if c.is_ascii_alphabetic() {
                            break;
                        }
                    }
                    self.obey(&order);
                }
                c => self.put(c),
            }
            if c == '\n' {
                self.column = 0;
            }
        }
    }

    fn obey(&mut self, order: &str) {
        let column = self.column;
        match order {
            "J" => self.lines.last_mut().unwrap().truncate(column),
            "?7l" => self.wraps = false,
            "?7h" => self.wraps = true,
            order => assert!(order.ends_with('m'), "no such order here: {order}"),
        }
    }

    fn put(&mut self, c: char) {
        let at = match self.wraps {
            true => self.column,
            false => self.column.min(self.width - 1),
        };
        let line = self.lines.last_mut().unwrap();
        line.resize(line.len().max(at + 1), ' ');
        line[at] = c;
        if at >= self.width {
            self.broken.push(line.iter().collect());
        }
        self.column = at + 1;
    }

    fn text(&self) -> Vec<String> {
        self.lines
            .iter()
            .map(|line| line.iter().collect::<String>().trim_end().to_owned())
            .collect()
    }
}

/// `onebox` on its own terminal.
pub(crate) struct Terminal {
    child: Child,
    pub(crate) keys: ChildStdin,
    screen: Arc<Mutex<Screen>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Terminal {
    /// The first line names the terminal.
    pub(crate) fn start(folder: &Folder, width: usize, variables: &[&str], args: &str) -> Self {
        let line = format!(
            "stty cols {width} rows 24; tty; exec env --default-signal {} {} {args}",
            variables.join(" "),
            env!("CARGO_BIN_EXE_onebox")
        );
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(folder.path("."));
        command.env("TERM", "xterm").env_remove("NO_COLOR").stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let screen = Arc::new(Mutex::new(Screen::new(width)));
        let (drawn, mut out) = (Arc::clone(&screen), child.stdout.take().unwrap());
        let reader = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = out.read(&mut piece) {
                drawn.lock().unwrap().take(&piece[..n]);
            }
        });
        let keys = child.stdin.take().unwrap();
        Self { child, keys, screen, reader: Some(reader) }
    }

    pub(crate) fn wait_for(&self, what: &str, came: impl Fn(&Screen) -> bool) {
        let since = Instant::now();
        while !came(&self.screen.lock().unwrap()) {
            let is_over = since.elapsed() > Duration::from_secs(180);
            assert!(
                !is_over,
                "not within three minutes: {what}:\n{:?}",
                self.screen.lock().unwrap().text()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for `text` in a line before the last line, which may still change.
    pub(crate) fn wait_for_line(&self, text: &str) {
        self.wait_for(text, |screen| screen.text().iter().rev().skip(1).any(|l| l.contains(text)));
    }

    fn resize(&self, width: usize) {
        let mut screen = self.screen.lock().unwrap();
        let terminal = screen.text()[0].clone();
        let columns = width.to_string();
        let stty = Command::new("stty").args(["-F", &terminal, "cols", &columns]).status();
        assert!(stty.unwrap().success(), "{terminal}");
        screen.width = width;
    }

    pub(crate) fn press_ctrl_c(&mut self) {
        self.keys.write_all(b"\x03").unwrap();
    }

    /// Exit code, and all lines below the first.
    pub(crate) fn end(mut self) -> (i32, Vec<String>, Screen) {
        let code = self.child.wait().unwrap().code().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let mut screen = std::mem::replace(&mut *self.screen.lock().unwrap(), Screen::new(80));
        screen.take(b"\n");
        (code, screen.text().split_off(1), screen)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Whether a terminal can be opened; if not, that is a failure in continuous integration.
pub(crate) fn has_terminals() -> bool {
    let mut tried = Command::new("script");
    tried.args(["-qec", "tty", "/dev/null"]).stdin(Stdio::null());
    let works = tried.output().is_ok_and(|output| output.stdout.starts_with(b"/dev/"));
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(works || !in_ci, "no `script` that works here");
    works
}

const LONG: &str = "--set train.steps=1000000 --set schedule.kind=Constant --set sample.tokens=0";

#[test]
fn a_terminal_keeps_whole_lines_and_no_status_is_left() {
    if !has_terminals() {
        return;
    }
    for width in [80, 140] {
        let folder = Folder::new();
        let args =
            "train tiny.ron --run-dir run --set train.checkpoint_every=2 --set sample.tokens=0";
        let (code, lines, screen) = Terminal::start(&folder, width, &[], args).end();
        assert_eq!(code, 0, "{lines:#?}");
        for step in 1..=4 {
            let start = format!("step     {step}/4  ");
            let is_whole = |line: &String| line.starts_with(&start) && line.contains("  loss ");
            assert!(lines.iter().any(is_whole), "{start}: {lines:#?}");
        }
        for step in [2, 4] {
            let [eval, saved] =
                [format!("eval     {step}/4  loss "), format!("checkpoint of step {step} saved: ")];
            assert!(lines.iter().any(|line| line.starts_with(&eval)), "{lines:#?}");
            assert!(lines.iter().any(|line| line.starts_with(&saved)), "{lines:#?}");
        }
        let broken =
            screen.broken.iter().find(|line| line.starts_with("step") || line.contains('%'));
        assert_eq!(broken, None);
        assert!(
            !lines.iter().any(|line| line.contains('░') || line.contains("  100%")),
            "{lines:#?}"
        );
    }
}

#[test]
fn a_window_that_changes_loses_and_garbles_no_line() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    let args = format!("train tiny.ron --run-dir run {LONG} --set train.eval_every=40");
    let mut terminal = Terminal::start(&folder, 140, &[], &args);
    terminal.wait_for_line("eval    40/");
    for (width, eval) in [(50, "80"), (100, "120"), (30, "160"), (140, "200")] {
        terminal.resize(width);
        terminal.wait_for_line(&format!("{eval}/1000000  loss"));
    }
    terminal.press_ctrl_c();
    let (code, lines, screen) = terminal.end();
    assert_eq!(code, 75, "{lines:#?}");
    // The cursor waits at the status's start: a narrower window wraps the text before.
    let after_status = screen.bytes.windows(6).filter(|at| at.starts_with(b"\x1b[?7h"));
    assert!(after_status.clone().count() > 10 && after_status.into_iter().all(|at| at[5] == b'\r'));
    let first = lines.iter().position(|line| line.starts_with("step")).unwrap();
    let last = lines.iter().position(|line| line.is_empty()).unwrap();
    for line in &lines[first..last] {
        let whole = ["step ", "eval ", "checkpoint of step ", "Stopping after", "^CStopping"];
        assert!(whole.iter().any(|start| line.starts_with(start)), "{line:?} in {lines:#?}");
        assert!(!line.contains('░'), "{line:?}");
    }
    let evals = folder.metrics("run").iter().filter(|line| line["kind"] == "eval").count();
    let shown = lines.iter().filter(|line| line.starts_with("eval ")).count();
    assert_eq!(shown, evals, "{lines:#?}");
}

#[test]
fn a_ctrl_c_gets_one_message_and_the_end_says_how_far_it_came() {
    if !has_terminals() {
        return;
    }
    let saving = "Stopping after this step and saving. Press Ctrl-C again to quit now.";
    let weights =
        "Stopping after this step and writing the weights; this run saves no checkpoints.";
    let none = "--set train.checkpoint_overhead=None";
    for (more, expected) in [("", saving), (none, weights)] {
        let folder = Folder::new();
        let args = format!("train tiny.ron --run-dir run {LONG} --set train.eval_every=0 {more}");
        let mut terminal = Terminal::start(&folder, 80, &[], &args);
        terminal.wait_for_line("step     3/");
        terminal.press_ctrl_c();
        let (code, lines, _) = terminal.end();
        assert_eq!(code, 75, "{lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.contains("Stopping")).count(), 1, "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains(expected)), "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains('░')), "{lines:#?}");
        let steps = folder.metrics("run").iter().filter(|line| line["kind"] == "step").count();
        let done = format!("interrupted after {steps} of 1000000 steps in ");
        assert!(lines.iter().any(|line| line.starts_with(&done)), "{done}: {lines:#?}");
    }
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_gets_the_lines_of_a_pipe() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    let args = "train tiny.ron --run-dir run --set train.checkpoint_every=2";
    let (code, lines, screen) = Terminal::start(&folder, 80, &["TERM=dumb"], args).end();
    assert_eq!(code, 0, "{lines:#?}");
    assert!(!screen.bytes.contains(&b'\x1b'), "{lines:#?}");
    for start in ["step     1/4", "step     4/4", "eval     2/4", "checkpoint of step 4 saved"] {
        assert!(lines.iter().any(|line| line.starts_with(start)), "{start}: {lines:#?}");
    }
    // A file takes the place of the checkpoint folder.
    std::fs::create_dir(folder.path("full")).unwrap();
    std::fs::write(folder.path("full/checkpoints"), "").unwrap();
    let args = "train tiny.ron --run-dir full --set train.checkpoint_every=2";
    let (code, lines, _) = Terminal::start(&folder, 80, &["TERM=dumb"], args).end();
    assert_eq!(code, 83, "{lines:#?}");
    let not = "checkpoint of step 4 NOT SAVED: ";
    assert!(lines.iter().any(|line| line.starts_with(not)), "{lines:#?}");
}

/// Whether a text sets colours: `ESC [`, numbers, `m`.
fn has_colours(bytes: &str) -> bool {
    let is_number = |c: char| c.is_ascii_digit() || c == ';';
    bytes.split("\u{1b}[").skip(1).any(|rest| rest.trim_start_matches(is_number).starts_with('m'))
}

#[test]
fn colours_are_for_terminals_that_want_them_and_hide_nothing() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    let whole = folder.train("run", &["-q", "--set", "train.checkpoint_every=4"]).ok();
    assert!(!whole.stderr.contains('\u{1b}'), "{}", whole.stderr);
    let (red, green) = ("\u{1b}[1m\u{1b}[31m", "\u{1b}[32m");
    for (args, painted) in [
        ("plan none.ron", format!("{red}error:\u{1b}[0m ")),
        ("plan tiny.ron", format!("{green}it fits\u{1b}[0m")),
        ("plan tiny.ron --set device.memory=1MiB", format!("{red}it does not fit\u{1b}[0m")),
        ("checkpoint verify run", format!(": {green}whole\u{1b}[0m")),
        ("doctor", format!("{green}ok\u{1b}[0m    host memory")),
    ] {
        let shown = |variables: &[&str]| {
            let (_, _, screen) = Terminal::start(&folder, 120, variables, args).end();
            (String::from_utf8_lossy(&screen.bytes).into_owned(), screen.text())
        };
        let (bytes, lines) = shown(&[]);
        assert!(bytes.contains(&painted), "{painted:?}: {bytes:?}");
        for variable in ["NO_COLOR=1", "TERM=dumb"] {
            let (bytes, plain) = shown(&[variable]);
            // On a busy machine a terminal with a cursor shows a line of progress.
            let hidden = variable == "TERM=dumb" && bytes.contains('\u{1b}');
            assert!(!hidden && !has_colours(&bytes), "{variable}: {bytes:?}");
            // Numbers of free memory vary.
            let letters =
                |lines: &[String]| lines.concat().replace(|c: char| !c.is_alphabetic(), "");
            assert_eq!(letters(&plain[1..]), letters(&lines[1..]));
        }
        let args: Vec<&str> = args.split(' ').collect();
        let piped = folder.onebox(&args);
        assert!(!(piped.stdout + &piped.stderr).contains('\u{1b}'), "{args:?}");
    }
}

#[test]
fn a_long_check_of_tokens_shows_how_far_it_is_until_a_ctrl_c() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    // A sparse file of zeros that takes hours to read.
    std::fs::File::create(folder.path("tokens.bin")).unwrap().set_len(1 << 42).unwrap();
    let args = "train tiny.ron --run-dir run --set data.train=tokens.bin --set data.format=U16";
    let mut terminal = Terminal::start(&folder, 100, &[], args);
    let shows = |text: &'static str| {
        move |screen: &Screen| String::from_utf8_lossy(&screen.bytes).contains(text)
    };
    terminal.wait_for("a status", shows("0%  checking data  "));
    terminal.wait_for("its end", shows(" of 4.00 TiB  "));
    terminal.press_ctrl_c();
    let (code, lines, _) = terminal.end();
    assert_eq!(code, 75, "{lines:#?}");
    let is_interrupted =
        lines.iter().any(|line| line.contains("interrupted before the first step"));
    assert!(is_interrupted && !lines.iter().any(|line| line.contains('░')), "{lines:#?}");
    assert!(!folder.path("run").exists());
}

/// The commands take far longer than the second after which their progress is shown.
#[test]
fn long_predictions_show_how_far_they_are() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    let config = format!("{}/../../configs/dgx2-70b.ron", env!("CARGO_MANIFEST_DIR"));
    let search = format!("plan --search {config}");
    let simulate = format!("simulate {config} --set batch.global=16384");
    for (args, shown) in [(search, " of "), (simulate, "simulating the step  0:0")] {
        let mut terminal = Terminal::start(&folder, 100, &[], &args);
        terminal.wait_for(shown, |screen| {
            String::from_utf8_lossy(&screen.bytes).lines().any(|line| line.contains(shown))
        });
        terminal.press_ctrl_c();
        let (code, lines, _) = terminal.end();
        assert_eq!(code, 130, "{lines:#?}");
    }
}
