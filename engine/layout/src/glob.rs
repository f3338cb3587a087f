//! Globs of names: `*` stands for any characters, `?` for one, and `[0-9]` for one of a set.

/// Whether `glob` matches all of `name`.
pub(crate) fn matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let (mut at, mut next) = (0, 0);
    // The last star, and the first character that it does not stand for.
    let mut star: Option<(usize, usize)> = None;
    while next < name.len() {
        match one(&glob[at..], name[next]) {
            Some(length) => (at, next) = (at + length, next + 1),
            None if glob.get(at) == Some(&'*') => {
                star = Some((at, next));
                at += 1;
            }
            None => {
                let Some((place, end)) = star else { return false };
                star = Some((place, end + 1));
                (at, next) = (place + 1, end + 1);
            }
        }
    }
    glob[at..].iter().all(|c| *c == '*')
}

/// Length of the beginning of `glob` that stands for the character `c`; `None` if it does not. A star
/// stands for no character here.
fn one(glob: &[char], c: char) -> Option<usize> {
    match *glob.first()? {
        '*' => None,
        '?' => Some(1),
        '[' => match set(glob) {
            Some(set) => set.has(c).then_some(set.length),
            // A bracket without its end is a character.
            None => (c == '[').then_some(1),
        },
        own => (own == c).then_some(1),
    }
}

/// A set of characters, such as `[0-9]`, `[135]` or `[!0]`.
struct CharacterSet<'a> {
    members: &'a [char],
    is_inverted: bool,
    /// Number of characters with the brackets.
    length: usize,
}

/// The set at the beginning of `glob`, if its bracket has an end.
fn set(glob: &[char]) -> Option<CharacterSet<'_>> {
    let is_inverted = glob.get(1) == Some(&'!');
    let start = if is_inverted { 2 } else { 1 };
    // An end at the first place is a member.
    let end = start + 1 + glob.get(start + 1..)?.iter().position(|c| *c == ']')?;
    Some(CharacterSet { members: &glob[start..end], is_inverted, length: end + 1 })
}

impl CharacterSet<'_> {
    fn has(&self, c: char) -> bool {
        let mut members = self.members;
        let mut found = false;
        while let [first, rest @ ..] = members {
            members = match rest {
                ['-', last, after @ ..] => {
                    found |= (*first..=*last).contains(&c);
                    after
                }
                _ => {
                    found |= *first == c;
                    rest
                }
            };
        }
        found != self.is_inverted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glob_matches_whole_names() {
        for (glob, name) in [
            ("lm_head.weight", "lm_head.weight"),
            ("*", ""),
            ("*.mlp.experts.*", "model.layers.0.mlp.experts.17.up_proj.weight"),
            ("*norm*", "model.norm.weight"),
            ("model.layers.[0-9].*", "model.layers.7.input_layernorm.weight"),
            ("model.layers.1[02].*", "model.layers.12.input_layernorm.weight"),
            ("model.layers.[!0].*", "model.layers.1.input_layernorm.weight"),
            ("*a*ab", "aabaab"),
            ("?[]]", "x]"),
            ("a[b", "a[b"),
        ] {
            assert!(matches(glob, name), "{glob} {name}");
        }
        for (glob, name) in [
            ("lm_head", "lm_head.weight"),
            ("model.layers.[0-9].*", "model.layers.17.input_layernorm.weight"),
            ("model.layers.[!0].*", "model.layers.0.input_layernorm.weight"),
            ("*.weight", "model.layers.0.self_attn.q_proj.bias"),
            ("?", ""),
            ("", "a"),
        ] {
            assert!(!matches(glob, name), "{glob} {name}");
        }
    }
}
