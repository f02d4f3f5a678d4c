"""Is it us or upstream?  ``python3 -m ci.bisect [OPTIONS] -- COMMAND``.

Runs a failing command with the whole series and on the pristine pin.  Where the outcome is
the same, it is not the stack.  Where it is not, the command is run

--by prefix   with the series cut after a patch, halving until the first patch that makes the
              outcome what it is now is found (--linear: after every patch, from the first)
--by family   with each family of patches off, as patches/switches.toml says: by its
              environment variable, or without its patches and what depends on them

and the first that changes the outcome is named.

An outcome is the exit code and the last line of output, numbers left open; with --match it
is only whether the output has the pattern.  A command that exits 125 cannot be judged.

The command sees the patched tree first on PYTHONPATH; a ROCm vLLM that is installed for its
Python lends its compiled ops.  --emulate gfx1201 runs it without a GPU, on the stand-in.
"""

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import envs, patches, paths, pin, toml, verify
from ci.errors import StackError, guarded
from ci.patches import Series
from ci.pin import Pin

SWITCHES = paths.PATCHES / "switches.toml"
_CANNOT_JUDGE = 125
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Family:
    """Patches that are switched off together.

    Attributes:
        name: The family's name.
        patterns: Shell globs on patch names.
        env: Variables that switch it off, empty when there are none.
        about: What off means, in a sentence.
    """

    name: str
    patterns: tuple[str, ...]
    env: Mapping[str, str]
    about: str

    def patches(self, series: Series) -> tuple[str, ...]:
        """Return the names of its patches."""
        return tuple(
            name
            for name in series.names
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        )


def families(path: Path = SWITCHES) -> tuple[Family, ...]:
    """Read the table of switches.

    Raises:
        StackError: It is malformed.
    """
    found = []
    for name, table in toml.read(path).items():
        try:
            env = {str(k): str(v) for k, v in table.get("env", {}).items()}
            found.append(Family(name, tuple(table["patches"]), env, str(table["about"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise StackError(f"{path.name}: {name}: {error} is missing or wrong") from None
    return tuple(found)


def family_problems(series: Series, table: Sequence[Family]) -> list[str]:
    """Name the patches that no family or several families have."""
    found = []
    for name in series.names:
        having = [f.name for f in table if name in f.patches(series)]
        if len(having) != 1:
            found.append(f"{name}: belongs to {', '.join(having) or 'no family'}")
    return found


def switches_table(series: Series, table: Sequence[Family]) -> str:
    """Return the README's table of switches."""
    rows = ["| family | patches | off | |", "|---|---|---|---|"]
    for family in table:
        if family.patches(series):
            off = " ".join(f"`{k}={v}`" for k, v in family.env.items()) or "leave it out"
            listed = ", ".join(f"`{pattern}`" for pattern in family.patterns)
            rows.append(f"| {family.name} | {listed} | {off} | {family.about} |")
    return "\n".join(rows)


def without(series: Series, names: Sequence[str]) -> Series:
    """Return the series without patches and without what depends on them."""
    gone = set(names)
    for patch in series:
        if gone.intersection(patch.depends):
            gone.add(patch.name)
    return series.only(set(series.names) - gone)


@dataclass(frozen=True)
class Outcome:
    """How the command ended; equal where a person would call it the same."""

    text: str
    judged: bool = True


def outcome_of(code: int | None, output: str, match: str = "", root: str = "") -> Outcome:
    """Reduce a run to its outcome.

    Args:
        code: The exit code, negative for a signal, None for a command that was stopped
            because its time was over.
        output: What it printed.
        match: A regular expression that tells the failure, or empty.
        root: The tree, whose path is left out.
    """
    if code == _CANNOT_JUDGE:
        return Outcome("cannot be judged (exit 125)", judged=False)
    if match:
        return Outcome(f"/{match}/ {'shows' if re.search(match, output) else 'does not show'}")
    if code is None:
        return Outcome("ran out of time")
    if code == 0:
        return Outcome("passes")
    if code < 0:
        return Outcome(f"killed by {signal.Signals(-code).name}")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1].replace(root, "") if root and lines else (lines or [""])[-1]
    return Outcome(f"exit {code}: {_NUMBER.sub('N', last)[:200]}")


Trial = Callable[[Series, Mapping[str, str]], Outcome]


@dataclass(frozen=True)
class Verdict:
    """What the search found.

    Attributes:
        culprit: The patch or family, or empty.
        text: The answer in a sentence.
    """

    culprit: str
    text: str


def compare_with_pin(series: Series, trial: Trial, say: Callable[[str], None]) -> tuple[
    Outcome, Outcome
]:  # fmt: skip
    """Run the command with the series and on the pin.

    Raises:
        StackError: Either cannot be judged.
    """
    ours = trial(series, {})
    say(f"all {len(series)} patches: {ours.text}")
    theirs = trial(Series(()), {})
    say(f"pristine pin: {theirs.text}")
    for outcome in (ours, theirs):
        if not outcome.judged:
            raise StackError("the command says that it cannot be judged (exit 125)")
    return ours, theirs


def by_prefix(series: Series, trial: Trial, linear: bool, say: Callable[[str], None]) -> Verdict:
    """Find the first patch after which the command ends as with the whole series.

    Args:
        series: The series.
        trial: Runs the command with a selection of the series.
        linear: Try every cut instead of halving.
        say: Prints progress.
    """
    ours, theirs = compare_with_pin(series, trial, say)
    if ours == theirs:
        return _same(ours)
    known: dict[int, Outcome] = {0: theirs, len(series): ours}

    def at(count: int) -> Outcome:
        if count not in known:
            known[count] = trial(Series(series.patches[:count]), {})
            say(f"{count} patches, until {series.names[count - 1]}: {known[count].text}")
        return known[count]

    if linear:
        first = next(n for n in range(1, len(series) + 1) if at(n).judged and at(n) != theirs)
    else:
        low, first = 0, len(series)
        while first - low > 1:
            # A cut that cannot be judged is passed over towards the end.
            middle = next((n for n in range((low + first) // 2, first) if at(n).judged), None)
            if middle is None:
                first_half = range((low + first) // 2 - 1, low, -1)
                middle = next((n for n in first_half if at(n).judged), None)
            if middle is None:
                break
            if at(middle) == ours:
                first = middle
            else:
                low = middle
        if first - low > 1:
            between = ", ".join(series.names[low:first])
            return Verdict("", f"one of these, the cuts between cannot be judged: {between}")
    name = series.names[first - 1]
    before = at(first - 1).text
    return Verdict(
        name, f"{name} changes the outcome: before it {before}; with it {at(first).text}"
    )


def by_family(
    series: Series, table: Sequence[Family], trial: Trial, drop: bool, say: Callable[[str], None]
) -> Verdict:
    """Find the first family without which the command ends otherwise.

    Args:
        series: The series.
        table: The families.
        trial: Runs the command.
        drop: Take patches out even where a variable switches them off.
        say: Prints progress.
    """
    ours, theirs = compare_with_pin(series, trial, say)
    if ours == theirs:
        return _same(ours)
    for family in table:
        names = family.patches(series)
        if not names:
            continue
        if family.env and not drop:
            how = " ".join(f"{k}={v}" for k, v in family.env.items())
            outcome = trial(series, family.env)
        else:
            left = without(series, names)
            also = [n for n in series.names if n not in left.names and n not in names]
            how = "its patches left out" + (f", and so {', '.join(also)}" if also else "")
            try:
                outcome = trial(left, {})
            except StackError as error:
                outcome = Outcome(f"cannot be judged: {error}", judged=False)
        say(f"without {family.name} ({how}): {outcome.text}")
        if outcome.judged and outcome != ours:
            return Verdict(
                family.name,
                f"{family.name} changes the outcome: with it {ours.text}; off ({how}) "
                f"{outcome.text}",
            )
    return Verdict("", "no family alone changes the outcome (try: --by prefix)")


def _same(outcome: Outcome) -> Verdict:
    if outcome.text == "passes":
        return Verdict("", "the command passes, with the series and without")
    return Verdict("", f"not the stack: the pristine pin ends the same ({outcome.text})")


class Runner:
    """Runs the command in patched trees, one after the other at the same place.

    Args:
        the_pin: The pin.
        args: The command line.
    """

    def __init__(self, the_pin: Pin, args: argparse.Namespace) -> None:
        self.pin, self.args = the_pin, args
        self.root = paths.BUILD / "bisect" / "vllm-src"
        self.laid: Series | None = None
        self.runs = 0
        if args.emulate:
            from ci import check

            self.python = str(envs.ensure_env(the_pin, check.pristine(the_pin, args.source)))
        else:
            self.python = args.python or shutil.which("python") or shutil.which("python3") or ""
        self.installed, self.version = ("", "") if args.emulate else self._installed()

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        if self.args.emulate:
            env = verify.environment(self.root, {"FAKE_GFX": self.args.emulate})
            path = f"{Path(self.python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
            env["PATH"] = path
        else:
            env = dict(os.environ)
            own = [str(self.root), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(p for p in own if p)
        return env | dict(extra)

    def _installed(self) -> tuple[str, str]:
        """Return where vLLM is installed for the command's Python, and its version."""
        code = (
            "import importlib.util as u, importlib.metadata as m\n"
            "s = u.find_spec('vllm')\n"
            "print(s.submodule_search_locations[0] if s else '')\n"
            "print(m.version('vllm') if s else '')"
        )
        result = subprocess.run(
            [self.python, "-P", "-c", code] if _knows_p(self.python) else [self.python, "-c", code],
            cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = result.stdout.splitlines()
        return (lines[0], lines[1]) if result.returncode == 0 and len(lines) == 2 else ("", "")

    def _lay(self, series: Series) -> None:
        if self.laid is not None and self.laid.names == series.names:
            return
        old, self.laid = self.laid, None
        if old is not None:
            verify.change_tree(self.pin, old, series, self.root, self.args.source)
            self.laid = series
            return
        verify.make_tree(self.pin, series, self.root, self.args.source, exact=False)
        if self.installed:
            lend_ops(Path(self.installed), self.root / "vllm")
            (self.root / "vllm" / "_version.py").write_text(
                f'__version__ = "{self.version}"\n__version_tuple__ = (0, 0, 0)\n'
            )
        found = subprocess.run(
            [self.python, "-c", "import importlib.util as u; print(u.find_spec('vllm').origin)"],
            cwd="/", env=self._environment({}), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not found.stdout.strip().startswith(str(self.root)):
            raise StackError(
                f"{self.python} imports vllm from {found.stdout.strip() or 'nowhere'}, not from "
                "the patched tree",
                "--python names the interpreter that the command uses",
            )
        self.laid = series

    def __call__(self, series: Series, extra: Mapping[str, str]) -> Outcome:
        """Run the command with a selection of the series."""
        self._lay(series)
        self.runs += 1
        log = self.root.parent / f"run-{self.runs:02}.log"
        where = self.root if self.args.in_tree else Path(self.args.cwd or os.getcwd())
        code: int | None
        with log.open("wb") as file:
            try:
                process = subprocess.Popen(
                    self.args.words, cwd=where, env=self._environment(extra), stdout=file,
                    stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise StackError(f"cannot run {self.args.words[0]}: {error.strerror}") from None
            try:
                code = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_group(process)
        output = log.read_text(encoding="utf-8", errors="replace")
        return outcome_of(code, output, self.args.match, str(self.root))


def _knows_p(python: str) -> bool:
    result = subprocess.run([python, "-P", "-c", ""], capture_output=True, check=False)
    return result.returncode == 0


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what the command left running: its engine processes would keep the GPU."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lend_ops(installed: Path, package: Path) -> int:
    """Link an installation's compiled libraries into a tree's package.

    Returns:
        How many.
    """
    count = 0
    for library in sorted(installed.rglob("*.so")):
        target = package / library.relative_to(installed)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(library.resolve())
            count += 1
    return count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.bisect",
        usage="python3 -m ci.bisect [OPTIONS] -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the failing command")
    parser.add_argument("--by", choices=("prefix", "family"), default="prefix")
    parser.add_argument("--linear", action="store_true", help="try every prefix, do not halve")
    parser.add_argument("--drop", action="store_true", help="families: by leaving patches out")
    parser.add_argument("--match", default="", metavar="REGEX", help="what the failure prints")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for each run")
    parser.add_argument("--emulate", default="", metavar="GFX", help="without a GPU, as this one")
    parser.add_argument("--python", default="", help="the Python that the command uses")
    parser.add_argument("--cwd", metavar="DIR", help="where to run the command (here)")
    parser.add_argument("--in-tree", action="store_true", help="run it in the root of the tree")
    parser.add_argument("--switches", action="store_true", help="print the off switches and stop")
    parser.add_argument("--pin", help="which pin (default: the current)")
    parser.add_argument("--source", default="sdist", help="of the pin: sdist, git or a path")
    args = parser.parse_args(argv)

    def work() -> int:
        if not args.words and not args.switches:
            raise StackError("there is no command", "python3 -m ci.bisect -- COMMAND")
        try:
            re.compile(args.match)
        except re.error as error:
            raise StackError(f"--match: {error}") from None
        envs.reexec_in_tools("ci.bisect", sys.argv[1:] if argv is None else argv)
        series, table = patches.load(), families()
        if args.switches:
            print(switches_table(series, table))
            return 0
        trial = Runner(pin.load(args.pin), args)

        def say(text: str) -> None:
            print(text, flush=True)

        if args.by == "prefix":
            verdict = by_prefix(series, trial, args.linear, say)
        else:
            verdict = by_family(series, table, trial, args.drop, say)
        print(f"\n{verdict.text}\noutput of every run: {trial.root.parent}/run-*.log")
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
