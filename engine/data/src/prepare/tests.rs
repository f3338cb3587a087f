use super::super::data_files::tests::{folder, path};
use super::super::megatron::path_of;
use super::super::{Corpus, CorpusSplit, Rows, SampleSettings, TextSource};
use super::*;
use crate::chat::Template;
use crate::model_files::ModelFiles;
use crate::progress::Silence;
use config::Packing;
use tempfile::TempDir;

const VOCAB: usize = 300;
const PART: u64 = 64 << 20;

fn tokenizer_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer-tiny.json")
}

fn prepare(
    parts: (&str, Option<&str>),
    format: &DataFormat,
    out: &Path,
    part: u64,
) -> Result<PreparedData, PrepareError> {
    let sizes = ChunkSizes { part, piece: 7, ..ChunkSizes::default() };
    let tokenizer = Tokenizer::open(&tokenizer_path()).unwrap();
    let rows = Rows::of_texts(&tokenizer, "text", None);
    let file = tokenizer_path();
    let rowed = RowSource {
        rows: &rows,
        tokenizer: &file,
        format,
        packing: Packing::Windows,
        truncate: false,
        names_all: false,
        is_brief: false,
        cache: &Cache::default(),
        progress: &Silence,
    };
    let rows = format.is_rows().then_some(rowed);
    let (tokenizer, cache) = (&tokenizer, &Cache::default());
    let (train, validation) = (vec![parts.0], parts.1.into_iter().collect());
    Preparation {
        train,
        validation,
        format,
        tokenizer,
        rows,
        cache,
        out,
        command: "",
        sizes,
        progress: &Silence,
    }
    .run(&|_| ())
}

/// Tokens of a run that reads the same text itself.
fn of_text((train, validation): (&str, Option<&str>), format: &DataFormat) -> Corpus {
    let parts = validation
        .map_or(CorpusSplit::Cut(train, 0.1), |validation| CorpusSplit::Both(train, validation));
    let file = tokenizer_path();
    let tokenizer = Tokenizer::open(&file).unwrap();
    if format.is_rows() {
        let rows = Rows::of_texts(&tokenizer, "text", None);
        let with = RowSource {
            rows: &rows,
            tokenizer: &file,
            format,
            packing: Packing::Windows,
            truncate: false,
            names_all: false,
            is_brief: false,
            cache: &Cache::default(),
            progress: &Silence,
        };
        return Corpus::open_rows(parts, &with, VOCAB, 4).unwrap();
    }
    let (cache, format) = (&Cache::default(), format.clone());
    let sizes = ChunkSizes::default();
    let with =
        TextSource { tokenizer: &tokenizer, path: &file, cache, format, sizes, progress: &Silence };
    Corpus::open_text(parts, &with, VOCAB, 4).unwrap()
}

fn of_tokens(prepared: &PreparedData) -> Corpus {
    let train = prepared.train[0].to_str().unwrap();
    let validation = prepared.validation.first().map(|folder| folder.to_str().unwrap());
    Corpus::open(train, validation, prepared.format.clone(), 0.1, VOCAB, 4).unwrap()
}

fn texts() -> TempDir {
    let words = ["the box ", "holds the model ", "caf\u{e9} \u{1f980} ", "that is too large.\n"];
    let text = |n: usize| (0..n).map(|i| words[(i * 7 + n) % 4]).collect::<String>();
    let row = |i: usize| serde_json::json!({ "text": text(i % 9 + 1) }).to_string() + "\n\n";
    let rows = |range: std::ops::Range<usize>| range.map(row).collect::<String>();
    folder(&[
        ("train/a.txt", text(40).as_bytes()),
        ("train/b.txt", b""),
        ("train/c/d.txt", text(5).as_bytes()),
        ("train/e.txt", text(90).as_bytes()),
        ("train/f.txt", b"\xff"),
        ("held/a.txt", text(33).as_bytes()),
        ("rows/a.jsonl", format!("\u{feff}{}", rows(0..50)).as_bytes()),
        ("rows/b.jsonl", format!("{}{{\n{}", rows(50..60), rows(60..130)).as_bytes()),
        ("more.jsonl", rows(7..40).as_bytes()),
    ])
}

fn jsonl() -> DataFormat {
    DataFormat::Jsonl { text: "text".into() }
}

#[test]
fn prepared_tokens_are_those_that_a_run_makes_of_the_text() {
    let folder = texts();
    for (i, (train, validation, format)) in [
        ("train", None, DataFormat::Auto),
        ("train", Some("held"), DataFormat::Auto),
        ("rows", None, jsonl()),
        ("rows", Some("more.jsonl"), jsonl()),
    ]
    .into_iter()
    .enumerate()
    {
        let (train, validation) =
            (path(&folder, train), validation.map(|name| path(&folder, name)));
        let parts = (train.as_str(), validation.as_deref());
        let expected = of_text(parts, &format);
        for part in [1, 100, 1000, PART] {
            let out = folder.path().join(format!("out-{i}-{part}"));
            let prepared = prepare(parts, &format, &out, part).unwrap();
            let data = of_tokens(&prepared);
            assert_eq!(data.bytes(), expected.bytes());
            // Equal identities allow a run to continue on the other data.
            assert_eq!(data.identity(), expected.identity());
            assert_eq!((prepared.before, &prepared.format), (0, &DataFormat::U16));
            let many = usize::from(validation.is_some()) + 1;
            assert!(part < PART || prepared.parts == many, "{prepared:?}");
            assert!(part > 100 || prepared.parts > many, "{prepared:?}");
        }
    }
}

#[test]
fn an_interrupted_one_goes_on_where_it_was() {
    let folder = texts();
    // The file is longer than one read.
    let row = |i: usize| serde_json::json!({ "text": format!("box {i}") }).to_string();
    let rows: Vec<String> = (0..20_000).map(row).collect();
    fs::write(folder.path().join("rows/a.jsonl"), rows.join("\n")).unwrap();
    let (rows, more) = (path(&folder, "rows"), path(&folder, "more.jsonl"));
    let (parts, out) = ((rows.as_str(), Some(more.as_str())), folder.path().join("out"));
    let whole = prepare(parts, &jsonl(), &out, 1500).unwrap();
    let expected = of_tokens(&whole).bytes();
    assert_eq!(expected, of_text(parts, &jsonl()).bytes());
    // Each part has a token file and an index.
    let train = fs::read_dir(out.join("train")).unwrap().count() / 2;
    assert!(train > 4 && whole.parts > train, "{whole:?}");
    for left in 0..train {
        // State after a kill: one part is incomplete, and the folders have their temporary names.
        for name in ["train", "validation"] {
            fs::rename(out.join(name), out.join(format!("{name}.partial"))).unwrap();
        }
        let cut = out.join("train.partial").join(mask::name_of_part(left, false));
        fs::write(cut.with_extension("tmp"), "x").unwrap();
        let half = if left % 2 == 0 { cut } else { path_of(&cut) };
        File::options().write(true).open(&half).unwrap().set_len(1).unwrap();
        let again = prepare(parts, &jsonl(), &out, 1500).unwrap();
        assert_eq!(again.before, whole.parts - train + left);
        assert_eq!(of_tokens(&again).bytes(), expected, "{left}");
    }
    // All parts are complete.
    let done = prepare(parts, &jsonl(), &out, 1500).unwrap();
    assert_eq!((done.before, done.parts), (whole.parts, whole.parts));
}

/// The manifest is older than the last parts, but all parts exist.
#[test]
fn parts_that_an_older_list_does_not_name_are_made_again() {
    let folder = texts();
    let (train, held) = (path(&folder, "train"), path(&folder, "held"));
    let (parts, out) = ((train.as_str(), Some(held.as_str())), folder.path().join("out"));
    let whole = prepare(parts, &DataFormat::Auto, &out, 100).unwrap();
    let expected = of_tokens(&whole).bytes();
    let list = out.join(MANIFEST);
    let (train, names) =
        (fs::read_dir(out.join("train")).unwrap().count(), ["train", "validation"]);
    assert!(train > 3, "{whole:?}");
    for left in [train - 1, 2, 0] {
        let mut older: Manifest = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
        older.parts[0].truncate(left);
        older.parts[1].clear();
        fs::write(&list, serde_json::to_vec(&older).unwrap()).unwrap();
        // This part has other tokens, and one more part exists than the text needs.
        let other = out.join("train").join(mask::name_of_part(left, false));
        let length = fs::metadata(&other).unwrap().len();
        fs::write(&other, vec![0; length as usize]).unwrap();
        fs::copy(&other, out.join("train").join(mask::name_of_part(train, false))).unwrap();
        let again = prepare(parts, &DataFormat::Auto, &out, 100).unwrap();
        assert_eq!((again.before, again.parts), (left, whole.parts));
        assert_eq!(of_tokens(&again).bytes(), expected, "{left}");
        assert!(names.iter().all(|name| !out.join(name).with_extension("partial").exists()));
    }
}

#[test]
fn other_text_and_other_folders_are_refused() {
    let folder = texts();
    let (train, rows) = (path(&folder, "train"), path(&folder, "rows"));
    let out = folder.path().join("out");
    prepare((&train, None), &DataFormat::Auto, &out, PART).unwrap();
    let refused = |train: &str, format: &DataFormat, out: &Path| {
        prepare((train, None), format, out, PART).unwrap_err().to_string()
    };
    let field = refused(&rows, &jsonl(), &out);
    let values =
        "prepared.json: it is of another field of a text: none then, and \"text\" now; name";
    assert!(field.contains(values), "{field}");
    fs::write(folder.path().join("train/a.txt"), "another text").unwrap();
    let changed = refused(&train, &DataFormat::Auto, &out);
    assert!(changed.contains("/train/a.txt has 12 bytes of xxh3-128 "), "{changed}");
    let foreign = refused(&train, &DataFormat::Auto, &folder.path().join("held"));
    assert!(foreign.contains("held: the folder is not empty"), "{foreign}");
    // The folder of a run has a lock.
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join(".lock"), "a pid").unwrap();
    let of_run = refused(&train, &DataFormat::Auto, &run);
    assert!(of_run.contains("run: the folder is not empty"), "{of_run}");
    assert_eq!(fs::read(run.join(".lock")).unwrap(), b"a pid");
    let held = File::open(out.join(LOCK)).unwrap();
    held.lock().unwrap();
    assert!(refused(&train, &DataFormat::Auto, &out).contains("another process"));
    // The number of bad rows is known only at the end.
    let rows = "{}\n".repeat(9) + "{\"text\": \"a b\"}\n";
    fs::write(folder.path().join("bad.jsonl"), rows).unwrap();
    let bad = refused(&path(&folder, "bad.jsonl"), &jsonl(), &folder.path().join("bad"));
    assert!(
        bad.contains("9 of 10 rows cannot be used (bad.jsonl lines 1, 2, 3 and 6 more: "),
        "{bad}"
    );
    assert!(!folder.path().join("bad/train").exists(), "nobody trains on it");
}

/// Interrupted preparation of chats gives the same masks as preparation without interruption.
#[test]
fn interrupted_chats_go_on_where_they_were() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    let tokenizer = Tokenizer::open(&fixture).unwrap();
    let template = Template::of_data(&ModelFiles::open(&fixture).unwrap()).unwrap();
    let rows = Rows::of_chats(&tokenizer, &template, "");
    let format = &DataFormat::Chat;
    let cache = &Cache::default();
    let chat = |i: usize| {
        let (question, answer) = ("what? ".repeat(1 + i % 3), "a box. ".repeat(1 + i % 4));
        serde_json::json!({ "prompt": question, "completion": answer }).to_string() + "\n"
    };
    let file = |n: usize| (n * 9..n * 9 + 9).map(chat).collect::<String>();
    let files: Vec<String> = (0..6).map(file).collect();
    let names: Vec<String> = (0..6).map(|n| format!("chats/{n}.jsonl")).collect();
    let files: Vec<(&str, &[u8])> =
        names.iter().zip(&files).map(|(name, file)| (name.as_str(), file.as_bytes())).collect();
    let folder = folder(&files);
    let (train, out) = (path(&folder, "chats"), folder.path().join("out"));
    let packing = Packing::None;
    let rowed = || RowSource {
        rows: &rows,
        tokenizer: &fixture,
        format,
        packing,
        truncate: false,
        names_all: false,
        is_brief: false,
        cache,
        progress: &Silence,
    };
    let run = || {
        // Each file is a part.
        let sizes = ChunkSizes { part: 1, ..ChunkSizes::default() };
        let (tokenizer, train) = (&tokenizer, vec![train.as_str()]);
        let (validation, rows, out) = (Vec::new(), Some(rowed()), out.as_path());
        Preparation {
            train,
            validation,
            format,
            tokenizer,
            rows,
            cache,
            out,
            command: "",
            sizes,
            progress: &Silence,
        }
        .run(&|_| ())
    };
    let identity = |prepared: &PreparedData| {
        let train = prepared.train[0].to_str().unwrap();
        let with = SampleSettings { format: &DataFormat::Megatron, packing, truncate: false };
        let data = Corpus::open_checked(CorpusSplit::Cut(train, 0.1), with, Checks::none(), 40);
        data.unwrap().identity()
    };
    let whole = run().unwrap();
    // The last part contains only the end of the last file.
    assert_eq!((whole.parts, whole.before), (7, 0));
    let of_rows = Corpus::open_rows(CorpusSplit::Cut(&train, 0.1), &rowed(), 307, 40);
    assert_eq!(identity(&whole), of_rows.unwrap().identity());
    for left in 0..6 {
        fs::rename(out.join("train"), out.join("train.partial")).unwrap();
        let tokens = out.join("train.partial").join(mask::name_of_part(left, true));
        let cut = [tokens.clone(), path_of(&tokens), mask::path_of(&tokens)][left % 3].clone();
        let length = fs::metadata(&cut).unwrap().len();
        File::options().write(true).open(&cut).unwrap().set_len(length - 1).unwrap();
        let again = run().unwrap();
        assert_eq!((again.parts, again.before), (7, left));
        assert_eq!(identity(&again), identity(&whole), "{left}");
    }
}
