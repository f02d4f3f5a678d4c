"""Does each patch stand on what it declares, and does every prefix of the series work?

A *cell* is a selection of the series, laid onto the pin and judged in four stages: it
applies, the modules that it touches import, upstream's linters are content, and the test
plans pass.

each       a patch with only the patches that it ``Depends:`` on; when the same stage passes
           with all patches before it, the dependency that it hides is searched and named
prefixes   the series cut after a patch: that patch's plan, and the plans of the patches
           before it that share a file of upstream with it

``--sample N`` judges N cells of each kind, chosen by the hash of the set, so that every
change of the series turns to other ones and a run can be repeated, and a cut then runs its
last patch's plan alone; that all patches apply with what they declare is always looked at,
it costs nothing.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ci import check, envs, paths, tree, verify
from ci.errors import StackError
from ci.patches import Patch, Series
from ci.pin import Pin

STAGES = ("apply", "import", "lint", "tests")
# What every vLLM process imports, besides the modules that a patch touches.
_ALWAYS = ("vllm", "vllm.platforms", "vllm.config", "vllm.v1.attention.selector")
_IMPORT = """
import importlib, json, sys
bad = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        bad[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
print("\\n" + json.dumps(bad))
"""


@dataclass(frozen=True)
class Cell:
    """A selection of the series to judge.

    Attributes:
        name: What it is called in messages.
        series: The patches, in order.
        focus: The patch whose modules, files and plan are judged.
        plans: Further patches whose plans shall pass.
    """

    name: str
    series: Series
    focus: Patch
    plans: tuple[Patch, ...] = ()


class Bench(Protocol):
    """Where cells are laid out and judged."""

    def judge(self, cell: Cell, stage: str) -> list[str]:
        """Return what is wrong in one stage; the stages before it have passed."""
        ...


class VllmBench:
    """Judges cells on vLLM's tree, on the CPU.

    Args:
        pin: The pin.
        origin: Where the pristine source comes from.
        jobs: Commands at a time.
    """

    def __init__(self, pin: Pin, origin: str, jobs: int) -> None:
        self.pin, self.origin, self.jobs = pin, origin, jobs
        self.root = paths.BUILD / "verify" / "cell"
        self.base = check.pristine(pin, origin)
        self._laid: tuple[str, ...] | None = None
        self.outcomes: list[verify.Outcome] = []

    def judge(self, cell: Cell, stage: str) -> list[str]:
        """See :class:`Bench`."""
        if stage == "apply":
            return applies(self.base, cell.series)
        self._lay(cell.series)
        if stage == "import":
            return self._imports(cell)
        if stage == "lint":
            return verify.lint(self.pin, Series((cell.focus,)), self.root)
        try:
            commands = [
                verify.parse_command(p.name, line)
                for p in (cell.focus, *cell.plans)
                for line in p.test_plan
            ]
        except StackError as error:
            return [str(error)]
        python = envs.ensure_env(self.pin, self.root)
        problems, outcomes = verify.run_commands(commands, self.root, python, self.jobs)
        self.outcomes += outcomes
        return problems

    def _lay(self, series: Series) -> None:
        if self._laid != series.names:
            self._laid = None
            verify.make_tree(self.pin, series, self.root, self.origin, exact=False)
            self._laid = series.names

    def _imports(self, cell: Cell) -> list[str]:
        modules = [*_ALWAYS, *modules_of(cell.focus, self.root)]
        bad = import_modules(self.pin, self.root, modules)
        known = [m for m in bad if (self.base / module_path(m)).is_file()]
        if known:
            # What does not import here without any patch either (a library is missing,
            # another vendor's platform) is not the patch's doing.
            self._laid = None
            verify.make_tree(self.pin, Series(()), self.root, self.origin)
            for name in import_modules(self.pin, self.root, known):
                bad.pop(name, None)
        return [f"{name} does not import: {reason}" for name, reason in bad.items()]


def module_path(name: str) -> str:
    """Return the file of a module that is no package."""
    return name.replace(".", "/") + ".py"


def modules_of(patch: Patch, root: Path) -> list[str]:
    """Return the modules of vLLM that a patch touches and that still exist."""
    found = []
    for change in patch.changes:
        path = change.path
        if path.startswith("vllm/") and path.endswith(".py") and (root / path).is_file():
            found.append(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return found


def import_modules(pin: Pin, root: Path, modules: Sequence[str]) -> dict[str, str]:
    """Import modules in a tree, one process for all.

    Returns:
        What failed, and how.

    Raises:
        StackError: The process died.
    """
    result = subprocess.run(
        [str(envs.ensure_env(pin, root)), "-c", _IMPORT, *modules],
        cwd=root, env=verify.environment(root, {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    last = (result.stdout.strip().splitlines() or [""])[-1]
    if result.returncode != 0 or not last.startswith("{"):
        return {"vllm": f"the interpreter died ({result.returncode}): {last[:200]}"}
    found: dict[str, str] = json.loads(last)
    return found


def applies(base: Path, series: Series) -> list[str]:
    """Say whether patches apply without fuzz, on copies of only the files that they touch."""
    with tempfile.TemporaryDirectory(prefix="hipstack-apply-") as scratch:
        for path in sorted({c.path for patch in series for c in patch.changes}):
            if (base / path).is_file():
                target = Path(scratch, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(base / path, target)
        for patch in series:
            try:
                tree.apply_with_offset(Path(scratch), patch)
            except StackError as error:
                return [str(error)]
    return []


def each_cell(series: Series, name: str) -> Cell:
    """Return the cell of a patch with only what it declares."""
    patch = series.get(name)
    return Cell(f"{patch.name} alone", series.closure(patch.name), patch)


def prefix_cell(series: Series, name: str) -> Cell:
    """Return the cell of the series cut after a patch."""
    cut = series.until(name)
    last = cut.patches[-1]
    files = {c.path for c in last.changes}
    sharing = tuple(
        p for p in cut.patches[:-1] if files & {c.path for c in p.changes}
    )  # fmt: skip
    return Cell(f"series until {last.name}", cut, last, sharing)


def sample(series: Series, count: int, kind: str) -> list[str]:
    """Choose patches by the hash of the set.

    Args:
        series: The series.
        count: How many; all when there are no more.
        kind: Makes the choices of different kinds of cells differ.

    Returns:
        Names, in series order.
    """

    def rank(name: str) -> str:
        return hashlib.sha256(f"{series.set_hash} {kind} {name}".encode()).hexdigest()

    chosen = set(sorted(series.names, key=rank)[:count])
    return [name for name in series.names if name in chosen]


def failing_stage(bench: Bench, cell: Cell, stages: Sequence[str] = STAGES) -> tuple[
    str, list[str]
]:  # fmt: skip
    """Judge a cell; return the first stage that fails and what is wrong, or two blanks."""
    for stage in stages:
        if problems := bench.judge(cell, stage):
            return stage, problems
    return "", []


def hidden_dependencies(series: Series, patch: Patch, works: Callable[[Series], bool]) -> list[str]:
    """Find the patches that one needs and does not declare.

    Args:
        series: The whole series.
        patch: The patch, which fails with only what it declares.
        works: Whether it works in a selection of the series.

    Returns:
        Names, latest first; none when it fails with all earlier patches too, and so
        hides no dependency but is broken.
    """
    have = set(series.closure(patch.name).names)
    before = series.names[: series.names.index(patch.name)]

    def selection(names: set[str]) -> Series:
        return Series(tuple(p for p in series if p.name in names))

    if not works(selection(have | set(before))):
        return []
    found: list[str] = []
    rest = [name for name in before if name not in have]
    while rest and (not found or not works(selection(have))):
        low, high = 0, len(rest)  # with rest[:low] it fails, with rest[:high] it works
        while high - low > 1:
            middle = (low + high) // 2
            if works(selection(have | set(rest[:middle]))):
                high = middle
            else:
                low = middle
        needed = rest[high - 1]
        found.append(needed)
        have |= set(series.closure(needed).names)
        rest = [name for name in rest[: high - 1] if name not in have]
    return found


def verify_each(bench: Bench, series: Series, names: Sequence[str], stages: Sequence[str]) -> (
    list[str]
):  # fmt: skip
    """Judge patches with only what they declare.

    Returns:
        One text a patch that does not stand alone; it names what the patch hides.
    """
    found = []
    for name in names:
        cell = each_cell(series, name)
        stage, problems = failing_stage(bench, cell, stages)
        print(f"{'FAILED' if stage else 'ok    '} {cell.name}{f': {stage}' if stage else ''}",
              flush=True)  # fmt: skip
        if not stage:
            continue
        upto = STAGES[: STAGES.index(stage) + 1]

        def works(selected: Series, patch: Patch = cell.focus, upto: Sequence[str] = upto) -> bool:
            return not failing_stage(bench, Cell("search", selected, patch), upto)[0]

        hidden = hidden_dependencies(series, cell.focus, works)
        if hidden:
            text = f"needs {', '.join(hidden)}, which its Depends: does not name"
        else:
            text = "fails with all patches before it, too"
        found.append(f"{name}: {text} ({stage}): {problems[0]}")
    return found


def verify_prefixes(
    bench: Bench, series: Series, names: Sequence[str], sharing: bool = True
) -> list[str]:
    """Judge the series cut after patches.

    Args:
        bench: Where.
        series: The whole series.
        names: The patches to cut after.
        sharing: Run the plans of the patches that share a file with the last one, too.

    Returns:
        One text a cut that does not work.
    """
    found = []
    for name in names:
        cell = prefix_cell(series, name)
        if not sharing:
            cell = dataclasses.replace(cell, plans=())
        stage, problems = failing_stage(bench, cell)
        print(f"{'FAILED' if stage else 'ok    '} {cell.name}{f': {stage}' if stage else ''}",
              flush=True)  # fmt: skip
        if stage:
            found.append(f"{cell.name}: {stage}: {problems[0]}")
    return found


def run(
    pin: Pin, series: Series, origin: str, jobs: int, each: bool, prefixes: bool,
    count: int | None, only: str | None,
) -> tuple[list[str], list[verify.Outcome]]:  # fmt: skip
    """Carry out ``ci.verify --each`` and ``--prefixes``.

    Args:
        pin: The pin.
        series: The series.
        origin: Where the pristine source comes from.
        jobs: Commands at a time.
        each: Judge patches alone.
        prefixes: Judge cuts.
        count: Sample so many of each kind; all when None.
        only: Judge this patch and no other.

    Returns:
        Problems, and the outcomes of all commands.
    """
    # One cache for all cells: mypy looks at contents, not at where a tree came from.
    os.environ["MYPY_CACHE_DIR"] = str(paths.BUILD / "verify" / "mypy-cache")
    bench = VllmBench(pin, origin, jobs)
    problems: list[str] = []

    def chosen(kind: str) -> list[str]:
        if only:
            return [series.get(only).name]
        return list(series.names) if count is None else sample(series, count, kind)

    if each:
        names = chosen("each")
        problems += verify_each(
            bench, series, [n for n in series.names if n not in names], STAGES[:1]
        )
        problems += verify_each(bench, series, names, STAGES)
    if prefixes:
        problems += verify_prefixes(bench, series, chosen("prefixes"), sharing=count is None)
    return problems, bench.outcomes
