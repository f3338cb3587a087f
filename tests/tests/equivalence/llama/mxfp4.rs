//! A folder whose experts are codes and scales, from tests/fixtures/make_mxfp4_fixture.py: a run reads
//! the numbers that transformers makes of them, on every layout, and an export has them in bf16.

use super::{Numbers, T, V, dataset_of_windows, folder, grid, lay_out, pretrained};
use checkpoint::hugging_face::{ModelExport, export};
use checkpoint::{Checkpoint, RunFolder};
use data::model_files::ModelFiles;
use data::progress::Silence;
use engine::run::{RunOptions, train};
use safetensors::{Dtype, SafeTensors};

/// Name of the model in `folder`.
const MODEL: &str = "gpt-oss-mxfp4";

#[test]
fn codes_are_read_as_transformers_reads_them_and_exported_as_numbers() {
    let expected = std::fs::read(folder(MODEL).join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let tokens: Vec<f64> = (0..6 * (T + 1)).map(|i| ((i * i + 3 * i) % V) as f64).collect();
    let windows: Vec<&[f64]> = tokens.chunks(T + 1).collect();
    for layout in [(1, 1, false), (2, 2, true), (4, 1, false)] {
        let run = tempfile::tempdir().unwrap();
        let (seed, data) = dataset_of_windows(&windows, 6, V, run.path());
        let sets = ["optimizer.lr=1e-30", "train.steps=1", "train.checkpoint_every=1"];
        let sets = [grid(layout), sets.map(str::to_owned).into()].concat();
        let config = super::fp32(MODEL, &sets, seed);
        let options = RunOptions {
            pretrained: Some(pretrained(MODEL)),
            checkpoints: Some(RunFolder::at(&run.path().join("checkpoints")).unwrap()),
            ..RunOptions::default()
        };
        let built = lay_out(&config);
        train(&config, &built, &data, &options, &mut |_| ()).unwrap();
        let checkpoint =
            Checkpoint::open(&run.path().join("checkpoints/step-00000001"), 1).unwrap();
        let out = run.path().join("out");
        let model_files = ModelFiles::open(&folder(MODEL)).unwrap();
        let exported = ModelExport {
            base: None,
            checkpoint: &checkpoint,
            config: &config,
            built: &built,
            tokenizer: None,
            model_files: &model_files,
            numbers: Numbers::Bf16,
            max_file_bytes: u64::MAX,
            progress: &Silence,
        };
        export(&exported, &out).unwrap_or_else(|e| panic!("{e}"));
        let ours = std::fs::read(out.join("model.safetensors")).unwrap();
        let ours = SafeTensors::deserialize(&ours).unwrap();
        assert_eq!(expected.len(), 2);
        for (name, want) in expected.tensors() {
            let own = ours.tensor(&name).unwrap();
            assert_eq!((own.dtype(), own.shape()), (Dtype::BF16, want.shape()), "{name}");
            // The step moves a zero by 1e-30, and no other number.
            let numbers = |data: &[u8]| -> Vec<f32> {
                let all = data.chunks(2).map(|x| half::bf16::from_le_bytes([x[0], x[1]]).to_f32());
                all.map(|x| if x.abs() < 1e-20 { 0.0 } else { x }).collect()
            };
            assert!(numbers(own.data()) == numbers(want.data()), "{layout:?} {name}");
        }
        // All other tensors are those of the folder.
        let came = std::fs::read(folder(MODEL).join("model.safetensors")).unwrap();
        let came = SafeTensors::deserialize(&came).unwrap();
        let is_code = |name: &str| name.ends_with("_blocks") || name.ends_with("_scales");
        let others = came.tensors().into_iter().filter(|(name, _)| !is_code(name));
        let others: Vec<_> = others.collect();
        assert_eq!(ours.len(), others.len() + 2);
        for (name, want) in others {
            assert!(ours.tensor(&name).unwrap().data() == want.data(), "{layout:?} {name}");
        }
        let keys = std::fs::read_to_string(out.join("config.json")).unwrap();
        assert!(!keys.contains("quantization_config") && keys.contains("GptOssForCausalLM"));
    }
}
