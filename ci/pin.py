"""The pinned upstream release."""

import re
from dataclasses import dataclass
from pathlib import Path

from ci import toml
from ci.errors import StackError
from ci.paths import PIN_FILE

_PATTERNS = {
    "version": r"\d+\.\d+\.\d+",
    "commit": r"[0-9a-f]{40}",
    "git": r"\S+",
    "tag": r"\S+",
    "sdist": r"[\w.+-]+\.tar\.gz",
    "sdist_sha256": r"[0-9a-f]{64}",
    "tree_sha256": r"[0-9a-f]{64}",
    "torch": r"\d+\.\d+\.\d+",
    "triton": r"\d+\.\d+\.\d+",
    "ruff": r"\d+\.\d+\.\d+",
    "mypy": r"\d+\.\d+\.\d+",
}


@dataclass(frozen=True)
class Pin:
    """One upstream release, as ``vllm-src/pin.toml`` describes it."""

    name: str
    version: str
    commit: str
    git: str
    tag: str
    sdist: str
    sdist_sha256: str
    tree_sha256: str
    torch: str
    triton: str
    ruff: str
    mypy: str
    python: tuple[str, ...]


def load(name: str | None = None, path: Path = PIN_FILE) -> Pin:
    """Read a pin.

    Args:
        name: Which pin; the file's ``current`` one when left out.
        path: The pin file.

    Returns:
        The pin, every field checked.

    Raises:
        StackError: The file, the pin or one of its fields is missing or malformed.
    """
    data = toml.read(path)
    name = name or data.get("current")
    tables = data.get("pins", {})
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise StackError(f"{path.name}: [pins] must hold one table a pin")
    if not isinstance(name, str) or name not in tables:
        known = ", ".join(sorted(tables)) or "none"
        raise StackError(f"{path.name} has no pin named {name!r}; known: {known}")
    table = {key.replace("-", "_"): value for key, value in tables[name].items()}
    for field, pattern in _PATTERNS.items():
        value = table.get(field)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise StackError(
                f"{path.name}: pin {name}: {field.replace('_', '-')} is missing or "
                f"malformed: {value!r}"
            )
    python = table.get("python")
    if not isinstance(python, list) or not all(
        isinstance(p, str) and re.fullmatch(r"(>=|<)\d+\.\d+", p) for p in python
    ):
        raise StackError(f'{path.name}: pin {name}: python must be a list like [">=3.10"]')
    return Pin(name=name, python=tuple(python), **{field: table[field] for field in _PATTERNS})
