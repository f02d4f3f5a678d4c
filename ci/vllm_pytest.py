"""A pytest plugin for vLLM's own tests on a machine without a GPU.

vLLM's conftest cleans up distributed state after every test; that costs a second each
and asks the accelerator, which is not there.  Its own marker switches it off.

Where ``HIPSTACK_IMPORTS`` names a file with a list of modules, they are imported in a copy of
the process once it has collected, and what fails is written to that file: vLLM itself is
imported by then, which is most of the time that an import takes.
"""

import gc
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

_REQUEST = os.environ.pop("HIPSTACK_IMPORTS", "")

# vLLM's imports make millions of objects that live to the end.  Searching them for garbage
# while they are made, and again at every collection, takes as long as the imports themselves.
gc.disable()


def import_all(names: Sequence[str]) -> dict[str, str]:
    """Import modules; return those that fail, and how."""
    bad = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            bad[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return bad


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test so that the accelerator is left alone."""
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection; try the imports that were asked for."""
    gc.freeze()
    gc.enable()
    if not _REQUEST:
        return
    child = os.fork()
    if child == 0:
        try:
            request = Path(_REQUEST)
            bad = import_all(json.loads(request.read_text())["modules"])
            request.write_text(json.dumps({"bad": bad}))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
