//! A tokenizer.json may come from an untrusted source, and the library panics on some files or uses
//! unbounded memory and time. This module bounds both before the tokenizer gets any data.

use device::panics::quietly;
use files::foreign_text::reason;
use serde_json::Value;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tokenizers::{Encoding, NormalizedString, Normalizer};

/// Most bytes that a normalizer or pre-tokenizer may make of one byte; usual is at most four.
const MOST_GROWTH: f64 = 64.0;
/// Largest number of bytes that a normalizer or pre-tokenizer may add before a text.
const MOST_ADDED: f64 = 4096.0;
/// Largest number of parts in sequences. Real tokenizers have about ten.
const MOST_PARTS: usize = 512;
/// Largest number of tokens per byte of text, plus [`MOST_ADDED`].
const MOST_TOKENS: usize = 16;
/// Text encoded before the data: usual ASCII characters, and some of 2, 3 and 4 bytes.
const SAMPLE: &str = "The box holds 2 models, (each) \"too large\" for one card: a[0] = {x} + y; 100% of #7!\n\
    \t~`@$^&*_-|\\<>?/'. Én français, 漢字かな, 한국어, русский, عربي 🦀\r\n\n    def f(self):\u{a0}return None\n";
/// Lengths of the samples in characters, shortest first; each is encoded separately.
const LENGTHS: [usize; 3] = [1, 128, 8 << 10];
/// Time limit for all samples together.
const PATIENCE: Duration = Duration::from_secs(20);

/// Calls `f` and returns a panic as an error.
pub(super) fn guarded<T>(what: &str, f: impl FnOnce() -> T) -> Result<T, String> {
    let text = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("the tokenizer library fails {what}: {}", reason(text.unwrap_or("no message")))
    };
    quietly(|| catch_unwind(AssertUnwindSafe(f))).map_err(text)
}

/// Upper bound of the growth of a text.
#[derive(Clone, Copy)]
struct Growth {
    factor: f64,
    added: f64,
    parts: usize,
}

impl Growth {
    const NONE: Self = Self { factor: 1.0, added: 0.0, parts: 0 };

    fn then(self, next: Self) -> Self {
        Self {
            factor: self.factor * next.factor,
            added: self.added * next.factor + next.added,
            parts: self.parts + next.parts,
        }
    }
}

/// Growth by a normalizer, a pre-tokenizer or a decoder.
fn growth(part: &Value) -> Growth {
    let length = |text: &Value| text.as_str().map_or(0.0, |text| text.len() as f64);
    let sequence = ["normalizers", "pretokenizers", "decoders"].map(|key| part[key].as_array());
    let inside = sequence.into_iter().flatten().flatten().map(growth);
    let (factor, added) = match part["type"].as_str() {
        Some("Replace") => {
            let replaced = length(&part["pattern"]["String"]).max(1.0);
            ((length(&part["content"]) / replaced).max(1.0), 0.0)
        }
        Some("Prepend") => (1.0, length(&part["prepend"])),
        // A byte becomes a character of two bytes, and a blank may precede each word.
        Some("ByteLevel") => (3.0, 1.0),
        Some("Metaspace") => (4.0, 4.0),
        _ => (1.0, 0.0),
    };
    let parts = usize::from(!part.is_null());
    inside.fold(Growth { factor, added, parts }, Growth::then)
}

/// Checks the growth bounds of a tokenizer.json before the library uses it.
pub(super) fn check(file: &Value) -> Result<(), String> {
    for (what, parts) in [
        ("normalizer and pre_tokenizer", &["normalizer", "pre_tokenizer"][..]),
        ("decoder", &["decoder"]),
    ] {
        let growth = parts.iter().map(|part| growth(&file[*part])).fold(Growth::NONE, Growth::then);
        if growth.factor > MOST_GROWTH || growth.added > MOST_ADDED {
            let (factor, added) = (growth.factor, growth.added);
            return Err(format!(
                "its {what} can make {factor:.0} bytes of one and put {added:.0} before a text, more than \
                 {MOST_GROWTH:.0} and {MOST_ADDED:.0}"
            ));
        }
        if growth.parts > MOST_PARTS {
            let parts = growth.parts;
            return Err(format!("its {what} has {parts} parts, more than {MOST_PARTS}"));
        }
    }
    Ok(())
}

pub(super) fn with_places(
    encoded: tokenizers::Result<Encoding>,
    text: &str,
) -> Result<Vec<(u32, Range<usize>)>, String> {
    let encoded = encoded.map_err(|e| reason(e).to_string())?;
    check_growth(encoded.len(), text)?;
    let places = encoded.get_offsets().iter().map(|(start, end)| *start..*end);
    Ok(encoded.get_ids().iter().copied().zip(places).collect())
}

pub(super) fn check_growth(tokens: usize, text: &str) -> Result<(), String> {
    let most = text.len().saturating_mul(MOST_TOKENS).saturating_add(MOST_ADDED as usize);
    match tokens > most {
        true => Err(format!("it makes {tokens} tokens of {} bytes", text.len())),
        false => Ok(()),
    }
}

/// Encodes the samples on a separate thread, for at most [`PATIENCE`]. A thread that exceeds the
/// limit is abandoned: it cannot be stopped, and the process ends soon.
pub(super) fn try_out(inner: &Arc<tokenizers::Tokenizer>) -> Result<(), String> {
    let tokenizer = Arc::clone(inner);
    within(PATIENCE, move || samples(&tokenizer))
}

/// Runs `tries` on a new thread, or here if none can start; exceeding `patience` is an error.
pub(super) fn within(
    patience: Duration,
    tries: impl Fn() -> Result<(), String> + Clone + Send + 'static,
) -> Result<(), String> {
    let (sender, receiver) = mpsc::channel();
    let on_thread = tries.clone();
    let tried = thread::Builder::new().spawn(move || {
        // After a timeout the receiver is gone.
        let _ = sender.send(on_thread());
    });
    if tried.is_err() {
        return tries();
    }
    receiver.recv_timeout(patience).unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => {
            let (bytes, seconds) = (LENGTHS.iter().sum::<usize>(), patience.as_secs_f64());
            Err(format!("it takes more than {seconds} s over {bytes} bytes of text"))
        }
        RecvTimeoutError::Disconnected => Err("its trial ended without a word".into()),
    })
}

fn samples(inner: &tokenizers::Tokenizer) -> Result<(), String> {
    for length in LENGTHS {
        let text: String = SAMPLE.chars().cycle().take(length).collect();
        if let Some(normalizer) = inner.get_normalizer() {
            let mut normalized = NormalizedString::from(text.as_str());
            let done = guarded("over a sample", || normalizer.normalize(&mut normalized))?;
            let (most, length) = (text.len() as f64 * MOST_GROWTH + MOST_ADDED, normalized.len());
            if done.is_ok() && length as f64 > most {
                return Err(format!("its normalizer makes {length} bytes of {}", text.len()));
            }
        }
        // An encoding error is ignored: a missing token for a character of the sample does not
        // matter for the data. The call must only end.
        let encoded = guarded("over a sample", || inner.encode_fast(text.as_str(), false))?;
        let tokens = encoded.map_or(0, |encoded| encoded.len());
        check_growth(tokens, &text)?;
    }
    Ok(())
}
