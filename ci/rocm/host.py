"""An installed ROCm and its torch, looked at before anything is compiled with them.

ROCm may be the system's (``/opt/rocm``) or the one that AMD ships as Python packages
(TheRock), which names its folders by ``rocm-sdk path``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.errors import StackError

# One file of vLLM takes 4.9 GB to compile (skinny_gemms_int4, ROCm 7.2.4).
MEMORY_BYTES = 5_000_000_000
# Objects and libraries of a build, for the first architecture; about as much for each more.
DISK_BYTES = 2_000_000_000
# What vLLM's setup.py imports or starts; the names are those of the packages.
BUILD_TOOLS = {
    "cmake": "cmake>=3.26.1,<4", "jinja2": "jinja2", "ninja": "ninja", "packaging": "packaging",
    "setuptools": "setuptools>=77.0.3,<80", "setuptools_rust": "setuptools-rust>=1.9.0",
    "setuptools_scm": "setuptools-scm>=8,<10", "wheel": "wheel",
}  # fmt: skip
_ASK = """
import json, shutil, sys
from importlib.util import find_spec
facts = {"python": list(sys.version_info[:2])}
facts["lacks"] = [n for n in %r if find_spec(n) is None and shutil.which(n) is None]
try:
    import torch
except ImportError:
    pass
else:
    facts |= {"torch": torch.__version__, "hip": torch.version.hip or ""}
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Host:
    """What a machine has to compile with.

    Attributes:
        rocm: ROCm's prefix, or None.
        python: The interpreter whose torch is compiled against.
        name: How the user knows it ("python3" or "HIPSTACK_PYTHON").
        version: Its version, such as (3, 11); (0, 0) when it cannot be run.
        torch: torch's version, or "".
        hip: The HIP version that torch was built with, or "".
        compiler_hip: The HIP version of the installed ROCm, or "".
        arches: GPU names that its compiler knows; empty when it cannot be asked.
        lacks: Python packages that vLLM's setup.py needs and that are absent.
        memory: Bytes of memory.
        disk: Bytes free where the build goes.
    """

    rocm: Path | None
    python: str
    name: str = "python3"
    version: tuple[int, int] = (0, 0)
    torch: str = ""
    hip: str = ""
    compiler_hip: str = ""
    arches: frozenset[str] = field(default_factory=frozenset)
    lacks: tuple[str, ...] = ()
    memory: int = MEMORY_BYTES
    disk: int = DISK_BYTES


def problems(host: Host, torch: str, arches: Sequence[str], python: tuple[int, int]) -> list[str]:
    """Say what keeps a machine from compiling, one reason each; empty when nothing.

    Args:
        host: The machine.
        torch: The torch that the pin wants.
        arches: The architectures that are wanted.
        python: The Python that runs the build and that the wheel's tag names.
    """
    found = []
    if host.rocm is None:
        found.append("no ROCm with hipcc (ROCM_PATH, rocm-sdk, /opt/rocm or PATH)")
    if not host.torch:
        found.append(f"{host.name} has no torch")
    elif not host.hip:
        found.append(f"the torch of {host.name} ({host.torch}) is not a ROCm build")
    elif host.torch.split("+")[0].split(".")[:2] != torch.split(".")[:2]:
        found.append(f"torch {host.torch} is installed, the pin wants {torch}")
    if found:
        return found
    if host.compiler_hip and major(host.compiler_hip) != major(host.hip):
        found.append(f"ROCm at {host.rocm} is {host.compiler_hip}, torch was built with {host.hip}")
    if unknown := [a for a in arches if host.arches and a not in host.arches]:
        found.append(f"the compiler of {host.rocm} does not know {', '.join(unknown)}")
    if host.version != python:
        found.append(
            f"{host.name} is Python {'.'.join(map(str, host.version))}, the build runs with "
            f"{'.'.join(map(str, python))}"
        )
    if host.lacks:
        packages = " ".join(repr(BUILD_TOOLS[n]) for n in host.lacks)
        found.append(f"{host.name} lacks {packages} (pip install them)")
    if host.memory < MEMORY_BYTES:
        found.append(f"{host.memory / 1e9:.1f} GB of memory, one file takes 5 GB to compile")
    if host.disk < (needed := DISK_BYTES * len(arches)):
        found.append(f"{host.disk / 1e9:.1f} GB free, {needed / 1e9:.0f} GB are needed")
    return found


def major(version: str) -> str:
    """Return the first number of a version."""
    return version.split(".")[0]


def sdk_root(python: str) -> Path | None:
    """Return the prefix of the ROCm that an interpreter's packages bring, or None."""
    beside = Path(python).parent / "rocm-sdk"
    program = str(beside) if beside.exists() else shutil.which("rocm-sdk")
    if not program:
        return None
    result = subprocess.run(
        [program, "path", "--root"], capture_output=True, text=True, check=False
    )
    root = Path(result.stdout.strip() or "/nonexistent")
    return root if result.returncode == 0 and (root / "bin" / "hipcc").exists() else None


def rocm_root(python: str) -> Path | None:
    """Return the prefix of an installed ROCm with a compiler, or None."""
    for value in (os.environ.get("ROCM_PATH"), os.environ.get("ROCM_HOME")):
        if value and (Path(value) / "bin" / "hipcc").exists():
            return Path(value)
    if root := sdk_root(python):
        return root
    if (Path("/opt/rocm") / "bin" / "hipcc").exists():
        return Path("/opt/rocm")
    if hipcc := shutil.which("hipcc"):
        return Path(hipcc).resolve().parent.parent
    return None


def compiler_arches(rocm: Path) -> set[str]:
    """Return the AMD GPU names that a ROCm's clang knows; empty if it cannot be asked."""
    for path in ("llvm/bin/clang", "lib/llvm/bin/clang", "bin/amdclang"):
        clang = rocm / path
        if clang.exists():
            result = subprocess.run(
                [str(clang), "--target=amdgcn-amd-amdhsa", "-mcpu=help", "-x", "c", "-S", "-"],
                input="",
                capture_output=True,
                text=True,
                check=False,
            )
            return set(re.findall(r"\bgfx[0-9a-f]+\b", result.stdout + result.stderr))
    return set()


def compiler_hip(rocm: Path) -> str:
    """Return the HIP version of an installed ROCm, or ""."""
    result = subprocess.run(
        [str(rocm / "bin" / "hipcc"), "--version"], capture_output=True, text=True, check=False
    )
    match = re.search(r"HIP version:\s*(\d+(?:\.\d+)+)", result.stdout)
    return match[1] if match else ""


def look(folder: Path) -> Host:
    """Look at this machine.

    Args:
        folder: Where a build would go.

    Raises:
        StackError: ``HIPSTACK_PYTHON`` cannot be run.
    """
    asked = os.environ.get("HIPSTACK_PYTHON")
    python = asked or shutil.which("python3") or sys.executable
    name = "HIPSTACK_PYTHON" if asked else "python3"
    try:
        result = subprocess.run(
            [python, "-c", _ASK % list(BUILD_TOOLS)],
            capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip
    except OSError as error:
        raise StackError(f"{name} {python} cannot be run: {error.strerror}") from None
    facts = {}
    if result.returncode == 0 and result.stdout.strip():
        facts = json.loads(result.stdout.splitlines()[-1])
    rocm = rocm_root(python)
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    return Host(
        rocm=rocm,
        python=python,
        name=name,
        version=tuple(facts.get("python", (0, 0))),
        torch=facts.get("torch", ""),
        hip=facts.get("hip", ""),
        compiler_hip=compiler_hip(rocm) if rocm else "",
        arches=frozenset(compiler_arches(rocm)) if rocm else frozenset(),
        lacks=tuple(facts.get("lacks", ())),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=shutil.disk_usage(existing).free,
    )
