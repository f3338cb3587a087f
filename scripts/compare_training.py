"""Trains the same model with onebox and with PyTorch in turn and prints one table; see compare-training beside this."""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

SIZES = {
    "small-text": dict(layers=4, hidden=128, heads=4, seq_len=64, vocab=256, micro=12, dropout=0.0),
    "hidden-384": dict(layers=6, hidden=384, heads=6, seq_len=256, vocab=256, micro=12, dropout=0.0),
    "gpt2-124m": dict(layers=12, hidden=768, heads=12, seq_len=64, vocab=50257, micro=4, dropout=0.1),
}
# Heads of keys and values, and the inner width of the feed-forward part, if the family is not gpt2.
LLAMA = {"small-text": (2, 384), "hidden-384": (2, 1024), "gpt2-124m": (4, 2048)}
# Experts of a layer, and those of a token, if the family is moe. Each has half of the inner width, so that a token computes as
# much as in a Llama.
EXPERTS, PER_TOKEN = 8, 2
FORMS = [(attention, adam) for attention in ("fused", "products") for adam in ("fused", "foreach")]
OPTIMIZER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def of_family(name, family):
    """The sizes of a model."""
    size = SIZES[name]
    kv_heads, ffn = (size["heads"], 4 * size["hidden"]) if family == "gpt2" else LLAMA[name]
    dropout = size["dropout"] if family == "gpt2" else 0.0
    experts = EXPERTS if family == "moe" else 0
    return {**size, "kv_heads": kv_heads, "ffn": ffn, "dropout": dropout, "llama": family != "gpt2", "experts": experts}


def model_flops(size):
    """Of one step: 6 per weight of the products and token, and attention's causal products."""
    c, layers = size["hidden"], size["layers"]
    attention = 2 * c * c + 2 * c * c * size["kv_heads"] // size["heads"]
    products = layers * (attention + (3 if size["llama"] else 2) * c * size["ffn"] + c * size["experts"]) + size["vocab"] * c
    return size["micro"] * size["seq_len"] * (6 * products + 6 * layers * size["seq_len"] * c)


def write_tokens(path, vocab):
    """A file of little-endian 16-bit tokens: few are frequent, many are rare, as in text."""
    import numpy

    draws = numpy.random.default_rng(1).random(1 << 20)
    tokens = numpy.floor(numpy.exp(draws * math.log(vocab))).astype("<u2") - 1
    tokens.tofile(path)


def write_config(path, name, size, tokens, threads):
    model = f"layers: {size['layers']}, hidden: {size['hidden']}, heads: {size['heads']}, seq_len: {size['seq_len']}"
    if size["llama"]:
        model = f"family: Llama, {model}, kv_heads: {size['kv_heads']}, ffn_hidden: {size['ffn']}"
    if size["experts"]:
        experts = f"count: {size['experts']}, per_token: {PER_TOKEN}, ffn_hidden: {size['ffn'] // PER_TOKEN}"
        model = f"{model}, qk_norm: true, experts: ({experts})"
    betas = OPTIMIZER["betas"]
    path.write_text(f"""// {name}, for compare-training.
(
    device: Cpu(count: 1, memory: "16GiB", threads: {threads}),
    model: ({model}, vocab: {size['vocab']}, dropout: {size['dropout']}),
    parallel: (tensor: 1, data: 1),
    precision: Fp32,
    optimizer: (lr: {OPTIMIZER['lr']}, beta1: {betas[0]}, beta2: {betas[1]}, weight_decay: 0.1, clip: 1.0),
    schedule: (kind: Constant, warmup_steps: 0),
    batch: (micro: {size['micro']}),
    data: (train: "{tokens.resolve()}", format: U16),
    train: (steps: 100000),
)
""")


def contestant(form, size, tokens, threads, steps, seconds):
    """PyTorch in a process of its own: seconds of the median step and the number of steps, as JSON."""
    import numpy
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    attention_form, adam = form
    c, t, heads, p = size["hidden"], size["seq_len"], size["heads"], size["dropout"]
    kv_heads, ffn, llama = size["kv_heads"], size["ffn"], size["llama"]
    dim = c // heads
    angles = torch.outer(torch.arange(t), 10000.0 ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    def norm():
        return nn.RMSNorm(c, eps=1e-6) if llama else nn.LayerNorm(c)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(c, c + 2 * kv_heads * dim, bias=not llama)
            self.proj = nn.Linear(c, c, bias=not llama)
            self.register_buffer("future", torch.ones(t, t, dtype=torch.bool).triu(1))

        def forward(self, x):
            samples = x.shape[0]
            parts = self.qkv(x).split((c, kv_heads * dim, kv_heads * dim), dim=2)
            q, k, v = (y.view(samples, t, -1, dim).transpose(1, 2) for y in parts)
            if llama:
                q, k = rotate(q), rotate(k)
            if attention_form == "fused":
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=kv_heads != heads)
            else:
                k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
                scores = q @ k.transpose(-2, -1) / math.sqrt(c // heads)
                weights = F.softmax(scores.masked_fill(self.future, -math.inf), dim=-1)
                y = F.dropout(weights, p) @ v
            return F.dropout(self.proj(y.transpose(1, 2).reshape(samples, t, c)), p)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.attention, self.norm_2 = norm(), Attention(), norm()
            self.up = nn.Linear(c, (2 if llama else 1) * ffn, bias=not llama)
            self.down = nn.Linear(ffn, c, bias=not llama)

        def inner(self, x):
            if not llama:
                return F.gelu(x, approximate="tanh")
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        def forward(self, x):
            x = x + self.attention(self.norm_1(x))
            return x + F.dropout(self.down(self.inner(self.up(self.norm_2(x)))), p)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(size["vocab"], c)
            self.positions = None if llama else nn.Embedding(t, c)
            self.output = nn.Linear(c, size["vocab"], bias=False)
            if not llama:
                self.output.weight = self.tokens.weight
            self.blocks = nn.ModuleList(Block() for _ in range(size["layers"]))
            self.norm = norm()

        def forward(self, tokens, targets):
            x = self.tokens(tokens)
            if self.positions is not None:
                x = F.dropout(x + self.positions(torch.arange(t)), p)
            for block in self.blocks:
                x = block(x)
            logits = self.output(self.norm(x))
            return F.cross_entropy(logits.view(-1, size["vocab"]), targets.reshape(-1))

    def mixture():
        """Qwen3-MoE of transformers, with experts in its eager form."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=size["vocab"], hidden_size=c, num_hidden_layers=size["layers"], num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=t, num_experts=size["experts"],
            num_experts_per_tok=PER_TOKEN, moe_intermediate_size=ffn // PER_TOKEN, intermediate_size=ffn, norm_topk_prob=True,
            tie_word_embeddings=False, output_router_logits=False, use_cache=False, attn_implementation="sdpa"
            if attention_form == "fused" else "eager", experts_implementation="eager",
        )
        model = Qwen3MoeForCausalLM(config)

        def loss_of(tokens, targets):
            logits = model(input_ids=tokens).logits
            return F.cross_entropy(logits.view(-1, size["vocab"]), targets.reshape(-1))

        return model, loss_of

    if size["experts"]:
        model, loss_of = mixture()
    else:
        model = loss_of = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), **{adam: True}, **OPTIMIZER)
    data = numpy.fromfile(tokens, dtype="<u2").astype(numpy.int64)

    def step():
        starts = torch.randint(len(data) - t - 1, (size["micro"],))
        batch = torch.stack([torch.from_numpy(data[i : i + t + 1]) for i in starts])
        loss = loss_of(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for _ in range(2):
        loss = step()
    taken, began = [], time.perf_counter()
    while len(taken) < 3 or (len(taken) < steps and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        loss = step()
        taken.append(time.perf_counter() - start)
    assert math.isfinite(loss), loss
    print(json.dumps(dict(seconds=statistics.median(taken), steps=len(taken))))


# Of which each of PyTorch's forms has the median, before one is chosen.
TURNS = 5


def output(command, threads):
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout)


def compare(name, options):
    size, work, threads, seconds = of_family(name, options.family), options.work, options.threads, options.seconds
    title = {"gpt2": name, "llama": f"{name}, Llama", "moe": f"{name}, {EXPERTS} experts"}[options.family]
    tokens, config = work / f"tokens-{size['vocab']}.bin", work / f"{name}-{options.family}.ron"
    if not tokens.exists():
        write_tokens(tokens, size["vocab"])
    write_config(config, title, size, tokens, threads)

    def torch_step(form, budget):
        arguments = [",".join(form), name, options.family, str(tokens), str(threads), "100000", str(budget)]
        return output([sys.executable, __file__, "--contestant", *arguments], threads)["seconds"]

    def onebox_step(steps):
        command = [options.onebox, "bench", "step", str(config), "--steps", str(steps), "--json"]
        return output([*command, *(word for one in options.set for word in ("--set", one))], threads)

    # In turn, so that no form is chosen for a quiet moment.
    turns = [{form: torch_step(form, seconds / 4) for form in FORMS} for _ in range(TURNS)]
    by_form = {form: statistics.median(turn[form] for turn in turns) for form in FORMS}
    best = min(by_form, key=by_form.get)
    steps = max(3, min(2000, int(seconds / onebox_step(3)["seconds"])))
    ours, theirs, ceilings, load = [], [], [], []
    for round_ in range(options.rounds):
        measured = onebox_step(steps)
        ours.append(measured["seconds"])
        ceilings.append(measured["ceiling_tflops"])
        theirs.append(torch_step(best, seconds))
        load.append(os.getloadavg()[0])
        print(f"{title}: round {round_ + 1} of {options.rounds}, load {load[-1]:.1f}, ratio {theirs[-1] / ours[-1]:.2f}", file=sys.stderr)
    in_step, gflops = size["micro"] * size["seq_len"], model_flops(size) / 1e9
    rates = [statistics.median(in_step / s for s in side) for side in (ours, theirs)]
    ratios = sorted(theirs / ours for ours, theirs in zip(ours, theirs))
    forms = ", ".join(f"{'/'.join(form)} {1e3 * s:.1f}" for form, s in by_form.items())
    print(f"{title}: PyTorch attention/AdamW, ms a step: {forms}; load {min(load):.1f} to {max(load):.1f}", file=sys.stderr)
    return (
        f"| {title} | {rates[0]:.0f} | {rates[1]:.0f} | **{statistics.median(ratios):.2f}x** "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {rates[0] / in_step * gflops:.0f} | {rates[1] / in_step * gflops:.0f} "
        f"| {1e3 * statistics.median(ceilings):.0f} | {'/'.join(best)} |"
    )


def main():
    import torch

    parser = argparse.ArgumentParser(prog="compare-training")
    parser.add_argument("--onebox", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", required=True, type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", action="append", choices=list(SIZES))
    parser.add_argument("--family", choices=("gpt2", "llama", "moe"), default="gpt2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    threads, rounds, onebox = options.threads, options.rounds, options.onebox
    rows = [compare(name, options) for name in options.size or SIZES]
    products = [p for p in output([onebox, "bench", "gemm", "--threads", str(threads), "--json"], threads)["rows"] if p["dtype"] == "fp32"]
    fma = statistics.median(p["ceiling_gflops"] for p in products)
    print(f"fp32, {threads} threads, PyTorch {torch.__version__} eager, medians of {rounds} rounds; fused multiply-adds in registers: {fma:.0f} GFLOP/s\n")
    print("| size | onebox tok/s | PyTorch tok/s | onebox over PyTorch | onebox GFLOP/s | PyTorch GFLOP/s | plain product | PyTorch attention/AdamW |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if sys.argv[1] == "--contestant":
    form, name, family, tokens, threads, steps, seconds = sys.argv[2:9]
    contestant(form.split(","), of_family(name, family), tokens, int(threads), int(steps), float(seconds))
else:
    main()
