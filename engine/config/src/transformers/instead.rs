//! Recognizes folders and files that are not a model in safetensors files, and says how to get such
//! a model.

use files::foreign_text::foreign;
use files::hub::download_of_snapshot;
use files::input;
use files::names::is_there;
use files::shell::{python_text, quoted};
use std::fmt;
use std::path::Path;

/// Content that is not a model, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderContent {
    pub(crate) what: String,
    pub(crate) remedy: String,
}

impl fmt::Display for FolderContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// Bytes of a file; a pointer of Git LFS is shorter.
pub const POINTER: u64 = 1024;

/// Recognizes the pointer that Git LFS writes in place of a file that it has not fetched.
pub fn pointer(bytes: &[u8]) -> Option<FolderContent> {
    const STARTS: [&[u8]; 2] =
        [b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"];
    let is_one = (bytes.len() as u64) < POINTER && STARTS.iter().any(|s| bytes.starts_with(s));
    is_one.then(|| FolderContent {
        what: "it is a Git LFS pointer, not the file itself".into(),
        remedy: "fetch the file with `git lfs pull` in its repository".into(),
    })
}

/// Call that merges wrapped linears of a model into its own weights.
pub const MERGE: &str = "merge_and_unload()";

/// Recognizes an adapter of PEFT, which holds only a difference to the weights of another folder.
pub fn adapter(folder: &Path) -> Option<FolderContent> {
    let names = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"];
    let name = names.into_iter().find(|name| is_there(&folder.join(name)))?;
    let new = next_to(folder, "merged");
    let merged = python(&format!(
        "from peft import AutoPeftModelForCausalLM; \
         AutoPeftModelForCausalLM.from_pretrained({}).{MERGE}.save_pretrained({})",
        python_text(&folder.to_string_lossy()),
        python_text(&new)
    ));
    Some(FolderContent {
        what: format!("`{name}` is of a PEFT adapter (such as LoRA), which is no whole model"),
        remedy: format!(
            "name the folder of its base as `model.from` and this one as `adapter: Lora(from: ..)`; or merge it with `{merged}`, copy \
             the tokenizer's files there, and name that folder; if the folder has merged weights already, move the adapter's files away"
        ),
    })
}

/// A form of weights that onebox does not read.
struct Form {
    /// Whether a name in the folder shows this form.
    shows: fn(&str) -> bool,
    /// Description of the file or folder with this name.
    what: &'static str,
    /// Text that says how to make safetensors files in the folder `new`.
    remedy: fn(folder: &str, name: &str, new: &str) -> String,
}

/// Forms in the order of the search; the first form that fits decides.
const FORMS: [Form; 7] = [
    Form {
        shows: |name| name == "zero_to_fp32.py" || name.starts_with("global_step"),
        what: "is of a DeepSpeed checkpoint, in which each rank has a part of the weights",
        remedy: |folder, _, new| {
            let line = [folder, "/zero_to_fp32.py"].concat();
            let line =
                [&quoted(&line), &quoted(folder), &quoted(new)].map(String::as_str).join(" ");
            format!(
                "gather them with `python {line} --safe_serialization`, and copy config.json and the tokenizer's files there"
            )
        },
    },
    Form {
        shows: |name| name.starts_with("pytorch_model_fsdp"),
        what: "is of an FSDP checkpoint, in which each rank has a part of the weights",
        remedy: |folder, name, new| {
            let parts = quoted(&format!("{folder}/{name}"));
            format!(
                "gather them with `accelerate merge-weights {parts} {}`, and copy config.json and the tokenizer's files there",
                quoted(new)
            )
        },
    },
    Form {
        shows: |name| {
            name.strip_prefix("pytorch_model")
                .is_some_and(|rest| rest.ends_with(".bin") || rest.ends_with(".bin.index.json"))
        },
        what: "is a pickle of PyTorch, which onebox does not read",
        remedy: |folder, _, new| save_again(&python_text(folder), new),
    },
    Form {
        shows: |name| name.ends_with(".gguf"),
        what: "is for llama.cpp, and onebox does not read it",
        remedy: |folder, name, new| {
            let from = format!("{}, gguf_file={}", python_text(folder), python_text(name));
            save_again(&from, new)
        },
    },
    Form {
        shows: |name| name.starts_with("consolidated."),
        what: "has the weights in their publisher's own form",
        remedy: |folder, _, new| {
            format!(
                "get the same model in the form of transformers, or convert it with the script that transformers 4 has for its \
                 class, such as `python -m transformers.models.llama.convert_llama_weights_to_hf --input_dir {} --output_dir {}`",
                quoted(folder),
                quoted(new)
            )
        },
    },
    Form {
        shows: |name| name.starts_with("model-") && name.ends_with(".safetensors"),
        what: "is a part of the weights, and the index that names all parts is not there",
        remedy: |folder, _, _| {
            let command = download_of_snapshot(Path::new(folder));
            let command = command.map(|command| format!(": run `{command}`")).unwrap_or_default();
            format!("get model.safetensors.index.json, too{command}")
        },
    },
    Form {
        shows: |name| {
            let others = ["optimizer", "scheduler", "rng_state", "training_args", "scaler"];
            let pickle = [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
            pickle && !others.iter().any(|start| name.starts_with(start))
        },
        what: "is a pickle of PyTorch, which onebox does not read",
        remedy: |_, _, new| {
            format!(
                "load it into its model in Python, and save that with `model.save_pretrained({})`",
                python_text(new)
            )
        },
    },
];

/// Recognizes the form of the weights in a folder without safetensors files of transformers.
pub fn other_form(folder: &Path) -> Option<FolderContent> {
    /// Most names that are read.
    const MOST: usize = 10_000;
    let listed = std::fs::read_dir(folder).ok()?.take(MOST);
    let names = listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    let shown = |form: &'static Form| Some((form, names.iter().find(|name| (form.shows)(name))?));
    let (form, name) = FORMS.iter().find_map(shown)?;
    let (at, new) = (folder.display().to_string(), next_to(folder, "safetensors"));
    let mut remedy = (form.remedy)(at.trim_end_matches('/'), name, &new);
    if let Some(pointer) = start_of(&folder.join(name)).and_then(|bytes| pointer(&bytes)) {
        remedy = format!("{pointer}; then {remedy}");
    }
    Some(FolderContent { what: format!("`{}` {}", foreign(name), form.what), remedy })
}

/// Bytes of a file, if it is small enough for a pointer.
fn start_of(path: &Path) -> Option<Vec<u8>> {
    let short = std::fs::symlink_metadata(path).ok()?;
    if !short.is_file() || short.len() >= POINTER {
        return None;
    }
    input::bytes(path, POINTER).ok()
}

fn save_again(from: &str, new: &str) -> String {
    let line = python(&format!(
        "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({from}).save_pretrained({})",
        python_text(new)
    ));
    format!(
        "make safetensors files of it with `{line}`, copy the tokenizer's files there, and name that folder"
    )
}

/// Name of a folder next to `folder` that usually does not exist yet.
pub fn next_to(folder: &Path, ending: &str) -> String {
    format!("{}-{ending}", folder.display().to_string().trim_end_matches('/'))
}

/// Shell command that runs Python code.
pub fn python(code: &str) -> String {
    format!("python -c {}", quoted(code))
}
