//! Quotes the words of commands that messages print, so that the line works in a POSIX shell,
//! whatever names it contains.

use super::path_text::acts;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Quotes a word of a command.
pub fn quoted(text: &str) -> String {
    word(text.as_bytes())
}

/// Quotes a path as a word of a command. No program mistakes the word for an option.
pub fn quoted_path(path: &Path) -> String {
    match path.as_os_str().as_bytes() {
        option if option.starts_with(b"-") => word(&[b"./", option].concat()),
        bytes => word(bytes),
    }
}

fn word(bytes: &[u8]) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"_-./=:,+@%".contains(b);
    match str::from_utf8(bytes) {
        // zsh expands `=` and a name to the path of a program.
        Ok(text) if !text.is_empty() && !text.starts_with('=') && bytes.iter().all(plain) => {
            text.to_owned()
        }
        Ok(text) if !text.chars().any(acts) => format!("'{}'", text.replace('\'', r"'\''")),
        // Command substitution drops final line breaks. Not every shell supports `$'`.
        _ if bytes.ends_with(b"\n") => format!("$'{}'", escaped(bytes)),
        _ => format!("\"$(printf '{}')\"", escaped(bytes)),
    }
}

/// Writes special characters and invalid bytes as octal escapes, which printf and `$'` read.
fn escaped(bytes: &[u8]) -> String {
    let mut out = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            let is_plain = c.is_ascii_alphanumeric() || "_./=:,+@ ".contains(c);
            if is_plain || !c.is_ascii() && !acts(c) {
                out.push(c);
            } else {
                octal(c.encode_utf8(&mut [0; 4]).as_bytes(), &mut out);
            }
        }
        octal(chunk.invalid(), &mut out);
    }
    out
}

fn octal(bytes: &[u8], out: &mut String) {
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(out, "\\{byte:03o}");
    }
}

/// The words of a command that this module quoted, `&&` included; `None` for any other syntax.
pub fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut rest = command.chars();
    while let Some(c) = rest.next() {
        match c {
            ' ' => words.extend(word.take()),
            '"' => {
                let (inside, after) =
                    rest.as_str().strip_prefix("$(printf '")?.split_once("')\"")?;
                word.get_or_insert_default().push_str(&unescaped(inside)?);
                rest = after.chars();
            }
            '\'' => {
                let (inside, after) = rest.as_str().split_once('\'')?;
                word.get_or_insert_default().push_str(inside);
                rest = after.chars();
            }
            '\\' => word.get_or_insert_default().push(rest.next().filter(|c| *c == '\'')?),
            c if c.is_ascii_alphanumeric() || "_-./=:,+@%&".contains(c) => {
                word.get_or_insert_default().push(c);
            }
            _ => return None,
        }
    }
    words.extend(word);
    Some(words)
}

/// The text that printf prints for octal escapes.
fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('\\');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (octal, rest) = part.split_at_checked(3)?;
        bytes.push(u8::from_str_radix(octal, 8).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok().filter(|_| !text.contains(['%', '\'']))
}

/// A string literal of Python, for code in a command.
pub fn python_text(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            // All of them are below U+10000.
            c if acts(c) => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out + "\""
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::process::Command;

    /// Names that a shell, a program or a terminal could misread.
    const NASTY: [&str; 16] = [
        "plain/name-1.txt",
        "",
        "two  words ",
        "it's",
        "'; touch owned; '",
        "$(touch owned)`touch owned`$HOME",
        "a\nb",
        "a\n'\n; touch owned\n b",
        "\"\\\\n%s!!*?[a]{b,c}~#&|<>",
        "~/a",
        "=ls",
        "-rf",
        "--set",
        "\u{1b}[2J\u{202e}é 漢\t\r",
        "-e\n%d\\n'",
        " ",
    ];

    fn shell(line: &str) -> Vec<u8> {
        let done = Command::new("sh").args(["-c", line]).output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{line}: {done:?}");
        done.stdout
    }

    #[test]
    fn a_shell_reads_every_word_as_it_was() {
        for name in NASTY {
            let word = quoted(name);
            assert!(!word.chars().any(acts), "{word}");
            assert_eq!(
                shell(&format!("printf '%s|' {word} end")),
                format!("{name}|end|").as_bytes()
            );
            let path = quoted_path(Path::new(name));
            let is = if name.starts_with('-') { format!("./{name}") } else { name.into() };
            assert_eq!(shell(&format!("printf '%s|' {path}")), format!("{is}|").as_bytes());
        }
        let bytes = b"\xff\n\xfe a'";
        let path = quoted_path(Path::new(OsStr::from_bytes(bytes)));
        assert_eq!(shell(&format!("printf %s {path}")), bytes);
        assert_eq!(quoted_path(Path::new("a\n")), "$'a\\012'");
        assert_eq!(quoted("a b"), "'a b'");
    }

    #[test]
    fn the_words_of_a_command_are_found_and_nothing_but_words() {
        for name in NASTY {
            let line = format!("a {} && b", quoted(name));
            assert_eq!(words(&line).unwrap(), ["a", name, "&&", "b"], "{line}");
        }
        // The form in which an early version of onebox quoted words.
        assert_eq!(words("'a\nb' c").unwrap(), ["a\nb", "c"]);
        for line in [
            "a; b",
            "a | b",
            "a $(b)",
            "a `b`",
            "a 'b",
            "a \"b\"",
            "\"$(printf 'a')$(b)\"",
            "\"$(printf '%s')\"",
            "a\nb",
            "a \\b",
            "a > b",
        ] {
            assert_eq!(words(line), None, "{line}");
        }
    }

    #[test]
    fn a_literal_of_python_is_the_text() {
        assert_eq!(python_text("a\"b\\c\nd'é\u{1b}"), r#""a\"b\\c\nd'é\u001b""#);
    }
}
