"""Lint, type-check and test a patched tree the way upstream would.

``python -m ci.verify`` makes a tree with the series applied and runs on it

* ruff (check and format) and mypy, upstream's versions and settings, on every Python
  file that a patch touches;
* every patch's Test-Plan;
* vLLM's own tests that the patches concern (ci/upstream_tests.toml),

all on the CPU, with the stand-in ``amdsmi`` that makes vLLM choose its ROCm platform.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ci import check, envs, gitstack, patches, paths, pin, toml, tree
from ci.errors import StackError
from ci.patches import Series
from ci.pin import Pin

UPSTREAM_TESTS = paths.ROOT / "ci" / "upstream_tests.toml"
# Upstream's own pre-commit scripts for Python files, with their leading arguments.
HOOKS: tuple[tuple[str, list[str]], ...] = (
    ("mypy.py", ["3.10"]),
    ("check_spdx_header.py", []),
    ("check_forbidden_imports.py", []),
    ("check_torch_cuda.py", []),
    ("check_boolean_context_manager.py", []),
)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|error)")


@dataclass(frozen=True)
class Command:
    """One command of a test plan, run from the root of vLLM's tree."""

    owner: str
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The command as a person would type it."""
        return " ".join(
            [*(f"{k}={shlex.quote(v)}" for k, v in self.env), *map(shlex.quote, self.words)]
        )


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    command: Command
    code: int
    counts: dict[str, int]
    seconds: float
    output: str

    @property
    def good(self) -> bool:
        """Whether it passed and ran at least one test."""
        return self.code == 0 and self.counts.get("passed", 0) > 0


def parse_command(owner: str, text: str) -> Command:
    """Split a line of a test plan into environment and words.

    Raises:
        StackError: It is no pytest command.
    """
    words = shlex.split(text)
    env: list[tuple[str, str]] = []
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env.append((name, value))
    if not words or words[0] != "pytest":
        raise StackError(f"{owner}: Test-Plan: {text!r} is no pytest command")
    return Command(owner, tuple(words), tuple(env))


def upstream_commands(path: Path = UPSTREAM_TESTS) -> list[Command]:
    """Read the list of vLLM's own tests.

    Raises:
        StackError: The file is malformed, or a deselected test has no reason.
    """
    commands = []
    for entry in toml.read(path)["tests"]:
        words = ["pytest", "-q", entry["path"]]
        for item in entry.get("deselect", []):
            if not item.get("why"):
                raise StackError(f"{path.name}: {item.get('test')} is deselected without a reason")
            words += ["--deselect", f"{entry['path']}::{item['test']}"]
        env = tuple(sorted(entry.get("env", {}).items()))
        commands.append(Command("upstream", tuple(words), env))
    return commands


def make_tree(
    pin_: Pin, series: Series, destination: Path, origin: str = "sdist", exact: bool = True
) -> None:
    """Make a patched tree that can be imported in place.

    Args:
        pin_: The pin.
        series: The patches.
        destination: Where; an older tree there is replaced.
        origin: Where the pristine source comes from.
        exact: Refuse offsets; a selection of the series has them where a patch that is
            left out adds lines higher up in the same file.

    Raises:
        StackError: A patch does not apply; the message begins with its name.
    """
    gitstack.remove_tree(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    gitstack.copy_tree(check.pristine(pin_, origin), destination)
    if exact:
        tree.apply(destination, series, destination.parent / f"{destination.name}-patches")
    else:
        for patch in series:
            tree.apply_with_offset(destination, patch)
    version = pin_.version
    numbers = ", ".join(version.split("."))
    (destination / "vllm" / "_version.py").write_text(
        f'__version__ = "{version}"\n__version_tuple__ = ({numbers})\n'
    )
    info = destination / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def change_tree(pin_: Pin, old: Series, new: Series, root: Path, origin: str = "sdist") -> None:
    """Turn a tree of :func:`make_tree` into that of another selection of patches.

    Only the files that patches touch are written, which is much quicker than a new tree.

    Args:
        pin_: The pin.
        old: The patches in the tree.
        new: The patches that shall be in it.
        root: The tree.
        origin: Where the pristine source comes from.

    Raises:
        StackError: A patch does not apply; the tree has to be made anew then.
    """
    base = check.pristine(pin_, origin)
    for path in sorted({c.path for patch in old for c in patch.changes}, reverse=True):
        file, before = root / path, base / path
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()
        file.unlink(missing_ok=True)
        if before.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(before, file)
        elif not (base / path).parent.is_dir():
            # An empty folder would still be a package to Python.
            shutil.rmtree(file.parent, ignore_errors=True)
    for patch in new:
        tree.apply_with_offset(root, patch)


def environment(root: Path, own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which a tree runs on a machine without a GPU.

    Args:
        root: The tree.
        own: What the command itself sets; where it names a target device, the stand-in
            for an AMD GPU is left out.
    """
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VLLM_", "TRITON_", "FAKE_", "HIP_", "HSA_"))
    }
    folders = [str(root), str(paths.ROOT)]
    if "VLLM_TARGET_DEVICE" not in own:
        # vLLM believes the stand-in; a command that names its platform goes without.
        folders.insert(1, str(paths.STANDIN))
        env |= {"FAKE_GFX": "gfx1201", "HIP_VISIBLE_DEVICES": ""}
    return env | {
        "PYTHONPATH": os.pathsep.join(folders),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        **own,
    }


def run_command(command: Command, root: Path, python: Path) -> Outcome:
    """Run one command of a plan in a tree made by :func:`make_tree`."""
    env = environment(root, dict(command.env))
    words = [str(python), "-m", "pytest", "-p", "ci.vllm_pytest", "-p", "no:cacheprovider", "-ra"]
    begin = time.monotonic()
    result = subprocess.run(
        [*words, *command.words[1:]],
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    output = result.stdout.decode("utf-8", "replace")
    tail = "\n".join(output.splitlines()[-3:])
    counts = {kind: int(number) for number, kind in _COUNT.findall(tail)}
    return Outcome(command, result.returncode, counts, time.monotonic() - begin, output)


def touched_files(series: Series, root: Path) -> list[str]:
    """Return the Python files that patches touch and that still exist."""
    found = {c.path for patch in series for c in patch.changes if c.path.endswith(".py")}
    return sorted(path for path in found if (root / path).is_file())


def lint(pin_: Pin, series: Series, root: Path) -> list[str]:
    """Run upstream's ruff and mypy on the files that patches touch.

    Returns:
        What they complain about; empty when nothing.
    """
    python = envs.ensure_lint(pin_)
    files = touched_files(series, root)
    if not files:
        return []
    problems = []
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for words in (
        [str(python), "-m", "ruff", "check", *files],
        [str(python), "-m", "ruff", "format", "--check", *files],
        *([str(python), f"tools/pre_commit/{hook}", *more, *files] for hook, more in HOOKS),
    ):
        name = f"ruff {words[3]}" if words[1] == "-m" else words[1]
        result = subprocess.run(
            words, cwd=root, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if result.returncode != 0:
            problems.append(f"{name}:\n{result.stdout}")
    return problems


def verify(
    pin_: Pin, series: Series, root: Path, commands: Sequence[Command], jobs: int
) -> tuple[list[str], list[Outcome]]:
    """Lint a tree and run commands in it, several at a time.

    Returns:
        Problems, and how each command ended.
    """
    problems = lint(pin_, series, root)
    failed, outcomes = run_commands(commands, root, envs.ensure_env(pin_, root), jobs)
    return problems + failed, outcomes


def run_commands(
    commands: Sequence[Command], root: Path, python: Path, jobs: int
) -> tuple[list[str], list[Outcome]]:
    """Run commands in a tree, several at a time, and print how each ended.

    Returns:
        Problems, and how each command ended.
    """
    problems, outcomes = [], []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for outcome in pool.map(lambda c: run_command(c, root, python), commands):
            outcomes.append(outcome)
            word = "ok    " if outcome.good else "FAILED"
            counts = ", ".join(f"{n} {kind}" for kind, n in outcome.counts.items())
            print(f"{word} {outcome.seconds:6.1f} s  {outcome.command.owner}: "
                  f"{outcome.command.text}: {counts or 'no test ran'}", flush=True)  # fmt: skip
            if not outcome.good:
                problems.append(f"{outcome.command.text}\n{outcome.output[-6000:]}")
    return problems, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pin", help="which pin (default: the current)")
    parser.add_argument("--source", default="sdist", help="sdist, git or a path")
    parser.add_argument("--until", metavar="PATCH", help="only the series up to this patch")
    parser.add_argument("--only", metavar="PATCH", help="only this patch's plan")
    parser.add_argument("--no-upstream", action="store_true", help="leave vLLM's own tests out")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    parser.add_argument(
        "--each", action="store_true",
        help="instead: each patch with only what it declares to depend on",
    )  # fmt: skip
    parser.add_argument(
        "--prefixes", action="store_true", help="instead: the series cut after each patch"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N",
        help="with these two: N patches, chosen by the hash of the set, instead of all",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        envs.reexec_in_tools("ci.verify", sys.argv[1:] if argv is None else argv)
        pin_ = pin.load(args.pin)
        series = patches.load().until(args.until)
        if args.each or args.prefixes:
            from ci import independence

            problems, outcomes = independence.run(
                pin_, series, args.source, args.jobs, args.each, args.prefixes,
                args.sample, args.only,
            )  # fmt: skip
            return _report(problems, outcomes)
        chosen = [series.get(args.only)] if args.only else list(series)
        commands = [parse_command(p.name, line) for p in chosen for line in p.test_plan]
        if not args.no_upstream and not args.only:
            commands += upstream_commands()
        root = paths.BUILD / "verify" / "vllm-src"
        make_tree(pin_, series, root, args.source)
        problems, outcomes = verify(pin_, series, root, commands, args.jobs)
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _report(problems, outcomes)


def _report(problems: Sequence[str], outcomes: Sequence[Outcome]) -> int:
    """Print problems and totals; return the exit code."""
    for problem in problems:
        print(f"\n--- {problem}", file=sys.stderr)
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in outcomes:
        for kind, number in outcome.counts.items():
            key = "failed" if kind == "error" else kind
            total[key] = total.get(key, 0) + number
    print("in-tree: {passed} passed, {failed} failed, {skipped} skipped".format(**total))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
