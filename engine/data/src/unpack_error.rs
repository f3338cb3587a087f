//! Reasons why a packed file cannot be unpacked, as clauses after "it is compressed (gzip), and".

use files::path_text::PathText;
use std::io;
use std::path::PathBuf;
use topology::format_bytes;

/// Largest number of unpacked bytes for each byte of a packed file. Text shrinks 3 to 30 times.
pub(crate) const MOST_GROWTH: u64 = 250;
/// Unpacked bytes up to which [`MOST_GROWTH`] is not checked.
pub(crate) const SMALL: u64 = 64 << 20;

/// The reason why a packed file cannot be unpacked.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum UnpackError {
    #[error("it is damaged: {0}; get the whole file again")]
    Damaged(String),
    #[error("it contains {0}: unpack it by hand")]
    Contains(&'static str),
    #[error("{0}")]
    Unusable(String),
    #[error(
        "its {} have become more than {} of text, over {MOST_GROWTH} times as many: it may be a zip bomb, which fills the disk; \
         if you trust it, unpack it by hand",
        format_bytes(*packed),
        format_bytes(*unpacked)
    )]
    Bomb { packed: u64, unpacked: u64 },
    #[error(
        "it has more than {} of text, which need more than nine tenths of the {} that are free in {}: make room there, or give \
         another {setting}",
        format_bytes(*unpacked),
        format_bytes(*free),
        PathText(folder)
    )]
    NoRoom { unpacked: u64, free: u64, folder: PathBuf, setting: &'static str },
    #[error("its text cannot be read or written: {0}")]
    Unwritten(#[from] io::Error),
    #[error("the beginning is enough")]
    Enough,
}

impl UnpackError {
    /// The error of a decoder or of the file system while a file is read, after `done` bytes
    /// of text.
    pub(crate) fn unread(error: &io::Error, done: u64) -> Self {
        // The file system has no part in a decoder's errors.
        if error.raw_os_error().is_some() {
            return Self::Unusable(format!("it cannot be read: {error}"));
        }
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it ends too early".to_owned(),
            _ => files::foreign_text::reason(error).to_string(),
        };
        Self::Damaged(format!("{why}, behind {} of text", format_bytes(done)))
    }
}
