//! Revalidation of files whose change time changes while they are in use, for example after
//! `touch`, a new link, or a copy back into place. They are read again, and the run continues if
//! the bytes are the same.

use super::identity::{self, TokenRanges};
use super::mask::Mask;
use super::store::{ReadError, Stamp, TokenFile};
use super::{Corpus, Documents};
use files::path_text::PathText;
use std::fs::File;
use std::sync::PoisonError;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

/// Longest wait for change times old enough that another change would get another time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);

impl Corpus {
    /// Calls `read`. If files with only a new change time make it fail, rereads them and tries
    /// again.
    pub(super) fn retry_if_touched<T>(
        &self,
        mut read: impl FnMut() -> Result<T, ReadError>,
    ) -> Result<T, ReadError> {
        loop {
            let (result, before) = {
                let times = self.read_again.read().unwrap_or_else(PoisonError::into_inner);
                (read(), *times)
            };
            match result {
                Err(unread) => self.read_again(before, unread)?,
                read => return read,
            }
        }
    }

    /// Rereads the touched files while no other thread reads. `before` is the number of such passes
    /// when the failed read began.
    fn read_again(&self, before: u64, unread: ReadError) -> Result<(), ReadError> {
        let mut times = self.read_again.write().unwrap_or_else(PoisonError::into_inner);
        if *times > before {
            return Ok(());
        }
        let since = Instant::now();
        let touched = loop {
            let touched = self
                .files_in_use()
                .filter_map(|(number, file)| Some((number, file, file.touched()?)));
            let touched: Vec<_> = touched.collect();
            if touched.is_empty() || since.elapsed() > PATIENCE {
                return Err(unread);
            }
            let now = SystemTime::now();
            let is_same = |(_, file, stamp): &(usize, &TokenFile, Stamp)| {
                // After the sync, a program that has the file mapped changes its time with the next
                // write. If the sync fails, rely on the time.
                drop(file.with_opened(File::sync_data));
                file.touched() == Some(*stamp)
            };
            if touched.iter().all(|(_, _, stamp)| stamp.is_settled(now))
                && touched.iter().all(is_same)
            {
                break touched;
            }
            sleep(LOOK);
        };
        for (number, file, stamp) in touched {
            tracing::warn!(
                "{} has another time of change: it is read through again",
                PathText(&file.path)
            );
            let known = file.believe(stamp);
            if self.is_same(number, file) != Ok(true) {
                file.believe(known);
                return Err(match unread.path == file.path {
                    true => unread,
                    false => file.unread(0, "it was written to".into()),
                });
            }
        }
        *times += 1;
        Ok(())
    }

    /// Whether a file has its original content: its segment, or all bytes of an index or mask.
    fn is_same(&self, number: usize, file: &TokenFile) -> Result<bool, ReadError> {
        Ok(match number.checked_sub(self.store.num_segments()) {
            None => {
                let sum = identity::sum(&self.store, &self.parts(), number)?;
                sum == self.found.segments[number].sum
            }
            Some(index) => file.hash(&|_| ())? == self.found.index_and_mask_hashes[index],
        })
    }

    /// All files of tokens, indexes and masks with their numbers; the files of segments come first.
    fn files_in_use(&self) -> impl Iterator<Item = (usize, &TokenFile)> {
        let segments = (0..self.store.num_segments()).map(|segment| self.store.file(segment));
        let all = segments.chain(self.indexes_and_masks().map(Some)).enumerate();
        all.filter_map(|(number, file)| Some((number, file?)))
    }

    /// The masks of all files; empty without masks.
    pub(super) fn masks(&self) -> &[Mask] {
        self.documents.as_ref().map_or(&[], Documents::masks)
    }

    /// The files of the indexes, then the files of the masks.
    pub(super) fn indexes_and_masks(&self) -> impl Iterator<Item = &TokenFile> {
        let indexes = self.indexes.iter().map(|index| &index.file);
        indexes.chain(self.masks().iter().map(|mask| &mask.file))
    }

    /// The training tokens and the validation tokens.
    pub(super) fn parts(&self) -> [TokenRanges; 2] {
        match &self.documents {
            Some(documents) => documents.parts(),
            None => [0..self.split, self.split..self.num_tokens()].map(TokenRanges::one),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::data_files::tests::{folder, path};
    use super::super::progress::Silence;
    use super::super::{
        Cache, Checks, ChunkSizes, CorpusSplit, SampleSettings, TextSource, Tokenizer, mask,
        megatron,
    };
    use super::*;
    use config::{DataFormat, Packing};
    use std::fs;
    use std::os::unix::fs::{FileExt, PermissionsExt};
    use std::path::Path;
    use tempfile::TempDir;

    /// Token files with documents and masks.
    fn files() -> TempDir {
        let tokens: Vec<u8> = (0..600u16).flat_map(|i| (i % 200).to_le_bytes()).collect();
        let index = megatron::written([20; 30].into_iter(), 2);
        let counted: Vec<bool> = (0..600).map(|i| i % 20 > 7).collect();
        let mask = mask::written(&[12; 30], &counted);
        let all = ["a", "b", "c"].map(|name| {
            [("bin", &tokens), ("idx", &index), ("mask", &mask)]
                .map(|(kind, bytes)| (format!("t/{name}.{kind}"), bytes.as_slice()))
        });
        let all: Vec<_> =
            all.as_flattened().iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        folder(&all)
    }

    fn open(folder: &TempDir, (format, packing): (DataFormat, Packing)) -> Corpus {
        let with = SampleSettings { format: &format, packing, truncate: false };
        let parts = CorpusSplit::Cut(&path(folder, "t"), 0.25);
        Corpus::open_checked(parts, with, Checks::none(), 40).unwrap()
    }

    const PACKED: (DataFormat, Packing) = (DataFormat::Megatron, Packing::Documents);

    /// All tokens, targets and document starts.
    fn whole(data: &Corpus) -> Result<Vec<i32>, ReadError> {
        let (mut all, mut targets, mut inputs) = (Vec::new(), [0; 40], [0; 40]);
        for place in 0..data.num_train_samples() {
            data.fill_train(place, &mut inputs, &mut targets)?;
            all.extend([inputs, targets].concat());
        }
        for window in 0..data.num_eval_windows() {
            data.fill_eval(window, &mut inputs, &mut targets)?;
            all.extend([inputs, targets].concat());
        }
        all.extend(data.starts_in_window(0)?.into_iter().map(|start| start as i32));
        Ok(all)
    }

    fn touch(path: &Path) {
        File::options().write(true).open(path).unwrap().set_modified(SystemTime::now()).unwrap();
    }

    fn change(path: &Path, at: u64) {
        let file = File::options().write(true).read(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        touch(path);
    }

    #[test]
    fn a_file_that_is_touched_is_read_on_by_all_at_once() {
        let bytes = |format| (format, Packing::Windows);
        let each = |how: (DataFormat, Packing)| {
            let folder = files();
            if how.1 == Packing::Windows {
                ["a", "b", "c"].iter().for_each(|name| {
                    fs::remove_file(folder.path().join(format!("t/{name}.mask"))).unwrap();
                });
            }
            let data = open(&folder, how);
            let before = whole(&data).unwrap();
            for entry in fs::read_dir(folder.path().join("t")).unwrap() {
                touch(&entry.unwrap().path());
            }
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| assert!(whole(&data).unwrap() == before));
                }
            });
            assert_eq!(*data.read_again.read().unwrap(), 1, "once for all files and threads");
            // A thread whose read failed at the same time may call `read_again` too.
            let (_, file) = data.files_in_use().next().unwrap();
            assert_eq!(data.read_again(0, file.unread(0, "it was written to".into())), Ok(()));
            let now = SystemTime::now();
            assert!(data.files_in_use().all(|(_, file)| file.believed().is_settled(now)));
            // From now on the file must have the accepted stamp.
            change(&folder.path().join("t/a.bin"), 5);
            let Err(unread) = whole(&data) else { panic!("a byte is another one") };
            assert!(
                unread.path.ends_with("t/a.bin") && unread.why == "it was written to",
                "{unread}"
            );
        };
        std::thread::scope(|scope| {
            for how in [PACKED, bytes(DataFormat::Megatron), bytes(DataFormat::U16)] {
                scope.spawn(|| each(how));
            }
        });
    }

    #[test]
    fn a_file_with_another_link_or_name_is_read_on_and_one_whose_time_was_put_back_is_not() {
        let put_back = |path: &Path| {
            let before = fs::metadata(path).unwrap().modified().unwrap();
            change(path, 5);
            File::options().write(true).open(path).unwrap().set_modified(before).unwrap();
        };
        let each = |change: &(dyn Fn(&Path) + Sync), goes_on: bool| {
            let folder = files();
            let data = open(&folder, PACKED);
            let before = whole(&data).unwrap();
            let path = folder.path().join("t/b.bin");
            change(&path);
            let read = whole(&data);
            assert_eq!(read.is_ok_and(|read| read == before), goes_on);
            assert_eq!(*data.read_again.read().unwrap(), u64::from(goes_on));
        };
        let link = |path: &Path| fs::hard_link(path, path.with_extension("link")).unwrap();
        let mode = |path: &Path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o440)).unwrap();
        };
        let gone = |path: &Path| fs::remove_file(path).unwrap();
        let replaced = |path: &Path| {
            fs::write(path.with_extension("new"), [2; 1200]).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        };
        let same_bytes: [&(dyn Fn(&Path) + Sync); 4] = [&link, &mode, &gone, &replaced];
        std::thread::scope(|scope| {
            for change in same_bytes {
                scope.spawn(move || each(change, true));
            }
            scope.spawn(|| each(&put_back, false));
        });
    }

    #[test]
    fn a_file_with_other_bytes_is_named_though_others_are_touched() {
        let each = |name: &str, at: u64| {
            let folder = files();
            let data = open(&folder, PACKED);
            let before = whole(&data).unwrap();
            let at_path = |name: &str| folder.path().join("t").join(name);
            ["a.bin", "a.mask", "c.bin", "b.idx"].iter().for_each(|name| touch(&at_path(name)));
            change(&at_path(name), at);
            let Err(unread) = whole(&data) else { panic!("a byte is another one") };
            assert_eq!((&unread.path, &*unread.why), (&at_path(name), "it was written to"));
            // With its original bytes the file is accepted again.
            change(&at_path(name), at);
            assert!(whole(&data).unwrap() == before);
        };
        std::thread::scope(|scope| {
            for (name, at) in
                [("b.bin", 77), ("b.mask", 180), ("a.bin", 0), ("c.mask", 190), ("b.idx", 40)]
            {
                scope.spawn(move || each(name, at));
            }
        });
    }

    #[test]
    fn kept_tokens_of_text_that_are_touched_are_read_on() {
        let folder = folder(&[("t.txt", "the box holds a model ".repeat(90).as_bytes())]);
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer-tiny.json");
        let tokenizer = &Tokenizer::open(&file).unwrap();
        let cache = &Cache { folder: Some(folder.path().join("cache")), read_only: false };
        let (format, sizes) = (DataFormat::Auto, ChunkSizes::default());
        let with = TextSource { tokenizer, path: &file, cache, format, sizes, progress: &Silence };
        let text = path(&folder, "t.txt");
        let data = Corpus::open_text(CorpusSplit::Cut(&text, 0.2), &with, 300, 40).unwrap();
        let before = whole(&data).unwrap();
        let mut kept =
            fs::read_dir(folder.path().join("cache")).unwrap().map(|e| e.unwrap().path());
        let kept = kept.find(|path| path.extension().unwrap() == "bin").unwrap();
        touch(&kept);
        assert!(whole(&data).unwrap() == before);
        change(&kept, 20);
        assert!(whole(&data).is_err_and(|unread| unread.path == kept));
    }
}
