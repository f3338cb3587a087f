#!/usr/bin/env python3
"""Plants many mutants in one tree, each with a switch, so that one build serves them all; scripts/mutants calls it.

    python3 scripts/mutant_switches.py SOURCE TREE PATCH ..

A function that mutants change gets one body for each of them, and the environment variable ONEBOX_MUTANT holds the number of the body
that runs ("mutant schemata": Untch, Offutt and Harrold, 1993). TREE becomes a copy of SOURCE with these switches. The tests of the
mutants must pass there if the variable is not set. Then the test of each mutant is run with its number. Prints "caught PATCH" for each
mutant whose test fails as the patch says. A mutant without a line needs a build of its own, which has the last word: it changes more
than bodies of functions, or its test passes or does not run here.

The source has the form of rustfmt: a function ends with the first brace that is indented as its first line.
"""
import json, os, re, subprocess, sys, threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Selects a body. Each function reads the variable once, at its first call.
SWITCH = (
    "match { static MUTANT: ::std::sync::OnceLock<u32> = ::std::sync::OnceLock::new(); "
    '*MUTANT.get_or_init(|| ::std::env::var("ONEBOX_MUTANT").ok().and_then(|text| text.parse().ok()).unwrap_or(0)) } {\n'
)
# Kernels of the cores: with a switch in each function the optimizer needs hours, and their tests much longer.
HOT = ("device/src/cpu/", "device/src/numerics/", "offload/src/")
FUNCTION = re.compile(r'^(\s*)(?:pub(?:\([a-z:]+\))? )?((?:const |unsafe |extern "C" |async )*)fn \w+')


def functions(lines):
    """(line of the opening brace, line of the closing brace, whether it can have two bodies) of each outermost function."""
    found, at = [], 0
    while at < len(lines):
        head = FUNCTION.match(lines[at])
        if not head:
            at += 1
            continue
        opening = at
        while not lines[opening].rstrip().endswith(("{", ";", "}")):
            opening += 1
        if not lines[opening].rstrip().endswith("{"):
            at = opening + 1
            continue
        closing = opening + 1
        while closing < len(lines) and lines[closing].rstrip("\n") != head[1] + "}":
            closing += 1
        signature = "".join(lines[at : opening + 1])
        single = "const " in head[2] or "async " in head[2] or re.search(r"-> [^{]*\bimpl\b", signature)
        found.append((opening, closing, not single))
        at = closing + 1
    return found


def hunks(patch):
    """{file: [(first line, old lines, new lines)]} of a patch; lines count from 0. None if it makes or removes a file."""
    files, current, name = defaultdict(list), None, None
    for line in patch.read_text().splitlines(keepends=True):
        if line.startswith("--- a/"):
            name, current = line[6:].strip(), None
        elif line.startswith(("--- ", "+++ /dev/null")):
            return None
        elif line.startswith("@@ "):
            current = (int(re.match(r"@@ -(\d+)", line)[1]) - 1, [], [])
            files[name].append(current)
        elif current is not None and not line.startswith(("\\", "+++ ")):
            sign, text = (line[0], line[1:]) if line != "\n" else (" ", "\n")
            if sign in " -":
                current[1].append(text)
            if sign in " +":
                current[2].append(text)
    return files


def place(source, old, first):
    """The line nearest to `first` at which the lines `old` stand, as `patch` finds it; None if they stand nowhere."""
    places = [at for at in range(len(source) - len(old) + 1) if source[at : at + len(old)] == old]
    return min(places, key=lambda at: abs(at - first), default=None)


def bodies(source, changes, ranges):
    """{index in ranges: lines of the new body} for the functions that the hunks change; None if they change anything else."""
    edits = defaultdict(list)
    for first, old, new in changes:
        first = place(source, old, first)
        if first is None:
            return None
        shorter = min(len(old), len(new))
        head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
        tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)
        begin, end = first + head, first + len(old) - tail
        owners = [i for i, (opening, closing, _) in enumerate(ranges) if opening < begin and end <= closing]
        if not owners or not ranges[owners[0]][2]:
            return None
        edits[owners[0]].append((begin, end, new[head : len(new) - tail]))
    changed = {}
    for index, parts in edits.items():
        opening, closing, _ = ranges[index]
        body, at = [], opening + 1
        for begin, end, new in sorted(parts, key=lambda part: part[:2]):
            body += source[at:begin] + new
            at = end
        changed[index] = body + source[at:closing]
    return changed


class Tree:
    """The source, and what of it mutants change: `mutants` maps a number to {file: {function: body}}."""

    def __init__(self, source, root, patches):
        self.source, self.root, self.sources, self.ranges, self.mutants = source, root, {}, {}, {}
        for number, patch in patches.items():
            mutant = {name: self.changed(name, changes) for name, changes in (hunks(patch) or {}).items()}
            if mutant and all(mutant.values()):
                self.mutants[number] = mutant

    def changed(self, name, changes):
        path = self.source / name
        if path.suffix != ".rs" or path.name == "build.rs" or name.startswith(HOT) or not path.is_file():
            return None
        if name not in self.sources:
            self.sources[name] = path.read_text().splitlines(keepends=True)
            self.ranges[name] = functions(self.sources[name])
        return bodies(self.sources[name], changes, self.ranges[name])

    def write(self):
        """Writes the files that differ, because cargo goes by times, and removes those that the source lacks."""
        names = {str(path.relative_to(self.source)) for path in self.source.rglob("*") if path.is_file()}
        for path in self.root.rglob("*"):
            if path.is_file() and str(path.relative_to(self.root)) not in names:
                path.unlink()
        for name in names - self.sources.keys():
            self.replace(name, (self.source / name).read_bytes())
        for name, source in self.sources.items():
            switched = defaultdict(dict)
            for number, mutant in self.mutants.items():
                for index, body in mutant.get(name, {}).items():
                    switched[index][number] = body
            out, at = [], 0
            for index, arms in sorted(switched.items()):
                opening, closing, _ = self.ranges[name][index]
                out += source[at : opening + 1] + [SWITCH]
                for number, body in arms.items():
                    out += [f"{number} => {{\n", *body, "}\n"]
                out += ["_ => {\n", *source[opening + 1 : closing], "}\n}\n"]
                at = closing
            self.replace(name, "".join(out + source[at:]).encode())

    def replace(self, name, content):
        path = self.root / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((self.source / name).stat().st_mode)

    def mutants_at(self, name, line):
        """The mutants to which line `line` (from 1) of a written file belongs: that of its arm, or all of the function."""
        lines = (self.root / name).read_text().splitlines()
        for at in range(line - 1, -1, -1):
            arm = re.match(r"(\d+) => \{$", lines[at])
            if arm:
                return {int(arm[1])}
            if lines[at] == "_ => {" or lines[at] + "\n" == SWITCH:
                break
        return {number for number, mutant in self.mutants.items() if name in mutant}


def build(tree):
    """Builds all tests; leaves out mutants that do not build here. Returns {(package, target kind and name): (program, folder)}."""
    while True:
        tree.write()
        command = ["cargo", "build", "--workspace", "--lib", "--bins", "--tests", "--keep-going", "--locked", "--offline", "--message-format", "json"]
        run = subprocess.run(command, cwd=tree.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        programs, broken = {}, set()
        for line in run.stdout.splitlines():
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("reason") == "compiler-artifact" and message.get("executable") and message["profile"]["test"]:
                folder = Path(message["manifest_path"]).parent
                package = re.search(r'(?m)^name = "([^"]+)"', Path(message["manifest_path"]).read_text())[1]
                kind = message["target"]["kind"][0]
                target = f"--test {message['target']['name']}" if kind == "test" else "--lib" if kind == "lib" else kind
                programs[package, target] = (message["executable"], folder)
            elif message.get("reason") == "compiler-message" and message["message"]["level"] == "error":
                for span in message["message"]["spans"]:
                    if span["file_name"] in tree.sources:
                        broken |= tree.mutants_at(span["file_name"], span["line_start"])
        if run.returncode == 0:
            return programs
        broken &= tree.mutants.keys()
        if not broken:
            sys.exit(f"mutants: the build fails, and for no mutant:\n{run.stderr[-4000:]}")
        print(f"mutants: {len(broken)} mutants do not build beside the others", file=sys.stderr)
        for number in broken:
            del tree.mutants[number]


def field(patch, name):
    return next((line[len(name) + 4 :].strip() for line in patch.read_text().splitlines() if line.startswith(f"# {name}: ")), "")


def run(program, folder, names, number=None, limit=600):
    """Runs tests of one program; returns its output, or None if it takes longer than `limit` seconds."""
    environment = {key: value for key, value in os.environ.items() if key not in ("ONEBOX_MUTANT", "ONEBOX_FULL")}
    environment |= {"CARGO_MANIFEST_DIR": str(folder), "RUST_BACKTRACE": "0"}
    if number is not None:
        environment["ONEBOX_MUTANT"] = str(number)
    command = ["timeout", str(limit), program, "--exact", *names]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace").stdout


def main():
    patches = {number: Path(name) for number, name in enumerate(sys.argv[3:], 1)}
    tree = Tree(Path(sys.argv[1]), Path(sys.argv[2]), patches)
    programs = build(tree)
    jobs, tests = {}, defaultdict(set)
    for number in tree.mutants:
        test = re.match(r"-p (\S+) (--lib|--test \S+) (\S+)$", field(patches[number], "test"))
        if test and test.group(1, 2) in programs:
            jobs[number] = (*programs[test.group(1, 2)], test[3])
            tests[programs[test.group(1, 2)]].add(test[3])
    passing = set()
    for (program, folder), names in sorted(tests.items()):
        output = run(program, folder, sorted(names), limit=3600)
        for name in names:
            if re.search(rf"(?m)^test {re.escape(name)}( - should panic)? \.\.\. ok$", output):
                passing.add((program, name))
            else:
                print(f"mutants: without a mutant, {name} does not pass", file=sys.stderr)

    def attempt(number):
        program, folder, name = jobs[number]
        output = run(program, folder, [name], number)
        says = field(patches[number], "says")
        if "0 passed; 1 failed" in output and says in output:
            print(f"caught {patches[number]}", flush=True)
        else:
            print(f"mutants: {patches[number].stem} is not caught by {name}", file=sys.stderr)

    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        list(pool.map(attempt, [number for number, (program, _, name) in jobs.items() if (program, name) in passing]))


main()
