"""Make the root, and check it with what compiles in seconds."""

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ci import arches, codeobjects, envs, gitstack, patches, paths, pin, verify
from ci.build import only_one
from ci.errors import StackError
from ci.rocm import audit, debian, machine, proof, stubs, toolchain
from ci.rocm.toolchain import Ready
from ci.run import run

# Targets without GPU code, and one file with it that compiles in seconds.
TARGETS = ("spinloop", "fs_io_C", "cumem_allocator", "_hipdnn_C")
DEVICE = "CMakeFiles/_C_stable_libtorch.dir/csrc/libtorch_stable/pos_encoding_kernels.hip.o"


@contextlib.contextmanager
def timed(what: str) -> Iterator[list[str]]:
    """Print how long a part took, on the wall and of the CPUs."""
    notes: list[str] = []
    begin, before = time.monotonic(), os.times()
    yield notes
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    detail = f": {'; '.join(notes)}" if notes else ""
    print(f"{what}{detail} ({time.monotonic() - begin:.0f} s, {cpu:.0f} CPU s)", flush=True)


def small_targets(ready: Ready, tree: Path, names: Sequence[str], jobs: int) -> list[str]:
    """Configure a tree and build what takes seconds; return the problems.

    Args:
        ready: The toolchain with the root.
        tree: A patched tree.
        names: Architectures.
        jobs: Parallel jobs.

    Raises:
        StackError: CMake or a compiler failed.
    """
    problems: list[str] = []
    with ready.work(Path("/")) as place:
        gitstack.copy_tree(tree, place / "vllm-src")
        env = {**ready.env, "PYTORCH_ROCM_ARCH": ";".join(names)}
        build = place / "b"
        words = [
            "cmake", "-S", ready.inner(place / "vllm-src"), "-B", ready.inner(build),
            "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DVLLM_TARGET_DEVICE=rocm",
            f"-DVLLM_PYTHON_EXECUTABLE={ready.python}", f"-DROCM_PATH={ready.rocm}",
        ]  # fmt: skip
        with timed("configure"):
            run(ready.command(words, place, env), what="configuring vLLM")
        with timed("build") as notes:
            words = ["ninja", f"-j{jobs}", *TARGETS, DEVICE]
            run(ready.command(words, build, env), what="building small targets")
            notes.append(", ".join([*TARGETS, Path(DEVICE).name]))
        provided, listed = proof.providers(ready), stubs.load()
        for name in TARGETS:
            library = audit.read_library(next(build.glob(f"{name}*.so")))
            # Where CMake finds torch is taken out when it installs.
            problems += audit.needed_problems(dataclasses.replace(library, runpath=""))
            problems += audit.symbol_problems(library, provided, listed)[1]
            print(f"  {library.name}: needs {', '.join(library.needed)}; "
                  f"{audit.newest(library.versions)}")  # fmt: skip
        found = {arch for arch, _ in codeobjects.images((build / DEVICE).read_bytes())}
        print(f"  {Path(DEVICE).name}: code for {', '.join(sorted(found)) or 'nothing'}")
        if found != set(names):
            problems.append(f"{DEVICE} has code for {sorted(found)}, not for {list(names)}")
        problems += _loads(ready, build)
    return problems


def _loads(ready: Ready, build: Path) -> list[str]:
    """Load the small targets in the root, with the real HIP runtime."""
    code = (
        "import ctypes, glob, os, sys; sys.setdlopenflags(os.RTLD_NOW)\n"
        "hip = ctypes.CDLL('libamdhip64.so.7'); n = ctypes.c_int()\n"
        "print('hipGetDeviceCount', hip.hipGetDeviceCount(ctypes.byref(n)))\n"
        "import torch, cumem_allocator, spinloop\n"
        "ctypes.CDLL(glob.glob('_hipdnn_C*.so')[0] and './' + glob.glob('_hipdnn_C*.so')[0])\n"
    )
    env = {**ready.env, "PYTHONPATH": ready.inner(build)}
    try:
        said = run(
            ready.command([ready.python, "-c", code], build, env), what="loading small targets"
        )
    except StackError as error:
        return [str(error)]
    print(f"  loaded; {said.strip().splitlines()[-1]}")
    return []


def run_command(args: argparse.Namespace) -> list[str]:
    """Carry out ``root``, ``check`` or ``prove``; return the problems.

    Raises:
        StackError: The root cannot be made, something cannot be built, or a build is at
            work.
    """
    names = arches.parse(args.arch)
    with only_one():
        return _run(args, names)


def _run(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    pin_ = pin.load(args.pin)
    mirror = machine.find_mirror(args.mirror)
    with timed("root") as notes:
        root = debian.ensure(mirror)
        size = f"{len(root.packages)} packages from {root.mirror}"
        notes.append(f"{root.path}, {size}, HIP {root.version('libamdhip64-dev')}")
    with tempfile.TemporaryDirectory(dir=paths.BUILD, prefix=".rocm-tree-") as scratch:
        tree = Path(scratch) / "vllm-src"
        with timed("source"):
            verify.make_tree(pin_, patches.load(), tree, args.source)
        with timed("environment"):
            python = envs.ensure_env(pin_, tree)
        with timed("torch") as notes:
            ready = toolchain.prepare_debian(pin_, mirror, python)
            ready.check_arches(names)
            notes.append(ready.facts["torch"])
        if args.command == "check":
            return small_targets(ready, tree, names, args.jobs)
        if args.command == "prove":
            version = args.wheel.name.split("-")[1]
            with timed("proof") as notes, ready.work(Path("/")) as place:
                found = proof.prove(args.wheel, version, tree, names, ready, place)
                if not found.problems:
                    notes.append(found.describe())
            return list(found.problems)
    return []
