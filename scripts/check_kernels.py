"""Compiles the CUDA kernels with a given libnvrtc and reports what ptxas says. See check-kernels."""

import ctypes
import pathlib
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).parent.parent
KERNELS = ROOT / "device/src/cuda/kernels"
FOLDERS = [KERNELS, ROOT / "offload/src/kernels"]
ARCHITECTURES = ["70", "75", "80", "86", "89", "90"]
# As device/src/cuda/launch.rs has them.
OPTIONS = re.findall(r'"(-[^"]+)"', (KERNELS.parent / "launch.rs").read_text().split("OPTIONS", 1)[1].split(";", 1)[0])


def with_includes(path):
    """The text of a file with its included files, and theirs, in the places of their lines."""
    own = path.read_text()
    return re.sub(r'#include "(.*)"\n', lambda found: f'#line 1 "{found[1]}"\n' + with_includes(KERNELS / found[1])
                  + f'#line {own[:found.start()].count(chr(10)) + 2} "{path.name}"\n', own)


def compile_file(nvrtc, path, architecture):
    """Whether it compiled, NVRTC's log, and the machine code."""
    source = (KERNELS / "prelude.cuh").read_text() + f'#line 1 "{path.name}"\n' + with_includes(path)
    options = [f"--gpu-architecture=sm_{architecture}", *OPTIONS, "--ptxas-options=-v"]
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), path.name.encode(), 0, None, None)
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status == 0, log.value.decode(), cubin.raw


def kernels_of(log):
    """(name, registers, bytes of shared memory, stack and spills) by kernel."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    )
    for name, stack, stores, loads, registers, shared in re.findall(pattern, log, re.S):
        yield name, int(registers), int(shared or 0), int(stack), int(stores) + int(loads)


def main():
    nvrtc = ctypes.CDLL(sys.argv[1])
    architectures = sys.argv[2:] or ARCHITECTURES
    files = sorted(path for folder in FOLDERS for path in folder.glob("*.cu"))
    failed, table = False, {}
    started = time.monotonic()
    jobs = [(path, architecture) for architecture in architectures for path in files]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: compile_file(nvrtc, *job), jobs)
        for (path, architecture), (compiled, log, _) in zip(jobs, results):
            found = list(kernels_of(log))
            if not compiled or not found or "): warning" in log:
                failed = failed or not compiled or not found
                print(f"{path.name} for sm_{architecture}:\n{log}", file=sys.stderr)
            for name, registers, shared, stack, spills in found:
                cell = f"{registers}" + (f" SPILLS {spills}" if spills else "") + (f" stack {stack}" if stack else "")
                table.setdefault((path.name, name), {"shared": shared})[architecture] = cell
                failed = failed or spills > 0
    print(f"{'registers by architecture':36}" + "".join(f"{'sm_' + a:>7}" for a in architectures) + "  shared bytes")
    for (_, name), row in table.items():
        print(f"{name:36}" + "".join(f"{row.get(a, '-'):>7}" for a in architectures) + f"{row['shared']:14}")
    print(f"{len(jobs)} programs in {time.monotonic() - started:.1f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
