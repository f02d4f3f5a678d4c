"""Read TOML with the standard library, or with tomli on Python 3.10."""

import importlib
from pathlib import Path
from typing import Any

from ci.errors import StackError


def read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: The file.

    Returns:
        Its top-level table.

    Raises:
        StackError: It does not exist or is not TOML.
    """
    parser = _parser()
    try:
        data: dict[str, Any] = parser.loads(path.read_text(encoding="utf-8"))
        return data
    except FileNotFoundError:
        raise StackError(f"{path} does not exist") from None
    except (parser.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StackError(f"{path} is not valid TOML: {error}") from None


def _parser() -> Any:
    """Import a TOML parser only when a file is read: 3.10 gets its own with the tools."""
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise StackError("this Python has no TOML parser", "pip install tomli")
