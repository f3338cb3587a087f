//! Token files with their index, as Megatron writes them: they are data whose tokens are below the vocabulary, or there is a
//! reason.
#![no_main]

use config::DataFormat;
use data::Corpus;
use std::path::PathBuf;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("fuzz-megatron-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    });
    // The first byte says how many bytes of tokens, of four each, follow; the rest is the index.
    let Some((count, rest)) = bytes.split_first() else { return };
    let Some((tokens, index)) = rest.split_at_checked(4 * usize::from(*count)) else { return };
    std::fs::write(folder.join("t.bin"), tokens).unwrap();
    std::fs::write(folder.join("t.idx"), index).unwrap();
    let name = folder.join("t").to_str().unwrap().to_owned();
    let Ok(data) = Corpus::open(&name, None, DataFormat::Megatron, 0.2, 1000, 4) else { return };
    let (mut inputs, mut targets) = ([0; 4], [0; 4]);
    for number in 0..data.num_train_samples() as u64 {
        let place = data.shuffled(1, number);
        data.fill_train(place, &mut inputs, &mut targets).unwrap();
        assert!(inputs.iter().chain(&targets).all(|token| (-1..1000).contains(token)));
        let starts = data.starts_in_window(place).unwrap();
        assert!(starts[0] == 0 && starts.is_sorted() && starts.iter().all(|start| *start <= 4));
    }
});
