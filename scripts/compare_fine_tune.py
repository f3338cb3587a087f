"""Fine-tunes a folder with onebox and with transformers' Trainer and compares validation losses; see compare-fine-tune beside this."""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, logging, set_seed

LENGTH = 128
# The share of the chats that onebox keeps for validation by default (data.validation_fraction).
VALIDATION = 0.1
# The label of a token that does not count.
IGNORED = -100
PLACES = ["the mill", "the harbour", "the old library", "the market", "the north gate", "the bakery", "the river bridge", "the garden"]
THINGS = ["a basket of pears", "two brass lamps", "a ladder", "nine blue plates", "a sack of flour", "the spare key", "a roll of rope", "the clock"]
PEOPLE = ["Mara", "Old Tom", "the miller", "Ines", "the ferryman", "Jonas", "the clerk", "Agnes"]
TIMES = ["at dawn", "after the rain", "on Monday", "before supper", "at noon", "in the evening"]


def chat(draw):
    """One chat of one or two turns, whose answers have a form of their own: the words of the village's log."""
    place, thing, person, time_ = (draw.choice(words) for words in (PLACES, THINGS, PEOPLE, TIMES))
    log = f"Log: {person} brought {thing} to {place} {time_}."
    forms = [
        (f"Write a line of the log. {person}, {thing}, {place}, {time_}.", log),
        (f"{log} Where is {thing}?", f"By the log, {thing} is at {place}."),
        (f"{log} Who brought {thing}?", f"By the log, it was {person}."),
        (f"{log} When was that?", f"By the log, {time_}."),
    ]
    turns = draw.sample(forms, draw.choice([1, 1, 2]))
    return [message for said, answer in turns for message in ({"role": "user", "content": said}, {"role": "assistant", "content": answer})]


def encode(tokenizer, messages):
    """The tokens of a chat and the labels: what the assistant says, with the token that ends each answer."""
    def tokens(some, **options):
        return tokenizer.apply_chat_template(some, tokenize=True, return_dict=True, **options)["input_ids"]

    ids = tokens(messages)
    labels = [IGNORED] * len(ids)
    for end in range(1, len(messages), 2):
        prompt = tokens(messages[:end], add_generation_prompt=True)
        answered = tokens(messages[: end + 1])
        assert ids[: len(answered)] == answered and answered[: len(prompt)] == prompt, "the template rewrites earlier turns"
        stop = len(answered) - answered[::-1].index(tokenizer.eos_token_id)
        assert stop > len(prompt), "an answer has no token that ends it"
        labels[len(prompt) : stop] = ids[len(prompt) : stop]
    assert len(ids) <= LENGTH, f"a chat has {len(ids)} tokens"
    return {"input_ids": ids, "labels": labels}


def padded(rows, pad):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = lambda key, with_: torch.tensor([row[key] + [with_] * (longest - len(row[key])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": fill("input_ids", pad), "labels": fill("labels", IGNORED), "attention_mask": mask}


def loss_of(folder, rows):
    """Mean loss over the labels of all rows, in float32; the first token of a row is no target."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = count = 0
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
        count += (labels != IGNORED).sum().item()
    return total / count


def run_onebox(options, chats, seed):
    """Trains with onebox's defaults; returns the exported folder, the run's own validation loss and the steps.

    The own loss is that of the 16-bit copies of the parameters, the folder has the fp32 parameters."""
    run, folder, config = (options.work / f"{name}-{seed}" for name in ("run", "onebox", "config"))
    for old in (run, folder):
        shutil.rmtree(old, ignore_errors=True)
    config = config.with_suffix(".ron")
    config.write_text(f"""(
    model: (from: {json.dumps(str(options.model.resolve()))}, seq_len: {LENGTH}),
    data: (train: {json.dumps(str(chats.resolve()))}, format: Chat),
    train: (epochs: 1, seed: {seed}),
)
""")
    words = [word for one in options.set for word in ("--set", one)]
    if seed == 1:
        subprocess.run([options.onebox, "config", "show", config, *words], check=True, stdout=(options.work / "onebox-settings.txt").open("w"))
    subprocess.run([options.onebox, "train", config, "--run-dir", run, "--quiet", *words], check=True)
    subprocess.run([options.onebox, "checkpoint", "export", run, folder, "--to", "safetensors"], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert last["whole"], "the last evaluation has not all of the validation set"
    return folder, last["loss"], sum(line["kind"] == "step" for line in lines)


def run_trainer(options, rows, pad, kind, seed):
    """Trains with the Trainer's defaults; returns the saved folder and the steps."""
    folder = options.work / f"trainer-{kind}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=kind if kind == "auto" else getattr(torch, kind))
    settings = TrainingArguments(
        # Not settings of the training: where it runs and what it writes.
        output_dir=folder, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", seed=seed,
        dataloader_pin_memory=False,
        num_train_epochs=1,
    )
    if seed == 1:
        (options.work / "trainer-settings.json").write_text(settings.to_json_string())
    trainer = Trainer(model=model, args=settings, train_dataset=rows, data_collator=lambda some: padded(some, pad))
    trainer.train()
    trainer.save_model(folder)
    return folder, trainer.state.global_step, settings


def main():
    ap = argparse.ArgumentParser(prog="compare-fine-tune")
    ap.add_argument("--onebox", required=True, help=argparse.SUPPRESS)
    ap.add_argument("--work", required=True, type=pathlib.Path, help=argparse.SUPPRESS)
    ap.add_argument("--model", required=True, type=pathlib.Path)
    ap.add_argument("--chats", type=int, default=120)
    ap.add_argument("--seeds", type=int, default=3)
    ap.add_argument("--trainer", action="append", choices=("auto", "float32", "bfloat16"))
    ap.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = ap.parse_args()
    if options.chats < 5:
        ap.error("--chats takes at least 5: the last tenth, rounded, is for validation")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count())

    draw = random.Random(43)
    texts = [chat(draw) for _ in range(options.chats)]
    chats = options.work / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in texts))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [encode(tokenizer, messages) for messages in texts]
    # Rounded as onebox rounds, a half upwards.
    held = int(len(rows) * VALIDATION + 0.5)
    train, validation = rows[:-held], rows[-held:]
    targets = sum(label != IGNORED for row in validation for label in row["labels"])
    print(f"{len(train)} chats to train, {held} for validation with {targets} targets", flush=True)
    print(f"before: validation loss {loss_of(options.model, validation):.4f}", flush=True)

    pad, kinds = tokenizer.pad_token_id or 0, options.trainer or ["auto", "float32"]
    losses = {name: [] for name in ("onebox", *kinds)}
    for seed in range(1, options.seeds + 1):
        start = time.time()
        folder, own, steps = run_onebox(options, chats, seed)
        seconds = time.time() - start
        losses["onebox"].append(loss_of(folder, validation))
        shutil.rmtree(folder)
        print(f"seed {seed}: onebox {losses['onebox'][-1]:.4f} ({own:.4f} by its own evaluation), {steps} steps, {seconds:.0f} s", flush=True)
        for kind in kinds:
            start = time.time()
            folder, steps, settings = run_trainer(options, train, pad, kind, seed)
            seconds = time.time() - start
            losses[kind].append(loss_of(folder, validation))
            shutil.rmtree(folder)
            print(f"seed {seed}: Trainer, {kind} {losses[kind][-1]:.4f}, {steps} steps, {seconds:.0f} s", flush=True)
    names = ("learning_rate", "lr_scheduler_type", "warmup_steps", "per_device_train_batch_size", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "optim", "bf16")
    print("Trainer's settings: " + ", ".join(f"{name} {getattr(settings, name)}" for name in names))
    means = {name: statistics.mean(some) for name, some in losses.items()}
    print("mean validation losses: " + ", ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
    good = means["onebox"] <= means[kinds[0]]
    print("onebox is not worse: ok" if good else "onebox is worse: NO")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
