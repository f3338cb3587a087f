"""Runs the parts of gpu-check and writes the page. Each step is bounded in time and none ends the others. A part keeps
what it found in OUT/parts/, after each step; the page is put together from all parts that are there."""

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from gpu_first import FIRST, First, block

PARTS = {
    "first": ["doctor", *FIRST],
    "ops": ["doctor", "kernels", "collectives", "sanitizer"],
    "parity": ["doctor", "fixture", "text", "generate"],
    "training": ["doctor", "layouts"],
    "bench": ["doctor", "copy", "box", "speed", "machine"],
}
WORDS = {True: "ok", False: "FAIL", None: "skip"}


class Part:
    """What one part found, and where that is kept."""

    def __init__(self, out, name, commit, fake, keeps):
        self.file = out / "parts" / f"{name}.json"
        self.found = {"part": name, "commit": commit, "fake": fake, "gpu": "no GPU", "steps": {}}
        self.found["date"] = datetime.datetime.now().isoformat(" ", "minutes")
        # A single step goes beside what was found of the others.
        if keeps and self.file.exists():
            self.found["steps"] = json.loads(self.file.read_text())["steps"]

    def add(self, name, passed, verdict, seconds, text):
        made = {key: self.found[key] for key in ["commit", "date"]}
        self.found["steps"][name] = {**made, "passed": passed, "verdict": verdict, "seconds": seconds, "text": text}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.found, indent=1) + "\n")


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_page(out):
    """(the page, what keeps it from being in order)"""
    found = [json.loads(file.read_text()) for file in (out / "parts" / f"{name}.json" for name in PARTS) if file.exists()]
    if not found:
        return None, ["no part has been run"]
    newest = max(found, key=lambda part: part["date"])
    gpus = sorted({part["gpu"] for part in found})
    wrong = [] if len(gpus) == 1 else [f"parts of different GPUs: {', '.join(gpus)}"]
    lines = [f"# {newest['gpu']}", "", "By scripts/gpu-check.", ""]
    if any(part["fake"] for part in found):
        lines += ["Under the fake driver: no figure here says anything about a GPU.", ""]
    rows, sections = ["| part | step | verdict | s | onebox | date |", "|---|---|---|---|---|---|"], []
    parts = {part["part"]: part for part in found}
    for name, steps in PARTS.items():
        part = parts.get(name)
        for step in steps:
            done = part and part["steps"].get(step)
            if not done:
                wrong.append(f"{name}: {step} has not been run")
                rows.append(f"| {name} | {step} | not run | | | |")
                continue
            if done["passed"] is False:
                wrong.append(f"{name}: {step}: {done['verdict']}")
            verdict = f"{WORDS[done['passed']]}: {done['verdict']}".replace("|", "/").replace("\n", " ")
            made = [done.get(key) or part[key] for key in ["commit", "date"]]
            rows.append(f"| {name} | {step} | {verdict} | {done['seconds']:.0f} | {made[0]} | {made[1]} |")
            if done["text"] and (step != "doctor" or part is newest or done["passed"] is False):
                sections += ["", f"## {step}", "", done["text"].rstrip()]
    lines += [f"**{'All in order.' if not wrong else 'NOT in order: ' + '; '.join(wrong)}**", "", *rows, *sections]
    page = out / f"{slug(newest['gpu'])}-{newest['date'][:10]}.md"
    page.write_text("\n".join(lines) + "\n")
    return page, wrong


class Check(First):
    """One part, on this machine."""

    def __init__(self, here, args, name):
        self.here, self.args, self.fake = here, args, args.fake
        self.until = self.step_until = time.monotonic() + 60 * args.minutes
        self.work = args.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = dict(os.environ, ONEBOX_REAL_GPU="1", RUST_BACKTRACE="0")
        # The programs find the libraries of lib/ by themselves; these are those that are opened by name.
        paths = [here / "fake"] if self.fake else self.cuda_libraries()
        known = os.environ.get("LD_LIBRARY_PATH")
        self.environment["LD_LIBRARY_PATH"] = ":".join([*map(str, paths), *([known] if known else [])])
        if self.fake:
            self.environment.setdefault("FAKECUDA_MEMORY", str(256 << 20))
            self.environment.setdefault("FAKECUDA_BESIDE", "0")
            self.environment["XDG_CACHE_HOME"] = str(self.work / "cache")
        self.part = Part(args.out, name, (here / "commit").read_text().strip(), self.fake, args.step)
        # All that the programs of the part print; the page has the ends of it.
        self.log = self.part.file.with_suffix(".log")
        if not args.step:
            self.log.unlink(missing_ok=True)

    @staticmethod
    def cuda_libraries():
        """Where NVRTC and cuBLASLt often are: the toolkit, or the wheels that PyTorch brings along."""
        folders = [pathlib.Path("/usr/local/cuda/lib64")]
        for python in {*sys.path, *map(str, pathlib.Path("/usr/local/lib").glob("python3*/*-packages"))}:
            folders += pathlib.Path(python).glob("nvidia/*/lib")
        return [folder for folder in folders if folder.is_dir()]

    def run(self, command, limit, **more):
        """(exit code or None when it ran into its limit, stdout, stderr, seconds)"""
        left = min(self.until, self.step_until) - time.monotonic()
        limit = min(limit, left)
        if limit < 1:
            return None, "", "no time is left", 0.0
        started = time.monotonic()
        environment = {**self.environment, **more}
        child = subprocess.Popen([str(word) for word in command], env=environment, cwd=self.work, text=True,
                                 errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, start_new_session=True)
        try:
            out, err = child.communicate(timeout=limit)
            code = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            try:
                out, err = child.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                # The driver does not let go of it; the others are still worth their time.
                out, err = "", "it does not even end when it is killed"
            code = None
        seconds = time.monotonic() - started
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{out}{err}exit code {code} after {seconds:.1f} s\n\n")
        return code, out, err, seconds

    def onebox(self, *words, limit=120):
        return self.run([self.here / "onebox", *words], limit)

    def step(self, name):
        """True unless it failed."""
        started = time.monotonic()
        self.step_until = min(self.until, started + FIRST.get(name, 600))
        # A step may change it for itself.
        environment = dict(self.environment)
        try:
            passed, verdict, text = getattr(self, name)()
        except Exception as error:  # a defect of a step must not cost the others
            passed, verdict, text = False, f"gpu-check itself failed: {error!r}", ""
        self.environment = environment
        self.part.add(name, passed, verdict, time.monotonic() - started, text)
        print(f"{WORDS[passed]:4}  {name:14}  {verdict}", flush=True)
        write_page(self.args.out)
        return passed is not False

    # The steps. Each gives (passed or None for not done, verdict, text of its section).

    def doctor(self):
        code, out, err, _ = self.onebox("doctor")
        gpu = re.search(r"\b0: (.+?), sm_", out)
        name = self.part.found["gpu"] = gpu[1] if gpu else "no GPU"
        usable = "this machine trains on its GPUs" in out
        return code == 0 and usable, name if usable else "no GPU can be used", block(out + err)

    def tests(self, program, limit, *words, **more):
        """A test program; which of its tests failed, and what they said."""
        code, out, err, _ = self.run([self.here / "tests" / program, "--test-threads=1", "--nocapture", *words], limit, **more)
        total = re.findall(r"^test result: .*? (\d+) passed; (\d+) failed", out, re.M)
        failed = re.findall(r"^test (?!result:)(\S+) .*FAILED", out, re.M) or re.findall(r"^(\S+) --- FAILED", out, re.M)
        if code is None:
            return False, "not over in time", block(tail(out + err))
        passed = total[-1][0] if total else "0"
        left_out = len(re.findall(r": skipped on ", out))
        if code == 0 and int(passed) > 0:
            return True, f"{passed} tests" + (f", {left_out} cases left out: they need a driver that fails, or more GPUs" if left_out else ""), ""
        return False, f"{', '.join(failed) or 'it ended'} (exit code {code})", block(tail(out + err, 12000))

    def kernels(self):
        """Every op on the GPU against the cpu backend."""
        only = ["columns_are_summed", "rows_of_tables"] if self.fake else ["--skip", "nvrtc", "--skip", "every_file"]
        return self.tests("kernels", 300, *only)

    def collectives(self):
        return self.tests("cuda", 120, "collectives_are")

    def fixture(self):
        return self.tests("equivalence", 200, "parity::ten_", ONEBOX_PARITY_ON_GPUS="1", ONEBOX_FULL="0" if self.fake else "1")

    def layouts(self):
        """TP x DP against the cpu backend; on one GPU where there is but one."""
        only = ["ranks_can_share"] if self.fake else ["--skip", "collectives_are"]
        return self.tests("cuda", 400, *only)

    def config(self, name, **keys):
        model = keys.pop("model")
        text = f"""// Made by gpu-check.
(device: {keys.pop("device", "Cuda")}, model: {model}, precision: {keys.pop("precision", "Bf16")},
 offload: ({keys.pop("offload", "optimizer: Host")}), batch: {keys.pop("batch")}, parallel: {keys.pop("parallel", "()")},
 data: (train: {json.dumps(str(keys.pop("text", self.here / "text.txt")))}), schedule: (warmup_steps: 1),
 train: (steps: {keys.pop("steps", 20)}))"""
        path = self.work / f"{name}.ron"
        path.write_text(text)
        return path

    def short_text(self, characters):
        """A run ends with an evaluation over all of its held-out part."""
        path = self.work / f"text-{characters}.txt"
        path.write_text((self.here / "text.txt").read_text(errors="replace")[:characters])
        return path

    # (precision, grid, how far a step's loss may be from the cpu's)
    TEXTS = [("Fp32", (1, 1), 1e-4), ("Bf16", (1, 1), 3e-2), ("Fp16", (1, 1), 1e-2), ("Fp32", (2, 2), 1e-4)]

    def text(self):
        """The same text run on both backends: the same losses. A grid is on one GPU where there is but one."""
        steps, hidden, seq_len, characters = (4, 32, 16, 2000) if self.fake else (40, 128, 64, 60000)
        rows, wrong = ["| precision | TP x DP | held-out, Cuda | held-out, Cpu | most apart in a step |", "|---|---|---|---|---|"], []
        for precision, (tp, dp), limit in self.TEXTS:
            validation_losses, losses = [], []
            for device in ["Cuda", f'Cpu(count: {tp * dp}, memory: "2GiB")']:
                name = f"text-{precision}-{tp}x{dp}-{device[:3]}".lower()
                path = self.config(name, model=f"(layers: 2, hidden: {hidden}, heads: 4, seq_len: {seq_len})", device=device,
                                   precision=precision, batch="(micro: 2, global: 4)", steps=steps,
                                   parallel=f"(tensor: {tp}, data: {dp})", text=self.short_text(characters))
                code, out, err, _ = self.onebox("train", path, "--run-dir", self.work / name, "--overwrite", "--quiet", limit=120)
                if code != 0:
                    return False, f"{precision} {tp} x {dp} on {device[:4]}: exit code {code}", block(tail(out + err))
                lines = [json.loads(line) for line in (self.work / name / "metrics.jsonl").read_text().splitlines()]
                losses.append([line["loss"] for line in lines if line["kind"] == "step"])
                validation_losses.append([line["loss"] for line in lines if line["kind"] == "eval"][-1])
            same_length = len(losses[0]) == len(losses[1]) == steps
            apart = max(abs(a - b) for a, b in zip(*losses)) if same_length else float("inf")
            if not apart <= limit:
                wrong.append(f"{precision} {tp} x {dp}: {apart:.1e} apart")
            rows.append(f"| {precision} | {tp} x {dp} | {validation_losses[0]:.5f} | {validation_losses[1]:.5f} | {apart:.1e} (allowed {limit:.0e}) |")
        return not wrong, "; ".join(wrong) or "losses as on cpu", "\n".join(rows)

    # (precision, how far a logit may be from the cpu's, by the largest one)
    LOGITS = [("Fp32", 1e-5), ("Bf16", 5e-2), ("Fp16", 1e-2)]

    def generate(self):
        """A trained model's logits on both backends, and the tokens of a text."""
        steps, hidden, characters, tokens = (2, 32, 2000, 8) if self.fake else (40, 128, 60000, 40)
        run, prompt = self.work / "generate", "what onebox reads "
        path = self.config("generate", model=f"(layers: 2, hidden: {hidden}, heads: 4, seq_len: 64)", precision="Fp32", steps=steps,
                           batch="(micro: 2, global: 4)", text=self.short_text(characters))
        code, out, err, _ = self.onebox("train", path, "--run-dir", run, "--overwrite", "--quiet", limit=120)
        if code != 0:
            return False, f"train: exit code {code}", block(tail(out + err))

        def ask(device, precision, *words):
            sets = ["--set", f"device={device}", "--set", f"precision={precision}"]
            code, out, err, seconds = self.onebox("generate", run, "--prompt", prompt, *sets, *words)
            if code != 0:
                raise RuntimeError(f"generate on {device} ends with {code}: {tail(out + err, 400)}")
            return json.loads(out), seconds

        want = ask("Cpu", "Fp32", "--logits")[0]["logits"]
        size, wrong = max(map(abs, want)), []
        rows = ["| precision | logits most apart from the cpu's in fp32, by the largest |", "|---|---|"]
        for precision, limit in self.LOGITS:
            if precision == "Bf16" and self.onebox("config", "check", path, "--set", "precision=Bf16")[0] != 0:
                rows.append("| Bf16 | not on this GPU |")
                continue
            got = ask("Cuda", precision, "--logits")[0]["logits"]
            apart = max(abs(a - b) for a, b in zip(got, want)) / size if len(got) == len(want) else float("inf")
            if not apart <= limit:
                wrong.append(f"{precision}: {apart:.1e} apart")
            rows.append(f"| {precision} | {apart:.1e} (allowed {limit:.0e}) |")
        words = ["--tokens", tokens, "--temperature", "0", "--json"]
        (cpu, _), (gpu, seconds) = ask("Cpu", "Fp32", *words), ask("Cuda", "Fp32", *words)
        alike = next((i for i, (a, b) in enumerate(zip(cpu["tokens"], gpu["tokens"])) if a != b), len(cpu["tokens"]))
        rows.append(f"\n{len(gpu['tokens'])} tokens in {seconds:.1f} s, the start included; the first {alike} are the cpu's (a tie of "
                    "two logits may part them).")
        return not wrong, "; ".join(wrong) or f"logits as on cpu; {alike} of {len(cpu['tokens'])} tokens alike", "\n".join(rows)

    def sanitizer(self):
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not pathlib.Path(tool).exists():
            return None, "compute-sanitizer is not here", ""
        path = self.config("sanitizer", model="(layers: 2, hidden: 64, heads: 4, seq_len: 32)", batch="(micro: 2, global: 4)", steps=2,
                           text=self.short_text(2000))
        code, out, err, _ = self.run([tool, "--error-exitcode", "99", self.here / "onebox", "train", path, "--quiet", "--set", "train.proof=false",
                                      "--run-dir", self.work / "sanitizer", "--overwrite"], 180)
        verdict = "not over in time" if code is None else "no errors" if code == 0 else f"exit code {code}"
        return code == 0, verdict, "" if code == 0 else block(tail(out + err))

    def copy(self):
        code, out, err, _ = self.onebox("bench", "copy", "--mib", "4" if self.fake else "1024", "--json")
        if code != 0:
            return False, f"exit code {code}", block(tail(out + err))
        c = json.loads(out)
        ceiling, parts = f"{c['ceiling']:.1f}" if c["ceiling"] else "unknown", c["parts"]
        rows = [("up", "up", f"tiles of {parts['tile_bytes'] / 2**20:.1f} MiB"), ("down", "down", f"pieces of {parts['piece_bytes'] / 2**20:.1f} MiB"),
                ("both, added", "both", "both")]
        text = ("| pinned copies | GB/s in one copy | in the parts of a run | GB/s | share | ceiling |\n|---|---|---|---|---|---|\n" + "\n".join(
            f"| {what} | {c[key]:.2f} | {cut} | {parts[key]:.2f} | {parts[key + '_share']:.1%} | {ceiling} |" for what, key, cut in rows)
            + f"\n\nCeiling: {c['ceiling_is']}, one direction. Share: of one copy of each direction, added where there are both.")
        return True, f"up {c['up']:.1f}, down {c['down']:.1f}, both {c['both']:.1f} GB/s", text

    def box(self):
        """This machine as a box for plan, search and simulate."""
        path = self.work / "here.ron"
        code, out, err, seconds = self.onebox("bench", "--save-box", path, limit=480)
        if code != 0:
            return False, f"exit code {code}", block(tail(out + err))
        text = path.read_text()
        rates = re.findall(r"^ *(gemm_tflops|memory_gb_per_s|peer_gb_per_s|link_gb_per_s): ([0-9.]+)", text, re.M)
        path = self.config("box", model="(layers: 2, hidden: 128, heads: 4, seq_len: 64)", batch="(micro: 2, global: 4)")
        if not self.fake:  # the stand-in's GPU is smaller than what a plan keeps back
            code, out, err, _ = self.onebox("simulate", path, "--box", self.work / "here.ron")
        return code == 0, "keys " + ", ".join(f"{key} {value}" for key, value in rates), block(text) + ("" if code == 0 else block(tail(out + err)))

    # (name, layers, hidden, heads), largest first
    MODELS = [("1.3B", 24, 2048, 16), ("760M", 24, 1536, 16), ("350M", 24, 1024, 16), ("124M", 12, 768, 12)]

    def fits(self, path, *words):
        code, out, err, _ = self.onebox("plan", path, *words, "--json", limit=60)
        if code not in (0, 1):
            raise RuntimeError(f"onebox plan ends with {code}: {tail(out + err, 400)}")
        return code == 0

    def speed(self):
        """Host against Device, Overlapped against Serial, on the largest model that fits on the host."""
        models, seq_len, micro, batch, steps = self.MODELS, 1024, 8, 256, 3
        if self.fake:
            models, seq_len, micro, batch, steps = [("toy", 2, 32, 4)], 16, 2, 8, 2
        rows = ["| model | optimizer | update | s/step | ktok/s | TFLOP/s | of a plain product | host s | exposed s |", "|---|---|---|---|---|---|---|---|---|"]
        wrong, done = [], {}
        for name, layers, hidden, heads in models:
            path = self.config(f"speed-{name}", model=f"(layers: {layers}, hidden: {hidden}, heads: {heads}, seq_len: {seq_len})",
                               batch=f"(micro: {micro}, global: {batch})")
            if not self.fits(path):
                rows.append(f"| {name} | Host | does not fit | | | | | | |")
                continue
            for optimizer, update in [("Host", "Overlapped"), ("Device", "Overlapped"), ("Host", "Serial")]:
                words = ["--set", f"offload.optimizer={optimizer}", "--set", f"offload.update={update}"]
                if not self.fits(path, *words):
                    rows.append(f"| {name} | {optimizer} | {update}: does not fit | | | | | | |")
                    continue
                code, out, err, _ = self.onebox("bench", "step", path, *words, "--steps", steps, "--json", limit=150)
                if code != 0:
                    wrong.append(f"{optimizer} {update}: exit code {code}")
                    rows.append(f"| {name} | {optimizer} | {update}: {tail(err, 150).strip()} | | | | | | |".replace("\n", " "))
                    continue
                s = done[optimizer, update] = json.loads(out)
                rows.append(f"| {name} | {optimizer} | {update} | {s['seconds']:.4f} | {s['tokens_per_second'] / 1e3:.1f} | "
                            f"{s['tflops_per_gpu']:.2f} | {s['tflops_per_gpu'] / s['ceiling_tflops']:.1%} | {s['host_seconds']:.4f} | "
                            f"{s['exposed_seconds']:.4f} ({s['exposed_seconds'] / s['seconds']:.1%}) |")
            break
        host, device = done.get(("Host", "Overlapped")), done.get(("Device", "Overlapped"))
        if host is None:
            return False, "; ".join(wrong) or "no model fits", "\n".join(rows)
        words = [f"{host['tokens_per_second'] / 1e3:.1f} ktok/s, {host['tflops_per_gpu']:.1f} TFLOP/s"]
        # A forward pass is a third of the work of a micro-batch.
        forward = (host["seconds"] - host["exposed_seconds"]) / (batch // micro) / 3
        allowed = max(0.0, host["host_seconds"] - forward) + 0.02 * host["seconds"]
        late = host["exposed_seconds"] > allowed
        words.append(f"{host['exposed_seconds']:.3f} s of the update exposed, {'MORE' if late else 'no more'} than {allowed:.3f}")
        slow = False
        if device:
            ratio = device["seconds"] / host["seconds"]
            slow = ratio < 0.95
            words.append(f"{ratio:.3f} of Device's speed{', LESS than 0.95' if slow else ''}")
        # The fake driver knows no time.
        return not wrong and (self.fake or not late and not slow), "; ".join(wrong + words), "\n".join(rows)

    def largest(self):
        """The deepest model that `plan` lets through, by bisection; it trains, and one layer more is refused with figures."""
        hidden, heads, seq_len, top = 4096, 32, 1024, 256
        if self.fake:
            # The workspace of products alone takes 32 MiB.
            hidden, heads, seq_len, top = 256, 4, 16, 32
            self.environment["FAKECUDA_MEMORY"] = str(64 << 20)
        rows, wrong = ["| optimizer | layers | parameters | GPU | host | a step | one layer more |", "|---|---|---|---|---|---|---|"], []
        for optimizer in ["Host", "Device"]:
            path = self.config(f"largest-{optimizer}", model=f"(layers: 1, hidden: {hidden}, heads: {heads}, seq_len: {seq_len})",
                               batch="(micro: 1, global: 2)", offload=f"optimizer: {optimizer}", steps=2)
            words = lambda layers: ["--set", f"model.layers={layers}", "--set", "recompute=Block"]
            low, high = 0, top
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.fits(path, *words(middle)) else (low, middle - 1)
            if low in (0, top):
                wrong.append(f"{optimizer}: {low} layers are no bound")
                continue
            plan = json.loads(self.onebox("plan", path, *words(low), "--json")[1])
            code, out, err, _ = self.onebox("bench", "step", path, *words(low), "--steps", "1", "--json", limit=200)
            result = f"{json.loads(out)['seconds']:.2f} s" if code == 0 else f"exit code {code}: {tail(err, 200).strip()}"
            more, _, refusal, _ = self.onebox("bench", "step", path, *words(low + 1), "--steps", "1", "--json")
            figures = re.search(r"[^\n]*\d[\d.]* [KMGT]iB[^\n]*", refusal)
            if code != 0:
                wrong.append(f"{optimizer}: {low} layers, which fit as planned, end with {code}")
            if more in (0, None) or not figures:
                wrong.append(f"{optimizer}: {low + 1} layers are not refused with figures (exit code {more})")
            rows.append(f"| {optimizer} | {low} | {plan['parameters'] / 1e9:.4f} G | {plan['gpu']['bytes'] / 2**30:.2f} of "
                        f"{(plan['gpu']['limit'] or 0) / 2**30:.2f} GiB | {plan['host_per_rank']['bytes'] / 2**30:.2f} GiB | {result} | "
                        f"exit code {more}: {figures[0].strip() if figures else tail(refusal, 200)} |".replace("\n", " "))
        sizes = ", ".join(f"{cells[1]} {cells[3]}" for cells in ([c.strip() for c in row.split("|")] for row in rows[2:]))
        return not wrong, "; ".join(wrong) or sizes, "\n".join(rows)

    def machine(self):
        parts = []
        for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["lscpu"], ["free", "-g"]):
            if shutil.which(command[0]):
                parts.append(block(tail(self.run(command, 20)[1], 4000)))
        code, out, err, _ = self.onebox("topology")
        parts.append(block(tail(out + err, 6000)))
        return code == 0, "described", "\n\n".join(parts)


def tail(text, most=4000):
    return text if len(text) <= most else "..." + text[-most:]


def main():
    parser = argparse.ArgumentParser(prog="gpu-check")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one (again for another); all without")
    steps = sorted({step for steps in PARTS.values() for step in steps} - {"doctor"})
    parser.add_argument("--step", choices=steps, action="append", help="of the parts only this step (again for another)")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the parts that are there")
    parser.add_argument("--out", type=pathlib.Path, help="where the page goes: benchmarks/, under the fake driver page/ beside this file")
    parser.add_argument("--minutes", type=float, default=9, help="for each part")
    parser.add_argument("--fake", action="store_true", help="under the fake driver, small")
    here = pathlib.Path(sys.argv[1])
    args = parser.parse_args(sys.argv[2:])
    args.out = (args.out or (here / "page" if args.fake else pathlib.Path("benchmarks"))).resolve()
    if args.fake and not (here / "fake").is_dir():
        parser.error("this folder has no fake driver; pack it with scripts/gpu-pack --dev")
    failed = []
    for name in [] if args.page else args.part or PARTS:
        check = Check(here, args, name)
        # Without a GPU nothing else of the part is worth its time.
        asked = [step for step in PARTS[name] if not args.step or step in ["doctor", *args.step]]
        for step in asked if len(asked) > 1 else []:
            if not check.step(step):
                failed.append(f"{name}: {step}")
                if step == "doctor":
                    break
        shutil.rmtree(check.work, ignore_errors=True)
    page, wrong = write_page(args.out)
    # Of what was asked for; a page is asked for whole.
    failed = failed if (args.part or args.step) and not args.page else wrong
    print(f"{page}: {'in order' if not failed else 'NOT in order: ' + '; '.join(failed)}")
    sys.exit(1 if failed else 0)


main()
