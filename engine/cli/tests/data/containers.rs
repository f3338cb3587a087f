//! Compressed files, JSON arrays, tables and saved data sets, from the view of a user. The files of
//! `tests/fixtures/containers` are written by Python (`make_containers_fixture.py`).
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{CommandOutput, Folder, with_chats};
use std::fs;
use std::path::Path;

/// A folder with the chats, the fixture's files, and its rows as JSON lines in `plain.jsonl`.
fn with_containers() -> Folder {
    let folder = with_chats();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/containers");
    let from = from.to_str().unwrap();
    folder.shell(&format!("cp -r '{from}' files")).ok();
    let expected: serde_json::Value =
        serde_json::from_str(&folder.read("files/expected.json")).unwrap();
    let rows = expected["compact.json"].as_array().unwrap();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(folder.path("plain.jsonl"), lines).unwrap();
    folder
}

/// Runs a command on `data.train`, with a cache folder of its own.
fn run(folder: &Folder, command: &[&str], train: &str, sets: &[&str]) -> CommandOutput {
    let train = format!("data.train={train:?}");
    let length = match sets.iter().any(|set| set.starts_with("model.seq_len")) {
        true => &[][..],
        false => &["model.seq_len=256"],
    };
    let sets = length.iter().copied().chain([train.as_str()]).chain(sets.iter().copied());
    let sets = sets.flat_map(|set| ["--set", set]);
    let args: Vec<_> = command.iter().copied().chain(sets).collect();
    let mut command = folder.command(&args);
    command.env("XDG_CACHE_HOME", folder.path("cache"));
    Folder::done(command)
}

fn cached(folder: &Folder) -> usize {
    fs::read_dir(folder.path("cache/onebox/tokens")).map_or(0, Iterator::count)
}

#[test]
fn the_same_chats_in_any_container_are_the_same_data() {
    let folder = with_containers();
    let check = |train: &str| -> [serde_json::Value; 2] {
        let output = run(&folder, &["data", "check", "chat.ron", "--json"], train, &[]).ok();
        let output: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
        ["train_hash", "held_out_hash"].map(|key| output[key].clone())
    };
    let plain = check("plain.jsonl");
    assert!(plain.iter().all(serde_json::Value::is_string), "{plain:?}");
    let rows = ["chats.jsonl.gz", "chats.jsonl.zst", "compact.json"];
    let tables = ["snappy.parquet", "zstd.parquet", "gzip.parquet", "lz4.parquet"];
    for name in rows.into_iter().chain(tables) {
        assert_eq!(check(&format!("files/{name}")), plain, "{name}");
    }
    // A second start reads the same copies. A dry run adds none.
    let before = cached(&folder);
    assert_eq!(check("files/compact.json"), plain);
    run(&folder, &["train", "chat.ron", "--dry-run"], "files/chats.jsonl.gz", &[]).ok();
    fs::rename(folder.path("cache"), folder.path("gone")).unwrap();
    run(&folder, &["train", "chat.ron", "--dry-run"], "files/chats.jsonl.gz", &[]).ok();
    run(&folder, &["config", "check", "chat.ron"], "files/zstd.parquet", &[]).ok();
    assert_eq!(cached(&folder), 0);
    fs::rename(folder.path("gone"), folder.path("cache")).unwrap();
    assert_eq!(cached(&folder), before);
    // A run trains on them, and `data prepare` makes the same tokens.
    let states = ["plain.jsonl", "files/compact.json"].map(|train| {
        let name = if train == "plain.jsonl" { "a" } else { "b" };
        run(&folder, &["train", "chat.ron", "--run-dir", name], train, &[]).ok();
        folder.hash(name)
    });
    assert_eq!(states[0], states[1]);
    for (train, out) in [("plain.jsonl", "plain"), ("files/zstd.parquet", "packed")] {
        run(&folder, &["data", "prepare", "chat.ron", out], train, &[]).ok();
    }
    for file in ["000000.chat.bin", "000000.chat.mask"] {
        let of = |out: &str| fs::read(folder.path(&format!("{out}/train/{file}"))).unwrap();
        assert!(of("plain") == of("packed"), "{file}");
    }
}

#[test]
fn messages_name_the_file_with_its_line_or_row() {
    let folder = with_containers();
    let shown = |train: &str| {
        let args = ["data", "show", "chat.ron", "--sample", "0"];
        run(&folder, &args, train, &[]).ok().stdout
    };
    let plain = shown("plain.jsonl");
    let (_, line) = plain.split_once("---- plain.jsonl:").unwrap();
    let number = line.lines().next().unwrap();
    for (name, place) in
        [("chats.jsonl.gz", ":"), ("compact.json", " row "), ("zstd.parquet", " row ")]
    {
        let text = shown(&format!("files/{name}"));
        assert!(text.contains(&format!("---- files/{name}{place}{number}\n")), "{text}");
        let body = |text: &str| text.lines().skip(3).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(body(&text), body(&plain));
    }
    // Rows that cannot be used: the row of an array, the line of a table.
    let put = |name: &str, text: &str| fs::write(folder.path(name), text).unwrap();
    let rows: Vec<String> = folder.read("chats.jsonl").lines().map(str::to_owned).collect();
    put("bad.json", &format!("[\n{},\n7]", rows.join(",\n\n")));
    let stderr = run(&folder, &["train", "chat.ron", "--dry-run"], "bad.json", &[]).ok().stderr;
    assert!(
        stderr.contains("1 of 61 rows cannot be used (bad.json row 61: it is a number"),
        "{stderr}"
    );
    let texts = "data.format=Jsonl(text: \"text\")";
    let good: String = (0..40).map(|i| format!("{i},\"the box\nholds {i}\"\n")).collect();
    put("table.csv", &format!("id,text\n{good}40,\n"));
    let args = ["train", "chat.ron", "--dry-run"];
    let stderr = run(&folder, &args, "table.csv", &[texts, "model.seq_len=8"]).ok().stderr;
    assert!(stderr.contains("1 of 41 rows cannot be used (table.csv line 82: "), "{stderr}");
}

#[test]
fn damaged_packed_files_are_refused_with_their_place_and_leave_no_copy() {
    let folder = with_containers();
    let gz = fs::read(folder.path("files/chats.jsonl.gz")).unwrap();
    let parquet = fs::read(folder.path("files/zstd.parquet")).unwrap();
    let json = fs::read(folder.path("files/alpaca.json")).unwrap();
    for (name, bytes, expected) in [
        (
            "cut.jsonl.gz",
            &gz[..gz.len() - 3],
            "it is compressed (gzip), and it is damaged: it ends too early",
        ),
        (
            "cut.parquet",
            &parquet[..parquet.len() - 3],
            "it is a Parquet table, and it is damaged: ",
        ),
        (
            "cut.json",
            &json[..json.len() - 9],
            "it is one JSON array, and it is damaged: it ends inside of row 5, which begins in line ",
        ),
        (
            "a.csv",
            b"messages,b\n1,2\n3\n",
            "it is a table (CSV), and the row that begins in line 3 has 1 column, and the header 2",
        ),
        ("latin.csv", b"messages,b\n1,caf\xe9\n", "line 2 is not UTF-8 (byte 0xe9)"),
        ("x.jsonl.gz", b"{}\n", "it is named as a gzip file, and is none"),
        ("lists.json", b"[{\"a\": 1}]\n[{\"a\": 1}]\n", "JSON lines with a list in each"),
    ] {
        fs::write(folder.path(name), bytes).unwrap();
        for command in [
            &["data", "check", "chat.ron"][..],
            &["config", "check", "chat.ron"],
            &["data", "prepare", "chat.ron", "out"],
        ] {
            let code = if command[0] == "config" { 78 } else { 66 };
            let output = run(&folder, command, name, &[]);
            assert!(
                [code, 66].contains(&output.code),
                "{name}: {}: {}",
                output.code,
                output.stderr
            );
            let expected = ["data.train", name, expected];
            assert!(
                expected.iter().all(|expected| output.stderr.contains(expected)),
                "{expected:?}: {}",
                output.stderr
            );
        }
    }
    assert_eq!(cached(&folder), 0);
}

#[test]
fn saved_data_sets_get_the_line_of_python_that_converts_them() {
    let folder = with_containers();
    let refused = |train: &str, line: &str| {
        let output = run(&folder, &["data", "check", "chat.ron"], train, &[]);
        output.refused(66, &["convert them with this line", line]);
    };
    let at = |name: &str| folder.path(name).display().to_string();
    let saved = format!(
        "python3 -c 'from datasets import load_from_disk; load_from_disk(\"{}\").to_json(\"{}.jsonl\")'",
        at("files/saved"),
        at("files/saved")
    );
    refused("files/saved", &saved);
    refused("files/saved/", &saved);
    refused("files/saved/data-00000-of-00001.arrow", &saved);
    let splits = format!(
        "[rows.to_json(\"{}-\" + name + \".jsonl\") for name, rows in load_from_disk(\"{}\").items()]",
        at("files/splits"),
        at("files/splits")
    );
    refused("files/splits", &splits);
    fs::create_dir(folder.path("alone")).unwrap();
    fs::rename(folder.path("files/saved/data-00000-of-00001.arrow"), folder.path("alone/x.arrow"))
        .unwrap();
    let alone = format!(
        "Dataset.from_file(\"{}\").to_json(\"{}\")",
        at("alone/x.arrow"),
        at("alone/x.jsonl")
    );
    refused("alone/x.arrow", &alone);
    refused("alone", &alone);
}

#[test]
fn compressed_text_is_text() {
    let folder = with_containers();
    folder.shell("gzip -k text.txt && mkdir many && cp text.txt.gz many/a.txt.gz").ok();
    let train = |run_dir: &str, train: &str| {
        let train = format!("data.train={train:?}");
        folder.train(run_dir, &["--set", &train]).ok();
        folder.hash(run_dir)
    };
    let plain = train("a", "text.txt");
    assert_eq!(train("b", "text.txt.gz"), plain);
    assert_eq!(train("c", "many"), plain);
    // Of a file and its compressed copy in a folder, onebox reads one.
    fs::copy(folder.path("text.txt"), folder.path("many/a.txt")).unwrap();
    let set = ["--set", "data.train=\"many\"", "--dry-run"];
    let stderr = folder.train("d", &set).ok().stderr;
    assert!(
        stderr.contains("a.txt.gz") && stderr.contains("is there, too: remove one of them"),
        "{stderr}"
    );
}

/// Columns of types that onebox does not read stand beside the chats of a Parquet table. They are
/// no obstacle, unless a row uses them.
#[test]
fn only_the_columns_in_use_of_a_table_must_be_of_a_type_that_is_read() {
    let folder = with_containers();
    let hash = |train: &str| -> serde_json::Value {
        let output = run(&folder, &["data", "check", "chat.ron", "--json"], train, &[]).ok();
        serde_json::from_str::<serde_json::Value>(&output.stdout).unwrap()["train_hash"].clone()
    };
    assert_eq!(hash("files/unused.parquet"), hash("files/zstd.parquet"));
    for (column, expected) in [
        ("stamp", "`stamp` is of the Parquet type TIMESTAMP(NANOS) (onebox does not read it)"),
        (
            "picture",
            "`picture` is a value that onebox does not read (it has bytes that are no text",
        ),
        ("vector", "`vector` is a value that onebox does not read (it has an infinite number"),
    ] {
        let text = format!("data.format=Jsonl(text: {column:?})");
        let output = run(&folder, &["data", "check", "chat.ron"], "files/unused.parquet", &[&text]);
        output.refused(66, &["data.train", "unused.parquet row", expected, ", not a text"]);
    }
}

/// In a folder of texts, what cannot be unpacked is left out with its reason, as a picture is. A
/// file that is named itself is refused, and so is a damaged file of rows.
#[test]
fn a_folder_of_texts_leaves_out_what_cannot_be_unpacked() {
    let folder = with_containers();
    let text: String = (0..30_000).map(|i| format!("the box {i} holds a model\n")).collect();
    fs::create_dir(folder.path("many")).unwrap();
    fs::write(folder.path("many/a.txt"), &text).unwrap();
    folder.shell("gzip -c many/a.txt > whole.gz && tar czf many/c.tgz text.txt").ok();
    let whole = fs::read(folder.path("whole.gz")).unwrap();
    // The damage of one file is behind its beginning, that of the other is not.
    fs::write(folder.path("many/b.txt.gz"), &whole[..whole.len() - 5]).unwrap();
    fs::write(folder.path("many/d.txt.gz"), &whole[..40]).unwrap();
    let check = |train: &str| {
        let train = format!("data.train={train:?}");
        folder.onebox(&["data", "check", "tiny.ron", "--json", "--set", &train]).ok()
    };
    let hash = |output: &CommandOutput| -> serde_json::Value {
        serde_json::from_str::<serde_json::Value>(&output.stdout).unwrap()["train_hash"].clone()
    };
    let output = check("many");
    assert_eq!(hash(&output), hash(&check("many/a.txt")));
    for expected in [
        "b.txt.gz: it is compressed (gzip), and it is damaged: it ends too early",
        "d.txt.gz: it is compressed (gzip), and it is damaged: it ends too early",
        "c.tgz: it is compressed (gzip), and it contains a tar archive: unpack it by hand; it is left out",
        "3 files of ",
        "b.txt.gz (",
        "is compressed, and damaged or cut off: get the whole file again",
    ] {
        assert!(output.stderr.contains(expected), "`{expected}` is not in:\n{}", output.stderr);
    }
    let plan = folder.onebox(&["plan", "tiny.ron", "--set", "data.train=\"many\""]);
    assert_eq!(plan.code, 0, "{}", plan.stderr);
    let named = ["data", "check", "tiny.ron", "--set", "data.train=\"many/b.txt.gz\""];
    folder.onebox(&named).refused(66, &["b.txt.gz", "it ends too early"]);
    // Rows are wanted data.
    fs::create_dir(folder.path("rows")).unwrap();
    fs::copy(folder.path("plain.jsonl"), folder.path("rows/a.jsonl")).unwrap();
    let gz = fs::read(folder.path("files/chats.jsonl.gz")).unwrap();
    fs::write(folder.path("rows/b.jsonl.gz"), &gz[..gz.len() - 3]).unwrap();
    let refused = run(&folder, &["config", "check", "chat.ron"], "rows", &[]);
    assert!([66, 78].contains(&refused.code), "{}", refused.stderr);
    assert!(refused.stderr.contains("it ends too early"), "{}", refused.stderr);
}

/// One text under one name in two forms is used twice, and onebox says so.
#[test]
fn two_copies_of_one_text_are_warned_of() {
    let folder = with_containers();
    fs::create_dir(folder.path("both")).unwrap();
    for name in ["chats.jsonl.gz", "chats.jsonl.zst"] {
        fs::copy(folder.path(&format!("files/{name}")), folder.path(&format!("both/{name}")))
            .unwrap();
    }
    let expected = "have texts of the same name and of ";
    let dry = ["train", "chat.ron", "--dry-run"];
    for train in ["both", "both/*"] {
        let stderr = run(&folder, &dry, train, &[]).ok().stderr;
        let line = stderr.lines().find(|line| line.contains(expected)).unwrap_or_default();
        for name in ["both/chats.jsonl.gz and ", "both/chats.jsonl.zst have "] {
            assert!(line.contains(name), "{train}: {stderr}");
        }
    }
    // A glob names a text and its compressed copy; other texts of one length have other names.
    folder.shell("mkdir glob && cp text.txt glob/a.txt && cp text.txt glob/b.txt").ok();
    folder.shell("gzip -k glob/a.txt").ok();
    let set = ["--set", "data.train=\"glob/*\"", "--dry-run"];
    let stderr = folder.train("d", &set).ok().stderr;
    assert!(
        stderr.contains("glob/a.txt and ") && stderr.contains("glob/a.txt.gz have"),
        "{stderr}"
    );
    let mut warned = stderr.lines().filter(|line| line.contains(expected));
    assert!(warned.all(|line| line.contains("a.txt.gz have")), "{stderr}");
}

/// A command that writes nothing unpacks on the disk of the cache folder. `TMPDIR` may be in memory.
#[test]
fn a_command_that_writes_nothing_unpacks_beside_the_cache() {
    let folder = with_containers();
    let check = |cache: &str, temporary: &str| {
        let train = "data.train=\"files/chats.jsonl.gz\"";
        let args = ["config", "check", "chat.ron", "--set", train, "--set", "model.seq_len=256"];
        let mut command = folder.command(&args);
        command.env("XDG_CACHE_HOME", folder.path(cache)).env("TMPDIR", folder.path(temporary));
        Folder::done(command)
    };
    fs::create_dir(folder.path("cache")).unwrap();
    fs::create_dir(folder.path("temporary")).unwrap();
    check("cache", "none").ok();
    check("none", "temporary").ok();
    for name in ["cache", "temporary"] {
        assert_eq!(fs::read_dir(folder.path(name)).unwrap().count(), 0, "{name}");
    }
    let refused = check("none", "none");
    let expected = "it is compressed (gzip), and its text cannot be read or written";
    assert!(refused.code != 0 && refused.stderr.contains(expected), "{}", refused.stderr);
    assert!(!folder.path("none").exists());
}

/// The unfinished copy of a start that was killed goes at the next start, and no file of a process
/// that lives.
#[test]
fn a_start_removes_what_a_killed_one_left() {
    let folder = with_containers();
    let tokens = folder.path("cache/onebox/tokens");
    fs::create_dir_all(&tokens).unwrap();
    // No process has such a number; process 1 lives.
    let (killed, locked, alive) = (u32::MAX, u32::MAX - 1, 1);
    let name = |id: u32| tokens.join(format!("{}.{id}-1.tmp", "0".repeat(32)));
    for id in [killed, locked, alive] {
        fs::write(name(id), "half of a copy").unwrap();
    }
    let lock = fs::File::open(name(locked)).unwrap();
    lock.lock().unwrap();
    run(&folder, &["data", "check", "chat.ron"], "files/chats.jsonl.gz", &[]).ok();
    assert_eq!([killed, locked, alive].map(|id| name(id).exists()), [false, true, true]);
    drop(lock);
    run(&folder, &["data", "check", "chat.ron"], "files/chats.jsonl.gz", &[]).ok();
    assert_eq!([locked, alive].map(|id| name(id).exists()), [false, true]);
}
