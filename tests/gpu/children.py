# SPDX-License-Identifier: Apache-2.0
"""Processes of their own for parts of a check that runs on a GPU.

A child prints one line with its result; whatever else it prints goes to a log. It has
a time limit, and its whole process group ends with it, so that one that hangs costs
its own result and no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MARK = "RESULT "
# Less is not worth a start.
LEAST_S = 10.0
# Grace for the ranks of a child that was told to end.
_GRACE_S = 5.0

_log_lock = threading.Lock()


def answer(run: Callable[[], dict[str, Any]]) -> None:
    """Run a job in a child, print its result or error, and end the process at once."""
    start = time.perf_counter()
    try:
        result = run()
    except BaseException as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:400]}
    result["seconds"] = round(time.perf_counter() - start, 2)
    sys.stderr.flush()
    print("\n" + MARK + json.dumps(result), flush=True)
    # Engines may hang in their exit handlers on a machine like this.
    os._exit(0)


def find_result(text: str) -> dict[str, Any] | None:
    """Return the last result in a child's output, if there is a whole one."""
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            try:
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            return result
    return None


class Deadline:
    """The time that all children together may take."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        """Seconds until then."""
        return self._end - time.monotonic()


def run_child(
    script: Path,
    job: Mapping[str, Any],
    *,
    name: str,
    gpus: str,
    limit_s: float,
    deadline: Deadline,
    env: Mapping[str, str] | None = None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> dict[str, Any]:
    """Run ``script --job JOB`` and return its result.

    Args:
        script: The script; it calls ``answer`` when it is given ``--job``.
        job: What it is to do, as JSON.
        name: Heads its part of the log.
        gpus: Value of ``CUDA_VISIBLE_DEVICES``.
        limit_s: Seconds that it may take.
        deadline: When all children must have ended.
        env: More environment variables.
        on_start: Called with the child's process id.

    Returns:
        The child's result; with ``error`` if it gave none.

    """
    limit = min(limit_s, deadline.left())
    if limit < LEAST_S:
        return {"error": "not run: the time given is used up"}
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus,
        "OMP_NUM_THREADS": "2",
        # Small helpers would be compiled for longer than they run.
        "TORCHDYNAMO_DISABLE": "1",
        **(env or {}),
    }
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), "--job", json.dumps(dict(job))],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        on_start(process.pid)
        ended = "with"
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = f"by us after {limit:.0f} s, with"
        _end_group(process)
        log.seek(0)
        text = log.read()
    result = find_result(text)
    if result is None:
        lines = [line for line in text.splitlines() if line.strip()]
        last = lines[-1][-200:] if lines else "no output"
        result = {"error": f"ended {ended} status {process.returncode}: {last}"}
    result["log"] = text
    _keep_log(name, text, failed="error" in result)
    return result


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a child's process group: ranks outlive their engine."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
    process.wait()


def _keep_log(name: str, text: str, *, failed: bool) -> None:
    """Append the end of a log to ``$OUT/children.log``, if ``OUT`` is set."""
    if out := os.environ.get("OUT"):
        with _log_lock, open(Path(out) / "children.log", "a", errors="replace") as log:
            log.write(f"\n===== {name}\n{text[-16000 if failed else -5000 :]}\n")


def keep(name: str, content: str) -> None:
    """Write a file of results into ``$OUT``, if that is set."""
    if out := os.environ.get("OUT"):
        (Path(out) / name).write_text(content)


def columns(rows: list[list[str]]) -> str:
    """Lay out rows as columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
