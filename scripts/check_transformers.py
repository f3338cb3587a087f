#!/usr/bin/env python3
"""Exports a run and compares the model with what transformers makes of it: logits, and the text that both draw greedily.

    python3 -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python scripts/check_transformers.py runs/NAME [--onebox target/release/onebox]

The run needs a checkpoint, which it saves at its end unless told otherwise. Exit code 1 when logits differ by more than --tolerance or
a text differs before a token that two logits, closer than that, could have given.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("run", type=pathlib.Path)
    ap.add_argument("--onebox", default="target/release/onebox")
    ap.add_argument("--prompts", type=int, default=16)
    ap.add_argument("--tokens", type=int, default=32)
    ap.add_argument("--tolerance", type=float, default=1e-4)
    args = ap.parse_args()

    def onebox(*words):
        done = subprocess.run([args.onebox, *map(str, words)], capture_output=True)
        if done.returncode:
            sys.exit(f"onebox {words[0]}: {done.stderr.decode()}")
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "model"
        onebox("checkpoint", "export", args.run, out, "--to", "safetensors", "--max-shard-size", "1MB")
        model, report = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report.values()), report
    model.eval()
    config = model.config
    # Without a tokenizer a text is its bytes, unless the config says that it is tokens.
    tokens = any(f"format: {name}" in (args.run / "config.ron").read_text() for name in ("U16", "U32"))
    as_bytes = not tokens and not (args.run / "tokenizer.json").exists()
    rng = random.Random(1)
    worst = largest = 0.0
    same, texts = 0, 0
    for i in range(args.prompts):
        length = 1 + i * (config.max_position_embeddings - 1) // max(args.prompts - 1, 1)
        low, high = (32, 127) if as_bytes else (0, config.vocab_size)
        tokens = [rng.randrange(low, high) for _ in range(length)]
        prompt = bytes(tokens).decode() if as_bytes else " ".join(map(str, tokens))
        ours = torch.tensor(json.loads(onebox("generate", args.run, f"--prompt={prompt}", "--logits"))["logits"])
        with torch.no_grad():
            theirs = model(torch.tensor([tokens])).logits[0, -1].double()
        worst = max(worst, (ours - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
        more = min(args.tokens, config.max_position_embeddings - length)
        if more > 0:
            drawn = onebox("generate", args.run, f"--prompt={prompt}", f"--tokens={more}", "--temperature=0")
            texts += 1
            same += greedy(model, tokens, more, args.tolerance, lambda t: spell(t, as_bytes), drawn)
    print(f"{args.prompts} prompts of up to {config.max_position_embeddings} tokens: logits up to {largest:.1f}, at most {worst:.1e} apart")
    print(f"{same} of {texts} texts of up to {args.tokens} tokens drawn greedily are the same")
    return 0 if worst <= args.tolerance and same == texts else 1


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
