"""Makes benchmarks/kernels.md of what NVRTC and the interpreter of PTX say. See kernel-report."""

import csv
import ctypes
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from check_kernels import FOLDERS, KERNELS, compile_file, kernels_of

ARCHITECTURES = ["70", "80", "86", "89", "90", "100", "120"]
# The disassembler reads no code for sm_70; this is the nearest that it reads.
NEAREST = {"70": "75"}
# By architecture: registers, warps, blocks and bytes of shared memory of a multiprocessor; bytes that a block takes beside its own.
LIMITS = {
    "70": (65536, 64, 32, 96 << 10, 0),
    "80": (65536, 64, 32, 164 << 10, 1024),
    "86": (65536, 48, 16, 100 << 10, 1024),
    "89": (65536, 48, 24, 100 << 10, 1024),
    "90": (65536, 64, 32, 228 << 10, 1024),
    "100": (65536, 64, 32, 228 << 10, 1024),
    "120": (65536, 48, 24, 100 << 10, 1024),
}
# By config: GPU, architecture, multiprocessors, GHz, bytes/s of memory, clocks of a load, clocks of a product (m16n8k16, on a V100
# four of m8n8k4).
GPUS = {
    "h100-1.3b": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "llama3-8b": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "qwen3-14b 4090": ("RTX 4090", "89", 128, 2.5, 0.95e12, 600, 8.0),
    "gemma3-12b": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "gemma2-9b": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "gemma2-27b": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "gemma2-27b 4090": ("RTX 4090", "89", 128, 2.5, 0.95e12, 600, 8.0),
    "dgx2-70b": ("V100", "70", 80, 1.4, 0.8e12, 500, 2.0),
    "qwen3-30b-a3b a100": ("A100", "80", 108, 1.41, 1.9e12, 500, 2.0),
    "qwen3-30b-a3b 4090": ("RTX 4090", "89", 128, 2.5, 0.95e12, 600, 8.0),
    "qwen3-30b-a3b 5090": ("RTX 5090", "120", 170, 2.4, 1.7e12, 700, 8.0),
    "qwen3-30b-a3b h100": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "gpt-oss-20b a100": ("A100", "80", 108, 1.41, 1.9e12, 500, 2.0),
    "qwen3.5-9b h100": ("H100", "90", 132, 1.7, 3.0e12, 600, 1.6),
    "qwen3.5-9b 4090": ("RTX 4090", "89", 128, 2.5, 0.95e12, 600, 8.0),
}


def source_hash():
    """FNV-1a of all sources of kernels, as tests/fake-cuda/tests/kernels/ptx.rs has it."""
    value = 0xCBF29CE484222325
    paths = sorted((path for folder in FOLDERS for path in folder.glob("*.cu*")), key=lambda path: path.name)
    for byte in b"".join(path.read_bytes() for path in paths):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def registers_of(text):
    return set(re.findall(r"\bU?R\d+", text))


def loads_in_flight(disassembler, cubin):
    """By kernel, the most global loads between the first of them and the first use of one; of 16 bytes where there are any, and in
    loops where these have any. Then the most copies (cp.async) between two waits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([disassembler, file.name], capture_output=True, text=True)
    found = {}
    for part in done.stdout.split("\n.text.")[1:]:
        name = part.split(":", 1)[0]
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)([^;]*);|^(\.L_x_\d+):", part, re.M)
        at = {label: number for number, (_, _, label) in enumerate(lines) if label}
        looped = [False] * len(lines)
        for number, (op, operands, _) in enumerate(lines):
            target = at.get((re.findall(r"\.L_x_\d+", operands) or [""])[-1])
            # The trap behind the end jumps to itself.
            if op.startswith("BRA") and target is not None and target < number - 1:
                looped[target:number] = [True] * (number - target)
        is_load = [op.split(".")[0] == "LDG" for op, _, _ in lines]
        in_loops = any(load and inside for load, inside in zip(is_load, looped))
        wide = any(load and ".128" in op and (inside or not in_loops) for load, inside, (op, _, _) in zip(is_load, looped, lines))
        most, pending, copies = 0, [], [0]
        for (op, operands, label), inside, load in zip(lines, looped, is_load):
            if label:
                pending = []
                continue
            if op.startswith("LDGSTS"):
                copies[-1] += 1
                continue
            if op.startswith("DEPBAR"):
                copies.append(0)
            used = registers_of(operands)
            if any(used & targets for targets in pending):
                pending = []
            if load and (".128" in op or not wide) and (inside or not in_loops):
                first = int(re.search(r"R(\d+)", operands).group(1))
                words = 4 if ".128" in op else 2 if ".64" in op else 1
                pending.append({f"R{first + i}" for i in range(words)})
                most = max(most, len(pending))
        found[name] = max(most, 1), max(copies)
    return found


def compiled(library, disassembler):
    """By (kernel, architecture): registers, declared shared memory, spills, loads and copies in flight (or None)."""
    nvrtc = ctypes.CDLL(library)
    files = sorted(path for folder in FOLDERS for path in folder.glob("*.cu"))
    all_architectures = sorted({*ARCHITECTURES, *NEAREST.values()}, key=int)
    jobs = [(path, architecture) for architecture in all_architectures for path in files]
    table = {}
    with ThreadPoolExecutor(2) as pool:
        for (path, architecture), (done, log, cubin) in zip(jobs, pool.map(lambda job: compile_file(nvrtc, *job), jobs)):
            if not done:
                sys.exit(f"{path.name} for sm_{architecture}: {log}")
            loads = loads_in_flight(disassembler, cubin) if disassembler and architecture not in NEAREST else {}
            for name, registers, shared, _, spills in kernels_of(log):
                table[name, architecture] = (registers, shared, spills, loads.get(name))
    return table


def blocks_per_multiprocessor(architecture, registers, threads, shared):
    all_registers, warps, blocks, all_shared, beside = LIMITS[architecture]
    of_block = threads // 32
    by_registers = all_registers // (-(-registers * 32 // 256) * 256 * of_block)
    by_shared = all_shared // (shared + beside) if shared else blocks
    return max(1, min(by_registers, warps // of_block, blocks, by_shared))


def estimate(row, table):
    """Seconds by limit, bytes at least, and warps of a multiprocessor."""
    _, architecture, count, ghz, bandwidth, latency, product = GPUS[row["config"]]
    number = {key: float(value) for key, value in row.items() if key not in ("config", "op", "kernel")}
    registers, shared, _, loads = table[row["kernel"], architecture]
    if loads is None:
        loads = table[row["kernel"], NEAREST.get(architecture, architecture)][3] or (1, 0)
    threads = int(number["threads"])
    resident = blocks_per_multiprocessor(architecture, registers, threads, shared + int(number["dynamic"]))
    warps = min(resident, number["blocks"] / count) * threads / 32
    scale, clock = number["scale"], ghz * 1e9
    executed = sum(number[unit] for unit in row if unit[0].isupper()) - number["Move"]
    busy = min(1.0, number["blocks"] / count) * count * clock
    times = {
        "memory": number["touched"] * scale / bandwidth,
        "latency": (number["LoadGlobal"] / loads[0] + number["Wait"]) * scale * latency / (warps * count * clock),
        "issue": executed * scale / (4 * busy),
        "shared": number["passes"] * scale / busy,
        "tensor": number["Tensor"] * scale * product / busy,
    }
    return times, number["touched"] * scale, warps, loads


def beside_products(row, times):
    """Products of 16 x 8 x 16, and clocks of a multiprocessor for each, by limit; None where there are none."""
    _, _, count, ghz, _, _, _ = GPUS[row["config"]]
    # Two of m8n8k4 are as much.
    products = float(row["Tensor"]) * float(row["scale"]) / (2 if "volta" in row["kernel"] else 1)
    clocks = {limit: time * count * ghz * 1e9 / max(products, 1) for limit, time in times.items() if limit != "memory"}
    return (products, clocks) if products else None


# The kinds of attention kernels on tensor cores, in the order of the simulator.
KINDS = ["Ampere", "AmpereSmall", "AmpereWide", "AmpereCapped", "AmpereSmallCapped", "AmpereWideCapped", "Volta"]


def constants():
    """What the simulator has of it, by architecture and pass."""
    text = (KERNELS.parents[3] / "engine/predict/src/sim/cost/attention.rs").read_text()
    found = re.findall(r"TensorCoreCost \{ shared: ([\d.]+), issue: ([\d.]+), latency: ([\d.]+) \}", text)
    names = [(kind, name) for kind in KINDS for name in ["attention", "attention_backward"]]
    return {name: dict(zip(["shared", "issue", "latency"], map(float, row))) for name, row in zip(names, found, strict=True)}


def attention(rows, table):
    """The table of what attention takes where limits add up, and what the simulator has of it wrong."""
    sums, wrong, of_simulator = {}, [], constants()
    for row in rows:
        if not row["op"].startswith("attention"):
            continue
        times, _, _, _ = estimate(row, table)
        of_op = sums.setdefault((row["config"], row["op"]), {"products": 0, "clocks": {}, "greatest": 0, "halfway": 0})
        wide, capped = row["kernel"].endswith("_256"), "_capped_" in row["kernel"]
        small = row["kernel"].endswith("_128") and LIMITS[GPUS[row["config"]][1]][3] == 100 << 10
        of_op["kind"] = "Volta" if "_volta_" in row["kernel"] else "Ampere" + "Small" * small + "Wide" * wide + "Capped" * capped
        greatest = halfway = max(times.values())
        if of_products := beside_products(row, times):
            products, clocks = of_products
            of_op["products"] += products
            for limit, value in clocks.items():
                of_op["clocks"][limit] = of_op["clocks"].get(limit, 0) + value * products
            halfway = (greatest + sum(time for limit, time in times.items() if limit != "memory")) / 2
        of_op["greatest"] += greatest
        of_op["halfway"] += halfway
    lines = []
    for (config, op), of_op in sums.items():
        counted = {limit: value / of_op["products"] for limit, value in of_op["clocks"].items()}
        cells = [f"{counted[limit]:.2f}" for limit in ["tensor", "shared", "issue", "latency"]]
        lines.append(f"| {config} | {op} | {' | '.join(cells)} | {of_op['greatest'] * 1e6:.0f} | {of_op['halfway'] * 1e6:.0f} |")
        known = of_simulator[of_op["kind"], op]
        wrong += [f"{config} {op}: {limit} is {counted[limit]:.2f} clocks, and {value} in engine/predict/src/sim/cost/attention.rs"
                  for limit, value in known.items() if abs(counted[limit] - value) > 0.05 * value + 0.02]
    return lines, wrong


def in_flight(loads):
    return "unknown" if loads is None else f"{loads[1]} copies" if loads[1] else loads[0]


def page(library, disassembler, counts):
    table = compiled(library, disassembler)
    out = ["# CUDA kernels, estimated", ""]
    out += [
        "Made by `scripts/kernel-report`, without a GPU: every figure is estimated. A test fails when a kernel has changed since.",
        "",
        f"sources: {source_hash()}",
        "",
        "## As compiled",
        "",
        "Registers by architecture, and the spills (bytes) where there are any; then the loads of global memory (of 16 bytes, where a",
        "kernel has such) that a thread of the code for sm_90 (of kernels named small, for sm_89) has in flight before it uses one, or the",
        "copies (`cp.async`) that it begins before it waits for them. A kernel of 4 registers has no code for the GPU.",
        "",
        "| kernel | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " | declared shared bytes | loads in flight |",
        "|---" * (len(ARCHITECTURES) + 3) + "|",
    ]
    for name in sorted({name for name, _ in table}):
        rows = [table.get((name, a)) for a in ARCHITECTURES]
        cells = [f"{r[0]}" + (f" spills {r[2]}" if r[2] else "") if r else "-" for r in rows]
        shown = table[name, "89" if "_small_" in name else "90"]
        out.append(f"| {name} | " + " | ".join(cells) + f" | {shown[1]} | {in_flight(shown[3])} |")
    out += [
        "",
        "## At the shapes of configs",
        "",
        "Per op of a block (and of the head) and micro-batch on one GPU. The interpreter of PTX runs each kernel on a part of its rows or",
        "heads, and the counts are scaled. `least` is the distinct bytes that are read or written, and `moved` is the sectors that all",
        "requests touch, most of which caches hold where it is more. `conflicts` is passes of shared memory over those without bank",
        "conflicts. The estimate is the greatest of five limits: memory (least over its bandwidth), latency (rounds of loads, and waits for",
        "copies, over resident warps), issue (PTX instructions without moves, 4 per clock), passes of shared memory, tensor cores. Limits that",
        "add up, and instructions that machine code has beside PTX, make a GPU slower. `roofline` is memory or tensor time over the estimate.",
        "`llama3-8b` runs samples of 1024 tokens and scales all counts of attention to 4096 by pairs of tiles, its bytes, too, which is too",
        "much for them. The Gemmas have attention in layers without a window alone, scaled to 4096 tokens; the scores of `gemma2-9b`",
        "and `gemma2-27b` have a cap. On an RTX 4090 Qwen3 14B and Gemma 2 27B have the attention kernels for 100 KiB of shared memory.",
        "Models of experts have the ops of a layer's experts for 8192 tokens, with as many rows for each expert; a grouped matmul runs one",
        "expert. `qwen3.5-9b` has the gated delta rule of a layer and ops around it for one sample of 4096 tokens. Loads in flight for sm_70",
        "are those of sm_75.",
        "",
        "GPUs, as assumed: " + "; ".join(
            f"{name} ({config}): {count} multiprocessors at {ghz} GHz, {bandwidth / 1e12} TB/s, {latency} clocks per load"
            for config, (name, _, count, ghz, bandwidth, latency, _) in GPUS.items()
        ) + ".",
        "",
        "| config | op | kernel | warps | loads in flight | instructions (M) | least (MB) | moved (MB) | conflicts | estimated us | limit | roofline |",
        "|---" * 12 + "|",
    ]
    sums = {}
    for row in csv.DictReader(open(counts), delimiter="\t"):
        times, least, warps, loads = estimate(row, table)
        limit = max(times, key=times.get)
        time = times[limit]
        share = max(times["memory"], times["tensor"]) / time
        executed = sum(float(row[unit]) for unit in row if unit[0].isupper()) * float(row["scale"])
        moved = float(row["sectors"]) * 32 * float(row["scale"])
        ratio = float(row["passes"]) / max(float(row["least_passes"]), 1)
        conflicts = f"{ratio:.2f}x" if float(row["passes"]) else "-"
        sums.setdefault((row["config"], row["op"]), []).append(time)
        out.append(
            f"| {row['config']} | {row['op']} | {row['kernel']} | {warps:.0f} | {in_flight(loads)} | {executed / 1e6:.1f} | {least / 1e6:.0f} "
            f"| {moved / 1e6:.0f} | {conflicts} | {time * 1e6:.0f} | {limit} | {share:.0%} |"
        )
    out += ["", "Ops of several kernels: " + "; ".join(
        f"{config} {op} {sum(times) * 1e6:.0f} us" for (config, op), times in sums.items() if len(times) > 1
    ) + "."]
    with open(counts) as file:
        lines, wrong = attention(list(csv.DictReader(file, delimiter="\t")), table)
    out += [
        "",
        "## Attention, where limits add up",
        "",
        "Clocks of a multiprocessor for each product of 16 x 8 x 16, by limit, of all kernels with products of an op; `simulate` has these",
        "figures. Then the op in microseconds: the greatest limit of each kernel, and halfway between it and the sum of all, which",
        "`gpu-check` takes. `simulate` takes 0.45 of the way, as an H200 measured.",
        "",
        "| config | op | tensor | shared | issue | latency | greatest | halfway |",
        "|---" * 8 + "|",
        *lines,
    ]
    print("\n".join(out))
    for problem in wrong:
        print(f"kernel-report: {problem}", file=sys.stderr)
    return not wrong


def times_of(path):
    cells = [line.strip("| \n").split(" | ") for line in open(path) if line.startswith("| ")]
    return {tuple(row[:3]): float(row[9]) for row in cells if len(row) == 12 and row[9].isdigit()}


def compare(old, new):
    old, new = times_of(old), times_of(new)
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        change = f"{a:.0f} -> {b:.0f} us ({b / a:.2f}x)" if a and b else "new" if b else "gone"
        print(f"{' '.join(key):70} {change}")


if sys.argv[1] == "--compare":
    compare(sys.argv[2], sys.argv[3])
elif not page(*sys.argv[1:4]):
    sys.exit(1)
