"""Run vLLM's own setup.py with a toolchain, and say how far it is."""

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ci import toml
from ci.errors import StackError

COSTS = Path(__file__).with_name("costs.toml")
# CMake goes on after these, without the options that it would give a compiler that it knows
# (-O3, -std): an hour later there would be a slow wheel.
UNUSABLE = (
    "-- The HIP compiler identification is unknown",
    "-- The CXX compiler identification is unknown",
)
_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
_FILE = re.compile(r"([\w.-]+)\.o\b")


class Progress:
    """Follows ninja's lines and estimates the time left by what the files cost.

    Args:
        costs: File name to its CPU seconds; others take the default.
        default: That default.
        jobs: How many compile at a time.
        clock: A clock in seconds.
    """

    # So many CPU seconds must be done before the speed seen outweighs the tracked one.
    TRUST = 120.0

    def __init__(
        self,
        costs: Mapping[str, float],
        default: float,
        jobs: int,
        clock: Callable[[], float],
    ) -> None:
        self.left = dict(costs)
        self.default = default
        self.jobs = jobs
        self.clock = clock
        self.begin: float | None = None
        self.done = 0.0

    def line(self, text: str) -> str | None:
        """Return what to show after a line of output, or None when it says nothing."""
        match = _STEP.match(text)
        if not match:
            return None
        if self.begin is None:
            self.begin = self.clock()
        finished, total, what = int(match[1]), int(match[2]), match[3]
        file = _FILE.search(what) if "Building" in what else None
        if file:
            self.done += self.left.pop(file[1], self.default)
        shown = f"{finished}/{total} {file[1] if file else what}"
        others = max(0, total - finished - len(self.left))
        work = sum(self.left.values()) + others * self.default
        spent = self.clock() - self.begin
        # Seconds that pass for a CPU second: as tracked at first, then as seen.
        pace = (spent + self.TRUST / self.jobs) / (self.done + self.TRUST)
        return f"{shown}, about {duration(work * pace)} left" if finished < total else shown


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def costs(arches: int) -> tuple[dict[str, float], float]:
    """Return the tracked costs, and the default, for a number of architectures."""
    table = toml.read(COSTS)
    factor = 1 + (arches - 1) * table["share_of_device"]
    return (
        {name: cost * factor for name, cost in table["files"].items()},
        table["default"] * factor,
    )


def setup(
    command: Sequence[str],
    cwd: Path | None,
    env: Mapping[str, str] | None,
    log: Path,
    progress: Callable[[str], None],
    jobs: int,
    arches: int,
) -> None:
    """Run setup.py to its end.

    Args:
        command: The whole command.
        cwd: Where to run it, or None where the command itself goes there.
        env: Its environment, or None where the command sets it.
        log: File that gets its output.
        progress: Told about each file.
        jobs: How many files compile at a time.
        arches: For how many architectures.

    Raises:
        StackError: It failed; the message has the first error of the compiler, or the last
            line.
    """
    known, default = costs(arches)
    follow = Progress(known, default, jobs, time.monotonic)
    with log.open("ab") as file:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, umask=0o022,
        )  # fmt: skip
        assert process.stdout is not None
        tail: list[str] = []
        try:
            for raw in process.stdout:
                file.write(raw)
                file.flush()
                text = raw.decode("utf-8", "replace").rstrip()
                if text:
                    tail = [*tail[-400:], text]
                if text in UNUSABLE:
                    raise StackError(f"CMake: {text.removeprefix('-- ')}")
                if shown := follow.line(text):
                    progress(shown)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        code = process.wait()
    if code != 0:
        raise StackError(f"setup.py failed ({code}): {reason(tail)}")


def reason(lines: Sequence[str]) -> str:
    """Return the line of a failed build that says why."""
    for pattern in (r"\b(?:fatal )?error: ", r"^CMake Error", r"No space left", r"Killed"):
        for index, line in enumerate(lines):
            if re.search(pattern, line):
                more = lines[index + 1].strip() if line.startswith("CMake Error") else ""
                return f"{line.strip()} {more}".strip()
    return lines[-1].strip() if lines else "no output"
