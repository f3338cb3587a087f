"""Runs the steps of gpu-check. Each is bounded in time, none ends the others, and the page is written after each."""

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


class Check:
    def __init__(self, here, args):
        self.here, self.args = here, args
        self.fake = args.fake
        self.until = time.monotonic() + 60 * args.minutes
        self.verdicts, self.sections = [], []
        self.work = args.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = dict(os.environ, ONEBOX_REAL_GPU="1", RUST_BACKTRACE="0")
        paths = [here / "fake"] if self.fake else []
        paths += [here / "lib", *self.cuda_libraries()]
        known = os.environ.get("LD_LIBRARY_PATH")
        self.environment["LD_LIBRARY_PATH"] = ":".join([*map(str, paths), *([known] if known else [])])
        if self.fake:
            self.environment.setdefault("FAKECUDA_MEMORY", str(256 << 20))
        self.page = None

    @staticmethod
    def cuda_libraries():
        """Where NVRTC and cuBLASLt often are: the toolkit, or the wheels that PyTorch brings along."""
        folders = [pathlib.Path("/usr/local/cuda/lib64")]
        for python in {*sys.path, *map(str, pathlib.Path("/usr/local/lib").glob("python3*/*-packages"))}:
            folders += pathlib.Path(python).glob("nvidia/*/lib")
        return [folder for folder in folders if folder.is_dir()]

    def run(self, command, limit, **more):
        """(exit code or None when it ran into its limit, stdout, stderr, seconds)"""
        left = self.until - time.monotonic()
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
            out, err = child.communicate()
            code = None
        return code, out, err, time.monotonic() - started

    def onebox(self, *words, limit=120):
        return self.run([self.here / "onebox", *words], limit)

    def step(self, name, work):
        if self.args.only and name not in self.args.only:
            return
        started = time.monotonic()
        try:
            passed, verdict, text = work()
        except Exception as error:  # a defect of a step must not cost the others
            passed, verdict, text = False, f"gpu-check itself failed: {error!r}", ""
        word = {True: "ok", False: "FAIL", None: "skip"}[passed]
        self.verdicts.append((name, passed, f"{word}: {verdict}", time.monotonic() - started))
        self.sections.append((name, text))
        print(f"{word:4}  {name:14}  {verdict}", flush=True)
        self.write()

    def write(self):
        if self.page is None:
            return
        commit = (self.here / "commit").read_text().strip()
        lines = [f"# {self.title}", "", f"onebox {commit}, {datetime.date.today()}, by scripts/gpu-check.", ""]
        if self.fake:
            lines += ["Under the fake driver: no figure here says anything about a GPU.", ""]
        lines += ["| step | verdict | s |", "|---|---|---|"]
        for name, _, verdict, seconds in self.verdicts:
            verdict = verdict.replace("|", "/")
            lines.append(f"| {name} | {verdict} | {seconds:.0f} |")
        for name, text in self.sections:
            if text:
                lines += ["", f"## {name}", "", text.rstrip()]
        self.page.write_text("\n".join(lines) + "\n")

    # What is looked at, in order of what it would be worst not to know.

    def doctor(self):
        code, out, err, _ = self.onebox("doctor")
        gpu = re.search(r"\b0: (.+?), sm_", out)
        self.title = gpu[1] if gpu else "no GPU"
        name = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")
        self.page = self.args.out / f"{name}-{datetime.date.today()}.md"
        usable = "this machine trains on its GPUs" in out
        return code == 0 and usable, self.title if usable else "no GPU can be used", block(out + err)

    def tests(self, program, limit, *words, **more):
        """A test program; which of its tests failed, and what they said."""
        code, out, err, _ = self.run([self.here / "tests" / program, "--test-threads=1", "--nocapture", *words], limit, **more)
        total = re.findall(r"^test result: .*? (\d+) passed; (\d+) failed", out, re.M)
        failed = re.findall(r"^test (\S+) .*FAILED", out, re.M) or re.findall(r"^(\S+) --- FAILED", out, re.M)
        if code is None:
            return False, "not over in time", block(tail(out + err))
        passed = total[-1][0] if total else "0"
        if code == 0 and int(passed) > 0:
            return True, f"{passed} tests", ""
        return False, f"{', '.join(failed) or 'it ended'} (exit code {code})", block(tail(out + err, 12000))

    def kernels(self):
        only = ["columns_are_summed"] if self.fake else ["--skip", "nvrtc", "--skip", "every_file"]
        return self.tests("kernels", 300, *only)

    def fixture(self):
        return self.tests("parity", 200, "ten_", ONEBOX_PARITY_ON_GPUS="1", ONEBOX_FULL="0" if self.fake else "1")

    def layouts(self):
        only = ["collectives", "ranks_can_share"] if self.fake else []
        return self.tests("cuda", 300, *only)

    def config(self, name, **keys):
        model = keys.pop("model")
        text = f"""// Made by gpu-check.
(device: {keys.pop("device", "Cuda")}, model: {model}, precision: {keys.pop("precision", "Bf16")},
 offload: ({keys.pop("offload", "optimizer: Host")}), batch: {keys.pop("batch")}, parallel: {keys.pop("parallel", "()")},
 data: (train: {json.dumps(str(self.here / "text.txt"))}), schedule: (warmup_steps: 1),
 train: (steps: {keys.pop("steps", 20)}))"""
        path = self.work / f"{name}.ron"
        path.write_text(text)
        return path

    def text(self):
        """The same text run on both backends: the same losses."""
        steps = 4 if self.fake else 40
        hidden, seq_len = (32, 16) if self.fake else (128, 64)
        rows, worst = ["| precision | held-out, Cuda | held-out, Cpu | most apart in a step |", "|---|---|---|---|"], True
        for precision, limit in [("Fp32", 1e-4), ("Bf16", 3e-2), ("Fp16", 1e-2)]:
            held_out, losses = {}, {}
            for device in ["Cuda", 'Cpu(count: 1, memory: "2GiB")']:
                name = f"text-{precision}-{device[:3]}".lower()
                path = self.config(name, model=f"(layers: 2, hidden: {hidden}, heads: 4, seq_len: {seq_len})", device=device,
                                   precision=precision, batch="(micro: 2, global: 4)", steps=steps)
                # A short text: the evaluation is over all of its held-out part.
                short = self.work / "short.txt"
                short.write_text((self.here / "text.txt").read_text(errors="replace")[: 2000 if self.fake else 60000])
                code, out, err, _ = self.onebox("train", path, "--run-dir", self.work / name, "--overwrite", "--quiet",
                                                "--set", f"data.train={json.dumps(str(short))}", limit=120)
                if code != 0:
                    return False, f"{precision} on {device[:4]}: exit code {code}", block(tail(out + err))
                lines = [json.loads(line) for line in (self.work / name / "metrics.jsonl").read_text().splitlines()]
                losses[device[:4]] = [line["loss"] for line in lines if line["kind"] == "step"]
                held_out[device[:4]] = [line["loss"] for line in lines if line["kind"] == "eval"][-1]
            apart = max(abs(a - b) for a, b in zip(losses["Cuda"], losses["Cpu("]))
            worst = worst and apart <= limit
            rows.append(f"| {precision} | {held_out['Cuda']:.5f} | {held_out['Cpu(']:.5f} | {apart:.1e} (allowed {limit:.0e}) |")
        return worst, "losses as on cpu" if worst else "losses differ", "\n".join(rows)

    def sanitizer(self):
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not pathlib.Path(tool).exists():
            return None, "compute-sanitizer is not here", ""
        path = self.config("sanitizer", model="(layers: 2, hidden: 64, heads: 4, seq_len: 32)", batch="(micro: 2, global: 4)", steps=2)
        code, out, err, _ = self.run([tool, "--error-exitcode", "99", self.here / "onebox", "train", path, "--quiet",
                                      "--run-dir", self.work / "sanitizer", "--overwrite"], 180)
        return code == 0, f"exit code {code}", "" if code == 0 else block(tail(out + err))

    def copy(self):
        code, out, err, _ = self.onebox("bench", "copy", "--mib", "4" if self.fake else "1024", "--json")
        if code != 0:
            return False, f"exit code {code}", block(tail(out + err))
        c = json.loads(out)
        ceiling = f"{c['ceiling']:.1f}" if c["ceiling"] else "unknown"
        text = ("| pinned copies | GB/s | ceiling |\n|---|---|---|\n" + "\n".join(
            f"| {what} | {c[key]:.2f} | {ceiling} |" for what, key in [("up", "up"), ("down", "down"), ("both, added", "both")])
            + f"\n\nCeiling: {c['ceiling_is']}, one direction.")
        return True, f"up {c['up']:.1f}, down {c['down']:.1f}, both {c['both']:.1f} GB/s", text

    # (name, layers, hidden, heads), largest first
    MODELS = [("1.3B", 24, 2048, 16), ("760M", 24, 1536, 16), ("350M", 24, 1024, 16), ("124M", 12, 768, 12)]

    def fits(self, path, *sets):
        words = [word for s in sets for word in ("--set", s)]
        return self.onebox("plan", path, *words, "--json", limit=60)[0] == 0

    def speed(self):
        """Host against Device, Overlapped against Serial, on the largest model of which both fit."""
        seq_len, batch, steps = 1024, "(micro: 8, global: 256)", 3
        models = self.MODELS
        if self.fake:
            models, seq_len, batch, steps = [("toy", 2, 32, 4)], 16, "(micro: 2, global: 8)", 2
        rows = ["| model | optimizer | update | s/step | ktok/s | TFLOP/s | of a plain product | host s | exposed s |", "|---|---|---|---|---|---|---|---|---|"]
        done = {}
        for name, layers, hidden, heads in models:
            path = self.config(f"speed-{name}", model=f"(layers: {layers}, hidden: {hidden}, heads: {heads}, seq_len: {seq_len})", batch=batch)
            if not self.fits(path):
                rows.append(f"| {name} | Host | does not fit | | | | | | |")
                continue
            for optimizer, update in [("Host", "Overlapped"), ("Device", "Overlapped"), ("Host", "Serial")]:
                sets = [f"offload.optimizer={optimizer}", f"offload.update={update}"]
                words = [word for s in sets for word in ("--set", s)]
                code, out, err, _ = self.onebox("bench", "step", path, *words, "--steps", steps, "--json", limit=240)
                if code != 0:
                    rows.append(f"| {name} | {optimizer} | {update}: exit code {code}: {tail(err, 150).strip()} | | | | | | |".replace("\n", " "))
                    continue
                s = json.loads(out)
                done[optimizer, update] = s
                share = s["tflops_per_gpu"] / s["ceiling_tflops"]
                exposed = s["exposed_seconds"]
                exposed = f"{exposed:.4f} ({exposed / s['seconds']:.1%})" if exposed is not None else "-"
                rows.append(f"| {name} | {optimizer} | {update} | {s['seconds']:.4f} | {s['tokens_per_second'] / 1e3:.1f} | "
                            f"{s['tflops_per_gpu']:.2f} | {share:.1%} | {s['host_seconds']:.4f} | {exposed} |")
                self.sections.append(("speed so far", "\n".join(rows)))
                self.write()
                self.sections.pop()
            break
        host = done.get(("Host", "Overlapped"))
        if host is None:
            return False, "nothing was measured", "\n".join(rows)
        device = done.get(("Device", "Overlapped"))
        ratio = f", {device['seconds'] / host['seconds']:.3f} of Device's speed" if device else ""
        return True, f"{host['tokens_per_second'] / 1e3:.1f} ktok/s, {host['tflops_per_gpu']:.1f} TFLOP/s{ratio}", "\n".join(rows)

    def largest(self):
        """The deepest model that `plan` lets through, by bisection, then two steps of it."""
        hidden, heads, seq_len, batch = 4096, 32, 1024, "(micro: 1, global: 2)"
        top = 256
        if self.fake:
            hidden, heads, seq_len, top = 64, 4, 16, 64
        rows, passed = ["| optimizer | layers | parameters | GPU | host | two steps |", "|---|---|---|---|---|---|"], True
        for optimizer in ["Host", "Device"]:
            path = self.config(f"largest-{optimizer}", model=f"(layers: 1, hidden: {hidden}, heads: {heads}, seq_len: {seq_len})",
                               batch=batch, offload=f"optimizer: {optimizer}", steps=2)
            low, high = 0, top
            while low < high:
                middle = (low + high + 1) // 2
                if self.fits(path, f"model.layers={middle}", "recompute=Block"):
                    low = middle
                else:
                    high = middle - 1
            if low == 0:
                rows.append(f"| {optimizer} | 0 | none fits | | | |")
                passed = False
                continue
            words = ["--set", f"model.layers={low}", "--set", "recompute=Block"]
            plan = json.loads(self.onebox("plan", path, *words, "--json")[1])
            code, out, err, seconds = self.onebox("bench", "step", path, *words, "--steps", "1", "--json", limit=300)
            passed = passed and code == 0
            result = f"{json.loads(out)['seconds']:.2f} s a step" if code == 0 else f"exit code {code}: {tail(err, 200).strip()}".replace("\n", " ")
            rows.append(f"| {optimizer} | {low} | {plan['parameters'] / 1e9:.3f} G | {plan['gpu']['bytes'] / 2**30:.2f} of "
                        f"{(plan['gpu']['limit'] or 0) / 2**30:.2f} GiB | {plan['host_per_rank']['bytes'] / 2**30:.2f} GiB | {result} |")
        return passed, rows[2].strip("| ") if len(rows) > 2 else "none", "\n".join(rows)

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


def block(text):
    return f"```\n{text.rstrip()}\n```"


STEPS = ["doctor", "copy", "kernels", "layouts", "fixture", "text", "speed", "largest", "sanitizer", "machine"]


def main():
    parser = argparse.ArgumentParser(prog="gpu-check")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks"), help="where the page goes")
    parser.add_argument("--minutes", type=float, default=25, help="all in all")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--fake", action="store_true", help="under the fake driver, small")
    here = pathlib.Path(sys.argv[1])
    args = parser.parse_args(sys.argv[2:])
    args.out = args.out.resolve()
    if args.only:
        args.only = {"doctor", *args.only}
    if args.fake and not (here / "fake").is_dir():
        parser.error("this folder has no fake driver; pack it with scripts/gpu-pack --dev")
    check = Check(here, args)
    for name in STEPS:
        check.step(name, getattr(check, name))
    shutil.rmtree(check.work, ignore_errors=True)
    failed = [name for name, passed, *_ in check.verdicts if passed is False]
    print(f"{len(check.verdicts) - len(failed)} of {len(check.verdicts)} steps in order; {check.page}")
    sys.exit(1 if failed else 0)


main()
