"""Where results lie: written whole or not at all, each with what identifies it."""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ci import patches, pin
from ci.errors import StackError
from ci.paths import ROOT

SCHEMA = 1
_VERSIONS = ("vllm", "torch", "triton", "transformers", "lm_eval", "guidellm")
_ENVIRONMENT = re.compile(r"(VLLM|HIPDNN|ROCM|HIP|PYTORCH|TRITON|FAKE|MIOPEN)_\w+")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def slug(text: str) -> str:
    """Return a name that is good for a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file through a temporary one beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StackError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, data: Any) -> None:
    """Write JSON, compressed if the name ends in .gz; NaN becomes null."""
    text = json.dumps(_plain(data), indent=None if path.suffix == ".gz" else 1, allow_nan=False)
    raw = text.encode()
    write_bytes(path, gzip.compress(raw, 6, mtime=0) if path.suffix == ".gz" else raw + b"\n")


def _plain(data: Any) -> Any:
    if isinstance(data, float):
        return data if data == data and abs(data) != float("inf") else None
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, Path):
        return str(data)
    return data


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        StackError: It is not there or is not whole.
    """
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except FileNotFoundError:
        raise StackError(f"{path} does not exist") from None
    except (ValueError, OSError, EOFError) as error:
        raise StackError(f"{path} is no result of ci.validate: {error}") from None


def digest(data: Any) -> str:
    """Return a short hash of plain data, the same for equal data."""
    return hashlib.sha256(json.dumps(_plain(data), sort_keys=True).encode()).hexdigest()[:16]


def _vllm_folder() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def code_digest(folder: Path) -> str:
    """Return the hash of a package's Python files: what ran, whatever it is called."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _git_head() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def identity() -> dict[str, Any]:
    """Return what identifies the software of a run.

    Returns:
        ``pin``, ``commit`` (upstream's), ``set_hash`` (the build's record if vLLM has one,
        else this repository's series, which says so), ``repository``, ``code`` (hash of
        vLLM's Python files), ``versions`` and ``environment``.

    Raises:
        StackError: This Python has no vLLM.
    """
    folder = _vllm_folder()
    if folder is None:
        raise StackError(
            f"{sys.executable} has no vLLM", "run it with the Python that vLLM is installed in"
        )
    the_pin = pin.load()
    record = folder / "hipstack" / "stack.json"
    built: Mapping[str, Any] = read_json(record) if record.is_file() else {}
    try:
        series: str | None = patches.load().set_hash
    except StackError:
        series = None  # a copy without patches
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "pin": built.get("pin", the_pin.version),
        "commit": built.get("commit", the_pin.commit),
        "set_hash": built.get("set_hash", series),
        "set_hash_from": "the installed build" if built else "this repository's series",
        "repository": _git_head(),
        "code": code_digest(folder),
        "versions": versions,
        "environment": {
            key: value
            for key, value in sorted(os.environ.items())
            if _ENVIRONMENT.fullmatch(key) and not _SECRET.search(key)
        },
    }
