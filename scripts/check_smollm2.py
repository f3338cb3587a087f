"""Fine-tunes SmolLM2 with onebox and compares it with transformers in float32. See check-smollm2."""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

ROOT = pathlib.Path(__file__).resolve().parent.parent
LENGTH = 128
# A step has every sample of the data, so the order of samples does not matter.
SAMPLES = 4
RATE = 1e-5
BETAS = (0.9, 0.95)
EPSILON = 1e-8
COMPARED = 3
QUESTIONS = ["What is the capital of France?", "Name three colors.", "Write a short sentence about the sea."]
ANSWER = 24


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--onebox", required=True)
    ap.add_argument("--model", type=pathlib.Path, required=True)
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--loss-tolerance", type=float, default=1e-4)
    ap.add_argument("--norm-tolerance", type=float, default=1e-3)
    args = ap.parse_args()
    logging.disable_progress_bar()
    run, exported = args.work / "run", args.work / "exported"
    for old in (run, exported):
        shutil.rmtree(old, ignore_errors=True)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = (ROOT / "docs/how-it-works.md").read_text()
    size = SAMPLES * LENGTH + 1
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert len(tokens) > size + LENGTH, len(tokens)
    tokens, held_out = tokens[:size], tokens[size : size + LENGTH + 1]
    for name, some in (("tokens.bin", tokens), ("held-out.bin", held_out)):
        numpy.array(some, dtype="<u2").tofile(args.work / name)
    config = args.work / "smollm2.ron"
    config.write_text(f"""(
    device: Cpu(memory: "4GiB"),
    precision: Fp32,
    model: (from: {json.dumps(str(args.model.resolve()))}, seq_len: {LENGTH}),
    optimizer: (lr: {RATE}, beta1: {BETAS[0]}, beta2: {BETAS[1]}, eps: {EPSILON}, weight_decay: 0.0, clip: None),
    schedule: (kind: Constant, warmup_steps: 0),
    batch: (global: {SAMPLES}, micro: 1),
    data: (train: "tokens.bin", validation: "held-out.bin", format: U16, tokenizer: {json.dumps(str(args.model.resolve()))}),
    train: (steps: {args.steps}),
)
""")

    def onebox(*words):
        done = subprocess.run([args.onebox, *map(str, words)], stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"check-smollm2: onebox {words[0]} ended with {done.returncode}")
        return done.stdout.decode()

    start = time.time()
    onebox("train", config, "--run-dir", run)
    print(f"onebox: {args.steps} steps in {time.time() - start:.0f} s", flush=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "step"]
    assert len(ours) == args.steps, len(ours)
    good = ours[-1][0] < ours[0][0]
    print(f"the loss falls from {ours[0][0]:.4f} to {ours[-1][0]:.4f}: {'ok' if good else 'NO'}")
    for step, (own, other) in enumerate(zip(ours, theirs(args.model, tokens)), 1):
        loss, norm = (abs(a - b) / abs(b) for a, b in zip(own, other))
        fits = loss <= args.loss_tolerance and norm <= args.norm_tolerance
        good &= fits
        print(f"step {step}: loss {own[0]:.5f} ({other[0]:.5f} in transformers), norm {own[1]:.4f} ({other[1]:.4f}): {'ok' if fits else 'NO'}")

    onebox("checkpoint", "export", run, exported, "--to", "safetensors")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for question in QUESTIONS:
        said = onebox("generate", run, "--chat", "--prompt", question, "--tokens", ANSWER, "--temperature", 0).strip()
        expected = answer(model, tokenizer, question)
        fits = said == expected
        good &= fits
        print(f"{question} {said!r}: {'ok' if fits else f'NO, transformers says {expected!r}'}")
    sys.exit(0 if good else 1)


def theirs(folder, tokens):
    """Losses and gradient norms of the first steps in PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    for _ in range(COMPARED):
        optimizer.zero_grad()
        total = 0.0
        for sample in range(SAMPLES):
            window = torch.tensor([tokens[sample * LENGTH : (sample + 1) * LENGTH + 1]])
            logits = model(window[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits[0], window[0, 1:]) / SAMPLES
            loss.backward()
            total += loss.item()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()])).item()
        optimizer.step()
        yield total, norm


def answer(model, tokenizer, question):
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=ANSWER, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
