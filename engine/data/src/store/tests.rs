use super::super::data_files::tests::folder;
use super::*;
use std::fs;
use std::time::Duration;
use tempfile::TempDir;

fn store(folder: &TempDir, width: usize, names: &[String]) -> Store {
    let mut store = Store::new(width);
    for name in names {
        let path = folder.path().join(name);
        let file = TokenFile::new(&path, File::open(&path).unwrap()).unwrap();
        // Other tests in the same process share the limit.
        let closes = store.num_segments() >= 20;
        store.push_file(if closes { file.closed() } else { file });
    }
    store
}

fn tokens(store: &Store, range: Range<usize>) -> Result<Vec<u32>, ReadError> {
    let mut all = Vec::new();
    store.each(range, |i, token| {
        assert_eq!(i, all.len());
        all.push(token);
    })?;
    Ok(all)
}

#[test]
fn tokens_of_many_files_are_one_row() {
    let folder = tempfile::tempdir().unwrap();
    let (mut all, mut names) = (Vec::new(), Vec::new());
    for i in 0..200 {
        let tokens: Vec<u16> = (0..i % 7).map(|k| (i * 7 + k) as u16).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let name = format!("{i}");
        fs::write(folder.path().join(&name), bytes).unwrap();
        names.push(name);
        all.extend(tokens.into_iter().map(u32::from));
    }
    let store = store(&folder, 2, &names);
    assert_eq!(store.num_tokens(), all.len());
    for start in 0..all.len() {
        for len in [0, 1, 2, 5, 9, 30] {
            let range = start..(start + len).min(all.len());
            assert_eq!(tokens(&store, range.clone()).unwrap(), all[range]);
        }
    }
    assert_eq!(tokens(&store, 0..all.len()).unwrap(), all);
}

#[test]
fn each_width_is_little_endian_and_blocks_leave_no_token_out() {
    let many: Vec<u32> = (0..3 * AT_ONCE as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    for width in [1, 2, 4] {
        let bytes: Vec<u8> =
            many.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()).collect();
        let folder = folder(&[("a", &bytes)]);
        let mut store = store(&folder, width, &["a".into()]);
        store.push_bytes(&bytes[..40]);
        store.push_bytes(&bytes[40..48]);
        let mask = u32::MAX >> (32 - 8 * width);
        let mut expected: Vec<u32> = many.iter().map(|token| token & mask).collect();
        expected.extend_from_within(..48 / width);
        assert_eq!(tokens(&store, 0..expected.len()).unwrap(), expected, "{width}");
        assert_eq!(store.num_segments(), 2);
    }
}

/// Applies `change` to a file in use, which a run keeps open or opens for each read.
fn changed(kept: bool, change: impl Fn(&Path)) -> Result<Vec<u32>, ReadError> {
    let folder = folder(&[("t.bin", &[1; 100])]);
    let mut store = store(&folder, 2, &["t.bin".into()]);
    assert_eq!(tokens(&store, 10..12).unwrap(), [257, 257]);
    if let SegmentData::File(file) = &mut store.segments[0].place
        && !kept
    {
        file.file = None;
    }
    let path = folder.path().join("t.bin");
    change(&path);
    let read = tokens(&store, 10..12);
    if let Err(unread) = &read {
        assert_eq!((&unread.path, unread.offset), (&path, 20));
    }
    read
}

#[test]
fn a_file_that_changes_under_a_run_is_an_error_that_says_how() {
    let grow = |path: &Path| fs::write(path, [1; 102]).unwrap();
    let shrink = |path: &Path| File::options().write(true).open(path).unwrap().set_len(21).unwrap();
    let rewrite = |path: &Path| {
        fs::write(path, [1; 100]).unwrap();
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(7)).unwrap();
    };
    let replace = |path: &Path| {
        fs::write(path.with_extension("new"), [2; 100]).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    };
    for kept in [true, false] {
        let why = |change: &dyn Fn(&Path)| changed(kept, change).unwrap_err().why;
        assert_eq!(why(&grow), "it has 102 bytes now, and had 100");
        assert_eq!(why(&shrink), "it has 21 bytes now, and had 100");
        assert_eq!(why(&rewrite), "it was written to");
    }
    let gone = |path: &Path| fs::remove_file(path).unwrap();
    let link = |path: &Path| fs::hard_link(path, path.with_extension("link")).unwrap();
    let put_back = |path: &Path| {
        let file = File::options().write(true).open(path).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&[2; 100], 0).unwrap();
        file.set_modified(before).unwrap();
    };
    // These changes may or may not have changed the bytes, so the bytes are compared.
    for change in [&link as &dyn Fn(&Path), &replace, &gone, &put_back] {
        let why = changed(true, change).unwrap_err().why;
        assert_eq!(why, "it was written to, or has another link, owner or mode");
    }
    assert_eq!(changed(false, put_back).unwrap_err().why, changed(true, link).unwrap_err().why);
    let unread = changed(false, replace).unwrap_err();
    assert!(
        unread.to_string().contains("t.bin: cannot read the tokens at byte 20: another file"),
        "{unread}"
    );
    assert_eq!(changed(false, gone).unwrap_err().why, "it is gone");
}

#[test]
fn a_token_above_what_a_check_has_found_is_an_error() {
    let folder = folder(&[("t.bin", &[1, 0, 9, 0, 2, 0])]);
    let mut store = store(&folder, 2, &["t.bin".into()]);
    store.bound(&[9]);
    assert_eq!(tokens(&store, 0..3).unwrap(), [1, 9, 2]);
    store.bound(&[8]);
    assert_eq!(tokens(&store, 2..3).unwrap(), [2]);
    let unread = tokens(&store, 1..3).unwrap_err();
    assert!(unread.offset == 2 && unread.why.contains("token 9"), "{unread}");
}
