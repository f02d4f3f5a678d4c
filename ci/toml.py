"""Read TOML with the standard library, or with tomli on Python 3.10."""

import sys
from pathlib import Path
from typing import Any

from ci.errors import StackError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the machines that run the tests have 3.11
    import tomli as tomllib


def read(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Args:
        path: The file.

    Returns:
        Its top-level table.

    Raises:
        StackError: It does not exist or is not TOML.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return data
    except FileNotFoundError:
        raise StackError(f"{path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StackError(f"{path} is not valid TOML: {error}") from None
