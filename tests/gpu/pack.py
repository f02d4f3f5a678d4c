#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pack what a bare GPU machine needs to run a vLLM source tree as ROCm.

The machine has Python 3.12, torch, triton and transformers, no network and no build
of vLLM. The pack holds the tree's python files, wheels of the missing dependencies,
the stand-ins and the check itself: about 45 MB.

    python pack.py TREE DEST
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
GLIBCS = ["2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35"]
PLATFORMS = [f"manylinux_{v}_x86_64" for v in GLIBCS]
PLATFORMS += [f"manylinux{v}_x86_64" for v in ("1", "2010", "2014")]
# Tests and benchmarks of the stack's kernels, as far as the tree has them.
EXTRAS = [
    "tests/__init__.py",
    "tests/kernels/__init__.py",
    "tests/kernels/attention/paged_attention_reference.py",
    "tests/kernels/attention/*segmented*.py",
    "tests/kernels/attention/test_unified_attention_*.py",
    "tests/v1/__init__.py",
    "tests/v1/attention/rocm_arch.py",
    "tests/v1/attention/test_rocm_segmented_attn.py",
    "benchmarks/kernels/benchmark_segmented_attention.py",
]
FILES = (
    "lay_out.sh",
    "engine_parity.py",
    "children.py",
    "start_up.py",
    "tensor_parallel.py",
    "tiny_models.py",
    "validate.toml",
    "validate_gpu.py",
)


def pack_harness(dest: Path) -> None:
    """Copy ci/ and what names the stack, so that its commands run there."""
    root = HERE.parents[1]
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "ci", dest / "ci", dirs_exist_ok=True, ignore=unwanted)
    (dest / "vllm-src").mkdir(exist_ok=True)
    shutil.copy(root / "vllm-src" / "pin.toml", dest / "vllm-src")
    shutil.copy(root / "series", dest)
    with tarfile.open(dest / "patches.tar.xz", "w:xz") as archive:
        archive.add(root / "patches", "patches")


def fetch_wheels(dest: Path) -> list[str]:
    """Download the wheels of ``wheels.txt`` for CPython 3.12, no dependencies.

    Returns:
        The requirements that the index does not have as such a wheel.

    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    for abi in ("cp312", "abi3", "none"):
        pip += ["--abi", abi]
    for platform in PLATFORMS:
        pip += ["--platform", platform]
    pip += ["--dest", str(dest)]
    listed = HERE / "wheels.txt"
    if subprocess.run([*pip, "--requirement", str(listed)]).returncode == 0:
        return []
    wanted = listed.read_text().split()
    return [r for r in wanted if subprocess.run([*pip, r]).returncode]


def pack_tree(tree: Path, dest: Path) -> None:
    """Write the package's files and ``EXTRAS`` to ``tree.tar.xz``."""

    def keep(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(entry.name)
        unwanted = name.suffix in (".pyc", ".so") or "__pycache__" in name.parts
        return None if unwanted else entry

    with tarfile.open(dest / "tree.tar.xz", "w:xz") as archive:
        archive.add(tree / "vllm", "vllm", filter=keep)
        for pattern in EXTRAS:
            for path in sorted(tree.glob(pattern)):
                archive.add(path, str(path.relative_to(tree)))


def main() -> int:
    """Make the pack; 1 if a wheel is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="source tree of vLLM, patched")
    parser.add_argument("dest", type=Path, help="folder to fill")
    args = parser.parse_args()
    if not (args.tree / "vllm" / "envs.py").is_file():
        parser.error(f"{args.tree} is no source tree of vLLM")
    args.dest.mkdir(parents=True, exist_ok=True)
    missing = fetch_wheels(args.dest)
    pack_tree(args.tree, args.dest)
    for standins in (HERE / "standins", HERE.parents[1] / "ci" / "aot" / "_fake_amdsmi"):
        shutil.copytree(standins, args.dest / "standins", dirs_exist_ok=True)
    for name in FILES:
        shutil.copy(HERE / name, args.dest)
    pack_harness(args.dest)
    size = sum(f.stat().st_size for f in args.dest.rglob("*") if f.is_file())
    print(f"{args.dest}: {size / 2**20:.0f} MiB")
    if missing:
        print("no wheel for:", " ".join(missing), file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
