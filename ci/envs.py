"""The private Python environments of a build, made once and reused.

tools   what ``ci`` itself imports (requirements.txt); re-executed into by the build
release what checks a release: linters of Dockerfile and workflows, the in-toto library
env     vLLM's own requirements with a CPU torch and the pin's Triton: it runs vLLM's
        setup.py where no compiled extension is wanted, compiles Triton kernels for AMD
        GPUs without one, and runs vLLM's tests
lint    ruff and mypy as vLLM's pre-commit pins them
audit   auditwheel and abi3audit, for wheels with compiled extensions
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import source
from ci.errors import StackError
from ci.paths import ENVS, ROOT
from ci.pin import Pin
from ci.run import run

REQUIREMENTS = ROOT / "ci" / "requirements.txt"
RELEASE_REQUIREMENTS = ROOT / "ci" / "release-requirements.txt"

BUILD_REQUIREMENTS = (
    "setuptools>=77.0.3,<80",
    "setuptools-scm>=8,<10",
    "setuptools-rust>=1.9.0",
    "wheel",
    "packaging",
    "jinja2",
    "cmake>=3.26.1,<4",
    "ninja",
)
AUDIT_REQUIREMENTS = ("auditwheel==6.8.2", "abi3audit==0.0.26")
TEST_REQUIREMENTS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "tblib",
    "hypothesis",
    "matplotlib",
    "pandas",
)


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def _stamp(lines: Sequence[str]) -> str:
    text = "\n".join([sys.version, *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def _make(folder: Path, lines: Sequence[str], fill: "list[list[str]]") -> Path:
    """Make an environment; the stamp, written last, says that it is whole."""
    stamp = folder / ".hipstack-stamp"
    wanted = _stamp(lines)
    if stamp.is_file() and stamp.read_text() == wanted and python_of(folder).exists():
        return python_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(f"cannot write to {folder.parent}: {error.strerror}") from None
    print(f"making {folder} (once)", file=sys.stderr, flush=True)
    try:
        _venv(folder)
        for command in fill:
            run(
                [str(python_of(folder)) if part == "{python}" else part for part in command],
                what="installing Python packages",
                hint="check the network and the package index that pip is configured to use",
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    stamp.write_text(wanted)
    return python_of(folder)


def _venv(folder: Path) -> None:
    command = [sys.executable, "-m", "venv", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    shutil.rmtree(folder, ignore_errors=True)
    fix = "apt-get install -y python3-venv"
    if "ensurepip" not in result.stdout + result.stderr:
        reason = (result.stderr.strip().splitlines() or ["python -m venv failed"])[-1]
        raise StackError(f"cannot make a virtual environment: {reason}")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise StackError("python3 has no venv module", f"sudo {fix}")
    run(["apt-get", "update", "-q"], what="apt-get update", hint=fix)
    run(fix.split(), env={"DEBIAN_FRONTEND": "noninteractive"}, what=fix)
    run(command, what="python -m venv")


def _lines(file: Path) -> list[str]:
    return [x for x in file.read_text().splitlines() if x and not x.startswith("#")]


def _tools_requirements() -> list[str]:
    return _lines(REQUIREMENTS)


def ensure_tools() -> Path:
    """Return the interpreter of the tools environment, made when it is not there."""
    lines = _tools_requirements()
    install = ["{python}", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    return _make(ENVS / "tools", lines, [[*install, "-r", str(REQUIREMENTS)]])


def reexec_in_tools(module: str, arguments: Sequence[str]) -> None:
    """Continue this command line inside the tools environment, unless already there.

    Args:
        module: The module to run with ``-m``.
        arguments: Its arguments.

    Raises:
        StackError: The environment cannot be made.
    """
    if _tools_present():
        return
    if Path(sys.prefix).resolve() == (ENVS / "tools").resolve():
        raise StackError(f"{sys.prefix} lacks packages of its own", f"rm -r {sys.prefix}")
    python = str(ensure_tools())
    sys.stdout.flush()
    os.execv(python, [python, "-m", module, *arguments])


def _tools_present() -> bool:
    try:
        import cyclonedx  # noqa: F401
        import elftools  # noqa: F401
        import pypi_simple  # noqa: F401
        import unidiff  # noqa: F401
        import uv  # noqa: F401
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def uv_pip(python: str, *arguments: str) -> list[str]:
    """Return the command that installs into an environment with uv."""
    index = source.index_url()
    extra = ["--default-index", index] if index else []
    return [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "-q",
        "--python",
        python,
        *extra,
        *arguments,
    ]


def torch_requirement(version: str) -> list[str]:
    """Return uv's arguments for a CPU build of torch.

    A folder that pip is told to look into (``find-links``) and that holds the CPU wheel
    is used; otherwise uv knows where PyTorch publishes its CPU wheels.

    Args:
        version: torch's version, without a local part.
    """
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if any(Path(folder).glob(f"torch-{version}+cpu-{tag}-*.whl")):
            return ["--find-links", folder, f"torch=={version}+cpu"]
    return ["--torch-backend", "cpu", f"torch=={version}"]


def ensure_env(pin: Pin, tree: Path) -> Path:
    """Return the interpreter of the environment that builds and tests vLLM.

    Args:
        pin: The pin: which torch and which Triton.
        tree: A source tree, for its requirements/common.txt.

    Raises:
        StackError: A package cannot be had.
    """
    common = tree / "requirements" / "common.txt"
    if not common.is_file():
        raise StackError(f"{tree} is no source tree of vLLM: it has no requirements/common.txt")
    wanted = [
        *torch_requirement(pin.torch),
        f"triton=={pin.triton}",
        *BUILD_REQUIREMENTS,
        *TEST_REQUIREMENTS,
        *_tools_requirements(),
        f"ruff=={pin.ruff}",
    ]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return _make(
        ENVS / f"env-{pin.version}-{tag}",
        [*wanted, common.read_text()],
        [uv_pip("{python}", *wanted, "-r", str(common))],
    )


def ensure_release() -> Path:
    """Return the interpreter of the environment that checks releases.

    Raises:
        StackError: A package cannot be had.
    """
    wanted = _lines(RELEASE_REQUIREMENTS)
    return _make(ENVS / "release", wanted, [uv_pip("{python}", *wanted)])


def ensure_lint(pin: Pin) -> Path:
    """Return the interpreter of the environment with vLLM's ruff and mypy.

    The packages are those of the mypy hook in the pin's .pre-commit-config.yaml, which
    keeps torch itself out.

    Raises:
        StackError: A package cannot be had.
    """
    wanted = [
        *_tools_requirements(),  # this project's own code is checked there too
        f"ruff=={pin.ruff}",
        f"mypy=={pin.mypy}",
        "regex",
        "types-cachetools",
        "types-setuptools",
        "types-PyYAML",
        "types-requests",
        "types-torch",
        "pydantic",
    ]
    return _make(ENVS / f"lint-{pin.version}", wanted, [uv_pip("{python}", *wanted)])


def ensure_audit() -> Path:
    """Return the interpreter of the environment that judges a wheel's tags.

    Raises:
        StackError: A package cannot be had.
    """
    wanted = list(AUDIT_REQUIREMENTS)
    return _make(ENVS / "audit", wanted, [uv_pip("{python}", *wanted)])
