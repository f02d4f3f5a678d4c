"""Lint, type-check and test patched trees the way upstream would.

``python3 -m ci.verify``, as CI runs it:

* each patch with only what it declares to depend on: it applies, what it touches imports,
  upstream's ruff and mypy (versions and settings) are content, its Test-Plan passes; a
  dependency that it hides is named;
* the whole series: it applies without fuzz or offset, ruff and mypy are content with every
  Python file that it touches, vLLM's own tests that it concerns (ci/upstream_tests.toml)
  and a sample of the plans pass;
* the series cut after one patch, sampled.

``--each``, ``--prefixes`` and ``--whole`` are one of the three, complete.  All on the CPU, with
the stand-in ``amdsmi`` that makes vLLM choose its ROCm platform.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import check, envs, gitstack, patches, paths, pin, toml, tree
from ci.errors import StackError, guarded
from ci.patches import Patch, Series
from ci.pin import Pin
from ci.run import capture

UPSTREAM_TESTS = paths.ROOT / "ci" / "upstream_tests.toml"
# Upstream's own pre-commit scripts for Python files, besides that of mypy.
HOOKS = (
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_torch_cuda.py",
    "check_boolean_context_manager.py",
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
    """How a command ended.

    Attributes:
        command: The command.
        code: Its exit code.
        counts: Tests by how they ended.
        seconds: How long it took.
        output: What it printed.
        imports: The modules of those that were asked for that do not import, and how;
            None when none was tried.
    """

    command: Command
    code: int
    counts: dict[str, int]
    seconds: float
    output: str
    imports: dict[str, str] | None = None

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

    Returns:
        One command for all that share an environment: most of a command's time goes into
        importing vLLM.

    Raises:
        StackError: The file is malformed, or a deselected test has no reason.
    """
    words: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for entry in toml.read(path)["tests"]:
        env = tuple(sorted(entry.get("env", {}).items()))
        command = words.setdefault(env, ["pytest", "-q"])
        command.append(entry["path"])
        for item in entry.get("deselect", []):
            if not item.get("why"):
                raise StackError(f"{path.name}: {item.get('test')} is deselected without a reason")
            command += ["--deselect", f"{entry['path']}::{item['test']}"]
    return [Command("upstream", tuple(command), env) for env, command in words.items()]


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
        # Without bytecode every process would compile all of vLLM again.
        if not key.startswith(("VLLM_", "TRITON_", "FAKE_", "HIP_", "HSA_"))
        and key != "PYTHONDONTWRITEBYTECODE"
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


def plan_of(patch: Patch) -> list[Command]:
    """Return the commands of a patch's Test-Plan.

    Raises:
        StackError: A line is no pytest command.
    """
    return [parse_command(patch.name, line) for line in patch.test_plan]


def run_command(command: Command, root: Path, python: Path, modules: Sequence[str] = ()) -> Outcome:
    """Run one command of a plan in a tree made by :func:`make_tree`.

    Args:
        command: The command.
        root: The tree.
        python: The interpreter of the environment that tests vLLM.
        modules: Modules to import on the way, in a copy of the process.
    """
    env = environment(root, dict(command.env))
    words = [str(python), "-m", "pytest", "-p", "ci.vllm_pytest", "-p", "no:cacheprovider", "-ra"]
    begin = time.monotonic()
    imports = None
    with tempfile.NamedTemporaryFile("w+", prefix="hipstack-imports-", suffix=".json") as file:
        if modules:
            json.dump({"modules": list(modules)}, file)
            file.flush()
            env["HIPSTACK_IMPORTS"] = file.name
        code, output = capture([*words, *command.words[1:]], cwd=root, env=env)
        if modules:
            imports = json.loads(Path(file.name).read_text() or "{}").get("bad")
    tail = "\n".join(output.splitlines()[-3:])
    counts = {kind: int(number) for number, kind in _COUNT.findall(tail)}
    return Outcome(command, code, counts, time.monotonic() - begin, output, imports)


def touched_files(series: Series, root: Path) -> list[str]:
    """Return the Python files that patches touch and that still exist."""
    found = {c.path for patch in series for c in patch.changes if c.path.endswith(".py")}
    return sorted(path for path in found if (root / path).is_file())


def lint(pin_: Pin, series: Series, root: Path, cache: Path | None = None) -> list[str]:
    """Run upstream's ruff, mypy and pre-commit scripts on the files that patches touch.

    Args:
        pin_: The pin.
        series: The patches whose files are looked at.
        root: The tree.
        cache: A folder for mypy's caches, so that the next tree is quick.

    Returns:
        What they complain about; empty when nothing.
    """
    python = envs.ensure_lint(pin_)
    files = touched_files(series, root)
    if not files:
        return []
    cache = cache or paths.BUILD / "verify" / f"mypy-{root.name}"
    env = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    commands = [
        ("ruff check", ["-m", "ruff", "check", *files], env),
        ("ruff format", ["-m", "ruff", "format", "--check", *files], env),
        *((hook, [f"tools/pre_commit/{hook}", *files], env) for hook in HOOKS),
    ]
    # Upstream's script follows imports from the package and not from the tests; mypy throws
    # a cache away that was made with the other setting.
    package = [path for path in files if path.startswith("vllm/")]
    tests = [path for path in files if path not in package]
    for kind, some in (("package", package), ("tests", tests)):
        if some:
            words = ["tools/pre_commit/mypy.py", "3.10", *some]
            commands.append(("mypy.py", words, env | {"MYPY_CACHE_DIR": str(cache / kind)}))
    problems = []
    for name, words, variables in commands:
        code, output = capture([str(python), *words], cwd=root, env=variables)
        if code != 0:
            problems.append(f"{name}:\n{output}")
    return problems


def run_commands(
    commands: Sequence[Command], root: Path, python: Path, modules: Sequence[str] = ()
) -> tuple[list[str], list[Outcome]]:
    """Run commands in a tree one after the other, and print how each ended.

    Args:
        commands: The commands.
        root: The tree.
        python: The interpreter of the environment that tests vLLM.
        modules: Modules that the first command imports on the way.

    Returns:
        Problems, and how each command ended.
    """
    problems, outcomes = [], []
    for index, command in enumerate(commands):
        outcome = run_command(command, root, python, () if index else modules)
        outcomes.append(outcome)
        word = "ok    " if outcome.good else "FAILED"
        counts = ", ".join(f"{n} {kind}" for kind, n in outcome.counts.items())
        print(f"{word} {outcome.seconds:6.1f} s  {command.owner}: "
              f"{command.text}: {counts or 'no test ran'}", flush=True)  # fmt: skip
        if not outcome.good:
            problems.append(f"{command.text}\n{outcome.output[-6000:]}")
    return problems, outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pin", help="which pin (default: the current)")
    parser.add_argument("--source", default="sdist", help="sdist, git or a path")
    parser.add_argument("--until", metavar="PATCH", help="only the series up to this patch")
    parser.add_argument(
        "--only", metavar="PATCH",
        help="only this patch: with --each or --prefixes those; else its plan on the whole series",
    )  # fmt: skip
    parser.add_argument(
        "--each", action="store_true", help="each patch with only what it declares to depend on"
    )
    parser.add_argument("--prefixes", action="store_true", help="the series cut after each patch")
    parser.add_argument(
        "--whole", action="store_true", help="the whole series, with all plans and vLLM's own tests"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N",
        help="of these N patches, chosen by the hash of the set, instead of all",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="trees at a time (2)")
    args = parser.parse_args(argv)

    def work() -> int:
        from ci import independence

        envs.reexec_in_tools("ci.verify", sys.argv[1:] if argv is None else argv)
        if args.jobs < 1 or (args.sample is not None and args.sample < 0):
            raise StackError("--jobs must be at least 1, --sample at least 0")
        parts = {
            part: args.sample for part in independence.PARTS if getattr(args, part)
        } or ({"whole": args.sample} if args.only else independence.CI)  # fmt: skip
        series = patches.load().until(args.until)
        problems, outcomes = independence.run(
            pin.load(args.pin), series, args.source, args.jobs, parts, args.only
        )
        return _report(problems, outcomes)

    return guarded(work)


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
