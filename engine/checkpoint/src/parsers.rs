//! Parsers of untrusted bytes, one function each, for tests and fuzzers. Each must return quickly
//! and with little memory for any input. [`load_str`](config::load_str) parses configs.

use crate::header as own;
use crate::hugging_face::{config_json, weight_index};
use crate::manifest::Manifest;
use config::ModelConfig;

/// Parses the header of a rank's safetensors file. Returns whether encoding it again gives an equal
/// header, and whether the data fills the file.
///
/// # Errors
/// The fault in the header.
pub fn checkpoint_header(file: &[u8]) -> Result<bool, String> {
    let entries = own::decode_vectors(header_of(file)?, file.len() as u64)?;
    let again = own::encode(&entries);
    let data: usize = entries.iter().map(|entry| 4 * entry.len).sum();
    let decoded = own::decode_vectors(&again, (again.len() + data) as u64)?;
    Ok(decoded == entries && header_of(file)?.len() + data == file.len())
}

/// Parses another program's safetensors file; returns whether header and tensors fill the file.
///
/// # Errors
/// The fault in the header.
pub fn foreign_header(file: &[u8]) -> Result<bool, String> {
    let header = header_of(file)?;
    let tensors = own::decode(header, file.len() as u64)?;
    let size = |t: &own::TensorEntry| t.shape.iter().product::<usize>() as u64 * t.width();
    Ok(tensors.iter().map(size).sum::<u64>() + header.len() as u64 == file.len() as u64)
}

fn header_of(file: &[u8]) -> Result<&[u8], String> {
    let first = file.first_chunk::<8>().ok_or("it is too short")?;
    let bytes = own::length(*first, file.len() as u64)?;
    file.get(..bytes).ok_or_else(|| "it is too short".into())
}

/// Parses a manifest. It is sealed here, so that random changes get past the hash check. Returns
/// whether encoding it again gives the same bytes.
///
/// # Errors
/// The fault in the manifest.
pub fn manifest(json: &[u8]) -> Result<bool, String> {
    let manifest = Manifest::decode(&Manifest::seal(json))?;
    let again = manifest.encode().map_err(|e| e.to_string())?;
    let decoded = Manifest::decode(&again)?.encode().map_err(|e| e.to_string())?;
    Ok(decoded == again)
}

/// Parses the index of a transformers folder.
///
/// # Errors
/// The fault in the index.
pub fn index(json: &[u8]) -> Result<(), String> {
    weight_index::index(json).map(drop)
}

/// Number of keys of a transformers `config.json` that are wrong, missing or different from
/// `model`.
pub fn config_json(json: &[u8], model: &ModelConfig) -> usize {
    config_json::mismatches(json, model).len()
}
