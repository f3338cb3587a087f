"""PyTorch's figures at the shapes of the first look, for gpu_first.py: `figure WHAT key=value ...` on stdout.
    gpu_torch.py products|ops|train [--small]     --small: tiny shapes, on the CPU where there is no GPU"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F

SMALL = "--small" in sys.argv
WHERE = "cuda" if torch.cuda.is_available() and not SMALL else "cpu"
TOKENS, HIDDEN, VOCAB, HEADS, SEQ, LAYERS = (16, 32, 64, 2, 8, 2) if SMALL else (8192, 2048, 50304, 16, 1024, 24)
VALUE = torch.bfloat16
# Attention by what PyTorch chooses, and by two libraries. The CPU has the first alone.
BACKENDS = [("", None), ("-flash", "FLASH_ATTENTION"), ("-cudnn", "CUDNN_ATTENTION")][:1 if SMALL else 3]


def seconds(work, runs=20):
    """Of one run, by events where there is a GPU; after three that are not counted."""
    runs = 2 if SMALL else runs
    for _ in range(3):
        work()
    if WHERE == "cpu":
        started = time.perf_counter()
        for _ in range(runs):
            work()
        return (time.perf_counter() - started) / runs
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / runs


def random(*shape, grad=False):
    """Numbers in -1..1 as in onebox's probes: power, and with it clocks, follow the bits."""
    return (torch.randint(255, shape, device=WHERE).float() / 128 - 0.99).to(VALUE).requires_grad_(grad)


def products():
    shapes = {"qkv": (HIDDEN, 3 * HIDDEN), "projection": (HIDDEN, HIDDEN), "up": (HIDDEN, 4 * HIDDEN),
              "down": (4 * HIDDEN, HIDDEN), "head": (HIDDEN, VOCAB)}
    for name, (k, n) in shapes.items():
        x, w, d = random(TOKENS, k), random(n, k), random(TOKENS, n)
        for kind, work in [("forward", lambda: x @ w.t()), ("by-input", lambda: d @ w), ("by-weight", lambda: d.t() @ x)]:
            # As long as onebox's: a GPU at its limit of power is faster for the first milliseconds.
            work_flops = 2 * TOKENS * k * n
            best = min(seconds(work, int(min(100, max(5, 1e13 / work_flops)))) for _ in range(3))
            print(f"figure products name={name} kind={kind} tflops={work_flops / best / 1e12:.2f}", flush=True)


def ops():
    def told(name, work):
        print(f"figure ops name={name} us={1e6 * seconds(work):.2f}", flush=True)

    x, wide, gain, bias = random(TOKENS, HIDDEN, grad=True), random(TOKENS, 4 * HIDDEN, grad=True), random(HIDDEN), random(HIDDEN)
    plain, plain_wide = x.detach(), wide.detach()
    told("layer_norm", lambda: F.layer_norm(plain, (HIDDEN,), gain, bias))
    told("gelu", lambda: F.gelu(plain_wide, approximate="tanh"))
    told("bias_dropout_add", lambda: plain + bias + plain)
    told("add", lambda: plain_wide.add_(plain_wide, alpha=0))
    for name, out, given in [("layer_norm_backward", F.layer_norm(x, (HIDDEN,), gain, bias), x),
                             ("gelu_backward", F.gelu(wide, approximate="tanh"), wide)]:
        d = torch.ones_like(out)
        told(name, lambda: torch.autograd.grad(out, given, d, retain_graph=True))
    for times in [1, 3, 4]:
        told(f"column_sum-{times * 2048}", lambda: random_of(times).sum(0))
    q, k, v = (random(TOKENS // SEQ, HEADS, SEQ, HIDDEN // HEADS, grad=True) for _ in range(3))
    for name, backend in BACKENDS:
        # PyTorch has these names since 2.5.
        attention = __import__("torch.nn.attention", fromlist=["attention"]) if backend else None
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)) if backend else nullcontext():
            try:
                told("attention" + name, lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                d = random(*out.shape)
                told("attention_backward" + name, lambda: torch.autograd.grad(out, (q, k, v), d, retain_graph=True))
            except RuntimeError as error:  # not for this GPU
                print(f"attention{name}: {str(error)[:200]}", file=sys.stderr)
    logits, targets = random(TOKENS, VOCAB), torch.arange(TOKENS, device=WHERE) % VOCAB
    told("cross_entropy_stats", lambda: F.cross_entropy(logits, targets))


COLUMNS = {}


def random_of(times):
    if times not in COLUMNS:
        COLUMNS[times] = random(TOKENS, times * HIDDEN)
    return COLUMNS[times]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, HIDDEN // HEADS).transpose(1, 2) for y in self.qkv(self.norms[0](x)).split(HIDDEN, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCAB, HIDDEN), torch.nn.Embedding(SEQ, HIDDEN)
        self.blocks, self.norm = torch.nn.ModuleList([Block() for _ in range(LAYERS)]), torch.nn.LayerNorm(HIDDEN)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy((self.norm(h) @ self.tokens.weight.t()).flatten(0, 1), y.flatten())


def train():
    """Forward and backward pass of a micro-batch in bf16, without the update; plain, then compiled."""
    with torch.device(WHERE):
        model = Gpt().to(VALUE)
    x = torch.randint(VOCAB, (TOKENS // SEQ, SEQ), device=WHERE)
    parameters = sum(p.numel() for p in model.parameters()) - SEQ * HIDDEN
    flops = TOKENS * (6 * parameters + 6 * LAYERS * HIDDEN * SEQ)
    for name, run in [("eager", model), ("compiled", torch.compile(model))] if not SMALL else [("eager", model)]:
        def step():
            run(x, x).backward()
            model.zero_grad(set_to_none=True)
        took = seconds(step, 5)
        print(f"figure train name={name} ms={1e3 * took:.2f} tokens={TOKENS / took:.0f} tflops={flops / took / 1e12:.2f}", flush=True)


{"products": products, "ops": ops, "train": train}[sys.argv[1]]()
