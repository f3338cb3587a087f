//! What of the host's memory a run's data takes. Tokens in files stay there. Tokens that are made of text belong to no rank:
//! they are made before the ranks' memory is there, and lie on whichever nodes have room.

use config::{Config, DataConfig, DataFormat, DeviceConfig, Packing};
use data::{BYTES_AT_ONCE, Cache, ChunkSizes, DataInspection, Tokenizer, texts_at_once};
use serde::Serialize;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use topology::format_bytes;

/// Bytes that a tokenizer takes for each byte of a text while it works on it, and for each token: measured on source code, on
/// sentences and on random letters, 0.58 to 1 tokens a byte, by the highest memory of the process (150 to 260 a byte).
const PER_BYTE: f64 = 64.0;
const PER_TOKEN: f64 = 192.0;

/// Bytes of a row that may be among others although none is in their beginning.
const LONG_ROW: u64 = 64 << 10;

/// Bytes on the host for all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DataMemory {
    /// Of tokens that stay in their files.
    pub in_files: u64,
    /// Of tokens that stay in memory, and of chats which of them count.
    pub tokens: u64,
    /// Of where documents begin, how long they are and what of them counts, where samples are no windows.
    pub documents: u64,
    /// Largest number while they are read: the text that is read at once, its tokens, and what the tokenizer takes; of rows also the
    /// tokens that stay, twice while their buffer grows.
    pub reading: u64,
    /// How many tokens a text comes to was measured on its beginning.
    pub estimated: bool,
}

impl DataMemory {
    /// Of the data of `config`; none where there is none to be read, as on a described box.
    ///
    /// # Errors
    /// Why the data cannot be read: the key, the path and the remedy.
    pub fn of(config: &Config) -> Result<Option<Self>, String> {
        /// Layouts are compared by the thousand, and files do not change for that.
        static KNOWN: Mutex<Vec<(DataConfig, Result<DataMemory, String>)>> = Mutex::new(Vec::new());
        if matches!(config.device, DeviceConfig::Sim { .. }) || config.data.train.is_empty() {
            return Ok(None);
        }
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.iter().find(|(data, _)| *data == config.data) {
            return found.clone().map(Some);
        }
        let found = measured(config);
        known.push((config.data.clone(), found.clone()));
        found.map(Some)
    }

    /// A sentence.
    pub fn words(&self) -> String {
        let about = if self.estimated { "about " } else { "" };
        let documents = match self.documents {
            0 => String::new(),
            bytes => format!(", and {} of where documents are", format_bytes(bytes)),
        };
        let reading = match self.reading > self.tokens {
            true => format!(", {about}{} while the text is read", format_bytes(self.reading)),
            false => String::new(),
        };
        if self.in_files > 0 {
            let bytes = format_bytes(self.in_files);
            return format!(
                "data: {about}{bytes} of tokens stay in their files, and a run reads them from there{documents}{reading}"
            );
        }
        format!(
            "data: {about}{} of tokens{documents}{reading}, on the host once for all ranks, on any of its nodes",
            format_bytes(self.tokens)
        )
    }
}

fn measured(config: &Config) -> Result<DataMemory, String> {
    let look = DataInspection::at(config, false).map_err(|error| error.to_string())?;
    let Some(path) = config.data.tokenizer.as_ref().filter(|_| config.data.format.is_text()) else {
        let documents = documents(config, look.documents, look.tokens as u64, look.is_masked);
        return Ok(DataMemory { in_files: look.bytes, documents, ..DataMemory::default() });
    };
    let tokenizer = Tokenizer::open(Path::new(path));
    let tokenizer = tokenizer.map_err(|problem| format!("data.tokenizer: {path}: {problem}"))?;
    let sample = tokenizer.encode(&look.sample);
    let sample = sample.map_err(|why| format!("data.tokenizer: {path}: {why}"))?;
    let share = sample.len() as f64 / look.sample.len().max(1) as f64;
    let tokens = (look.bytes as f64 * share).ceil() as u64;
    let stored = tokens * if tokenizer.vocab() <= 1 << 16 { 2 } else { 4 };
    let ChunkSizes { part, piece, .. } = ChunkSizes::default();
    let working = |one: u64| {
        let at_once = look.bytes.min(texts_at_once(one) as u64 * one);
        (at_once as f64 * (PER_BYTE + PER_TOKEN * share)) as u64
    };
    if config.data.format.is_rows() {
        let chats = matches!(config.data.format, DataFormat::Chat);
        let lines = look.sample.lines().count() as f64 / look.sample.len().max(1) as f64;
        let documents = documents(config, (look.bytes as f64 * lines) as u64, tokens, chats);
        let stored = stored + if chats { tokens } else { 0 };
        let longest = look.sample.lines().map(str::len).max().unwrap_or(0) as u64;
        let at_once = look.bytes.min(BYTES_AT_ONCE as u64);
        // Each token and whether it counts, and both once more as the cache keeps them.
        let made = (at_once as f64 * share) as u64 * 2 * 5;
        let reading = 2 * stored + documents + at_once + made + working(longest.max(LONG_ROW));
        return Ok(DataMemory { in_files: 0, tokens: stored, documents, reading, estimated: true });
    }
    let one = if tokenizer.has_cuts() { piece as u64 } else { look.longest };
    // A part is read, cut, and its tokens are made and written.
    let of_part = part.min(look.bytes) as f64 / look.bytes.max(1) as f64;
    let reading = ((2 * look.bytes + 2 * stored) as f64 * of_part) as u64 + working(one);
    // Where no folder can keep them they stay in memory.
    let kept = Cache::of_user(true).folder.is_some();
    let (in_files, in_memory) = if kept { (stored, 0) } else { (0, stored) };
    let reading = reading + in_memory;
    Ok(DataMemory { in_files, tokens: in_memory, documents: 0, reading, estimated: true })
}

/// Bytes that are kept of documents: of each where it begins, how long it is and, where some tokens do not count, how many do; where
/// several share a sample its number, and the end of each sample.
fn documents(config: &Config, documents: u64, tokens: u64, counts: bool) -> u64 {
    let each = 12 + if counts { 4 } else { 0 };
    match config.data.packing {
        Packing::Windows => 0,
        Packing::None => documents * each,
        Packing::Documents => {
            documents * (each + 4) + 8 * tokens.div_ceil(config.model.seq_len as u64)
        }
    }
}
