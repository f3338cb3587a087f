//! `onebox data cache`: shows or clears the user's cache folder of texts that were read.

use super::{CommandError, Failable, code, print_as};
use ::data::{Cache, CacheRemoval, CacheUsage, PartCount};
use files::path_text::PathText;
use serde_json::json;
use std::io::ErrorKind;
use std::path::Path;
use topology::{counted, format_bytes};

#[derive(Debug, clap::Args)]
pub(super) struct CacheArgs {
    /// Remove the whole cache except the parts that runs read now; later runs rebuild what they
    /// need
    #[arg(long)]
    clear: bool,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CacheArgs) -> Result<(), CommandError> {
    let cache = Cache::of_user(!args.clear);
    let nowhere = "there is no cache folder: set XDG_CACHE_HOME or HOME to an absolute folder";
    let folder = cache.folder.as_deref().ok_or(nowhere).fail_with(code::CONFIG)?;
    let limit = cache.limit().fail_with(code::CONFIG)?;
    let failed = |error: std::io::Error| {
        let why = match error.kind() {
            ErrorKind::WouldBlock => {
                "a command reads from it now that begins, or that leaves no trace as `train --dry-run`: try again later".to_owned()
            }
            _ => error.to_string(),
        };
        CommandError::new(code::IO, format!("{}: {why}", PathText(folder)))
    };
    let CacheRemoval { removed, .. } = match args.clear {
        true => cache.clear().map_err(failed)?,
        false => CacheRemoval::default(),
    };
    let usage = cache.usage().map_err(failed)?;
    let CacheUsage { all, in_use } = usage;
    let document = json!({
        "folder": folder,
        "parts": all.parts,
        "bytes": all.bytes,
        "limit": limit,
        "parts_in_use": in_use.parts,
        "bytes_in_use": in_use.bytes,
        "parts_removed": removed.parts,
        "bytes_removed": removed.bytes,
    });
    print_as(args.json, &document, || {
        let removed = match args.clear {
            true => format!("removed: {}\n", size(removed)),
            false => String::new(),
        };
        removed + &contents(folder, usage, limit)
    })
}

/// Text about the size of the folder and its limit.
fn contents(folder: &Path, CacheUsage { all, in_use }: CacheUsage, limit: u64) -> String {
    let in_use = match in_use.parts {
        0 => String::new(),
        _ => format!(", of which runs read {} now", size(in_use)),
    };
    let (folder, size, limit) = (PathText(folder), size(all), format_bytes(limit));
    format!("{folder}: {size}{in_use}; its limit is {limit}\n")
}

fn size(PartCount { parts, bytes }: PartCount) -> String {
    format!("{} in {}", format_bytes(bytes), counted(parts, "part"))
}
