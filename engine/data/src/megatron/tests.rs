use super::super::checks::Checks;
use super::super::{Corpus, CorpusSplit, DataError, Document, SampleSettings};
use super::*;
use config::{DataFormat, Packing};
use std::fs;
use tempfile::TempDir;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/megatron")
}

/// Token sequences of each document.
fn documents() -> Vec<Vec<Vec<u32>>> {
    serde_json::from_slice(&fs::read(fixture().join("documents.json")).unwrap()).unwrap()
}

fn open(path: &Path) -> Result<Corpus, DataError> {
    Corpus::open(path.to_str().unwrap(), None, DataFormat::Megatron, 0.25, 250, 4)
}

#[test]
fn tokens_and_documents_are_those_that_megatron_wrote() {
    let documents = documents();
    let flat: Vec<u32> = documents.concat().concat();
    let lengths = documents.iter().map(|document| document.concat().len());
    let ends: Vec<usize> = lengths
        .scan(0, |end, n| {
            Some({
                *end += n;
                *end
            })
        })
        .collect();
    for name in ["mapped-u8", "mapped-u16", "mapped-i16", "mapped-i32", "mapped-modes", "old-u16"] {
        let path = fixture().join(name);
        let data = open(&path).unwrap();
        assert_eq!((0..flat.len()).map(|i| data.token(i)).collect::<Vec<_>>(), flat, "{name}");
        assert!(data.describe().contains("tokens in 7 documents: "), "{data:?}");
        let [index] = &data.indexes[..] else { panic!("one index") };
        assert_eq!(index.ends(0..7).unwrap(), ends, "{name}");
        for start in 0..flat.len() {
            for end in start..=flat.len() {
                let mut inside: Vec<_> =
                    ends.iter().copied().filter(|at| start < *at && *at < end).collect();
                inside.dedup();
                assert_eq!(
                    index.ends_inside(&(start..end)).unwrap(),
                    inside,
                    "{name} {start}..{end}"
                );
            }
        }
        // Users of Megatron also give the name of the token file.
        let named = open(&path.with_added_extension("bin")).unwrap();
        assert_eq!(named.identity(), data.identity());
    }
    // fairseq has sequences, but no documents.
    let data = open(&fixture().join("fairseq-i32")).unwrap();
    let sizes = documents.concat().into_iter().map(|sequence| sequence.len());
    let ends: Vec<usize> = sizes
        .scan(0, |end, n| {
            Some({
                *end += n;
                *end
            })
        })
        .collect();
    assert_eq!(data.indexes[0].ends(0..ends.len() as u64).unwrap(), ends);
}

#[test]
fn windows_say_where_documents_begin_in_any_file() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        copy(&folder, "mapped-u16", name);
    }
    let data =
        Corpus::open(folder.path().to_str().unwrap(), None, DataFormat::Megatron, 0.25, 250, 20);
    let data = data.unwrap();
    assert_eq!(data.num_tokens(), 84);
    // Documents end at 8, 9, 9, 16, 28, 40 and 42 in each file.
    for (place, starts) in [
        (0, vec![0, 8, 9, 16]),
        (8, vec![0, 1, 8, 20]),
        (30, vec![0, 10, 12, 20]),
        (42, vec![0, 8, 9, 16]),
    ] {
        assert_eq!(data.starts_in_window(place).unwrap(), starts, "{place}");
    }
}

fn copy(folder: &TempDir, from: &str, to: &str) {
    for kind in ["bin", "idx"] {
        let file = fixture().join(from).with_added_extension(kind);
        fs::copy(file, folder.path().join(to).with_added_extension(kind)).unwrap();
    }
}

fn refused(folder: &TempDir) -> String {
    open(&folder.path().join("t")).unwrap_err().to_string()
}

#[test]
fn a_damaged_index_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.idx");
    // Byte at which the list of document starts begins; a changed start may be valid.
    for (name, documents) in
        [("mapped-u16", 34 + 12 * 10), ("mapped-i32", 34 + 12 * 10), ("old-u16", 56 + 8 * 32)]
    {
        copy(&folder, name, "t");
        let good = fs::read(&path).unwrap();
        assert_eq!(good.len(), documents + 8 * 8, "{name}");
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                fs::write(&path, bad).unwrap();
                match open(&folder.path().join("t")) {
                    Ok(_) => assert!(at >= documents, "{name} {at}"),
                    Err(e) => assert!(e.to_string().contains("t.idx"), "{e}"),
                }
            }
            fs::write(&path, &good[..at]).unwrap();
            let message = refused(&folder);
            assert!(message.contains("t.idx is damaged"), "{message}");
        }
        fs::write(&path, [&good[..], &[0]].concat()).unwrap();
        assert!(refused(&folder).contains("do not fit a file of"));
    }
}

#[test]
fn what_is_wrong_is_named_with_its_byte() {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("t.idx");
    let with = |at: usize, bytes: &[u8]| {
        copy(&folder, "mapped-u16", "t");
        let mut bad = fs::read(&index).unwrap();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&index, bad).unwrap();
        refused(&folder)
    };
    for (at, bytes, message) in [
        (0, &b"X"[..], "at byte 0: it begins neither with MMIDIDX nor with TNTIDX"),
        (9, &[2], "at byte 9: it has version 2"),
        (17, &[5], "its tokens are int64"),
        (18, &[11], "at byte 18: 11 sequences and 8 documents do not fit a file of 218 bytes"),
        (25, &[255], "do not fit a file of 218 bytes"),
        (38, &[0xff; 4], "at byte 38: sequence 1 has -1 tokens"),
        (38, &[4], "at byte 90: sequence 2 begins at byte 16, and the ones before it end at 18"),
        (70, &[3], "its index"),
        (154, &[1], "at byte 154: document 0 begins with sequence 1, and not with 0"),
        (170, &[1], "at byte 170: document 2 begins with sequence 1, and not with 2 to 10"),
        (210, &[9], "at byte 210: document 7 begins with sequence 9, and not with 10"),
    ] {
        let got = with(at, bytes);
        assert!(got.contains(message), "{message}: {got}");
    }
    copy(&folder, "mapped-u16", "t");
    let tokens = folder.path().join("t.bin");
    let good = fs::read(&tokens).unwrap();
    for len in (0..good.len()).chain([good.len() + 2]) {
        fs::write(&tokens, good.iter().copied().cycle().take(len).collect::<Vec<_>>()).unwrap();
        let message = refused(&folder);
        let counts = format!("t.idx counts 84 bytes of tokens, and it has {len};");
        assert!(message.contains("t.bin: ") && message.contains(&counts), "{message}");
    }
    let mut high = good.clone();
    high[20..22].copy_from_slice(&[250, 0]);
    fs::write(&tokens, &high).unwrap();
    let message = refused(&folder);
    assert!(
        message.contains("t.bin: token 10, at byte 20, is 250, but model.vocab is 250"),
        "{message}"
    );
    copy(&folder, "mapped-i16", "t");
    high[20..22].copy_from_slice(&[255, 255]);
    fs::write(&tokens, &high).unwrap();
    assert!(refused(&folder).contains("t.bin: token 10, at byte 20, is negative"));
    fs::remove_file(&index).unwrap();
    assert!(refused(&folder).contains("t.idx is not there"));
    copy(&folder, "mapped-i64", "t");
    assert!(refused(&folder).contains("t.idx says that its tokens are int64"));
    copy(&folder, "mapped-i32", "u");
    copy(&folder, "mapped-u16", "t");
    let both = open(folder.path()).unwrap_err().to_string();
    assert!(
        both.contains("u.bin: its tokens have 4 bytes, and those of the files before it 2"),
        "{both}"
    );
}

/// Documents divided at `most` tokens, or cut if `truncate`; all tokens but the first count.
fn of_samples(most: usize, truncate: bool) -> Vec<Document> {
    let mut all = Vec::new();
    for document in documents() {
        let mut rest = document.concat();
        while rest.len() > 1 {
            let tokens: Vec<u32> = rest.iter().copied().take(most).collect();
            let counted = (0..tokens.len()).map(|token| token > 0).collect();
            rest.drain(..tokens.len() - 1);
            all.push(Document { tokens, counted });
            if truncate {
                break;
            }
        }
    }
    all
}

#[test]
fn documents_of_an_index_are_samples_as_those_of_rows_are() {
    let format = &DataFormat::Megatron;
    for name in ["mapped-u16", "mapped-i32", "old-u16"] {
        let path = fixture().join(name);
        let path = path.to_str().unwrap();
        for (seq_len, packing, truncate) in [
            (20, Packing::Documents, false),
            (11, Packing::None, false),
            (5, Packing::Documents, false),
            (1, Packing::Documents, false),
            (5, Packing::Documents, true),
            (5, Packing::None, true),
        ] {
            let with = SampleSettings { format, packing, truncate };
            let parts = CorpusSplit::Both(path, path);
            let data = Corpus::open_checked(parts, with, Checks::none(), seq_len).unwrap();
            let documents = of_samples(seq_len + 1, truncate);
            let packs = packing == Packing::Documents;
            let expected = Corpus::of_documents(&documents, &documents, seq_len, packs);
            assert_eq!(data.identity(), expected.identity(), "{name} {seq_len} {packing:?}");
            let samples = |of: &Corpus| (of.num_train_samples(), of.num_eval_windows());
            assert_eq!(samples(&data), samples(&expected));
            for sample in 0..samples(&data).0 {
                assert_eq!(data.documents(sample).unwrap(), expected.documents(sample).unwrap());
                assert_eq!(data.targets(sample), expected.targets(sample));
                let filled = |of: &Corpus| {
                    let mut rows =
                        [vec![7; seq_len], vec![7; seq_len], vec![7; seq_len], vec![7; seq_len]];
                    let [inputs, targets, evaluated, starts] = &mut rows;
                    of.fill_train(sample, inputs, targets).unwrap();
                    of.fill_starts(sample, starts);
                    let mut inputs = vec![7; seq_len];
                    of.fill_eval(sample, &mut inputs, evaluated).unwrap();
                    rows
                };
                assert_eq!(filled(&data), filled(&expected), "{name} {seq_len} {sample}");
            }
        }
        // Two of seven documents are too long for samples of one document.
        let with = SampleSettings { format, packing: Packing::None, truncate: false };
        let long = Corpus::open_checked(CorpusSplit::Train(path), with, Checks::none(), 10);
        let message = long.unwrap_err().to_string();
        assert!(
            message.contains("2 of 7 documents have more tokens than model.seq_len + 1"),
            "{message}"
        );
    }
}

#[test]
fn no_document_is_in_the_training_part_and_in_the_validation_part() {
    let path = fixture().join("mapped-u16");
    let path = path.to_str().unwrap();
    let with = SampleSettings {
        format: &DataFormat::Megatron,
        packing: Packing::Documents,
        truncate: false,
    };
    // The ends of documents that have a target.
    let whole = [8, 16, 28, 40];
    for seq_len in 1..8 {
        for fraction in [0.04, 0.1, 0.2, 0.3, 0.4, 0.5] {
            let parts = CorpusSplit::Cut(path, fraction);
            let data = Corpus::open_checked(parts, with, Checks::none(), seq_len).unwrap();
            let all = data.documents.as_ref().unwrap();
            let cut = all.tokens(all.split - 1).end;
            assert!(whole.contains(&cut), "{seq_len} {fraction}: {cut}");
        }
    }
}

/// Bytes that the system has read for this thread.
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn few_documents_of_many_are_a_small_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, count) = (folder.path().join("t.idx"), 300_000u64);
    let words = |words: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        words.flat_map(u64::to_le_bytes).collect()
    };
    let index = [
        [&MAPPED[..], &1u64.to_le_bytes(), &[8]].concat(),
        words(&mut [count, count + 1].into_iter()),
        (0..count).flat_map(|_| 2i32.to_le_bytes()).collect(),
        words(&mut (0..count).map(|i| 4 * i)),
        words(&mut (0..=count)),
    ];
    fs::write(&path, index.concat()).unwrap();
    let file = TokenFile::new(&path, fs::File::open(&path).unwrap()).unwrap();
    let index = Index::read(file).unwrap();
    let before = bytes_read();
    let ends = index.ends_inside(&(100_001..100_101)).unwrap();
    let read = bytes_read() - before;
    assert_eq!(ends, (100_002..100_101).step_by(2).collect::<Vec<_>>());
    println!("{read} bytes");
    // Each of 20 search steps and 2 * 50 documents reads 16 bytes; /proc adds its own bytes.
    assert!(read < 4096, "{read} bytes of {}", 20 * count);
}
