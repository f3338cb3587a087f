//! Runs a test's body in a child process that finds the fake libraries.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests")]

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// Runs `body` in a child of this test program, with `variables` set; `name` is the name of the
/// test. Returns the child's stderr, or `None` in the child itself.
pub(crate) fn in_child(
    name: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(),
) -> Option<String> {
    if std::env::var("FAKECUDA_TEST").is_ok_and(|running| running == name) {
        body();
        eprintln!("{name}: done");
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("FAKECUDA_TEST", name)
        .env("LD_LIBRARY_PATH", fake_cuda::library_folder())
        .envs(variables.iter().copied())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let hung = child.try_wait().unwrap().is_none();
    if hung {
        child.kill().unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!hung, "the child did not end:\n{text}");
    assert!(output.status.success(), "the child failed:\n{text}");
    assert!(text.contains(&format!("{name}: done")), "no test of this name ran in the child");
    Some(text)
}
