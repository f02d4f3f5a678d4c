"""Run a program; a failure becomes one clear error."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.errors import StackError

# A build sets this, so that its log holds what its commands print.
log: Path | None = None


def capture(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input_bytes: bytes | None = None,
) -> tuple[int, str]:
    """Run a command to its end, whatever that is.

    Args:
        command: Program and arguments; no shell is involved.
        cwd: Where to run it.
        env: All of its variables; this process's own when left out.
        input_bytes: Its standard input.

    Returns:
        Its exit code, and its standard output and standard error together.

    Raises:
        OSError: It cannot be started.
    """
    result = subprocess.run(
        list(command),
        cwd=cwd,
        env=env,
        input=input_bytes,
        stdin=None if input_bytes is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return result.returncode, result.stdout.decode("utf-8", "replace")


def run(
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input_bytes: bytes | None = None,
    what: str = "",
    hint: str = "",
) -> str:
    """Run a command to its end.

    Args:
        command: Program and arguments; no shell is involved.
        cwd: Where to run it.
        env: Variables to set on top of this process's.
        input_bytes: Its standard input.
        what: The step's name for the error message; the program's name by default.
        hint: What to try when it fails.

    Returns:
        Its standard output and standard error together.

    Raises:
        StackError: It is not installed or exits non-zero; the message carries the first
            line that it printed as an error, or its last one.
    """
    try:
        code, output = capture(
            command, cwd=cwd, env={**os.environ, **(env or {})}, input_bytes=input_bytes
        )
    except FileNotFoundError:
        raise StackError(f"{command[0]} is not installed", hint) from None
    except OSError as error:
        raise StackError(f"{command[0]} cannot be run: {error.strerror}", hint) from None
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{output}")
    if code != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        raise StackError(
            f"{what or command[0]} failed ({code}): {_reason(lines)}",
            hint,
        )
    return output


def _reason(lines: list[str]) -> str:
    """Return the line that says why: git puts advice below its errors."""
    return next(
        (x for x in lines if x.startswith(("error: ", "fatal: "))), (lines or ["no output"])[-1]
    )
