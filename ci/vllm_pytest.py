"""A pytest plugin for vLLM's own tests on a machine without a GPU.

vLLM's conftest cleans up distributed state after every test; that costs a second each
and asks the accelerator, which is not there.  Its own marker switches it off.
"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test so that the accelerator is left alone."""
    for item in items:
        item.add_marker(pytest.mark.skip_global_cleanup)
