//! Tokens in the order of the files: checks, splits, samples.

use super::data_files::tests::{TREE, folder, path};
use super::*;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};

/// Opens `train` as bytes in windows of 4; a quarter is for validation.
fn open(train: &str) -> Result<Corpus, DataError> {
    Corpus::open(train, None, DataFormat::Bytes, 0.25, 256, 4)
}

impl Corpus {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let width = self.store.width;
        let push = |_, token: u32| bytes.extend_from_slice(&token.to_le_bytes()[..width]);
        self.store.each(0..self.num_tokens(), push).unwrap();
        bytes
    }

    pub(super) fn token(&self, i: usize) -> u32 {
        let mut found = None;
        self.store.each(i..i + 1, |_, token| found = Some(token)).unwrap();
        found.unwrap()
    }
}

fn error(result: Result<Corpus, DataError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_directory_gives_its_text_in_sorted_path_order() {
    let folder = folder(&TREE);
    symlink(folder.path().join("b.txt"), folder.path().join("link.txt")).unwrap();
    symlink(folder.path(), folder.path().join("loop")).unwrap();
    let data = Corpus::open(&path(&folder, ""), None, DataFormat::Bytes, 0.5, 256, 3).unwrap();
    assert_eq!(data.bytes(), b"ddzzaabb");
    assert_eq!(
        data.describe(),
        "4 files, 8 B, 8 tokens: 4 to train, 4 for validation; 1 file (2 B) left out"
    );
}

#[test]
fn a_directory_leaves_out_what_is_no_text_and_a_named_file_may_be_binary() {
    let binary = vec![0xff; 100];
    let folder = folder(&[("binary.txt", &binary), ("zeros.txt", b"\0\0\0")]);
    let message = error(open(&path(&folder, "")));
    assert!(message.contains("1 file is left out") && message.contains("not UTF-8"), "{message}");
    assert_eq!(open(&path(&folder, "binary.txt")).unwrap().bytes(), binary);
    // A text longer than the examined head, with a character across its end, and a text with a late
    // fault.
    let long = [&b"x".repeat((64 << 10) - 1), "é and more".as_bytes()].concat();
    fs::write(folder.path().join("text.json"), &long).unwrap();
    let data = open(&path(&folder, "")).unwrap();
    assert_eq!(data.bytes(), long);
    assert!(data.describe().ends_with("; 1 file (100 B) left out; 1 binary file passed over"));
}

#[test]
fn a_directory_gives_only_bin_files_for_wide_tokens() {
    let folder = folder(&[("a.txt", b"aa"), ("b/tokens.bin", b"12345678"), ("c.idx", b"cc")]);
    let data = Corpus::open(&path(&folder, ""), None, DataFormat::U16, 0.5, 70_000, 1);
    assert_eq!(data.unwrap().bytes(), b"12345678");
}

#[test]
fn what_gives_no_text_is_refused_with_key_absolute_path_and_remedy() {
    let folder = folder(&[("empty.txt", b""), ("sub/.hidden", b"x"), ("none", b"")]);
    let root = folder.path().to_str().unwrap();
    for (name, text) in [
        ("missing.txt", "missing.txt: no such file"),
        ("*.md", "*.md: no file matches"),
        ("missing/*", "missing/*: no file matches"),
        ("empty.txt", "empty.txt: empty"),
        ("e*", "e*: empty"),
        ("sub", "sub: no usable file"),
        ("empty.txt/x", "empty.txt/x: cannot read it: Not a directory"),
    ] {
        let message = error(open(&path(&folder, name)));
        assert!(message.starts_with(&format!("data.train: {root}/{text}")), "{message}");
    }
    assert!(error(open("")).contains("the key is empty"));
    assert!(error(open("/dev/null")).contains("/dev/null: neither a regular file"));
    assert!(error(open("missing-é")).contains(env!("CARGO_MANIFEST_DIR")));
    let train = folder.path().join("train.txt");
    fs::write(&train, "0123456789").unwrap();
    let (train, missing) = (train.to_str().unwrap(), path(&folder, "missing"));
    let result = Corpus::open(train, Some(&missing), DataFormat::Bytes, 0.1, 256, 4);
    assert!(error(result).starts_with(&format!("data.validation: {missing}: no such file")));
}

#[test]
fn a_file_without_read_permission_is_an_error_also_inside_a_directory() {
    let folder = folder(&[("a.txt", b"0123456789"), ("b.txt", b"0123456789")]);
    let locked = folder.path().join("b.txt");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
    if File::open(&locked).is_ok() {
        assert!(std::env::var_os(ROOTLESS).is_none(), "root reads it without the right to");
        without_roots_rights("a_file_without_read_permission_is_an_error");
        return;
    }
    for name in ["b.txt", ""] {
        let message = error(open(&path(&folder, name)));
        assert!(message.contains("b.txt: cannot read it: Permission denied"), "{message}");
    }
    println!("{REFUSED}");
}

/// Set for a test whose root user has dropped its privileges.
const ROOTLESS: &str = "ONEBOX_TEST_WITHOUT_ROOTS_RIGHTS";
/// Output of a test if the system has refused an access.
const REFUSED: &str = "the system refused it";

/// Runs a test of this module in a child process whose root reads no more than a normal user.
fn without_roots_rights(test: &str) {
    let rights = "-dac_override,-dac_read_search";
    let child = std::process::Command::new("setpriv")
        .args([format!("--bounding-set={rights}"), format!("--inh-caps={rights}")])
        .arg(std::env::current_exe().unwrap())
        .args(["--nocapture", &format!("tests::{test}")])
        .env(ROOTLESS, "1")
        .output()
        .unwrap_or_else(|e| panic!("setpriv (package util-linux): {e}"));
    let message = String::from_utf8_lossy(&child.stdout);
    let refused = child.status.success() && message.contains(REFUSED);
    assert!(refused, "{message}{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn tokens_are_little_endian_whole_and_below_the_vocabulary() {
    let folder = folder(&[
        ("u16.bin", &[1, 0, 0, 1, 2, 0, 3, 0, 4, 0, 5, 0]),
        ("u32.bin", &[1, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]),
        ("odd.bin", &[1, 0, 0]),
    ]);
    let open =
        |name, format, vocab| Corpus::open(&path(&folder, name), None, format, 0.5, vocab, 1);
    let data = open("u16.bin", DataFormat::U16, 257).unwrap();
    assert_eq!((0..6).map(|i| data.token(i)).collect::<Vec<_>>(), [1, 256, 2, 3, 4, 5]);
    let data = open("u32.bin", DataFormat::U32, 257).unwrap();
    assert_eq!((0..4).map(|i| data.token(i)).collect::<Vec<_>>(), [1, 256, 2, 3]);
    let message = error(open("u16.bin", DataFormat::U16, 256));
    assert!(
        message.contains("u16.bin: token 1, at byte 2, is 256, but model.vocab is 256"),
        "{message}"
    );
    let message = error(open("u32.bin", DataFormat::U32, 3));
    assert!(
        message.contains("u32.bin: token 1, at byte 4, is 256, but model.vocab is 3"),
        "{message}"
    );
    let message = error(open("odd.bin", DataFormat::U16, 9));
    assert!(message.contains("3 bytes are no whole number of 2-byte tokens"), "{message}");
    assert!(error(open("u16.bin", DataFormat::Bytes, 5)).contains("token 10, at byte 10, is 5"));
}

#[test]
fn a_part_shorter_than_a_window_is_refused_with_the_arithmetic() {
    let folder = folder(&[("train", b"0123456789"), ("long", b"01234567890123456789")]);
    let open = |validation: Option<&str>, fraction, seq_len| {
        let validation = validation.map(|name| path(&folder, name));
        let train = path(&folder, "train");
        Corpus::open(&train, validation.as_deref(), DataFormat::Bytes, fraction, 256, seq_len)
    };
    let message = error(open(None, 0.1, 9));
    assert!(
        message.contains("training part has 9 tokens (10 in all - 1 in the other"),
        "{message}"
    );
    assert!(
        message.contains("needs seq_len + 1 = 10; lower model.seq_len to at most 8"),
        "{message}"
    );
    let message = error(open(None, 0.2, 2));
    assert!(
        message.contains("validation part has 2 tokens (10 in all - 8 in the other"),
        "{message}"
    );
    assert!(error(open(Some("long"), 0.1, 10)).starts_with("data.train"));
    assert!(open(Some("train"), 0.1, 9).is_ok());
    assert!(open(None, 0.5, 4).is_ok());
}

#[test]
fn samples_are_pure_cover_the_training_part_and_stay_inside_it() {
    let folder = folder(&[("t", b"0123456789abcdefghij")]);
    let data = open(&path(&folder, "t")).unwrap(); // 15 to train: starts 0..=10
    let starts: Vec<_> = (0..400).map(|i| data.sample(7, 1 + i / 20, i % 20)).collect();
    assert_eq!((starts.iter().min(), starts.iter().max()), (Some(&0), Some(&10)));
    assert!((0..11).all(|start| starts.contains(&start)));
    assert_eq!(starts[33], data.sample(7, 2, 13));
    assert_ne!(starts, (0..400).map(|i| data.sample(8, 1 + i / 20, i % 20)).collect::<Vec<_>>());
}

#[test]
fn targets_are_the_next_tokens_of_the_training_part_only() {
    let folder = folder(&[("t", b"0123456789abcdefghij")]);
    let data = open(&path(&folder, "t")).unwrap();
    let (mut inputs, mut targets) = ([9; 4], [9; 4]);
    data.fill_train(10, &mut inputs, &mut targets).unwrap();
    assert_eq!((inputs, targets), (b"abcd".map(i32::from), b"bcde".map(i32::from)));
}

#[test]
fn evaluation_predicts_every_validation_token_but_the_first_exactly_once() {
    let folder = folder(&[("t", b"0123456789"), ("v", b"abcdefghijk")]);
    let (train, validation) = (path(&folder, "t"), path(&folder, "v"));
    for seq_len in 1..=9 {
        let data =
            Corpus::open(&train, Some(&validation), DataFormat::Bytes, 0.1, 256, seq_len).unwrap();
        let (mut seen, mut windows) = (Vec::new(), 0);
        loop {
            let (mut inputs, mut targets) = (vec![9; seq_len], vec![9; seq_len]);
            data.fill_eval(windows, &mut inputs, &mut targets).unwrap();
            for (&input, &target) in inputs.iter().zip(&targets) {
                let padded = (input, target) == (0, device::PADDING);
                assert!(padded || target == input + 1, "{input} {target}");
                seen.extend((!padded).then_some(target as u8));
            }
            if targets.iter().all(|&target| target == device::PADDING) {
                break;
            }
            windows += 1;
        }
        assert_eq!(seen, b"bcdefghijk");
        assert_eq!((windows, data.num_eval_targets(u64::MAX)), (data.num_eval_windows(), 10));
    }
}

#[test]
fn the_last_tenth_is_the_validation_set_by_default() {
    let text: Vec<u8> = (0..200).collect();
    let folder = folder(&[("t", &text)]);
    let data = Corpus::open(&path(&folder, "t"), None, DataFormat::Bytes, 0.1, 256, 4).unwrap();
    assert_eq!((data.split, data.num_eval_targets(u64::MAX)), (180, 19));
    assert_eq!(data.describe(), "1 file, 200 B, 200 tokens: 180 to train, 20 for validation");
}

#[test]
fn windows_anywhere_in_a_file_are_its_tokens() {
    let tokens: Vec<u16> = (0..8 << 20).map(|i: u64| (i * i % 65_521) as u16).collect();
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let folder = folder(&[("t.bin", &bytes)]);
    let seq_len = 1000;
    let file = path(&folder, "t.bin");
    let data = Corpus::open(&file, None, DataFormat::U16, 0.1, 65_536, seq_len).unwrap();
    let windows = 3000;
    let (mut inputs, mut targets) = (vec![9; seq_len], vec![9; seq_len]);
    let mut spent = std::time::Duration::ZERO;
    for i in 0..windows {
        let place = data.sample(1, 1, i);
        let since = std::time::Instant::now();
        data.fill_train(place, &mut inputs, &mut targets).unwrap();
        spent += since.elapsed();
        let is = |got: &[i32], start: usize| {
            got.iter().zip(&tokens[start..]).all(|(got, token)| *got == i32::from(*token))
        };
        assert!(is(&inputs, place) && is(&targets, place + 1), "{place}");
    }
    let rate = (windows as usize * seq_len) as f64 / spent.as_secs_f64();
    println!("{:.0} million tokens a second by one thread", rate / 1e6);
}
