//! Folders of `onebox data prepare`, and the cache: they contain no links, and no planted object is
//! written through, waited for or read without a bound.

use super::plants::{Plant, Trap, Tree, differences, remove, tree, with_rights};
use super::program::{PATIENCE, ending};
use super::{Findings, Folder, sample};
use std::fs;
use std::path::Path;

const PREPARE: &str = "data prepare chat.ron made";

/// Files of a finished folder, and names that it had earlier.
const FILES: [&str; 9] = [
    ".prepare.lock",
    "prepared.json",
    "prepared.tmp",
    "train",
    "train.partial",
    "train.partial/000000.chat.tmp",
    "train/000000.chat.bin",
    "train/000000.chat.idx",
    "train/000000.chat.mask",
];

/// Contents of a preparation's folder, without times and plants.
fn made(folder: &Folder) -> Tree {
    let mut made = tree(&folder.path("made"));
    if let Some((_, bytes)) = made.get_mut(Path::new("prepared.json")) {
        let list: Result<serde_json::Value, _> = serde_json::from_slice(bytes);
        if let Ok(mut list) = list {
            timeless(&mut list);
            *bytes = list.to_string().into_bytes();
        }
    }
    made
}

/// Removes timestamps.
fn timeless(list: &mut serde_json::Value) {
    match list {
        serde_json::Value::Object(fields) => {
            fields.remove("stamp");
            fields.values_mut().for_each(timeless);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(timeless),
        _ => {}
    }
}

fn renew(folder: &Folder) {
    ["made", "new"].iter().for_each(|name| remove(&folder.path(name)));
    folder.shell("cp -a whole made").ok();
}

/// Prepares into a folder with a plant in it, and again without the plant.
fn prepared(folder: &Folder, file: &str, plant: Plant, whole: &Tree, findings: &mut Findings) {
    renew(folder);
    let is_unfinished = file.contains("partial");
    if is_unfinished {
        // The state of a kill before the first part got its name.
        ["train", "prepared.json"].iter().for_each(|name| remove(&folder.path("made").join(name)));
        if file != "train.partial" {
            fs::create_dir(folder.path("made/train.partial")).unwrap();
        }
    }
    let Some(planted) = Trap::new(folder, &format!("made/{file}"), plant) else { return };
    let case = format!("{plant:?} as made/{file} of `onebox {PREPARE}`");
    let first = ending(with_rights(folder.attacked(PREPARE), plant), PATIENCE);
    findings.look_at(&case, &first);
    findings.harm(&case, &planted.harm(), &first);
    // A plant that the command does not use may stay.
    let differ = differences(whole, &made(folder));
    let differ: Vec<_> =
        differ.iter().filter(|differ| **differ != format!("{file} is new")).collect();
    // Nothing reads or changes the content of a lock file.
    let is_lock = file == ".prepare.lock" && plant == Plant::Sparse;
    if first.code == 0 && plant != Plant::Unreadable && !is_lock && !differ.is_empty() {
        findings.blame(&case, &format!("makes something else: {differ:?}"), &first);
    }
    // The command may have started again with an unfinished folder.
    if folder.path("made/train.partial").exists() && !is_unfinished {
        remove(&folder.path("made").join(file));
        remove(&folder.path("made/train.partial"));
    }
    planted.undo();
    let again = folder.attempt(PREPARE);
    findings.look_at(&format!("{case}, again without it"), &again);
    if again.code != 0 || made(folder) != *whole {
        let differ = differences(whole, &made(folder)).join(", ");
        findings.blame(&case, &format!("is not made again without it: {differ}"), &again);
    }
}

/// A folder of prepared chats, `whole`.
fn with_prepared() -> (Folder, Tree) {
    let folder = super::inputs::material();
    let ending = folder.attempt(PREPARE);
    assert_eq!(ending.code, 0, "{ending}");
    let whole = made(&folder);
    fs::rename(folder.path("made"), folder.path("whole")).unwrap();
    (folder, whole)
}

#[test]
fn nothing_planted_in_a_folder_of_prepared_data_is_written_through_or_waited_for() {
    let (folder, whole) = with_prepared();
    let mut findings = Findings::new("data prepare");
    let cases = FILES.iter().flat_map(|file| Plant::ALL.map(|plant| (file, plant))).collect();
    for (file, plant) in sample(cases, 7) {
        prepared(&folder, file, plant, &whole, &mut findings);
    }
    findings.end();
}

#[test]
fn runs_on_prepared_data_with_plants_in_it_are_refused_or_are_the_same_run() {
    let (folder, _) = with_prepared();
    let mut findings = Findings::new("prepared data");
    let list = fs::read_dir(folder.path("whole/train")).unwrap();
    let mut files: Vec<_> =
        list.map(|e| format!("train/{}", e.unwrap().file_name().to_str().unwrap())).collect();
    files.push("prepared.json".into());
    files.sort();
    assert_eq!(files.len(), 4, "{files:?}");
    renew(&folder);
    let sets =
        "--set data.train=\"made/train\" --set data.format=Megatron --set data.packing=Documents";
    let train = format!("train chat.ron -q --run-dir new {sets}");
    let check = format!("data check chat.ron {sets}");
    let straight = folder.attempt(&train);
    findings.look_at("undisturbed", &straight);
    assert_eq!(straight.code, 0, "{straight}");
    let hash = folder.hash("new");
    remove(&folder.path("new"));
    let mut cases = Vec::new();
    for file in &files {
        cases.extend(Plant::ALL.map(|plant| (file, plant, &train)));
        cases.extend(Plant::ALL.map(|plant| (file, plant, &check)));
    }
    for (file, plant, line) in sample(cases, 7) {
        let Some(planted) = Trap::new(&folder, &format!("made/{file}"), plant) else { continue };
        let case = format!("{plant:?} as made/{file} of `onebox {line}`");
        let ending = ending(with_rights(folder.attacked(line), plant), PATIENCE);
        findings.look_at(&case, &ending);
        findings.harm(&case, &planted.harm(), &ending);
        if ending.code == 0 && line == &train && folder.hash("new") != hash {
            findings.blame(&case, "ends in another state", &ending);
        }
        if ending.code == 0 && line == &check && !matches!(plant, Plant::Link) {
            findings.blame(&case, "is not refused", &ending);
        }
        planted.undo();
        remove(&folder.path("new"));
    }
    findings.end();
}

/// Files below a folder, by their names in it.
fn files(folder: &Path) -> Vec<String> {
    let all = tree(folder).into_iter().filter(|(_, (kind, _))| kind.starts_with("file"));
    all.map(|(name, _)| name.to_str().unwrap().to_owned()).collect()
}

#[test]
fn nothing_planted_in_the_cache_is_written_through_or_waited_for() {
    let folder = super::inputs::material();
    let mut findings = Findings::new("cache");
    // The rows are enough for a cache entry.
    fs::write(folder.path("chats.jsonl"), folder.read("chats.jsonl").repeat(9)).unwrap();
    let text = "train tiny.ron -q --run-dir new --set data.tokenizer=\"tokenizer.json\" --set model.vocab=300";
    // Files that were just written may still change, so the cache keeps nothing from them.
    folder.shell("find . -type f | xargs touch -d 2020-01-01").ok();
    std::thread::sleep(std::time::Duration::from_secs(3));
    for line in [text, "train chat.ron -q --run-dir new"] {
        let straight = folder.attempt(line);
        assert_eq!(straight.code, 0, "{straight}");
        let hash = folder.hash("new");
        remove(&folder.path("new"));
        remove(&folder.path("whole"));
        folder.shell("cp -a cache whole").refused(0, &[]);
        let mut names = files(&folder.path("cache"));
        println!("{names:?}");
        assert!(!names.is_empty(), "nothing is kept");
        names.extend(["onebox".to_owned(), "onebox/tokens".to_owned(), String::new()]);
        let mut cases = Vec::new();
        for name in &names {
            cases.extend(Plant::ALL.map(|plant| (name, plant)));
        }
        for (name, plant) in sample(cases, 5) {
            remove(&folder.path("cache"));
            folder.shell("cp -a whole cache").ok();
            let path = if name.is_empty() { "cache".into() } else { format!("cache/{name}") };
            let Some(planted) = Trap::new(&folder, &path, plant) else { continue };
            let case = format!("{plant:?} as {path} of `onebox {line}`");
            let ending = ending(with_rights(folder.attacked(line), plant), PATIENCE);
            findings.look_at(&case, &ending);
            // Links to the folders are the user's own choice.
            let is_folder = !name.contains('.')
                && matches!(plant, Plant::Link | Plant::Foreign | Plant::Dangling);
            if !is_folder {
                findings.harm(&case, &planted.harm(), &ending);
            }
            let has_ended = ending.faults().is_empty();
            if has_ended && (ending.code != 0 || folder.hash("new") != hash) {
                findings.blame(&case, "is not the same run without it", &ending);
            }
            planted.undo();
            remove(&folder.path("new"));
        }
        remove(&folder.path("cache"));
    }
    findings.end();
}

#[test]
fn a_part_behind_a_link_is_made_again() {
    let (folder, whole) = with_prepared();
    for file in ["train/000000.chat.bin", "train/000000.chat.idx", "train/000000.chat.mask"] {
        renew(&folder);
        let made = folder.path("made").join(file);
        fs::rename(&made, folder.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink(folder.path("elsewhere"), &made).unwrap();
        let ending = folder.attempt(PREPARE);
        assert!(
            ending.code == 0 && ending.to_string().contains("it is a symbolic link"),
            "{ending}"
        );
        assert_eq!(differences(&whole, &self::made(&folder)), Vec::<String>::new(), "{file}");
    }
}
