"""Does each patch stand on what it declares, and does every prefix of the series work?

A *cell* is a selection of the series, laid onto the pin and judged in four stages: it
applies, the modules that it touches import, upstream's linters are content, and the test
plans pass.

each       a patch with only the patches that it ``Depends:`` on; when the same stage passes
           with all patches before it, the dependency that it hides is searched and named
prefixes   the series cut after a patch: that patch's plan, and the plans of the patches
           before it that share a file of upstream with it

Beside the cells there is the whole series, laid on as the build does it: without fuzz or
offset, linted whole, with vLLM's own tests and the plans.

A sample is chosen by the hash of the set, so that every change of the series turns to other
patches and a run can be repeated; a sampled cut runs its last patch's plan alone.  That all
patches apply with what they declare is always looked at, it costs nothing.
"""

import dataclasses
import hashlib
import json
import queue
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ci import check, envs, paths, tree, verify
from ci.errors import StackError
from ci.patches import Patch, Series
from ci.pin import Pin
from ci.run import capture

PARTS = ("each", "prefixes", "whole")
# What CI runs of each part: all (None), or a sample of so many patches.
CI: Mapping[str, int | None] = {"each": None, "prefixes": 1, "whole": 1}
STAGES = ("apply", "import", "lint", "tests")
# What every vLLM process imports, besides the modules that a patch touches.
_ALWAYS = ("vllm", "vllm.platforms", "vllm.config", "vllm.v1.attention.selector")
_IMPORT = """
import json, sys
from ci.vllm_pytest import import_all
print("\\n" + json.dumps(import_all(sys.argv[1:])))
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
        root: Where trees are laid out, one after the other.
    """

    def __init__(self, pin: Pin, origin: str, root: Path) -> None:
        self.pin, self.origin, self.root = pin, origin, root
        self.base = check.pristine(pin, origin)
        self.python = envs.ensure_env(pin, self.base)
        self._laid: Series | None = None
        self._tried: tuple[Cell, list[str]] | None = None
        self._unimportable: dict[str, bool] = {}
        self.outcomes: list[verify.Outcome] = []

    def judge(self, cell: Cell, stage: str) -> list[str]:
        """See :class:`Bench`."""
        if stage == "apply":
            return applies(self.base, cell.series)
        self._lay(cell.series)
        if stage == "lint":
            return verify.lint(self.pin, Series((cell.focus,)), self.root)
        try:
            commands = [c for p in (cell.focus, *cell.plans) for c in verify.plan_of(p)]
        except StackError as error:
            return [str(error)] if stage == "tests" else []
        carrier = carrier_of(commands)
        if stage == "import":
            modules = modules_of(cell.focus, self.root)
            failed, outcomes = self._run(commands[carrier : carrier + 1], modules)
            self._tried = cell, failed
            bad = outcomes[0].imports if outcomes else None
            if bad is None:  # no command can carry it, or the process ended before
                bad = import_modules(self.python, self.root, [*_ALWAYS, *modules])
            return self._judge_imports(bad)
        if self._tried is None or self._tried[0] is not cell:
            return self._run(commands)[0]
        rest = [command for n, command in enumerate(commands) if n != carrier]
        return self._tried[1] + self._run(rest)[0]

    def _run(
        self, commands: Sequence[verify.Command], modules: Sequence[str] = ()
    ) -> tuple[list[str], list[verify.Outcome]]:
        problems, outcomes = verify.run_commands(commands, self.root, self.python, modules)
        self.outcomes += outcomes
        return problems, outcomes

    def _lay(self, series: Series) -> None:
        if self._laid is not None and self._laid.names == series.names:
            return
        old, self._laid = self._laid, None
        if old is None:
            verify.make_tree(self.pin, series, self.root, self.origin, exact=False)
        else:
            verify.change_tree(self.pin, old, series, self.root, self.origin)
        self._laid = series

    def _judge_imports(self, bad: dict[str, str]) -> list[str]:
        """Leave out what does not import here without any patch either.

        A library is missing, or it is another vendor's platform: not the patch's doing.
        """
        asked = [
            name
            for name in bad
            if (self.base / module_path(name)).is_file() and name not in self._unimportable
        ]
        if asked:
            self._lay(Series(()))
            failing = import_modules(self.python, self.root, asked)
            self._unimportable |= {name: name in failing for name in asked}
        return [
            f"{name} does not import: {reason}"
            for name, reason in bad.items()
            if not self._unimportable.get(name)
        ]


def carrier_of(commands: Sequence[verify.Command]) -> int:
    """Return which command of a plan shall try the imports, too.

    It runs as the engine does, on the stand-in for an AMD GPU; without Triton's
    interpreter where the plan has such a command.  Past the end when there is none.
    """

    def rank(index: int) -> tuple[bool, int]:
        return "TRITON_INTERPRET" in dict(commands[index].env), index

    fit = [n for n, c in enumerate(commands) if "VLLM_TARGET_DEVICE" not in dict(c.env)]
    return min(fit, key=rank, default=len(commands))


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


def import_modules(python: Path, root: Path, modules: Sequence[str]) -> dict[str, str]:
    """Import modules in a tree, one process for all.

    Args:
        python: The interpreter of the environment that tests vLLM.
        root: The tree.
        modules: The modules.

    Returns:
        What failed, and how.
    """
    words = [str(python), "-c", _IMPORT, *modules]
    code, output = capture(words, cwd=root, env=verify.environment(root, {}))
    last = (output.strip().splitlines() or [""])[-1]
    if code != 0 or not last.startswith("{"):
        return {"vllm": f"the interpreter died ({code}): {last[:200]}"}
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

    if not works(series.only(have | set(before))):
        return []
    found: list[str] = []
    rest = [name for name in before if name not in have]
    while rest and (not found or not works(series.only(have))):
        low, high = 0, len(rest)  # with rest[:low] it fails, with rest[:high] it works
        while high - low > 1:
            middle = (low + high) // 2
            if works(series.only(have | set(rest[:middle]))):
                high = middle
            else:
                low = middle
        needed = rest[high - 1]
        found.append(needed)
        have |= set(series.closure(needed).names)
        rest = [name for name in rest[: high - 1] if name not in have]
    return found


def judge_alone(bench: Bench, series: Series, name: str, stages: Sequence[str]) -> str:
    """Judge a patch with only what it declares.

    Returns:
        What is wrong, with the names of what the patch hides; empty when it stands.
    """
    cell = each_cell(series, name)
    stage, problems = failing_stage(bench, cell, stages)
    print(f"{'FAILED' if stage else 'ok    '} {cell.name}{f': {stage}' if stage else ''}",
          flush=True)  # fmt: skip
    if not stage:
        return ""
    upto = STAGES[: STAGES.index(stage) + 1]

    def works(selected: Series) -> bool:
        return not failing_stage(bench, Cell("search", selected, cell.focus), upto)[0]

    if works(cell.series):
        # A search would blame the patch at which chance let it pass.
        return f"{name}: fails now and then ({stage}), the same again passes: {problems[0]}"
    hidden = hidden_dependencies(series, cell.focus, works)
    if hidden:
        text = f"needs {', '.join(hidden)}, which its Depends: does not name"
    else:
        text = "fails with all patches before it, too"
    return f"{name}: {text} ({stage}): {problems[0]}"


def judge_prefix(bench: Bench, series: Series, name: str, sharing: bool = True) -> str:
    """Judge the series cut after a patch.

    Args:
        bench: Where.
        series: The whole series.
        name: The patch to cut after.
        sharing: Run the plans of the patches that share a file with it, too.

    Returns:
        What is wrong; empty when the cut works.
    """
    cell = prefix_cell(series, name)
    if not sharing:
        cell = dataclasses.replace(cell, plans=())
    stage, problems = failing_stage(bench, cell)
    print(f"{'FAILED' if stage else 'ok    '} {cell.name}{f': {stage}' if stage else ''}",
          flush=True)  # fmt: skip
    return f"{cell.name}: {stage}: {problems[0]}" if stage else ""


@dataclass(frozen=True)
class Task:
    """Something to judge.

    Attributes:
        work: Judges it on a bench; returns what is wrong, or an empty text.
        weight: How long it takes, compared with others.
    """

    work: Callable[[Bench], str]
    weight: int = 0


def carry_out(tasks: Sequence[Task], benches: Sequence[Bench]) -> list[str]:
    """Carry out tasks on as many benches as there are, the longest first.

    Returns:
        What is wrong, in the order of the tasks.
    """
    idle: queue.SimpleQueue[Bench] = queue.SimpleQueue()
    for bench in benches:
        idle.put(bench)

    def one(task: Task) -> str:
        bench = idle.get()
        try:
            return task.work(bench)
        finally:
            idle.put(bench)

    with ThreadPoolExecutor(len(benches)) as pool:
        started = {
            id(task): pool.submit(one, task)
            for task in sorted(tasks, key=lambda task: -task.weight)
        }  # fmt: skip
        return [text for task in tasks if (text := started[id(task)].result())]


def whole_tasks(
    pin: Pin, series: Series, origin: str, plans: Sequence[str], upstream: bool,
    outcomes: list[verify.Outcome],
) -> list[Task]:  # fmt: skip
    """Return what is judged on the whole series, which is laid out at once.

    Args:
        pin: The pin.
        series: The series.
        origin: Where the pristine source comes from.
        plans: The patches whose plans are run.
        upstream: Run vLLM's own tests, too.
        outcomes: Gets how the commands end.

    Raises:
        StackError: A patch does not apply exactly, or a plan is malformed.
    """
    root = paths.BUILD / "verify" / "vllm-src"
    commands = [(c, len(series.get(n).data)) for n in plans for c in verify.plan_of(series.get(n))]
    if upstream:
        commands += [(command, 0) for command in verify.upstream_commands()]
    verify.make_tree(pin, series, root, origin)
    python = envs.ensure_env(pin, root)

    def lint(_: Bench) -> str:
        problems = verify.lint(pin, series, root)
        print(f"{'FAILED' if problems else 'ok    '} whole series: lint", flush=True)
        return "\n".join(problems)

    def task(command: verify.Command, size: int) -> Task:
        def run(_: Bench) -> str:
            problems, done = verify.run_commands([command], root, python)
            outcomes.extend(done)
            return "\n".join(problems)

        return Task(run, size)

    return [Task(lint), *(task(command, size) for command, size in commands)]


def run(
    pin: Pin, series: Series, origin: str, jobs: int, parts: Mapping[str, int | None],
    only: str | None = None,
) -> tuple[list[str], list[verify.Outcome]]:  # fmt: skip
    """Carry out ``ci.verify``.

    Args:
        pin: The pin.
        series: The series.
        origin: Where the pristine source comes from.
        jobs: Trees at a time.
        parts: Which of :data:`PARTS`; each with how many patches to sample, None for all.
        only: Judge this patch and no other.

    Returns:
        Problems, and the outcomes of all commands.

    Raises:
        StackError: The series does not apply.
    """

    def chosen(part: str) -> list[str]:
        count = parts[part]
        if only:
            return [series.get(only).name]
        return list(series.names) if count is None else sample(series, count, part)

    benches = [
        VllmBench(pin, origin, paths.BUILD / "verify" / f"cell-{n}") for n in range(jobs)
    ]  # fmt: skip
    outcomes: list[verify.Outcome] = []
    tasks = []
    if "each" in parts:
        names = chosen("each")
        for name in series.names if not only else names:
            stages = STAGES if name in names else STAGES[:1]
            tasks.append(_on(judge_alone, series, name, stages))
    if "prefixes" in parts:
        sharing = parts["prefixes"] is None
        tasks += [_on(judge_prefix, series, name, sharing) for name in chosen("prefixes")]
    if "whole" in parts:
        tasks += whole_tasks(pin, series, origin, chosen("whole"), not only, outcomes)
    problems = carry_out(tasks, benches)
    return problems, [*outcomes, *(o for bench in benches for o in bench.outcomes)]


def _on(judge: Callable[..., str], series: Series, name: str, how: object) -> Task:
    """Return the task that judges a patch; a longer patch has the longer plan."""
    return Task(lambda bench: judge(bench, series, name, how), len(series.get(name).data))
