//! Text is checked while it is read: a long file that is none is refused at its first bad byte.

use super::kind::{Kind, NOT_UTF8, TEXT_CUT};
use std::fmt;
use std::io::{self, Read};

/// Bytes that are read before they are checked.
const BLOCK: usize = 4 << 20;

/// Why bytes are no text, and the offset where they cease to be it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotUtf8 {
    /// This byte begins no character.
    BadByte {
        /// Bytes of text before it.
        offset: u64,
        /// The byte.
        byte: u8,
    },
    /// The bytes end inside the character that begins there.
    Cut {
        /// Bytes of text before it.
        offset: u64,
    },
}

impl NotUtf8 {
    /// The same without the place.
    pub(super) const fn kind(self) -> Kind {
        match self {
            Self::BadByte { .. } => NOT_UTF8,
            Self::Cut { .. } => TEXT_CUT,
        }
    }
}

impl fmt::Display for NotUtf8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind { what, remedy } = self.kind();
        match self {
            Self::BadByte { offset, byte } => {
                write!(f, "it is {what} (byte 0x{byte:02x} at offset {offset}): {remedy}")
            }
            Self::Cut { offset } => {
                write!(f, "it is {what} (which begins at offset {offset}): {remedy}")
            }
        }
    }
}

/// Appends what `from` gives to `to`, until its end or until it is no text.
pub(super) fn append(from: &mut impl Read, to: &mut Vec<u8>) -> io::Result<Option<NotUtf8>> {
    let start = to.len();
    let mut text = start;
    loop {
        let read = from.by_ref().take(BLOCK as u64).read_to_end(to)?;
        match str::from_utf8(&to[text..]) {
            Ok(_) => text = to.len(),
            Err(e) => {
                text += e.valid_up_to();
                if e.error_len().is_some() {
                    let offset = (text - start) as u64;
                    return Ok(Some(NotUtf8::BadByte { offset, byte: to[text] }));
                }
            }
        }
        if read < BLOCK {
            let cut = NotUtf8::Cut { offset: (text - start) as u64 };
            return Ok((text < to.len()).then_some(cut));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(mut from: impl Read) -> Option<NotUtf8> {
        append(&mut from, &mut b"before".to_vec()).unwrap()
    }

    #[test]
    fn what_is_no_text_is_found_without_reading_on() {
        let endless = (&b"caf\xe9 and more"[..]).chain(io::repeat(b'x'));
        assert_eq!(fault(endless), Some(NotUtf8::BadByte { offset: 3, byte: 0xe9 }));
    }

    #[test]
    fn a_character_across_two_blocks_is_one_and_one_at_the_end_is_cut() {
        let blanks = vec![b' '; BLOCK - 1];
        let whole = [&blanks[..], "é".as_bytes()].concat();
        assert_eq!(fault(&whole[..]), None);
        let offset = BLOCK as u64 - 1;
        assert_eq!(fault(&whole[..BLOCK]), Some(NotUtf8::Cut { offset }));
        assert_eq!(fault(&b"\xe6\xbc"[..]), Some(NotUtf8::Cut { offset: 0 }));
        let bad = [&blanks[..], b"\xc3\xff"].concat();
        assert_eq!(fault(&bad[..]), Some(NotUtf8::BadByte { offset, byte: 0xc3 }));
        assert_eq!(fault(&b""[..]), None);
    }
}
