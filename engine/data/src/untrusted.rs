//! A tokenizer.json may come from anywhere, and the library that reads it panics over some, or takes memory and time
//! without bound. Here both are bounded before any data goes through it.

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

/// Bytes that a normalizer or pre-tokenizer may make of one. Real ones make four at most.
const MOST_GROWTH: f64 = 64.0;
/// Bytes that it may put in front of a text.
const MOST_ADDED: f64 = 4096.0;
/// Parts of its sequences. Real ones have some ten.
const MOST_PARTS: usize = 512;
/// Tokens of a byte of text, beside [`MOST_ADDED`].
const MOST_TOKENS: usize = 16;
/// What is encoded before the data: all of the ASCII that texts have, and characters of 2, 3 and 4 bytes.
const SAMPLE: &str = "The box holds 2 models, (each) \"too large\" for one card: a[0] = {x} + y; 100% of #7!\n\
    \t~`@$^&*_-|\\<>?/'. Én français, 漢字かな, 한국어, русский, عربي 🦀\r\n\n    def f(self):\u{a0}return None\n";
/// Bytes of samples, each by itself, shortest first.
const LENGTHS: [usize; 3] = [1, 128, 8 << 10];
/// Time that the samples may take together.
const PATIENCE: Duration = Duration::from_secs(20);

/// `f`, with a panic as an error.
pub(super) fn guarded<T>(what: &str, f: impl FnOnce() -> T) -> Result<T, String> {
    let text = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("the tokenizer library fails {what}: {}", reason(text.unwrap_or("no message")))
    };
    quietly(|| catch_unwind(AssertUnwindSafe(f))).map_err(text)
}

/// How much longer a text may become.
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

/// Of a normalizer, a pre-tokenizer or a decoder.
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
        // A byte becomes a character of two, and a blank may stand before each word.
        Some("ByteLevel") => (3.0, 1.0),
        Some("Metaspace") => (4.0, 4.0),
        _ => (1.0, 0.0),
    };
    let parts = usize::from(!part.is_null());
    inside.fold(Growth { factor, added, parts }, Growth::then)
}

/// Looks at what a tokenizer.json asks for before the library does it.
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

/// Encodes samples on a thread of its own, at most for [`PATIENCE`]. A thread that does not end is left behind: nobody can
/// stop it, and the process ends soon.
pub(super) fn try_out(inner: &Arc<tokenizers::Tokenizer>) -> Result<(), String> {
    let tokenizer = Arc::clone(inner);
    within(PATIENCE, move || samples(&tokenizer))
}

/// What `tries` comes to, on a thread where there can be one, unless it takes longer.
pub(super) fn within(
    patience: Duration,
    tries: impl Fn() -> Result<(), String> + Clone + Send + 'static,
) -> Result<(), String> {
    let (sender, receiver) = mpsc::channel();
    let on_thread = tries.clone();
    let tried = thread::Builder::new().spawn(move || {
        // Nobody listens any more where it took too long.
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
        // That it has no token for a character of the sample says nothing of the data; only whether it ends counts.
        let encoded = guarded("over a sample", || inner.encode_fast(text.as_str(), false))?;
        let tokens = encoded.map_or(0, |encoded| encoded.len());
        check_growth(tokens, &text)?;
    }
    Ok(())
}
