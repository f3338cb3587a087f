"""Trains models with onebox, exports them, and compares the exports with what transformers makes of them. See check-transformers."""

import argparse
import json
import logging
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors import safe_open

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures"
CLASSES = ["gpt2", "llama3", "llama-linear", "mistral", "mistral-window", "ministral3", "qwen2", "qwen3", "qwen3-window", "gemma2",
           "gemma3", "olmo2", "olmo3", "smollm3", "phi3", "granite", "seed-oss", "qwen3-moe", "mixtral", "olmoe", "glm4-moe", "glm4-air",
           "gpt-oss", "qwen3-5", "qwen3-5-moe", "qwen3-next", "chat"]
# Wrappers: the class, the fixture whose config is that of its decoder, and the parts that are no decoder.
WRAPPERS = {
    "gemma3-wrapper": ("Gemma3", "gemma3", ("vision_tower", "multi_modal_projector")),
    "mistral3-wrapper": ("Mistral3", "ministral3", ("vision_tower", "multi_modal_projector")),
    "mistral3-of-mistral": ("Mistral3", "mistral", ("vision_tower", "multi_modal_projector")),
}
# Classes of which adapters are trained, too. PEFT has no adapters of parts of the joined linears of Phi-3 and Qwen3-Next.
ADAPTED = {f"{name}-lora": name for name in [*CLASSES, "gemma3-wrapper", "mistral3-wrapper"] if name not in ("chat", "phi3", "qwen3-next")}
# Tokens of a sample: more than the window of 5 tokens, and no more than the least limit of a class.
LENGTH = 16
# Samples of the validation set, whose number is no multiple of the batch.
SAMPLES = 10
STEPS = 6
# max_position_embeddings: the factor of YaRN in the fixtures times the tokens that it extends.
MOST = 64
# Tokens of the prompts: beyond the window.
PROMPTS = [6, 9, 13]


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("run", type=pathlib.Path, nargs="?", help="a run to compare; without it, a small model of every class")
    ap.add_argument("--onebox", default="target/release/onebox")
    ap.add_argument("--only", action="append", choices=[*CLASSES, *WRAPPERS, *ADAPTED], help="check this class only; may be given several times")
    ap.add_argument("--prompts", type=int, default=16)
    ap.add_argument("--tokens", type=int, default=32)
    ap.add_argument("--tolerance", type=float, default=1e-4)
    ap.add_argument("--loss-tolerance", type=float, default=1e-5)
    args = ap.parse_args()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)

    def onebox(*words):
        done = subprocess.run([args.onebox, *map(str, words)], capture_output=True)
        if done.returncode:
            sys.exit(f"check-transformers: onebox {words[0]} ended with {done.returncode}: {done.stderr.decode()}")
        return done.stdout

    if args.run:
        good, words = of_run(onebox, args)
        print(words)
        return 0 if good else 1
    wrong = []
    for name in args.only or [*CLASSES, *WRAPPERS, *ADAPTED]:
        with tempfile.TemporaryDirectory() as folder:
            good, words = of_class(onebox, args, name, pathlib.Path(folder))
        print(f"{name}: {words}: {'ok' if good else 'NO'}", flush=True)
        wrong += [] if good else [name]
    if wrong:
        print(f"check-transformers: {', '.join(wrong)} differ")
    return 1 if wrong else 0


def of_run(onebox, args):
    """Whether the export of a run is the run's model, and in which respects."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "model"
        onebox("checkpoint", "export", args.run, out, "--to", "safetensors", "--max-shard-size", "1MB")
        model, said = loaded(out)
    # Without a tokenizer a text is its bytes, unless the config says that it is tokens.
    tokens = any(f"format: {name}" in (args.run / "config.ron").read_text() for name in ("U16", "U32"))
    as_bytes = not tokens and not (args.run / "tokenizer.json").exists()
    context = model.config.get_text_config().max_position_embeddings
    lengths = [1 + i * (context - 1) // max(args.prompts - 1, 1) for i in range(args.prompts)]
    same, words = compared(onebox, args.run, model, lengths, context, as_bytes, args)
    return same and not said, "\n".join([words, *(f"transformers says: {line}" for line in said)])


def of_class(onebox, args, name, work):
    """Whether the export of a trained model of a class, or of its adapters, is the run's model, and in which respects."""
    folder, run, out = work / "model", work / "run", work / "out"
    adapted = name in ADAPTED
    parts = write_model(ADAPTED.get(name, name), folder)
    vocab = json.loads((folder / "config.json").read_text())
    vocab = vocab.get("text_config", vocab)["vocab_size"]
    rng = random.Random(1)
    held_out = [rng.randrange(vocab) for _ in range(SAMPLES * LENGTH + 1)]
    for file, tokens in (("train.bin", [rng.randrange(vocab) for _ in range(2000)]), ("held-out.bin", held_out)):
        (work / file).write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    tokenizer = f', tokenizer: {json.dumps(str(folder))}' if (folder / "tokenizer.json").exists() else ""
    (work / "a.ron").write_text(f"""(
    device: Cpu(count: 2, threads: 1),
    parallel: (tensor: 2),
    precision: Fp32,
    model: (from: "model", seq_len: {LENGTH}),
    {"adapter: Lora(rank: 4, alpha: 8), optimizer: (lr: 3e-2)" if adapted else "optimizer: (lr: 3e-3)"},
    schedule: (kind: Constant, warmup_steps: 0),
    batch: (global: 4, micro: 2),
    data: (train: "train.bin", validation: "held-out.bin", format: U16{tokenizer}),
    train: (steps: {STEPS}),
)
""")
    onebox("train", work / "a.ron", "-q", "--run-dir", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (own,) = (line for line in lines if line["kind"] == "eval")
    assert own["whole"], own
    onebox("checkpoint", "export", run, out, *(["--to", "safetensors", "--merge"] if adapted else ["--to", "safetensors"]))
    changed = [] if parts is None else other_bytes(folder, out, parts)
    model, said = loaded(out)
    # It says of every folder with LongRoPE, also of those that it writes itself, that another key is better.
    _, known = loaded(folder)
    said = [line for line in said if line not in known]
    samples = torch.tensor([held_out[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(SAMPLES)])
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits.double()
    other = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()
    apart = abs(own["loss"] - other)
    same, words = compared(onebox, run, model, PROMPTS, LENGTH, False, args)
    if adapted:
        onebox("checkpoint", "export", run, work / "peft", "--to", "peft")
        bare, again = loaded(folder)[0], loaded(folder)[0]
        # It says of adapters that it makes itself, that a property of transformers is deprecated.
        _, known = warned(lambda: peft.get_peft_model(again, peft.PeftConfig.from_pretrained(work / "peft")))
        wrapped, of_adapters = warned(lambda: peft.PeftModel.from_pretrained(bare, work / "peft").eval())
        said += [line for line in of_adapters if line not in known]
        with torch.no_grad():
            far = (wrapped(samples[:, :-1]).logits.double() - logits).abs().max().item()
            moved = (loaded(folder)[0](samples[:, :-1]).logits.double() - logits).abs().max().item()
        same = same and far <= args.tolerance < moved
        words += f"; PEFT is {far:.1e} apart, and the model without adapters {moved:.1e}"
    words = f"{type(model).__name__}, validation loss {own['loss']:.6f}, {apart:.1e} apart; {words}"
    if changed:
        words += f"; other bytes: {', '.join(changed)}"
    words += "".join(f"; transformers says: {line}" for line in said)
    return apart <= args.loss_tolerance and same and not changed and not said, words


def write_model(name, folder):
    """Writes a small model of a class. Returns the names of its parts that are no decoder, or None if it is no wrapper."""
    if name in CLASSES:
        shutil.copytree(FIXTURES / f"hf-{name}-tiny", folder)
        # Runs read tokens, and a draw must not end early.
        for other in ("expected.safetensors", "chat.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / other).unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(longer(config)))
        return None
    kind, decoder, parts = WRAPPERS[name]
    text = longer(json.loads((FIXTURES / f"hf-{decoder}-tiny/config.json").read_text()))
    vision = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    more = dict(mm_tokens_per_image=4) if kind == "Gemma3" else dict(spatial_merge_size=1)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"], **more)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return parts


def longer(config):
    """A config for more tokens than that of a fixture, about whose few tokens transformers warns."""
    return config | {"max_position_embeddings": MOST} if "max_position_embeddings" in config else config


def other_bytes(came, went, parts):
    """Names of tensors of the parts that are not the same in both folders."""
    def read(folder):
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if any(part in key for part in parts)}
        return found

    one, other = read(came), read(went)
    assert one, f"{came} has no {' or '.join(parts)}"
    same = (key for key in one.keys() & other.keys() if one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]))
    return sorted((one.keys() | other.keys()) - set(same))


def warned(work):
    """What `work` returns, and the warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work()
    return result, [str(warning.message) for warning in caught]


class Said(logging.Handler):
    """Keeps what transformers logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def loaded(folder):
    """The model of a folder in the class that its config names, and what transformers says of the folder as it reads it."""
    said = Said()
    # What it says once in a process, it says for each folder here.
    transformers.utils.logging.warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
        model, report = getattr(transformers, kind).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        # Its fast matmuls of experts refuse the widths of small models.
        if getattr(model.config, "num_experts", None) or getattr(model.config, "num_local_experts", None):
            model.set_experts_implementation("eager")
    logger.removeHandler(said)
    said.lines += [str(warning.message) for warning in caught]
    said.lines += [f"{what}: {names}" for what, names in report.items() if names]
    return model.eval(), said.lines


def compared(onebox, run, model, lengths, context, as_bytes, args):
    """Whether logits after prompts and greedy texts are those of transformers, and how far they are apart."""
    rng = random.Random(1)
    worst = largest = 0.0
    same, texts = 0, 0
    for length in lengths:
        low, high = (32, 127) if as_bytes else (0, model.config.get_text_config().vocab_size)
        tokens = [rng.randrange(low, high) for _ in range(length)]
        prompt = spell(tokens, as_bytes).decode()
        ours = torch.tensor(json.loads(onebox("generate", run, f"--prompt={prompt}", "--logits"))["logits"])
        with torch.no_grad():
            theirs = model(torch.tensor([tokens])).logits[0, -1].double()
        worst = max(worst, (ours - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
        more = min(args.tokens, context - length)
        if more > 0:
            drawn = onebox("generate", run, f"--prompt={prompt}", f"--tokens={more}", "--temperature=0")
            texts += 1
            same += greedy(model, tokens, more, args.tolerance, lambda t: spell(t, as_bytes), drawn)
    words = f"logits after {len(lengths)} prompts of up to {max(lengths)} tokens up to {largest:.1f}, at most {worst:.1e} apart; "
    words += f"{same} of {texts} texts drawn greedily are the same"
    return worst <= args.tolerance and same == texts, words


def spell(tokens, as_bytes):
    return bytes(tokens) if as_bytes else " ".join(map(str, tokens)).encode()


def greedy(model, prompt, more, tolerance, spell, drawn):
    """Whether `drawn` is what the model draws, up to a token that is as likely as another."""
    tokens = list(prompt)
    for _ in range(more):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        if first - second <= 2 * tolerance:
            break
        tokens.append(int(logits.argmax()))
    text = spell(tokens)
    return drawn.removesuffix(b"\n").startswith(text.removesuffix(b"\n"))


if __name__ == "__main__":
    sys.exit(main())
