"""Generates with onebox and with transformers in turn and prints one table; see compare-generate beside this."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

MODEL = dict(
    num_hidden_layers=6,
    hidden_size=384,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=1024,
    vocab_size=32000,
    max_position_embeddings=2048,
    # Every text gets all its tokens.
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
WARM_UP = 8


def write_model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**MODEL)).float().save_pretrained(folder)


def contestant(folder, prompt, tokens):
    """transformers in a process of its own: seconds, and the new tokens, as JSON."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(os.cpu_count())
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = torch.tensor([[int(token) for token in prompt.split()]])

    def generate(count):
        mask = torch.ones_like(start)
        return model.generate(start, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True)

    generate(WARM_UP)
    began = time.perf_counter()
    text = generate(tokens)
    seconds = time.perf_counter() - began
    print(json.dumps(dict(seconds=seconds, tokens=text[0, start.shape[1] :].tolist())))


def ours(onebox, folder, prompt, tokens):
    """Seconds from the prompt, which onebox prints when it has the weights, to the last token; and the new tokens."""
    command = [onebox, "generate", folder, "--prompt", prompt, "--tokens", str(tokens), "--temperature", "0"]
    text, began, ended = b"", None, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        while piece := process.stdout.read(1 << 16):
            ended = time.perf_counter()
            began = began or ended
            text += piece
    if process.returncode != 0:
        raise SystemExit(f"compare-generate: onebox ended with exit code {process.returncode}")
    words = [int(word) for word in text.split()]
    start = len(prompt.split())
    assert len(words) == start + tokens, (len(words), start, tokens)
    return ended - began, words[start:]


def theirs(folder, prompt, tokens):
    command = [sys.executable, __file__, "--contestant", folder, prompt, str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result = json.loads(done.stdout)
    return result["seconds"], result["tokens"]


def main():
    import torch
    import transformers

    parser = argparse.ArgumentParser(prog="compare-generate")
    parser.add_argument("--onebox", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", required=True, type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    folder, tokens = str(options.work / "model"), options.tokens
    if not (options.work / "model" / "model.safetensors").exists():
        write_model(folder)
    prompt = " ".join(str(token) for token in range(1, options.prompt + 1))
    rates, ratios, same = ([], []), [], []
    for round_ in range(options.rounds):
        mine, text = ours(options.onebox, folder, prompt, tokens)
        other, its_text = theirs(folder, prompt, tokens)
        for rate, seconds in zip(rates, (mine, other)):
            rate.append(tokens / seconds)
        ratios.append(other / mine)
        differs = (i for i, (a, b) in enumerate(zip(text, its_text)) if a != b)
        same.append(next(differs, tokens))
        print(f"round {round_ + 1} of {options.rounds}, load {os.getloadavg()[0]:.1f}, ratio {ratios[-1]:.2f}", file=sys.stderr)
    ratios.sort()
    one, two = (statistics.median(rate) for rate in rates)
    versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
    print(f"fp32, {os.cpu_count()} threads, {versions}, medians of {options.rounds} rounds; equal tokens: {min(same)} of {tokens}\n")
    print("| prompt | new tokens | onebox tok/s | transformers tok/s | onebox over transformers |")
    print("|---|---|---|---|---|")
    spread = f"**{statistics.median(ratios):.2f}x** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"| {options.prompt} | {tokens} | {one:.0f} | {two:.0f} | {spread} |")


if sys.argv[1] == "--contestant":
    contestant(sys.argv[2], sys.argv[3], int(sys.argv[4]))
else:
    main()
