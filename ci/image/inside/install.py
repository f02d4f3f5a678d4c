"""Lay out the image's Python: torch for ROCm first, then vLLM around it.

The Dockerfile calls it with the base image's own Python; only the standard library and
pip are used::

    install.py torch                  the environment, torch and what belongs to it
    install.py requirements WHEELS ARCHES   print what the wheel requires
    install.py packages FILE          install that, without touching torch and the rest
    install.py wheel WHEELS ARCHES    install the wheel, then prove that nothing moved
    install.py tuned FOLDER ARCHES    take over measured tiles, if there are any
    install.py verify                 is everything of torch's step still what it was?

What torch's step installs is held: its versions are constraints for every later step,
and its files are hashed before and after.
"""

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

VENV = Path(os.environ.get("HIPSTACK_VENV", "/opt/vllm"))
STATE = Path(os.environ.get("HIPSTACK_STATE", "/opt/hipstack"))
# What must come from torch's index, or from the base image, and never from anywhere else:
# the same packages exist on PyPI for another vendor's GPUs.
HELD = re.compile(
    r"(torch|torchvision|torchaudio|triton|pytorch-triton-rocm|triton-rocm|amdsmi"
    r"|flash-attn|amd-aiter|rocm|rocm-sdk-[\w-]+|amd-torch-device-[\w-]+)"
)
_LIST = """
import json
from importlib.metadata import distributions
print(json.dumps([[d.metadata["Name"], d.version, [str(d.locate_file(f)) for f in d.files or ()
    if str(f).endswith((".py", ".so", ".hsaco", ".bc"))]] for d in distributions()]))
"""
_HIP = "import torch; print(torch.version.hip or '')"


class InstallError(Exception):
    """What is wrong, in one line."""


def normalised(name: str) -> str:
    """Return a project name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def held(names: Iterable[str]) -> list[str]:
    """Return those of some project names that nothing may replace, sorted."""
    return sorted({n for n in map(normalised, names) if HELD.fullmatch(n)})


def constraints(versions: Mapping[str, str]) -> str:
    """Return pip's constraints file for what is held, one line a project."""
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))


def choose(names: Sequence[str], arches: str) -> str:
    """Choose the wheel for the image among the files of a folder.

    Args:
        names: File names.
        arches: Architectures with commas between them; empty takes the only wheel.

    Returns:
        The one wheel of vLLM that fits.

    Raises:
        InstallError: None or several fit.
    """
    wheels = sorted(n for n in names if n.startswith("vllm-") and n.endswith(".whl"))
    wanted = ".".join(sorted(a.strip() for a in arches.split(",") if a.strip()))
    # The version's local part is hipstackN.gfx..., so the wheel for gfx1100 and gfx1201 is
    # not the one for gfx1201 alone.
    local = {n: n.split("-")[1].partition("+")[2].partition(".")[2] for n in wheels}
    fits = [n for n in wheels if wanted in ("", local[n])]
    if len(fits) != 1:
        raise InstallError(
            f"{len(fits)} wheels for {arches or 'any architecture'} among "
            f"{', '.join(wheels) or 'no wheels'}; exactly one is needed"
        )
    return fits[0]


def requirements(metadata: str) -> list[str]:
    """Return what a wheel requires, without its extras.

    Args:
        metadata: The text of its METADATA.
    """
    lines = email.message_from_string(metadata).get_all("Requires-Dist") or []
    return sorted({line for line in lines if not re.search(r"\bextra\s*==", line)})


def moved(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> list[str]:
    """Say which held projects are no longer what they were.

    Args:
        before: Project to (version, digest of its files).
        after: The same, later.
    """
    return [
        f"{name} was {before[name][0]}, is {after[name][0] if name in after else 'gone'}"
        + ("" if name not in after or before[name][0] != after[name][0] else " with other files")
        for name in sorted(before)
        if list(before[name]) != list(after.get(name, ()))
    ]


def strangers(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """Say which projects should have come with torch and came from elsewhere.

    PyPI's torchvision, say, is built for PyPI's torch, and does not even import with another.

    Args:
        before: What is held.
        after: What is installed of that kind.
    """
    return [
        f"{name} did not come with torch: add it to TORCH_PACKAGES"
        for name in sorted(set(after) - set(before))
    ]


def _python() -> str:
    return str(VENV / "bin" / "python")


def _run(*command: str) -> None:
    print(f"+ {' '.join(command)}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise InstallError(f"{' '.join(command[:5])} ... failed ({code})")


def _ask(code: str) -> str:
    result = subprocess.run([_python(), "-c", code], capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise InstallError(f"{_python()}: {reason}")
    return result.stdout.strip().splitlines()[-1] if result.stdout.strip() else ""


def snapshot() -> dict[str, list[str]]:
    """Return version and digest of everything that is held in the environment."""
    found: dict[str, list[str]] = {}
    installed = json.loads(_ask(_LIST))
    names = held(name for name, _, _ in installed)
    for name, version, files in installed:
        # The first of a name is the one that Python imports.
        if normalised(name) in names and normalised(name) not in found:
            digest = hashlib.sha256()
            for file in sorted(files):
                path = Path(file)
                if path.is_file():
                    digest.update(file.encode() + b"\0")
                    digest.update(hashlib.sha256(path.read_bytes()).digest())
            found[normalised(name)] = [version, digest.hexdigest()]
    return found


def _base_has_torch() -> bool:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def install_torch(index: str, packages: Sequence[str]) -> None:
    """Make the environment and put torch into it.

    Args:
        index: Package index with torch for ROCm; empty takes the base image's torch.
        packages: What to take from it, and nothing else comes from there.

    Raises:
        InstallError: There is no torch.
    """
    base = _base_has_torch()
    if not index and not base:
        raise InstallError("the base image has no torch: give TORCH_INDEX, or another BASE_IMAGE")
    site = [] if index else ["--system-site-packages"]
    _run(sys.executable, "-m", "venv", *site, str(VENV))
    pip = [_python(), "-m", "pip", "install", "--disable-pip-version-check"]
    if index:
        _run(*pip, "--no-deps", "--index-url", index, *packages)
    held_now = snapshot()
    if "torch" not in held_now:
        raise InstallError(f"no torch came from {index or 'the base image'}")
    STATE.mkdir(parents=True, exist_ok=True)
    (STATE / "held.json").write_text(json.dumps(held_now, indent=2, sort_keys=True) + "\n")
    (STATE / "constraints.txt").write_text(
        constraints({name: version for name, (version, _) in held_now.items()})
    )


def check_rocm(any_torch: bool) -> None:
    """Refuse a torch that is no ROCm build.

    Raises:
        InstallError: It is none, or cannot be imported.
    """
    hip = _ask(_HIP)
    if not hip and not any_torch:
        raise InstallError("the torch in the image is no ROCm build")
    print(f"torch {json.loads((STATE / 'held.json').read_text())['torch'][0]}, HIP {hip or 'none'}")


def install_packages(file: Path, any_torch: bool) -> None:
    """Install requirements around what is held.

    Args:
        file: Requirements, one a line.
        any_torch: Accept a torch without ROCm (a stand-in image, to test the recipe).

    Raises:
        InstallError: pip failed (a requirement wants another torch, say), or something
            that is held moved.
    """
    names = list(json.loads((STATE / "held.json").read_text()))
    # Naming what is held makes pip install its own requirements, too.
    _run(
        _python(), "-m", "pip", "install", "--disable-pip-version-check",
        "-c", str(STATE / "constraints.txt"), "-r", str(file), *names,
    )  # fmt: skip
    verify()
    check_rocm(any_torch)


def install_wheel(folder: Path, arches: str) -> None:
    """Install the wheel, and keep its records beside the image's own.

    Raises:
        InstallError: No wheel fits, or something that is held moved.
    """
    name = choose([p.name for p in folder.iterdir()], arches)
    _run(
        _python(), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps",
        "--force-reinstall", str(folder / name),
    )  # fmt: skip
    stem = name.removesuffix(".whl")
    for suffix in (".build.json", ".cdx.json"):
        record = folder / f"{stem}{suffix}"
        if record.is_file():
            (STATE / record.name).write_bytes(record.read_bytes())
    verify()
    print(f"installed {name} into {VENV}")


def tuned_commands(files: Iterable[Path], arches: str) -> list[list[str]]:
    """Return the commands that import records of measured tiles.

    Args:
        files: Exported files.
        arches: Architectures with commas between them; others' records stay out.
    """
    module = "vllm.model_executor.warmup.rocm_segmented_attn_autotune_warmup"
    return [
        [_python(), "-m", module, "import", "--arch", arch.strip(), str(file)]
        for file in sorted(files)
        for arch in sorted(arches.split(","))
    ]


def install_tuned(folder: Path, arches: str) -> None:
    """Import exported records into vLLM's cache of the image, for every user to read.

    Raises:
        InstallError: A record is damaged.
    """
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", "/cache/vllm"))
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    for command in tuned_commands(folder.glob("*.json"), arches):
        _run(*command)
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o1777 if path.is_dir() else 0o644)


def verify() -> None:
    """Check that everything held is still what it was, and that nothing joined it.

    Raises:
        InstallError: Something moved, or came from elsewhere.
    """
    before, after = json.loads((STATE / "held.json").read_text()), snapshot()
    if problems := [*moved(before, after), *strangers(before, after)]:
        raise InstallError("; ".join(problems))
    print(f"held: {', '.join(f'{n} {v}' for n, (v, _) in sorted(before.items()))}")


def main(arguments: Sequence[str]) -> int:
    """Run one step; return the exit code."""
    any_torch = os.environ.get("ANY_TORCH", "") == "1"
    try:
        step, *rest = arguments or [""]
        if step == "torch":
            packages = os.environ.get("TORCH_PACKAGES", "torch triton").split()
            install_torch(os.environ.get("TORCH_INDEX", ""), packages)
        elif step == "requirements":
            folder = Path(rest[0])
            wheel = folder / choose([p.name for p in folder.iterdir()], rest[1])
            with zipfile.ZipFile(wheel) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
                print("\n".join(requirements(archive.read(name).decode())))
        elif step == "packages":
            install_packages(Path(rest[0]), any_torch)
        elif step == "wheel":
            install_wheel(Path(rest[0]), rest[1])
        elif step == "tuned":
            install_tuned(Path(rest[0]), rest[1])
        elif step == "verify":
            verify()
        else:
            raise InstallError(f"unknown step {step!r}")
    except (InstallError, OSError, zipfile.BadZipFile, StopIteration) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
