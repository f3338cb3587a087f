"""The first look at a GPU: ten checks in the order in which what they find matters. Each runs programs of its own with a
deadline, so one that hangs or crashes costs the others nothing. See gpu_check.py."""

import json
import pathlib
import re
import shutil
import sys

# In this order. What a check may take, in seconds; a program of it never has more.
FIRST = {"kernel_tests": 180, "ops": 60, "products": 60, "timeline": 60, "comparator": 100, "ledger": 60, "queue": 30, "tiles": 40,
         "largest": 120, "sharing": 60}
# Microseconds of the thread for an op of one driver call: CALL and CHECK of engine/predict/src/sim/submit.rs.
SIMULATED_LAUNCH = 3.8
# Microseconds between two kernels of a stream: KERNEL_GAP of engine/predict/src/sim/cost.rs.
SIMULATED_GAP = 2.0
# Of the plain copy's or product's rate, by what kind of op it is.
ASKED = {"element-wise": 0.6, "reduction": 0.3, "attention": 0.2, "grouped": 0.45, "recurrence": 0.01}
# How many times an estimate of kernels.md a time may be, the GPU (an H100 SXM) and the shapes that they are of; cases by the page's names.
SLOWER, ESTIMATED = 1.5, (r"\b0: .*H100(?!.*PCIe).*, sm_90\b", "h100-1.3b")
AS_ESTIMATED = {"column_sum-8192": "column_sum", **{name: name for name in [
    "layer_norm", "layer_norm_backward", "gelu", "gelu_backward", "bias_dropout_add", "attention", "attention_backward", "row_max",
    "cross_entropy_stats", "cross_entropy_backward"]}}
SANITIZED = ["attention::attention_on_tensor_cores_agrees", "layer_norm_and", "the_loss_over", "columns_are_summed", "sums_of_squares"]


def figures(text, kind):
    """The lines `figure KIND key=value ...`; what follows `note=` is one value."""
    for line in text.splitlines():
        at = line.find(f"figure {kind} ")
        if at >= 0:
            words, _, note = line[at:].partition(" note=")
            found = dict(word.split("=", 1) for word in words.split()[2:])
            yield {**found, "note": note} if note else found


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


def estimates(page):
    """Microseconds by op, of all its kernels, as scripts/kernel-report estimates them; of attention where limits add up in part."""
    found, halfway = {}, {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        if len(cells) == 12 and cells[0] == ESTIMATED[1]:
            found[cells[1]] = found.get(cells[1], 0) + float(cells[9])
        if len(cells) == 8 and cells[0] == ESTIMATED[1]:
            halfway[cells[1]] = float(cells[7])
    return {**found, **halfway}


def block(text):
    return f"```\n{text.rstrip()}\n```"


class First:
    """Steps of a Check. Each gives (passed or None for not done, verdict, text of its section)."""

    def probe(self, name, limit, **more):
        """(why it is not in order or None, what it printed)"""
        command = [self.here / "tests" / "probes", "--exact", name, "--nocapture", "--test-threads=1"]
        code, out, err, _ = self.run(command, limit, **more)
        said = out + err
        if code == 0 and "1 passed" in out:
            return None, said
        return ("not over in time" if code is None else f"exit code {code}"), said

    def ledger(self):
        taken, charged, wrong, log = {}, [], [], ""
        for mode in ["EAGER", "LAZY"]:
            # The fake driver is asked with all that lies beside allocations.
            fake = {"FAKECUDA_MEMORY": str(8 << 30), "FAKECUDA_BESIDE": "100",
                    "FAKECUDA_DEVICES": "4"} if self.fake else {}
            problem, said = self.probe("memory_ledger", 30, CUDA_MODULE_LOADING=mode, **fake)
            if problem:
                wrong.append(f"{mode}: {problem}")
                log += block(said[-3000:]) + "\n"
            for entry in figures(said, "ledger"):
                if "mib" in entry:
                    taken.setdefault(entry["stage"], {})[mode] = float(entry["mib"]), float(entry["seconds"])
            # Page tables are the same in both modes.
            charged = [[f"GPU {entry['gpu']}, {entry['how']}, {entry['mib']} MiB", *(entry[at].replace(",", " ") for at in ["before", "after"])]
                       for entry in figures(said, "charged") if "gpu" in entry] or charged
        rows = [[stage, *(f"{x:.1f}" for mode in ["EAGER", "LAZY"] for x in found.get(mode, (float("nan"),) * 2))]
                for stage, found in taken.items()]
        beside = {mode: sum(found[mode][0] for stage, found in taken.items()
                            if mode in found and not stage.startswith("register")) for mode in ["EAGER", "LAZY"]}
        words = [f"beside a plan {mib:.0f} MiB {mode}" for mode, mib in beside.items()]
        largest = [stage for stage in taken if stage.startswith("register")]
        if largest:
            words.append(f"{largest[-1]} takes {taken[largest[-1]].get('EAGER', (0, 0))[0]:.0f} MiB of the GPU")
        stages = table(["made", "MiB, EAGER", "s", "MiB, LAZY", "s"], rows)
        by_gpu = table(["registered by", "free KiB of each GPU before", "and after"], charged)
        return not wrong and len(taken) >= 12 and bool(charged), "; ".join(wrong + words), "\n\n".join([stages, by_gpu, log])

    def queue(self):
        problem, said = self.probe("queries_behind_a_full_queue", 25)
        found = list(figures(said, "queue"))
        launched = next((entry for entry in found if "launched" in entry), None)
        hangs = next((entry for entry in found if "hangs-after" in entry), None)
        rows = [[entry["call"], entry["us"]] for entry in found if "call" in entry]
        if hangs:
            return False, f"a call of another thread hangs behind {hangs['hangs-after']} launches", block(said[-3000:])
        if problem or not launched or len(rows) < 4:
            return False, problem or "figures are missing", block(said[-3000:])
        slow = [f"{call} takes {us} us" for call, us in rows[:-1] if float(us) > 1e6]
        words = f"{launched['launched']} of {launched['of']} launches fit; queries answer" if not slow else "; ".join(slow)
        return not slow, words, table(["call", "us"], rows)

    # (ranks, CUDA_DEVICE_MAX_CONNECTIONS or None)
    SHARING = [(2, None), (4, None), (5, None), (6, None), (8, None), (2, "1")]

    def sharing(self):
        """Ranks on one GPU either train or are refused; none hangs."""
        rows, wrong = [], []
        for ranks, connections in self.SHARING[:2] + self.SHARING[-1:] if self.fake else self.SHARING:
            path = self.config(f"sharing-{ranks}", model="(layers: 2, hidden: 64, heads: 4, seq_len: 32)", steps=5,
                               batch=f"(micro: 1, global: {2 * ranks})", parallel=f"(data: {ranks})", text=self.short_text(9000))
            more = {"CUDA_VISIBLE_DEVICES": "0", **({"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {})}
            command = [self.here / "onebox", "bench", "step", path, "--steps", 5, "--json"]
            code, out, err, seconds = self.run(command, 25, **more)
            name = f"{ranks} ranks" + (f", {connections} connection" if connections else "")
            last = " ".join(err.split())[-300:]
            if code == 0:
                rows.append([name, f"{json.loads(out)['seconds']:.4f} s a step", f"{seconds:.1f}"])
            elif code in (78, 80) and last:
                rows.append([name, f"refused: {last}", f"{seconds:.1f}"])
            else:
                wrong.append(f"{name}: " + ("HANGS" if code is None else f"exit code {code}"))
                rows.append([name, f"{wrong[-1]}: {last}", f"{seconds:.1f}"])
        trained = [row[0] for row in rows if "a step" in row[1]]
        return not wrong and bool(trained), "; ".join(wrong) or f"{', '.join(trained)} train", table(["ranks", "", "s"], rows)

    def kernel_tests(self):
        passed, verdict, text = self.kernels()
        words, tool = [verdict], shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not pathlib.Path(tool).exists():
            return passed, f"{verdict}; compute-sanitizer is not here", text
        for check in ["racecheck", "synccheck", "memcheck"]:
            command = [tool, "--tool", check, "--error-exitcode", "99", self.here / "tests" / "kernels",
                       "--test-threads=1", *SANITIZED]
            code, out, err, _ = self.run(command, 50)
            words.append(f"{check} " + ("not over in time" if code is None else "clean" if code == 0 else f"exit code {code}"))
            if code != 0:
                passed, text = False, text + "\n\n" + block((out + err)[-4000:])
        return passed, "; ".join(words), text

    def beside(self, what, limit):
        """PyTorch's figures where a Python here has it; (why there are none, figures)"""
        python = next((python for python in [sys.executable, "python3", "/opt/conda/bin/python"]
                       if shutil.which(python) and self.run([python, "-c", "import torch"], 20)[0] == 0), None)
        if python is None:
            return "PyTorch is not here", []
        sizes = ["--small"] if self.fake else []
        code, out, err, _ = self.run([python, "-B", self.here / "gpu_torch.py", what, *sizes], limit)
        why = None if code == 0 else "PyTorch: " + ("not over in time" if code is None else err.strip()[-200:])
        return why, list(figures(out, what))

    def products(self):
        problem, said = self.probe("products_of_a_block_and_head", 50)
        types, rows, wrong = ["Bf16", "E4m3", "F16", "F32"], {}, [problem] if problem else []
        for entry in figures(said, "product"):
            key = entry["name"], entry["kind"], entry["bias"], f"{entry['m']} x {entry['n']} x {entry['k']}"
            rows.setdefault(key, {})[entry["type"]] = entry
            if "note" in entry:
                wrong.append(f"{entry['type']} {entry['name']} {entry['kind']} bias {entry['bias']}: {entry['note'][:120]}")
        why, torch = self.beside("products", 30)
        theirs = {(entry["name"], entry["kind"]): entry["tflops"] for entry in torch}
        lines = [[*key, *(found.get(t, {}).get("tflops", "-") for t in types), theirs.get(key[:2], "-")]
                 for key, found in rows.items()]
        rates = {key: float(found["Bf16"]["tflops"]) for key, found in rows.items() if "tflops" in found.get("Bf16", {})}
        square = next((rate for key, rate in rates.items() if key[0] == "square"), 0)
        lowest = min(rates, key=rates.get, default=None)
        words = [f"Bf16 {square:.0f} TFLOP/s, lowest {rates[lowest]:.0f} ({' '.join(lowest[:2])})"] if lowest else []
        text = table(["product", "of", "bias", "m x n x k", *(f"{t}, TFLOP/s" for t in types), "PyTorch, Bf16"], lines)
        return not wrong and len(rows) >= 16, "; ".join(wrong + words + ([why] if why else [])), text + (
            "\n\n" + block(said[-3000:]) if problem else "")

    def ops(self):
        problem, said = self.probe("ops_beside_their_ceilings", 50)
        wrong, slow, rows = [problem] if problem else [], [], []
        why, torch = self.beside("ops", 30)
        theirs = {entry["name"]: entry["us"] for entry in torch}
        comparable = self.fake or re.search(ESTIMATED[0], self.onebox("doctor")[1]) is not None
        expected = estimates((self.here / "kernels.md").read_text()) if comparable else {}
        late = []
        for entry in figures(said, "op"):
            if "note" in entry:
                wrong.append(f"{entry['name']}: {entry['note'][:120]}")
                continue
            share, asked = float(entry["share"]), ASKED[entry["kind"]]
            if share < asked:
                slow.append(f"{entry['name']} {share:.0%}")
            rate = f"{entry['gb']} GB/s" if "gb" in entry else f"{entry['tflops']} TFLOP/s"
            estimate = expected.get(AS_ESTIMATED.get(entry["name"]))
            times = float(entry["us"]) / estimate if estimate else 0
            if times > SLOWER:
                late.append(f"{entry['name']} {times:.1f}x")
            rows.append([entry["name"], entry["us"], *([f"{estimate:.0f}", f"{times:.2f}x"] if estimate else ["-", "-"]), rate, f"{share:.1%}",
                         f"{asked:.0%}", theirs.get(entry["name"], "-")])
        ceilings = {entry["name"]: entry.get("gb") or entry.get("tflops") for entry in figures(said, "ceiling")}
        words = [f"copies {ceilings.get('copy')} GB/s, products {ceilings.get('product')} TFLOP/s"]
        launches = list(figures(said, "launch"))
        words += [f"a launch takes {entry['thread']} us of its thread (the simulator: {SIMULATED_LAUNCH}), a small kernel and the gap behind it {entry['kernel']} us (the simulator's gap: {SIMULATED_GAP})"
                  for entry in launches]
        if slow:
            words.append(f"{len(slow)} of {len(rows)} below what is asked: {', '.join(slow)}")
        if late:
            words.append(f"{len(late)} of {len(AS_ESTIMATED)} take more than {SLOWER} times their estimate: {', '.join(late)}")
        here, measured = {row[0] for row in rows}, len(rows)
        rows += [[name, *["-"] * 6, us] for name, us in theirs.items() if name not in here]
        text = table(["op", "us", "estimated, us", "measured over estimated", "rate", "of its ceiling", "asked", "PyTorch, us"], rows)
        missing = [name for name in AS_ESTIMATED if name not in {row[0] for row in rows if row[2] != "-"}] if comparable else []
        if missing:
            wrong.append(f"no estimate of {', '.join(missing)}")
        # The fake driver knows no time.
        passed = not wrong and len(launches) == 1 and measured >= 15 and (self.fake or not slow and not late)
        return passed, "; ".join(wrong + words + ([why] if why else [])), text

    def tiles(self):
        problem, said = self.probe("tiles_behind_words", 35)
        found = {entry["name"]: entry for entry in figures(said, "copy")}
        if problem or len(found) < 7:
            return False, problem or "figures are missing", block(said[-3000:])
        rate = {name: float(entry["gb"]) for name, entry in found.items()}
        whole, tiled = rate["up"], rate["up-in-tiles-of-2-MiB"]
        text = table(["copies", "GB/s", "s"], [[name, entry["gb"], entry["seconds"]] for name, entry in found.items()])
        words = (f"up {whole:.1f}, down {rate['down']:.1f} GB/s; in tiles of 2 MiB {tiled / whole:.0%} of it, of 8 MiB "
                 f"{rate['up-in-tiles-of-8-MiB'] / whole:.0%}; both beside products {rate['both-beside-products']:.1f}")
        return self.fake or tiled > 0.6 * whole, words, text

    def timeline(self):
        """One micro-batch a step: what Compute did, and how long it did nothing."""
        name, layers, hidden, heads = ("tiny", 2, 64, 4) if self.fake else self.MODELS[0]
        seq_len, micro = (16, 2) if self.fake else (1024, 8)
        text, words, wrong = [], [], []
        for recompute in ["None", "Block"]:
            path = self.config(f"timeline-{recompute}", model=f"(layers: {layers}, hidden: {hidden}, heads: {heads}, "
                               f"seq_len: {seq_len})", batch=f"(micro: {micro}, global: {micro})")
            trace = self.work / f"timeline-{recompute}.json"
            code, out, err, _ = self.onebox("bench", "step", path, "--steps", 3, "--trace", trace, "--json",
                                            "--set", f"recompute={recompute}", limit=40)
            if code != 0:
                wrong.append(f"{name} {recompute}: " + ("not over in time" if code is None else f"exit code {code}"))
                text.append(block((out + err)[-2000:]))
                continue
            busy, window, ops = compute_of(json.loads(trace.read_text())["traceEvents"])
            if not ops:
                wrong.append(f"{recompute}: nothing ran on Compute")
                continue
            step, idle = json.loads(out)["seconds"], 1 - busy / window
            words.append(f"{name} {recompute}: Compute is idle {idle:.1%} of {window / 1e3:.1f} ms")
            rows = [[op, count, f"{us / 1e3:.3f}", f"{us / window:.1%}"] for op, (count, us) in
                    sorted(ops.items(), key=lambda item: -item[1][1])]
            text.append(f"### {name}, recompute {recompute}: {1e3 * step:.1f} ms a step without marks around its ops\n\n"
                        + table(["op on Compute", "times", "ms", "of the step"], rows))
        return not wrong and len(words) == 2, "; ".join(wrong + words), "\n\n".join(text)

    def comparator(self):
        """A GPT of the same shapes in PyTorch, compiled, with its fused attention."""
        why, found = self.beside("train", 90)
        if not found:
            return None, why or "no figures", ""
        rows = [[entry["name"], entry["ms"], entry["tokens"], entry["tflops"]] for entry in found]
        best = max(found, key=lambda entry: float(entry["tflops"]))
        words = f"PyTorch ({best['name']}): {best['ms']} ms a micro-batch, {best['tflops']} TFLOP/s of the model"
        return why is None, "; ".join([words] + ([why] if why else [])), table(
            ["PyTorch", "ms a micro-batch", "tokens/s", "TFLOP/s of the model"], rows)


def compute_of(events):
    """(us in which Compute worked, us from its first op to its end, {op: (times, us)})"""
    lane = next((e["tid"] for e in events if e.get("name") == "thread_name" and e["args"]["name"] == "Compute"), None)
    own = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("ph") == "X" and e["tid"] == lane and e["pid"] == 0)
    busy, end, ops = 0.0, float("-inf"), {}
    for start, long, name in own:
        busy += max(0.0, start + long - max(start, end))
        end = max(end, start + long)
        count, us = ops.get(name, (0, 0.0))
        ops[name] = count + 1, us + long
    return (busy, max(end - own[0][0], 1e-3), ops) if own else (0.0, 1.0, {})
