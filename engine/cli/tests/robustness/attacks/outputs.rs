//! Files and folders that a user names for onebox to write.

use super::plants::{Plant, Trap, remove};
use super::{Findings, Folder, full, sample};

/// A file or folder that a command writes.
struct Output {
    name: &'static str,
    line: &'static str,
    is_folder: bool,
}

const fn file(name: &'static str, line: &'static str) -> Output {
    Output { name, line, is_folder: false }
}

const fn folder(line: &'static str) -> Output {
    Output { name: "out", line, is_folder: true }
}

const OUTPUTS: [Output; 11] = [
    file("out.json", "train tiny.ron -q --run-dir new --trace out.json --trace-steps 1..2"),
    file("out.json", "simulate tiny.ron --box dgx-a100 --no-schedules --trace out.json"),
    file("out.html", "report run -o out.html"),
    file("out.csv", "report run --csv out.csv"),
    file("out.ron", "plan --model chat --box h100-128gib --write out.ron"),
    // The command measures for a minute unless it is refused.
    file("out.ron", "bench --save-box out.ron --cores"),
    folder("checkpoint export run out --to safetensors"),
    folder("checkpoint reshard run out --tp 1 --dp 1"),
    folder("checkpoint import chat out chat.ron --set model.seq_len=256"),
    folder("data prepare chat.ron out"),
    folder("man out"),
];

fn one(folder: &Folder, output: &Output, plant: Plant, findings: &mut Findings) {
    let Output { name, line, is_folder } = *output;
    if is_folder {
        // The command must refuse a folder with a file in it.
        std::fs::create_dir(folder.path(name)).unwrap();
        std::fs::write(folder.path(name).join("notes"), "mine").unwrap();
    }
    if plant == Plant::Unreadable || !is_folder && plant == Plant::Link {
        remove(&folder.path(name));
        return;
    }
    let planted = Trap::new(folder, name, plant).unwrap();
    let case = format!("{plant:?} as {name} of `onebox {line}`");
    let measures = line.starts_with("bench");
    let ending = match measures {
        true => super::program::stopped_after(
            folder.attacked(line),
            std::time::Duration::from_secs(if full() { 10 } else { 1 }),
        ),
        false => folder.attempt(line),
    };
    findings.look_at(&case, &ending);
    let mut harm = planted.harm();
    // Runs may begin next to other files, as `train --run-dir` does.
    let is_run = ["reshard", "import"].iter().any(|word| line.contains(word));
    harm.retain(|harm| !(is_run && harm.ends_with(" is new")));
    // A dangling link may be followed, as a shell does, and manual pages go next to other files.
    let is_manual = line.starts_with("man");
    harm.retain(|harm| !(is_manual || plant == Plant::Dangling && harm.starts_with("new")));
    findings.harm(&case, &harm, &ending);
    let is_sink = plant == Plant::Zero && !is_folder;
    let may_work = is_sink || plant == Plant::Dangling || measures || is_manual || is_run;
    if !may_work && !ending.is_hung && !ending.is_refusal_of(name) {
        findings.blame(&case, "is not refused by name", &ending);
    }
    planted.undo();
    [name, "new"].iter().for_each(|name| remove(&folder.path(name)));
}

#[test]
fn what_a_user_names_for_writing_harms_no_file_of_others() {
    let folder = super::inputs::material();
    folder.train("run", &["-q"]).ok();
    let mut findings = Findings::new("outputs");
    let all = OUTPUTS.iter().flat_map(|output| Plant::ALL.map(|plant| (output, plant))).collect();
    for (output, plant) in sample(all, 10) {
        one(&folder, output, plant, &mut findings);
    }
    findings.end();
}
