//! What reads bytes that others wrote, one function each, for tests and fuzzers that change them at random. Each must return,
//! soon and with little memory, whatever it is given; a config is read by [`load_str`](config::load_str).

use crate::header as own;
use crate::hugging_face::{config_json, folder};
use crate::manifest::Manifest;
use config::ModelConfig;

/// A rank's safetensors file, as far as its header: what is accepted is written as it was read.
///
/// # Errors
/// What is wrong with it.
pub fn checkpoint_header(file: &[u8]) -> Result<bool, String> {
    let entries = own::decode_vectors(header_of(file)?, file.len() as u64)?;
    let again = own::encode(&entries);
    let data: usize = entries.iter().map(|entry| 4 * entry.len).sum();
    let decoded = own::decode_vectors(&again, (again.len() + data) as u64)?;
    Ok(decoded == entries && header_of(file)?.len() + data == file.len())
}

/// A safetensors file of others: what is accepted fills it.
///
/// # Errors
/// What is wrong with it.
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

/// A manifest, sealed here so that more than its hash is read: what is accepted is written as it was read.
///
/// # Errors
/// What is wrong with it.
pub fn manifest(json: &[u8]) -> Result<bool, String> {
    let manifest = Manifest::decode(&Manifest::seal(json))?;
    let again = manifest.encode().map_err(|e| e.to_string())?;
    let decoded = Manifest::decode(&again)?.encode().map_err(|e| e.to_string())?;
    Ok(decoded == again)
}

/// The index of a folder of transformers.
///
/// # Errors
/// What is wrong with it.
pub fn index(json: &[u8]) -> Result<(), String> {
    folder::index(json).map(drop)
}

/// `config.json` of a folder of transformers; the number of keys that differ, are wrong or missing.
pub fn config_json(json: &[u8], model: &ModelConfig) -> usize {
    config_json::mismatches(json, model).len()
}
