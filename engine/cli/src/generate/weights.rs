//! Reads the parameters of a model from the weights of a run, a checkpoint or a folder of
//! transformers.

use super::GenerateError;
use checkpoint::hugging_face::PretrainedWeights;
use checkpoint::manifest::TensorEntry;
use checkpoint::{Checkpoint, TensorState};
use data::progress::Reading;
use device::{Device, Tensor, ViewMut};
use engine::run::export::BASE;
use files::input;
use layout::segment_runs::SegmentRuns;
use safetensors::tensor::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use tensor_parallel::{Decoder, Param};

/// Maximum bytes of a header.
const LONGEST_HEADER: u64 = 1 << 26;
/// Elements of a parameter that a thread reads in one go.
const AT_ONCE: usize = 1 << 20;

/// Function that sets values, given the index of the first value.
type ValueSource<'a> = dyn Fn(usize, &mut [f32]) -> Result<(), GenerateError> + Sync + 'a;

/// Sets parameters with `fill`, on all kernel threads.
fn set(dev: &Device, params: Tensor, fill: &ValueSource<'_>) -> Result<(), GenerateError> {
    let failed = Mutex::new(None);
    dev.write_runs(&[params], &|first, views| {
        let [view] = views else { unreachable!("one tensor has one view") };
        if let Err(error) = set_run(first, view, fill) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        Ok(())
    })?;
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Sets a run of parameters from index `first`; 16-bit parameters are rounded.
fn set_run(
    first: usize,
    view: &mut ViewMut<'_>,
    fill: &ValueSource<'_>,
) -> Result<(), GenerateError> {
    if let ViewMut::F32(values) = view {
        let mut parts = values.chunks_mut(AT_ONCE).enumerate();
        return parts.try_for_each(|(i, some)| fill(first + i * AT_ONCE, some));
    }
    let mut exact = vec![0.0; AT_ONCE.min(view.len())];
    for at in (0..view.len()).step_by(AT_ONCE) {
        let some = &mut exact[..AT_ONCE.min(view.len() - at)];
        fill(first + at, some)?;
        view.store(at, some);
    }
    Ok(())
}

/// Bytes of fp32 values.
const fn bytes_of(values: &[f32]) -> u64 {
    size_of_val(values) as u64
}

/// Reads the parameters of `decoder` from a folder of transformers: all of them, or the frozen ones if it
/// has some.
pub(super) fn load_folder(
    dev: &Device,
    decoder: &Decoder,
    from: &PretrainedWeights,
    reading: &dyn Reading,
) -> Result<(), GenerateError> {
    let source = from.of_rank(decoder, dev.rank());
    for (segment, layout) in decoder.segments().iter().enumerate() {
        let base = match decoder.shape().has_frozen_params() {
            true => layout.padded..layout.whole,
            false => 0..layout.len,
        };
        let params = decoder.params(segment).slice(base.clone());
        set(dev, params, &|first, values| {
            source.fill(segment, base.start + first, values)?;
            reading.add(bytes_of(values));
            Ok(())
        })?;
    }
    decoder.write_router_corrections(dev, |segment, first, values: &mut [f32]| {
        Ok(source.fill(segment, first, values)?)
    })
}

/// Function that reads elements: the tensor's number, the first element's index, the values to set.
type TensorReader<'a> = dyn Fn(usize, usize, &mut [f32]) -> Result<(), GenerateError> + Sync + 'a;

/// Sets every trained parameter of `decoder`. Rows that pad the vocabulary are in no tensor and become 0.
fn set_all(dev: &Device, decoder: &Decoder, read: &TensorReader<'_>) -> Result<(), GenerateError> {
    let rank = dev.rank();
    let runs = SegmentRuns::new(decoder, rank, |number, _| number);
    for (segment, layout) in decoder.segments().iter().enumerate() {
        let params = decoder.params(segment).slice(0..layout.len);
        set(dev, params, &|first, values| {
            runs.fill(segment, first, values, |tensor, first, values| read(*tensor, first, values))
        })?;
    }
    if decoder.shape().has_frozen_params() {
        // The corrections are those of the base, since no training changes them.
        return Ok(());
    }
    decoder.write_router_corrections(dev, |segment, first, values: &mut [f32]| {
        runs.fill(segment, first, values, |tensor, first, values| read(*tensor, first, values))
    })
}

/// Reads all trained parameters from a safetensors file. If the file has more positions than the decoder,
/// the first ones count. Returns the hash of the base of adapters, if the file has it.
pub(super) fn load(
    dev: &Device,
    decoder: &Decoder,
    path: &Path,
    reading: &dyn Reading,
) -> Result<Option<String>, GenerateError> {
    let unreadable = |source| GenerateError::Read { path: path.to_owned(), source };
    let wrong = |problem: String| GenerateError::Weights { path: path.to_owned(), problem };
    let file = input::open(path).map_err(unreadable)?;
    let read = |bytes: &mut [u8], at: u64| {
        file.read_exact_at(bytes, at).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => wrong("it is cut off".into()),
            _ => unreadable(e),
        })
    };
    let mut length = [0; 8];
    read(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(wrong("not a safetensors file".into()));
    }
    let mut header = vec![0; length as usize];
    read(&mut header, 8)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| wrong(e.to_string()))?;
    let place = |param: &Param| {
        let name = &param.name;
        let info =
            metadata.info(name).ok_or_else(|| wrong(format!("it has no tensor `{name}`")))?;
        let (rows, cols) = param.global;
        let fits = match info.shape[..] {
            [r] => param.is_vector && r == rows,
            [r, c] => !param.is_vector && c == cols && (r == rows || (r > rows && name == "wpe")),
            _ => false,
        };
        if !fits || info.dtype != safetensors::Dtype::F32 {
            let found = format!("{:?} {:?}", info.dtype, info.shape);
            return Err(wrong(format!("`{name}` is {found}, not F32 [{rows}, {cols}]")));
        }
        Ok(8 + length + info.data_offsets.0 as u64)
    };
    let params = decoder.segments().iter().flat_map(|layout| &layout.params);
    let places: Vec<u64> = params.map(place).collect::<Result<_, _>>()?;
    set_all(dev, decoder, &|tensor, first, values| {
        let mut bytes = vec![0; 4 * values.len()];
        read(&mut bytes, places[tensor] + 4 * first as u64)?;
        let numbers = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        values.iter_mut().zip(numbers).for_each(|(value, x)| *value = x);
        reading.add(bytes_of(values));
        Ok(())
    })?;
    Ok(metadata.metadata().as_ref().and_then(|words| words.get(BASE)).cloned())
}

/// Reads all trained parameters from a checkpoint. If it has more positions than the decoder, the first
/// ones count.
pub(super) fn load_checkpoint(
    dev: &Device,
    decoder: &Decoder,
    from: &Checkpoint,
    reading: &dyn Reading,
) -> Result<(), GenerateError> {
    let wrong = |problem: String| GenerateError::Weights { path: from.path().to_owned(), problem };
    let tensors = from.summary().tensors();
    let number = |param: &Param| {
        let (rows, cols) = param.global;
        let fits = |t: &TensorEntry| {
            let more = param.name == "wpe" && t.shape[0] > rows;
            t.name == param.name && t.shape[1] == cols && (t.shape[0] == rows || more)
        };
        let absent = || wrong(format!("it has no `{}` [{rows}, {cols}]", param.name));
        tensors.iter().position(fits).ok_or_else(absent)
    };
    let params = decoder.segments().iter().flat_map(|layout| &layout.params);
    let numbers: Vec<usize> = params.map(number).collect::<Result<_, _>>()?;
    let reader = from.reader();
    set_all(dev, decoder, &|tensor, first, values| {
        let state = TensorState::parameter(numbers[tensor]);
        let read = reader.read(state, first..first + values.len(), values);
        reading.add(bytes_of(values));
        read.map_err(|e| wrong(e.to_string()))
    })
}
