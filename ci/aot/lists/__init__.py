"""Kernel lists: which launches of the tree's kernels are compiled ahead of time.

A list is a module of this package (or a Python file given by path) with a global ``LIST`` of type
:class:`ci.aot.model.KernelList`. It says what to launch and for which shapes; it must import
nothing but the standard library, :mod:`ci.aot.model` and :mod:`ci.aot.models` at its top, as
torch and vLLM are there only inside ``launch``.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from ci.aot.model import AotError, KernelList

_FOLDER = Path(__file__).parent


def available() -> list[str]:
    """Names of the lists in this package."""
    return sorted(path.stem for path in _FOLDER.glob("[a-z]*.py"))


def load(name: str) -> tuple[KernelList, str]:
    """Load a list.

    Args:
        name: The name of a list in this package, or the path of a ``.py`` file.

    Returns:
        The list and the sha256 of its definition.

    Raises:
        AotError: There is no such list, or it is not valid.
    """
    path = Path(name) if name.endswith(".py") else _FOLDER / f"{name}.py"
    if not path.is_file() or (not name.endswith(".py") and name not in available()):
        raise AotError(f"no kernel list {name!r}; there are: {', '.join(available())}")
    spec = importlib.util.spec_from_file_location(f"ci_aot_list_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        result = module.LIST
    except Exception as error:
        raise AotError(f"kernel list {name}: {type(error).__name__}: {error}") from error
    if not isinstance(result, KernelList):
        raise AotError(f"kernel list {name}: LIST is not a KernelList")
    return result, hashlib.sha256(path.read_bytes()).hexdigest()
