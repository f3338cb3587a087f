//! What a run leaves: a hash of its whole state, and its weights as one safetensors file, in global tensor
//! order whatever the layout was. Tensors are put together one at a time, so memory holds the largest.

use crate::run::meet;
use crate::run_dir::{UNFINISHED, sync_folder};
use device::{Device, Error, Rank, Tensor};
use offload::Optimizer;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tensor_parallel::{Gpt, Param, Run, SegmentLayout, Split};
use xxhash_rust::xxh3::Xxh3Default;

/// Elements read from a device at once.
const BLOCK: usize = 1 << 14;
/// Parameters, first and second moment.
const STATES: usize = 3;

/// The ranks' common work on the whole state.
pub(crate) struct Gathering {
    segments: Vec<SegmentLayout>,
    path: Option<PathBuf>,
    shared: Mutex<Shared>,
}

struct Shared {
    /// The tensor that is being put together.
    whole: Vec<f32>,
    hash: Xxh3Default,
    file: Option<BufWriter<File>>,
    problem: Option<io::Error>,
}

/// What came of it.
pub(crate) struct Finished {
    pub(crate) state_hash: String,
    /// Why the weights are not written.
    pub(crate) problem: Option<io::Error>,
}

impl Gathering {
    pub(crate) fn new(gpt: &Gpt, path: Option<&Path>) -> Self {
        let hash = Xxh3Default::new();
        let shared = Shared { whole: Vec::new(), hash, file: None, problem: None };
        let path = path.map(Path::to_owned);
        Self { segments: gpt.segments().to_vec(), path, shared: Mutex::new(shared) }
    }

    /// Every rank calls it after its last step, with all lanes at rest.
    pub(crate) fn run(
        &self,
        dev: &Device,
        optimizer: &Optimizer,
        meeting: Tensor,
    ) -> Result<(), Error> {
        let first = dev.rank().index() == 0;
        if first {
            self.start_file();
        }
        for (index, layout) in self.segments.iter().enumerate() {
            for param in &layout.params {
                for state in 0..STATES {
                    if first {
                        self.with(|s| {
                            s.whole.clear();
                            s.whole.resize(param.global_len(), 0.0);
                        });
                    }
                    meet(dev, meeting)?;
                    let replica = dev.rank().tp > 0 && param.split == Split::Replicated;
                    let part = (index, param, state);
                    if !replica {
                        self.contribute(dev, optimizer, part, Work::Write)?;
                    }
                    meet(dev, meeting)?;
                    if replica {
                        self.contribute(dev, optimizer, part, Work::Compare)?;
                    }
                    meet(dev, meeting)?;
                    if first {
                        self.with(|s| s.take(state == 0));
                    }
                }
            }
        }
        if first {
            self.with(|s| s.finish_file(self.path.as_deref()));
        }
        Ok(())
    }

    /// Copies what this rank owns of a tensor's state into the whole, or compares: what every tensor-parallel
    /// rank holds must be the same on all.
    fn contribute(
        &self,
        dev: &Device,
        optimizer: &Optimizer,
        (segment, param, state): (usize, &Param, usize),
        work: Work,
    ) -> Result<(), Error> {
        let Rank { tp, tp_size, .. } = dev.rank();
        let runs = param.runs(tp, tp_size);
        let mut block = vec![0.0; BLOCK];
        for owned in optimizer.owned(segment) {
            let end = (owned.start + owned.states[state].len()).min(param.range.end);
            let mut at = owned.start.max(param.range.start);
            while at < end {
                let n = BLOCK.min(end - at);
                let from = at - owned.start;
                owned.states[state].slice(from..from + n).read(dev, &mut block[..n])?;
                let local = at - param.range.start;
                let same = self.with(|s| work.on(&mut s.whole, &runs, local, &block[..n]));
                if !same {
                    let name = &param.name;
                    return Err(Error::Replica { rank: dev.rank().index(), param: name.clone() });
                }
                at += n;
            }
        }
        Ok(())
    }

    fn with<R>(&self, f: impl FnOnce(&mut Shared) -> R) -> R {
        f(&mut self.shared.lock().unwrap_or_else(|e| e.into_inner()))
    }

    fn start_file(&self) {
        let Some(path) = &self.path else { return };
        let opened = File::create(unfinished(path)).and_then(|file| {
            let mut file = BufWriter::new(file);
            file.write_all(&header(&self.segments)).map(|()| file)
        });
        self.with(|s| match opened {
            Ok(file) => s.file = Some(file),
            Err(error) => s.give_up(error),
        });
    }

    pub(crate) fn finish(self) -> Finished {
        let shared = self.shared.into_inner().unwrap_or_else(|e| e.into_inner());
        Finished { state_hash: format!("{:016x}", shared.hash.digest()), problem: shared.problem }
    }
}

/// What is done with a rank's part of a tensor.
#[derive(Clone, Copy)]
enum Work {
    Write,
    Compare,
}

impl Work {
    /// Local elements `local..` of a parameter, where they belong in the whole tensor. False: they differ.
    fn on(self, whole: &mut [f32], runs: &[Run], local: usize, values: &[f32]) -> bool {
        let end = local + values.len();
        let first = runs.partition_point(|run| run.local.end <= local);
        runs[first..].iter().take_while(|run| run.local.start < end).all(|run| {
            let (from, to) = (run.local.start.max(local), run.local.end.min(end));
            let at = run.global + from - run.local.start;
            let values = &values[from - local..to - local];
            let whole = &mut whole[at..at + to - from];
            match self {
                Self::Write => whole.copy_from_slice(values),
                Self::Compare => {
                    let mut pairs = whole.iter().zip(values);
                    return pairs.all(|(w, x)| w.to_bits() == x.to_bits());
                }
            }
            true
        })
    }
}

/// Where the weights grow until they are whole.
fn unfinished(path: &Path) -> PathBuf {
    path.with_file_name(UNFINISHED)
}

impl Shared {
    /// On the disk under its own name, or not at all.
    fn finish_file(&mut self, path: Option<&Path>) {
        let (Some(mut file), Some(path)) = (self.file.take(), path) else { return };
        let close = file.flush().and_then(|()| file.get_ref().sync_all());
        let whole = close.and_then(|()| std::fs::rename(unfinished(path), path));
        let named = whole.and_then(|()| path.parent().map_or(Ok(()), sync_folder));
        if let Err(error) = named {
            self.give_up(error);
        }
    }

    fn give_up(&mut self, error: io::Error) {
        self.problem.get_or_insert(error);
        self.file = None;
    }

    /// Hashes the whole tensor, and writes it when it is a parameter.
    fn take(&mut self, parameter: bool) {
        let mut bytes = [0u8; 4096];
        for part in self.whole.chunks(bytes.len() / 4) {
            let filled = &mut bytes[..4 * part.len()];
            filled.chunks_mut(4).zip(part).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
            self.hash.update(filled);
            if let (true, Some(file)) = (parameter, &mut self.file)
                && let Err(error) = file.write_all(filled)
            {
                self.problem.get_or_insert(error);
                self.file = None;
            }
        }
    }
}

/// The safetensors header of all parameters, in the order in which they are written.
fn header(segments: &[SegmentLayout]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut at = 0;
    for param in segments.iter().flat_map(|s| &s.params) {
        let end = at + 4 * param.global_len() as u64;
        let (rows, cols) = param.global;
        let shape = if cols == 1 { vec![rows] } else { vec![rows, cols] };
        let entry =
            serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] });
        entries.insert(param.name.clone(), entry);
        at = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}
