"""Runs onebox, PyTorch and DeepSpeed in turn and prints one table; see compare-adam beside this."""

import json
import os
import statistics
import subprocess
import sys
import time

PASSES = 5
CONTESTANTS = {
    "torch": "torch AdamW(fused=True), fp32 gradients, nothing else",
    "bare": "DeepSpeedCPUAdam alone, fp32 gradients",
    "full": "DeepSpeed: bf16 to fp32, unscale, CPUAdam, fp32 to bf16",
}
STATES = {
    "fp32": "onebox, bf16 gradients in and parameters out, fp32 states",
    "split": "onebox, offload.master: Split",
    "bf16": "onebox, offload.moments: Bf16",
    "split+bf16": "onebox, both",
}


def contestant(kind, params, threads):
    """In a process of its own: seconds of each pass, as JSON."""
    import torch

    torch.set_num_threads(threads)
    weights = torch.nn.Parameter(torch.full((params,), 0.02))
    weights.grad = torch.full((params,), 0.005)
    options = dict(lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    if kind == "torch":
        optimizer = torch.optim.AdamW([weights], fused=True, **options)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([weights], adamw_mode=True, **options)
    down = torch.full((params,), 0.01, dtype=torch.bfloat16)
    up = torch.empty(params, dtype=torch.bfloat16)

    def one():
        if kind == "full":
            weights.grad.copy_(down)
            weights.grad.mul_(0.5)
        optimizer.step()
        if kind == "full":
            up.copy_(weights.data)

    with torch.no_grad():
        one()
        seconds = []
        for _ in range(PASSES):
            began = time.perf_counter()
            one()
            seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


def output(command):
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1] if command[0] == sys.executable else done.stdout)


def main():
    onebox, params, threads, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    seconds = {name: [] for name in [*CONTESTANTS, *STATES]}
    shares, load = {name: [] for name in STATES}, []
    for round_ in range(rounds):
        for kind in CONTESTANTS:
            command = [sys.executable, __file__, "--contestant", kind, str(params), str(threads)]
            seconds[kind].append(statistics.median(output(command)))
        command = [onebox, "bench", "adam", "--params", str(params), "--threads", str(threads), "--rounds", str(PASSES)]
        rows = output([*command, "--states-only", "--json"])["rows"]
        for row in rows:
            seconds[row["state"]].append(row["pass_seconds"])
            shares[row["state"]].append(row["share_of_ceiling"])
        load.append(os.getloadavg()[0])
        print(f"round {round_ + 1} of {rounds}, load {load[-1]:.1f}", file=sys.stderr)
    medians = {name: statistics.median(of) for name, of in seconds.items()}
    ratio = lambda name, other: statistics.median(b / a for a, b in zip(seconds[name], seconds[other]))
    print(f"{params} parameters, {threads} threads, medians of {rounds} rounds; load {min(load):.1f} to {max(load):.1f}\n")
    print("| contestant | ms | over DeepSpeed's full path | over DeepSpeed alone | over onebox fp32 | of its own traffic |")
    print("|---|---|---|---|---|---|")
    for name, words in [*CONTESTANTS.items(), *STATES.items()]:
        share = f"{100 * statistics.median(shares[name]):.0f} %" if name in shares else ""
        over = " | ".join(f"{ratio(name, other):.2f}x" for other in ["full", "bare", "fp32"])
        print(f"| {words} | {1e3 * medians[name]:.1f} | {over} | {share} |")


if sys.argv[1] == "--contestant":
    contestant(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    main()
