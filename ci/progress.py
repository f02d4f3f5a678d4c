"""What a person sees while a build runs, and the log that keeps all of it."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ci import run
from ci.errors import StackError

_HINTS = {
    "source": "--source sdist",
    "series": "python3 -m ci.stack check",
    "environment": "check network, disk and the package index, then run it again",
    "kernels": "run it again with --until to find the patch at fault",
    "toolchain": "check network, disk and the mirror, then run it again",
    "wheel": "read the end of the log",
    "proof": "run it again with --until to find the patch at fault",
    "records": "another --out",
}


_SLOW = ("environment", "kernels", "toolchain", "wheel", "proof")


class Steps:
    """Numbered steps, each a line on the terminal and a section in the log.

    Args:
        total: How many steps there will be.
        log: The log file.
        quiet: Print nothing but errors.
    """

    def __init__(self, total: int, log: Path, quiet: bool) -> None:
        self.total = total
        self.log = log
        self.quiet = quiet
        self.done = 0
        self.current = ""
        self.shown = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        run.log = log

    def say(self, text: str) -> None:
        """Print a line and keep it in the log."""
        with self.log.open("a") as file:
            file.write(text + "\n")
        if not self.quiet:
            print(text, flush=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[list[str]]:
        """Run one step; what is appended to the yielded list ends its line."""
        self.done += 1
        self.current = title
        head = f"[{self.done}/{self.total}] {title}"
        live = sys.stdout.isatty() and not self.quiet
        if live:
            print(f"{head} ...", end="\r", flush=True)
        elif not self.quiet and title in _SLOW:
            print(f"{head} ...", flush=True)
        with self.log.open("a") as file:
            file.write(f"== {head}\n")
        notes: list[str] = []
        begin = time.monotonic()
        yield notes
        detail = f": {'; '.join(notes)}" if notes else ""
        self.say(f"{head}{detail} ({time.monotonic() - begin:.1f} s)")

    def tick(self, text: str) -> None:
        """Show within a step what is being done: at once on a terminal, else now and then."""
        with self.log.open("a") as file:
            file.write(f"{text}\n")
        if self.quiet:
            return
        shown = f"[{self.done}/{self.total}] {self.current}: {text:<60.60}"
        if sys.stdout.isatty():
            print(shown, end="\r", flush=True)
        elif time.monotonic() - self.shown > 60:
            self.shown = time.monotonic()
            print(shown.rstrip(), flush=True)

    def fail(self, error: StackError) -> str:
        """Return the lines that a failed build ends with."""
        if not error.hint and self.current in _HINTS:
            error = StackError(str(error), _HINTS[self.current])
        with self.log.open("a") as file:
            file.write(f"FAILED in {self.current}: {error}\n")
        where = (
            f"error: step {self.done}/{self.total} ({self.current}): "
            if self.current
            else "error: "
        )
        return f"{where}{error}\nlog: {self.log}"
