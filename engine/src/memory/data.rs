//! Host memory of a run's data. Tokens in files stay in their files. Tokens that are made from text
//! belong to no rank: they are made before the ranks allocate memory, and lie on any node with
//! room.

use config::{Config, DataConfig, DataFormat, DeviceConfig, Packing};
use data::{BYTES_AT_ONCE, Cache, ChunkSizes, DataInspection, Tokenizer, texts_at_once};
use serde::Serialize;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use topology::format_bytes;

/// Bytes that a tokenizer needs for each byte of its text and for each token. Measured by the peak
/// memory of the process (150 to 260 bytes per byte) on source code, sentences and random letters,
/// with 0.58 to 1 tokens per byte.
const PER_BYTE: f64 = 64.0;
const PER_TOKEN: f64 = 192.0;

/// Assumed bytes of the longest row, if the beginning of the rows has only shorter rows.
const LONG_ROW: u64 = 64 << 10;

/// Bytes of host memory for data, once for all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DataMemory {
    /// Bytes of tokens that stay in their files.
    pub in_files: u64,
    /// Bytes of tokens that stay in memory, and of the flags that mark trained tokens of chats.
    pub tokens: u64,
    /// Bytes of the starts, lengths and trained targets of documents; 0 if samples are windows.
    pub documents: u64,
    /// Peak bytes while text is read: the text that is read at a time, its tokens, and the memory
    /// of the tokenizer. For rows, also the tokens that stay, twice while their buffer grows.
    pub reading: u64,
    /// Whether the number of tokens is estimated from the beginning of the text.
    pub estimated: bool,
}

impl DataMemory {
    /// Measures the data of `config`. `None` if there is no data to read, as on a described box.
    ///
    /// # Errors
    /// The data cannot be read. The text has the key, the path and the remedy.
    pub fn of(config: &Config) -> Result<Option<Self>, String> {
        /// Results by data config. A search compares thousands of layouts of the same data.
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

    /// Describes the bytes in a sentence.
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
        // A token (4 bytes) and whether it is trained (1 byte), and the cache's copy of both.
        let made = (at_once as f64 * share) as u64 * 2 * 5;
        let reading = 2 * stored + documents + at_once + made + working(longest.max(LONG_ROW));
        return Ok(DataMemory { in_files: 0, tokens: stored, documents, reading, estimated: true });
    }
    let one = if tokenizer.has_cuts() { piece as u64 } else { look.longest };
    // Two copies of a part: the text is read and cut, its tokens are made and written.
    let of_part = part.min(look.bytes) as f64 / look.bytes.max(1) as f64;
    let reading = ((2 * look.bytes + 2 * stored) as f64 * of_part) as u64 + working(one);
    // If no folder can keep the tokens, they stay in memory.
    let kept = Cache::of_user(true).folder.is_some();
    let (in_files, in_memory) = if kept { (stored, 0) } else { (0, stored) };
    let reading = reading + in_memory;
    Ok(DataMemory { in_files, tokens: in_memory, documents: 0, reading, estimated: true })
}

/// Bytes of the list of documents: start and length of each, and its trained targets if `counts`.
/// If several documents share a sample, also the number of each, and the end of each sample.
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
