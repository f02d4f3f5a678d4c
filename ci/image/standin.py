"""A base image and a torch index made of Debian packages, to try the recipe without ROCm.

The base holds what a ROCm base offers to the recipe: Python with venv and headers, a C++
compiler, and Debian's HIP runtime.  The index holds a CPU build of torch, Triton and the
stand-in for `amdsmi` that lets vLLM choose its ROCm platform.  Such an image serves on no
GPU, and says so in its labels; everything else about it is the real thing.
"""

import base64
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from ci import envs, paths
from ci.errors import StackError
from ci.image.engine import Engine
from ci.pin import Pin
from ci.run import run

# The Debian release whose python3 is the one that runs this, so that the wheel's tag fits.
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
HIP_RUNTIME = {"bookworm": "libamdhip64-5", "trixie": "libamdhip64-5"}
PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "ca-certificates")


def suite_of(python: tuple[int, int]) -> str:
    """Return the Debian release with that Python.

    Raises:
        StackError: No release has it.
    """
    if python not in SUITES:
        known = ", ".join(f"{a}.{b}" for a, b in SUITES)
        raise StackError(
            f"no Debian release has Python {python[0]}.{python[1]} for the stand-in image",
            f"run it with one of {known}",
        )
    return SUITES[python]


def make_base(engine: Engine, tag: str, mirror: str = "") -> str:
    """Make the base image from Debian packages.

    Args:
        engine: What imports it.
        tag: The image's name.
        mirror: A Debian mirror; the one that the tool knows by default.

    Returns:
        The image's name.

    Raises:
        StackError: mmdebstrap is absent or fails.
    """
    suite = suite_of((sys.version_info[0], sys.version_info[1]))
    if shutil.which("mmdebstrap") is None:
        raise StackError("mmdebstrap is not installed", "apt-get install -y mmdebstrap")
    include = ",".join((*PACKAGES, HIP_RUNTIME[suite]))
    folder = paths.BUILD / "image"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".base-") as scratch:
        archive = Path(scratch) / "root.tar"
        run(
            [
                "mmdebstrap", "--variant=minbase", f"--include={include}",
                "--aptopt=APT::Install-Recommends \"false\"",
                *(f"--dpkgopt=path-exclude=/usr/share/{x}/*" for x in ("doc", "man", "locale")),
                suite, str(archive), *([mirror] if mirror else []),
            ],
            what="mmdebstrap",
            hint="check the mirror; as another user than root, user namespaces are needed",
        )  # fmt: skip
        (Path(scratch) / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        engine.build(["-t", tag, scratch])
    return tag


def make_index(pin: Pin, folder: Path) -> Path:
    """Make a package index ("simple", on disk) with what the recipe takes from ROCm's.

    Args:
        pin: Which torch and which Triton.
        folder: Where; made anew.

    Returns:
        The folder.

    Raises:
        StackError: A wheel cannot be had.
    """
    wheels = folder.with_name(f"{folder.name}-wheels")
    wheels.mkdir(parents=True, exist_ok=True)
    words = envs.torch_requirement(pin.torch)
    torch = f"torch=={pin.torch}+cpu"
    where = words[:2] if words[0] == "--find-links" else [
        "--extra-index-url", "https://download.pytorch.org/whl/cpu",
    ]  # fmt: skip
    for what, options in ((torch, where), (f"triton=={pin.triton}", [])):
        run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels),
             *options, what],
            what=f"downloading {what}",
        )  # fmt: skip
    make_wheel("amdsmi", "0", paths.STANDIN / "amdsmi", wheels)
    # PyPI has no CPU build of torchvision, and vLLM does without: only its name is there,
    # for the requirements that ask for it.
    make_wheel("torchvision", "0", None, wheels)
    shutil.rmtree(folder, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        project = folder / wheel.name.split("-")[0].replace("_", "-").lower()
        project.mkdir(parents=True, exist_ok=True)
        os.link(wheel, project / wheel.name)
        (project / "index.html").write_text(
            f'<!DOCTYPE html><a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>\n'
        )
    return folder


def make_wheel(name: str, version: str, package: Path | None, out: Path) -> Path:
    """Pack a pure Python package into a wheel.

    Args:
        name: The project's name, which is also the package's.
        version: Its version.
        package: The package's folder; None makes a wheel without content.
        out: Where the wheel goes.

    Returns:
        The wheel.
    """
    info = f"{name}-{version}.dist-info"
    files = {}
    if package is not None:
        for file in sorted(package.rglob("*.py")):
            files[f"{name}/{file.relative_to(package).as_posix()}"] = file.read_bytes()
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    )
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: hipstack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(
        f"{path},sha256="
        f"{base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},"
        f"{len(data)}\n"
        for path, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = out / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel
