"""Shared by the tests of the stack and of its build."""

import subprocess
import sys
from pathlib import Path

import pytest

from ci import paths, pin, source
from ci.patches import Patch, Series

HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: hipstack contributors <hipstack@example.invalid>
Date: Mon, 30 Nov 2026 12:00:00 +0000
Subject: [PATCH] {subject}

Why: because.

Test-Plan:
 pytest tests/test_x.py -q

Depends: {depends}
Forwarded: no
Obsolete-When: upstream has it
Hipstack-Patch: {name}

"""
NEW_FILE = """\
diff --git a/{path} b/{path}
new file mode 100644
index 0000000000000000000000000000000000000000..{blob}
--- /dev/null
+++ b/{path}
@@ -0,0 +1 @@
+{line}
"""


def run_module(module: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` from the repository's root."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


def make_patch(
    name: str,
    diff: str = "",
    depends: str = "none",
    subject: str = "[ROCm] Do something",
    header: str = HEADER,
) -> Patch:
    """A patch with a complete header."""
    text = header.format(name=name, depends=depends, subject=subject) + (
        diff
        or NEW_FILE.format(
            path=f"tests/{name.split('/')[1]}.py",
            blob="1" * 40,
            line=f"x = '{name}'",
        )
    )
    return Patch(name, text.encode())


def make_series(*patches: Patch) -> Series:
    return Series(tuple(patches))


@pytest.fixture(scope="session")
def the_pin() -> pin.Pin:
    return pin.load()


@pytest.fixture(scope="session")
def sdist(the_pin) -> Path:
    """The pinned sdist, downloaded once and verified."""
    return source.fetch_sdist(the_pin)


@pytest.fixture
def small_tree(tmp_path) -> Path:
    """A made-up source tree in which patches are quick to try."""
    root = tmp_path / "upstream"
    (root / "vllm").mkdir(parents=True)
    (root / "setup.py").write_text("print('setup')\n")
    (root / "vllm" / "a.py").write_text("".join(f"line {i}\n" for i in range(1, 41)))
    (root / "vllm" / "b.py").write_text("one\ntwo\nthree\n")
    (root / ".gitignore").write_text("ignored.json\n")
    (root / "ignored.json").write_text("{}\n")
    return root
