use super::super::origins::RowUnit;
use super::super::progress::Silence;
use super::super::store::{Store, TokenFile};
use super::super::token_cache::Cache;
use super::*;
use files::foreign_text::is_line;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/containers").join(name)
}

/// The text of a packed file, and what a number of a row counts.
fn unpacked(
    path: &Path,
    cache: &Cache,
    format: &DataFormat,
) -> Result<Option<(String, RowUnit)>, String> {
    let file = File::open(path).unwrap();
    let head = fs::read(path).unwrap();
    let head = &head[..head.len().min(HEAD as usize)];
    let found = Container::of(path, head, &file, format).map_err(|error| error.to_string())?;
    let Some((container, _)) = found else { return Ok(None) };
    let source = TokenFile::new(path, file).unwrap();
    let mut store = Store::new(1);
    let copy = cache.unpacked(&source, container, &mut store, &Silence);
    let copy = copy.map_err(|problem| problem.to_string())?;
    assert_eq!(copy.path, path);
    let mut text = vec![0; copy.stamp.bytes as usize];
    copy.closed().read(0, &mut text).unwrap();
    Ok(Some((String::from_utf8(text).unwrap(), container.unit())))
}

fn cache() -> (TempDir, Cache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache { folder: Some(folder.path().join("c")), read_only: false };
    (folder, cache)
}

/// Names of the files in the cache folder.
fn kept(cache: &Cache) -> Vec<String> {
    let Ok(all) = fs::read_dir(cache.folder.as_ref().unwrap()) else { return Vec::new() };
    let mut all: Vec<_> =
        all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

#[test]
fn rows_are_those_that_python_reads() {
    let (_folder, cache) = cache();
    let all: Value =
        serde_json::from_str(&fs::read_to_string(fixture("expected.json")).unwrap()).unwrap();
    let all = all.as_object().unwrap();
    assert_eq!(all.len(), 12);
    for (name, expected) in all {
        let format = if expected.is_array() { DataFormat::Chat } else { DataFormat::Auto };
        for cache in [&cache, &cache, &Cache::default()] {
            let (text, unit) = unpacked(&fixture(name), cache, &format).unwrap().unwrap();
            let Some(expected) = expected.as_array() else {
                assert_eq!((text.as_str(), unit), (expected.as_str().unwrap(), RowUnit::Line));
                continue;
            };
            let rows: Vec<Value> = text
                .lines()
                .filter(|line| !line.is_empty())
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
            assert_eq!(&rows, expected, "{name}");
            let has_lines = ["gz", "zst", "csv", "tsv"].iter().any(|kind| name.ends_with(kind));
            assert_eq!(unit == RowUnit::Line, has_lines, "{name}");
        }
    }
    // A list and a copy for each file.
    assert_eq!(kept(&cache).len(), 24);
    // Rows of a table have their lines in the copy: the header, and a text with a line break.
    let (text, _) = unpacked(&fixture("table.csv"), &cache, &DataFormat::Chat).unwrap().unwrap();
    let lines: Vec<bool> = text.lines().map(|line| !line.is_empty()).collect();
    assert_eq!(lines, [false, true, false, true, true, false, true, true]);
}

#[test]
fn a_copy_is_made_once_and_again_if_it_is_damaged() {
    let (folder, cache) = cache();
    let path = folder.path().join("a.jsonl.gz");
    let pack = |text: &str| {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        to.write_all(text.as_bytes()).unwrap();
        fs::write(&path, to.finish().unwrap()).unwrap();
    };
    let read = |cache: &Cache| unpacked(&path, cache, &DataFormat::Chat).unwrap().unwrap().0;
    pack("{\"a\": 1}\n");
    assert_eq!(read(&cache), "{\"a\": 1}\n");
    let [list, copy] = &kept(&cache)[..] else { panic!("{:?}", kept(&cache)) };
    assert!(list.ends_with(".json") && copy.ends_with(".unpacked"));
    let copy = cache.folder.as_ref().unwrap().join(copy);
    let written = fs::metadata(&copy).unwrap().modified().unwrap();
    assert_eq!(read(&cache), "{\"a\": 1}\n");
    assert_eq!(fs::metadata(&copy).unwrap().modified().unwrap(), written);
    for bad in [&b"{\"a\": 2}\n"[..], b"{\"a\": 1}", b""] {
        fs::write(&copy, bad).unwrap();
        assert_eq!(read(&cache), "{\"a\": 1}\n");
        assert_eq!(fs::read(&copy).unwrap(), b"{\"a\": 1}\n");
    }
    // Other bytes under the same name are another copy.
    pack("{\"a\": 3}\n");
    assert_eq!(read(&cache), "{\"a\": 3}\n");
    assert_eq!(kept(&cache).len(), 4);
    // A command that may not write into the folder reads copies, and makes others without a name.
    let quiet = Cache { read_only: true, ..cache.clone() };
    assert_eq!(read(&quiet), "{\"a\": 3}\n");
    pack("{\"a\": 4}\n");
    assert_eq!(read(&quiet), "{\"a\": 4}\n");
    assert_eq!(kept(&cache).len(), 4);
}

#[test]
fn what_is_cut_off_or_damaged_is_refused_and_leaves_no_copy() {
    let (folder, cache) = cache();
    for name in ["chats.jsonl.gz", "chats.jsonl.zst", "alpaca.json", "compact.json", "zstd.parquet"]
    {
        let (whole, path) = (fs::read(fixture(name)).unwrap(), folder.path().join(name));
        let step = (whole.len() / 20).max(1);
        let first = |at: &usize| *at > 40;
        for end in (0..whole.len()).step_by(step).filter(first).chain([whole.len() - 1]) {
            fs::write(&path, &whole[..end]).unwrap();
            // The first member of a file of two is a whole file.
            match unpacked(&path, &cache, &DataFormat::Chat) {
                Err(why) => assert!(why.contains("it is damaged: ") && is_line(&why), "{why}"),
                Ok(read) => panic!("{name}: {end} of {} bytes: {read:?}", whole.len()),
            }
        }
        // A checksum finds a changed byte; the others are structure.
        if !name.ends_with("parquet") && !name.ends_with("json") {
            for at in (10..whole.len()).step_by(step) {
                let mut bytes = whole.clone();
                bytes[at] ^= 0x10;
                fs::write(&path, bytes).unwrap();
                let read = unpacked(&path, &cache, &DataFormat::Chat);
                let good = unpacked(&fixture(name), &Cache::default(), &DataFormat::Chat);
                assert!(read.is_err() || read == good, "{name} {at}: {read:?}");
            }
        }
    }
    // Changed bytes of a table never end the process.
    for name in ["snappy.parquet", "kinds.parquet"] {
        let (whole, path) = (fs::read(fixture(name)).unwrap(), folder.path().join(name));
        for at in (0..whole.len()).step_by(17) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            fs::write(&path, bytes).unwrap();
            if let Err(why) = unpacked(&path, &Cache::default(), &DataFormat::Chat) {
                assert!(is_line(&why), "{why}");
            }
        }
    }
    let left = kept(&cache);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_file_that_becomes_far_larger_is_refused_and_leaves_nothing() {
    let (folder, cache) = cache();
    let path = folder.path().join("bomb.gz");
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    (0..80).for_each(|_| to.write_all(&[b' '; 1 << 20]).unwrap());
    fs::write(&path, to.finish().unwrap()).unwrap();
    let why = unpacked(&path, &cache, &DataFormat::Auto).unwrap_err();
    let message = "of text, over 250 times as many: it may be a zip bomb, which fills the disk";
    assert!(why.starts_with("it is compressed (gzip), and its ") && why.contains(message), "{why}");
    assert!(kept(&cache).is_empty());
}

#[test]
fn a_container_is_known_by_its_bytes_and_a_table_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let form_of = |name: &str, bytes: &[u8], format: DataFormat| {
        fs::write(path(name), bytes).unwrap();
        let file = File::open(path(name)).unwrap();
        let found = Container::of(&path(name), bytes, &file, &format);
        found.map(|found| found.map(|(container, _)| container.what())).map_err(|e| e.to_string())
    };
    let gz = fs::read(fixture("chats.jsonl.gz")).unwrap();
    let table = fs::read(fixture("zstd.parquet")).unwrap();
    let chat = || DataFormat::Chat;
    let yes = |what: &str| Ok(Some(what.to_owned()));
    assert_eq!(form_of("a.jsonl", &gz, chat()), yes("compressed (gzip)"));
    assert_eq!(form_of("a.json", &table, chat()), yes("a Parquet table"));
    assert_eq!(form_of("a", b" [{\"a\": 1}]", chat()), yes("one JSON array"));
    assert_eq!(form_of("a.csv", b"a\n1\n", chat()), yes("a table (CSV)"));
    assert_eq!(form_of("a.tsv", b"a\n1\n", chat()), yes("a table (TSV)"));
    assert_eq!(form_of("a.csv", b"{}\n{}\n", chat()), Ok(None));
    assert_eq!(form_of("a.json", b"{}\n{}\n", chat()), Ok(None));
    // Lines with a list in each are no array.
    assert_eq!(form_of("a.json", b"[{\"role\": 1}]\n[{\"role\": 2}]\n", chat()), Ok(None));
    // Text stays text, and tokens stay tokens.
    assert_eq!(form_of("a.csv", b"a\n1\n", DataFormat::Auto), Ok(None));
    assert_eq!(form_of("a.json", b"[{\"a\": 1}]", DataFormat::Auto), Ok(None));
    assert_eq!(form_of("a", &gz, DataFormat::Auto), yes("compressed (gzip)"));
    for format in [DataFormat::Bytes, DataFormat::U16] {
        assert_eq!(form_of("a", &gz, format), Ok(None));
    }
    let within = |name: &str, text: &[u8]| {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        to.write_all(text).unwrap();
        form_of(name, &to.finish().unwrap(), chat())
    };
    assert_eq!(within("a.json.gz", b"[{}]"), yes("one JSON array, compressed (gzip)"));
    assert_eq!(within("a.csv.gz", b"a\n1\n"), yes("a table (CSV), compressed (gzip)"));
    assert!(within("a.gz", &table).unwrap_err().contains("contains a Parquet table"));
    let tar = [&[b'a'; 257][..], b"ustar\0", &[0; 300]].concat();
    assert!(within("a.tgz", &tar).unwrap_err().contains("contains a tar archive"));
}
