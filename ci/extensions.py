"""How vLLM's compiled ops come into the wheel: decided here, with the reason."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ci.errors import StackError

MODES = ("auto", "compile", "precompiled", "none")
ABSENT = (
    "vLLM's compiled ops (vllm._C, vllm._rocm_C, ...) are ABSENT: models that need them "
    "will not run.  Add them with --extensions compile on a machine with ROCm and a ROCm "
    "torch, or with --extensions precompiled=WHEEL (a ROCm wheel of the same vLLM)."
)


@dataclass(frozen=True)
class Extensions:
    """The decision.

    Attributes:
        mode: "compile", "precompiled" or "none".
        reason: Why, in one sentence.
        wheel: The wheel to take the ops from (precompiled).
        rocm: ROCm's root (compile).
        hip: ROCm version of torch (compile) or of the wheel (precompiled), or "".
        python: The interpreter whose torch is compiled against (compile).
    """

    mode: str
    reason: str
    wheel: Path | None = None
    rocm: Path | None = None
    hip: str = ""
    python: str = ""


@dataclass(frozen=True)
class Toolchain:
    """What a machine has to compile with; ``missing`` says what it lacks."""

    rocm: Path | None
    python: str
    hip: str
    torch: str
    missing: tuple[str, ...]


def rocm_root() -> Path | None:
    """Return the root of an installed ROCm with a compiler, or None."""
    for value in (os.environ.get("ROCM_PATH"), os.environ.get("ROCM_HOME"), "/opt/rocm"):
        if value and (Path(value) / "bin" / "hipcc").exists():
            return Path(value)
    if hipcc := shutil.which("hipcc"):
        return Path(hipcc).resolve().parent.parent
    return None


def find_toolchain(torch_version: str, python: str | None = None) -> Toolchain:
    """Look for a ROCm toolchain and a ROCm torch.

    Args:
        torch_version: The torch that the pin wants.
        python: Interpreter to ask for torch; ``HIPSTACK_PYTHON`` or the one in PATH.

    Returns:
        What is there and what is missing.
    """
    rocm = rocm_root()
    missing = [] if rocm else ["no ROCm with hipcc (ROCM_PATH, /opt/rocm or PATH)"]
    asked = python or os.environ.get("HIPSTACK_PYTHON")
    python = asked or shutil.which("python3") or sys.executable
    name = "HIPSTACK_PYTHON" if asked else "python3"
    code = "import json,torch;print(json.dumps([torch.__version__,torch.version.hip or '']))"
    torch, hip = "", ""
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, cwd="/"
        )
    except OSError as error:
        raise StackError(f"{name} {python} cannot be run: {error.strerror}") from None
    if result.returncode != 0 or not result.stdout.strip():
        missing.append(f"{name} has no torch")
    else:
        torch, hip = json.loads(result.stdout.splitlines()[-1])
        if not hip:
            missing.append(f"the torch of {name} ({torch}) is not a ROCm build")
        elif torch.split("+")[0].split(".")[:2] != torch_version.split(".")[:2]:
            missing.append(f"torch {torch} is installed, the pin wants {torch_version}")
    return Toolchain(rocm, python, hip, torch, tuple(missing))


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


def check_precompiled(wheel: Path, version: str, arches: Sequence[str]) -> str:
    """Say whether a wheel's compiled ops fit, or refuse.

    Args:
        wheel: A ROCm wheel of vLLM.
        version: The pin's version.
        arches: The architectures that are wanted.

    Returns:
        The ROCm version in its local version ("7.2.3" for ``+rocm723``), or "".

    Raises:
        StackError: It is no wheel of that vLLM, is for another Python or platform, has
            no AMD code, or lacks an architecture.
    """
    from ci import codeobjects

    if not wheel.is_file():
        raise StackError(f"--extensions precompiled={wheel}: no such file")
    try:
        name, parsed, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise StackError(f"--extensions precompiled: {error}") from None
    if name != "vllm" or parsed.public != version:
        raise StackError(
            f"--extensions precompiled: {wheel.name} is {name} {parsed.public}, "
            f"the pin is vllm {version}"
        )
    from packaging.tags import sys_tags

    if not tags & set(sys_tags()):
        raise StackError(
            f"--extensions precompiled: {wheel.name} does not fit Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} on this platform"
        )
    try:
        found = codeobjects.scan_wheel(wheel)
    except (codeobjects.CodeObjectError, zipfile.BadZipFile, OSError) as error:
        raise StackError(f"--extensions precompiled: {wheel.name}: {error}") from None
    by_file = codeobjects.arches_by_file(found)
    if not by_file:
        raise StackError(f"--extensions precompiled: {wheel.name} holds no AMD GPU code")
    for file, names in sorted(by_file.items()):
        if lacking := sorted(set(arches) - set(names)):
            raise StackError(
                f"--extensions precompiled: {file} has code for {', '.join(names)}, "
                f"not for {', '.join(lacking)}"
            )
    match = re.fullmatch(r"rocm(\d)(\d+?)(\d)", parsed.local or "")
    return ".".join(match.groups()) if match else ""


def decide(text: str, version: str, torch: str, arches: Sequence[str]) -> Extensions:
    """Turn ``--extensions`` into a decision.

    Args:
        text: What the user said: a mode, or ``precompiled=WHEEL``.
        version: The pin's version.
        torch: The torch that the pin wants.
        arches: The architectures that are wanted.

    Returns:
        The mode to build with and why.

    Raises:
        StackError: The mode is unknown, or the machine cannot do what was asked.
    """
    mode, _, argument = text.partition("=")
    if mode not in MODES or bool(argument) != (mode == "precompiled"):
        raise StackError(f"--extensions {text!r} is none of auto, compile, precompiled=WHEEL, none")
    if mode == "none":
        return Extensions("none", "asked for")
    if mode == "precompiled":
        wheel = Path(os.environ.get("HIPSTACK_CWD", ".")) / argument
        hip = check_precompiled(wheel, version, arches)
        return Extensions("precompiled", f"taken from {wheel.name}", wheel=wheel, hip=hip)
    found = find_toolchain(torch)
    if not found.missing and found.rocm:
        known = compiler_arches(found.rocm)
        unknown = [a for a in arches if known and a not in known]
        if not unknown:
            return Extensions(
                "compile",
                f"ROCm at {found.rocm}, torch {found.torch}",
                rocm=found.rocm,
                hip=found.hip,
                python=found.python,
            )
        found = Toolchain(
            found.rocm, found.python, found.hip, found.torch,
            (f"the compiler of {found.rocm} does not know {', '.join(unknown)}",),
        )  # fmt: skip
    why = "; ".join(found.missing)
    if mode == "compile":
        raise StackError(
            f"--extensions compile: {why}",
            "install ROCm and its torch, or --extensions precompiled=WHEEL, or none",
        )
    return Extensions("none", f"cannot compile ({why}) and no precompiled=WHEEL was given")
