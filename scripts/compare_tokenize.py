"""Makes tokens of a text with onebox and with tokenizers in turn and prints one table; see compare-tokenize beside this."""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

import tokenizers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

BYTES = 32 << 20
LEARNT = 8 << 20
VOCAB = 32_000
PIECE = 4 << 10
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_text(path):
    """Sources of crates, as many as it takes."""
    home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    left = BYTES
    with path.open("w", newline="") as out:
        for source in sorted((home / "registry" / "src").rglob("*.rs")):
            try:
                text = source.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if left <= 0:
                return
            out.write(text)
            left -= len(text.encode())
    if left > 0:
        sys.exit(f"compare-tokenize: {home}/registry/src has less than {BYTES >> 20} MiB of sources: name a text with --text")


def write_tokenizer(path, text):
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    by_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, by_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    with text.open(newline="") as lines:
        made.train_from_iterator(lines.read(LEARNT).splitlines(keepends=True), trainer)
    made.save(str(path))


def contestant(text, tokenizer, method):
    """tokenizers in a process of its own: seconds and tokens, as JSON."""
    made = Tokenizer.from_file(tokenizer)
    with open(text, newline="") as file:
        whole = file.read()
    pieces, start = [], 0
    while start < len(whole):
        end = whole.find("\n", start + PIECE) + 1 or len(whole)
        pieces.append(whole[start:end])
        start = end
    began = time.perf_counter()
    encoded = getattr(made, method)(pieces, add_special_tokens=False)
    seconds = time.perf_counter() - began
    print(json.dumps(dict(seconds=seconds, tokens=sum(len(one) for one in encoded))))


def theirs(text, tokenizer, method):
    command = [sys.executable, __file__, "--contestant", method, "--text", str(text), "--tokenizer", str(tokenizer)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return told["seconds"], told["tokens"]


def ours(onebox, text, tokenizer, work):
    made = Tokenizer.from_file(str(tokenizer))
    largest = max(made.get_vocab().values())
    config, out = work / "compare.ron", work / "tokens"
    names = [json.dumps(str(path.resolve()), ensure_ascii=False) for path in (text, tokenizer)]
    config.write_text(
        f"(model: (layers: 1, hidden: 16, heads: 1, seq_len: 64, vocab: {largest + 1}), device: Cpu(count: 1, memory: \"1GiB\"), precision: Fp32, "
        f"data: (train: {names[0]}, tokenizer: {names[1]}), train: (steps: 1))"
    )
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    done = subprocess.run([onebox, "data", "prepare", config, out], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    return seconds, int(re.search(r"(\d+) tokens of", done.stdout)[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--onebox")
    ap.add_argument("--work", type=pathlib.Path)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--text", type=pathlib.Path)
    ap.add_argument("--tokenizer", type=pathlib.Path)
    ap.add_argument("--contestant")
    args = ap.parse_args()
    if args.contestant:
        return contestant(args.text, str(args.tokenizer), args.contestant)
    text = args.text or args.work / "text.txt"
    tokenizer = args.tokenizer or args.work / "tokenizer.json"
    if args.text is None and not text.exists():
        write_text(text)
    if args.tokenizer is None:
        write_tokenizer(tokenizer, text)
    methods = ["encode_batch", "encode_batch_fast"]
    rounds = []
    for number in range(args.rounds):
        runs = {method: theirs(text, tokenizer, method) for method in methods}
        runs["onebox"] = ours(args.onebox, text, tokenizer, args.work)
        counts = {tokens for _, tokens in runs.values()}
        if len(counts) != 1:
            sys.exit(f"compare-tokenize: not the same number of tokens: {runs}")
        rounds.append({name: seconds for name, (seconds, _) in runs.items()})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr)
    size = text.stat().st_size / (1 << 20)
    print(f"{size:.0f} MiB, {counts.pop()} tokens, {os.cpu_count()} cores, tokenizers {tokenizers.__version__}, {args.rounds} rounds\n")
    print("| | seconds | MiB/s | time beside that of onebox |\n|---|---|---|---|")
    for name in ["onebox", *methods]:
        seconds = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(one[name] / one["onebox"] for one in rounds)
        print(f"| {name} | {seconds:.2f} | {size / seconds:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
