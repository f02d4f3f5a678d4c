"""How vLLM's compiled ops come into the wheel: decided here, with the reason."""

import os
import re
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ci.errors import StackError
from ci.paths import BUILD, SOURCES
from ci.rocm import debian, host, machine

MODES = ("auto", "compile", "precompiled", "none")
ABSENT = (
    "vLLM's compiled ops (vllm._C, vllm._rocm_C, ...) are ABSENT: models that need them "
    "will not run.  Add them with --extensions compile (as root in Debian or Ubuntu, a "
    "container will do, or where ROCm and a ROCm torch are installed), or with "
    "--extensions precompiled=WHEEL (a ROCm wheel of the same vLLM)."
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
        python: The interpreter whose torch is compiled against (compile with "host").
        toolchain: "host" or "debian" (compile).
        mirror: The Debian mirror (compile with "debian").
    """

    mode: str
    reason: str
    wheel: Path | None = None
    rocm: Path | None = None
    hip: str = ""
    python: str = ""
    toolchain: str = ""
    mirror: str = ""


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


def decide(
    text: str,
    version: str,
    torch: str,
    arches: Sequence[str],
    toolchain: str = "auto",
    mirror: str | None = None,
) -> Extensions:
    """Turn ``--extensions`` and ``--toolchain`` into a decision.

    Args:
        text: What the user said: a mode, or ``precompiled=WHEEL``.
        version: The pin's version.
        torch: The torch that the pin wants.
        arches: The architectures that are wanted.
        toolchain: "auto", "host" or "debian".
        mirror: The Debian mirror that the user named, or None.

    Returns:
        The mode to build with and why.

    Raises:
        StackError: The mode is unknown, or the machine cannot do what was asked.
    """
    mode, _, argument = text.partition("=")
    if mode not in MODES or bool(argument) != (mode == "precompiled"):
        raise StackError(f"--extensions {text!r} is none of auto, compile, precompiled=WHEEL, none")
    if mode in ("none", "precompiled") and toolchain != "auto":
        raise StackError(f"--toolchain {toolchain} has nothing to do with --extensions {mode}")
    if mode == "none":
        return Extensions("none", "asked for")
    if mode == "precompiled":
        wheel = Path(os.environ.get("HIPSTACK_CWD", ".")) / argument
        return _precompiled(wheel, version, arches)
    refused: list[str] = []
    for name, attempt in (("host", _host), ("debian", _debian)):
        if toolchain in ("auto", name):
            decided = attempt(torch, arches, mirror)
            if isinstance(decided, Extensions):
                if refused:
                    reason = f"{decided.reason} ({'; '.join(refused)})"
                    decided = replace(decided, reason=reason)
                return decided
            refused.append(f"{name}: {decided}")
    why = "; ".join(refused)
    if mode == "compile" or toolchain != "auto":
        raise StackError(
            f"cannot compile: {why}",
            "install ROCm and its torch, or --extensions precompiled=WHEEL, or none",
        )
    for wheel in sorted(SOURCES.glob(f"vllm-{version}+rocm*.whl")):
        try:
            found = _precompiled(wheel, version, arches)
        except StackError as error:
            why += f"; {error}"
            continue
        return replace(found, reason=f"{found.reason}; cannot compile ({why})")
    return Extensions("none", f"cannot compile ({why}) and no precompiled=WHEEL was given")


def _precompiled(wheel: Path, version: str, arches: Sequence[str]) -> Extensions:
    hip = check_precompiled(wheel, version, arches)
    return Extensions("precompiled", f"taken from {wheel.name}", wheel=wheel, hip=hip)


def _host(torch: str, arches: Sequence[str], mirror: str | None) -> "Extensions | str":
    """Decide for the machine's own ROCm, or say what it lacks."""
    found = host.look(BUILD)
    if lacking := host.problems(found, torch, arches, sys.version_info[:2]):
        return "; ".join(lacking)
    return Extensions(
        "compile",
        f"ROCm at {found.rocm}, torch {found.torch}",
        rocm=found.rocm,
        hip=found.hip,
        python=found.python,
        toolchain="host",
    )


def _debian(torch: str, arches: Sequence[str], mirror: str | None) -> "Extensions | str":
    """Decide for a private root of Debian packages, or say what this machine lacks."""
    address = machine.find_mirror(mirror)
    if lacking := debian.machine_lacks(address):
        return "; ".join(lacking)
    return Extensions(
        "compile",
        f"a private root of Debian packages from {address}",
        toolchain="debian",
        mirror=address,
    )
