"""Patches stand on what they declare, prefixes work: on made-up series, and by sample."""

import threading

import pytest
from conftest import HEADER, make_patch, make_series

from ci import independence, verify
from ci.independence import Cell, each_cell, prefix_cell
from ci.patches import Patch, Series

NEW = """\
diff --git a/{path} b/{path}
new file mode 100644
index 0000000000000000000000000000000000000000..1111111111111111111111111111111111111111
--- /dev/null
+++ b/{path}
@@ -0,0 +1 @@
+x = 1
"""
ADD = """\
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -{at},6 +{to},7 @@
 {a}
 {b}
 {c}
+{new}
 {d}
 {e}
 {f}
"""


def adds(name, new, around, at, to, depends="none"):
    lines = dict(zip("abcdef", around, strict=True))
    return make_patch(name, depends=depends, diff=ADD.format(new=new, at=at, to=to, **lines))


LINES = [f"line {i}" for i in range(1, 41)]
FIRST = adds("core/first", "first", LINES[9:15], 10, 10)
# Its context holds the line that core/first adds.
HIDING = adds("core/hiding", "hiding", [*LINES[10:12], "first", *LINES[12:15]], 11, 11)
FAR = adds("core/far", "far", LINES[29:35], 31, 31)


class FakeBench:
    """Judges by a rule instead of by running anything."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    def judge(self, cell: Cell, stage: str) -> list[str]:
        self.calls.append((cell.series.names, stage))
        return self.rule(cell, stage)


def verify_each(bench, series, names, stages=independence.STAGES):
    return [t for n in names if (t := independence.judge_alone(bench, series, n, stages))]


def series_of(*names, depends=None):
    return make_series(*(make_patch(n, depends=(depends or {}).get(n, "none")) for n in names))


def needs(patch, stage, *others):
    """A rule: the patch passes a stage only in the company of others."""

    def rule(cell, at):
        missing = [o for o in others if o not in cell.series.names]
        if cell.focus.name == patch and at == stage and missing:
            return [f"no {missing[0]} here"]
        return []

    return FakeBench(rule)


def test_a_patch_that_stands_alone_passes_all_stages():
    bench = FakeBench(lambda cell, stage: [])
    series = series_of("core/a", "core/b", "core/c", depends={"core/c": "core/a"})
    assert verify_each(bench, series, ["core/c"], independence.STAGES) == []
    assert bench.calls == [(("core/a", "core/c"), s) for s in independence.STAGES]


@pytest.mark.parametrize("stage", independence.STAGES)
@pytest.mark.parametrize("hidden", ["core/a", "core/b", "core/c", "core/d"])
def test_a_hidden_dependency_fails_by_name(stage, hidden):
    series = series_of("core/a", "core/b", "core/c", "core/d", "core/z")
    bench = needs("core/z", stage, hidden)
    (text,) = verify_each(bench, series, ["core/z"], independence.STAGES)
    assert text == (
        f"core/z: needs {hidden}, which its Depends: does not name ({stage}): no {hidden} here"
    )


def test_what_fails_only_now_and_then_is_no_hidden_dependency():
    series = series_of("core/a", "core/b", "core/z")
    fails = iter([["by chance"]])
    bench = FakeBench(lambda cell, stage: next(fails, []) if stage == "tests" else [])
    (text,) = verify_each(bench, series, ["core/z"])
    assert text == "core/z: fails now and then (tests), the same again passes: by chance"


def test_several_hidden_dependencies_are_all_named():
    series = series_of("core/a", "core/b", "core/c", "core/d", "core/z")
    bench = needs("core/z", "tests", "core/b", "core/d")
    (text,) = verify_each(bench, series, ["core/z"], independence.STAGES)
    assert "needs core/d, core/b, which" in text


def test_a_hidden_dependency_brings_what_it_declares_itself():
    series = series_of("core/a", "core/b", "core/z", depends={"core/b": "core/a"})
    bench = needs("core/z", "import", "core/b", "core/a")
    (text,) = verify_each(bench, series, ["core/z"], independence.STAGES)
    assert "needs core/b, which" in text


def test_a_patch_that_is_broken_anyway_hides_nothing():
    series = series_of("core/a", "core/z")
    bench = FakeBench(lambda cell, stage: ["broken"] if stage == "lint" else [])
    (text,) = verify_each(bench, series, ["core/z"], independence.STAGES)
    assert text == "core/z: fails with all patches before it, too (lint): broken"


def test_a_later_patch_is_no_candidate():
    series = series_of("core/z", "core/a")
    (text,) = verify_each(
        needs("core/z", "tests", "core/a"), series, ["core/z"], independence.STAGES
    )
    assert "fails with all patches before it" in text


class ApplyBench:
    def __init__(self, base):
        self.base = base

    def judge(self, cell, stage):
        return independence.applies(self.base, cell.series) if stage == "apply" else []


def test_real_patches_whose_context_hides_a_dependency(small_tree):
    series = make_series(FIRST, FAR, HIDING)
    bench = ApplyBench(small_tree)
    assert independence.applies(small_tree, series) == []
    # core/far was made on top of core/first: alone it has an offset, and that is no fault.
    (text,) = verify_each(bench, series, series.names, ("apply",))
    assert text.startswith("core/hiding: needs core/first, which its Depends: does not name")
    declared = adds(
        "core/hiding", "hiding", [*LINES[10:12], "first", *LINES[12:15]], 11, 11, "core/first"
    )
    assert verify_each(
        bench, make_series(FIRST, FAR, declared), ["core/hiding"], ("apply",)
    ) == []  # fmt: skip


def test_applying_leaves_the_pristine_tree_alone(small_tree):
    before = (small_tree / "vllm" / "a.py").read_text()
    assert independence.applies(small_tree, make_series(FIRST)) == []
    assert (small_tree / "vllm" / "a.py").read_text() == before


def test_a_prefix_runs_the_plans_of_patches_that_share_a_file():
    other = make_patch("core/other", diff=NEW.format(path="vllm/other.py"))
    series = make_series(FIRST, other, FAR)
    cell = prefix_cell(series, "core/far")
    assert cell.series.names == ("core/first", "core/other", "core/far")
    assert cell.focus.name == "core/far" and [p.name for p in cell.plans] == ["core/first"]
    assert prefix_cell(series, "core/other").plans == ()


def test_a_sampled_prefix_runs_its_last_plan_alone():
    series = make_series(FIRST, FAR)
    seen = []

    def rule(cell, stage):
        seen.append([p.name for p in cell.plans])
        return []

    independence.judge_prefix(FakeBench(rule), series, "core/far")
    independence.judge_prefix(FakeBench(rule), series, "core/far", sharing=False)
    assert seen == [["core/first"]] * 4 + [[]] * 4


def test_a_prefix_that_does_not_work_is_named():
    series = series_of("core/a", "core/b", "core/c")
    bench = FakeBench(
        lambda cell, stage: ["dies"] if cell.focus.name == "core/b" and stage == "import" else []
    )
    assert [independence.judge_prefix(bench, series, name) for name in series.names] == [
        "", "series until core/b: import: dies", "",
    ]  # fmt: skip


def test_the_sample_turns_with_the_set_and_can_be_repeated():
    names = [f"core/p{i}" for i in range(10)]
    seen = set()
    for round_ in range(60):
        patches = [Patch(n, make_patch(n).data + f"{round_}\n".encode()) for n in names]
        series = Series(tuple(patches))
        chosen = independence.sample(series, 2, "each")
        assert chosen == independence.sample(series, 2, "each") and len(chosen) == 2
        assert chosen == [n for n in series.names if n in chosen]
        seen.update(chosen)
    assert seen == set(names)
    assert independence.sample(series, 99, "each") == names


def test_modules_of_a_patch(tmp_path):
    diff = "".join(
        NEW.format(path=p)
        for p in ("vllm/x/__init__.py", "vllm/x/y.py", "tests/z.py", "vllm/gone.py", "vllm/c.cu")
    )
    for path in ("vllm/x/__init__.py", "vllm/x/y.py", "vllm/c.cu"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert independence.modules_of(make_patch("core/x", diff=diff), tmp_path) == [
        "vllm.x", "vllm.x.y",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "carrier"),
    [
        (["pytest a", "pytest b"], 0),
        (["TRITON_INTERPRET=1 pytest a", "FAKE_GFX=gfx942 pytest b"], 1),
        (["VLLM_TARGET_DEVICE=cpu pytest a", "TRITON_INTERPRET=1 pytest b"], 1),
        (["VLLM_TARGET_DEVICE=cpu pytest a"], 1),
        ([], 0),
    ],
)
def test_the_command_that_tries_the_imports(plan, carrier):
    commands = [verify.parse_command("core/x", line) for line in plan]
    assert independence.carrier_of(commands) == carrier


class PlanBench(independence.VllmBench):
    """A bench whose commands and imports are made up; it notes what it runs."""

    def __init__(self, base, failing=(), imports=None, broken_before=()):
        self.base = self.root = base
        self.pin = None
        self.python = None
        self._laid, self._tried, self._unimportable, self.outcomes = None, None, {}, []
        self.failing, self.imports, self.broken_before = failing, imports, broken_before
        self.ran, self.laid = [], []

    def _run(self, commands, modules=()):
        self.ran += [(c.words[1], tuple(modules)) for c in commands]
        outcomes = [
            verify.Outcome(c, 0, {}, 0, "", self.imports if modules else None) for c in commands
        ]
        return [c.words[1] for c in commands if c.words[1] in self.failing], outcomes

    def _lay(self, series):
        self.laid.append(series.names)


PLAN = HEADER.replace(" pytest tests/test_x.py -q", " TRITON_INTERPRET=1 pytest one\n pytest two")


def judged(bench, monkeypatch):
    monkeypatch.setattr(verify, "lint", lambda *a: [])
    monkeypatch.setattr(
        independence, "import_modules", lambda python, root, names: {
            n: "as before" for n in names if n in bench.broken_before
        },
    )  # fmt: skip
    diff = NEW.format(path="vllm/b.py")
    patch = make_patch("core/x", diff=diff, header=PLAN)
    return independence.failing_stage(bench, each_cell(make_series(patch), "core/x"))


def test_a_plan_runs_once_and_one_of_its_commands_tries_the_imports(small_tree, monkeypatch):
    bench = PlanBench(small_tree, imports={})
    monkeypatch.setattr(independence, "applies", lambda base, series: [])
    assert judged(bench, monkeypatch) == ("", [])
    assert bench.ran == [("two", ("vllm.b",)), ("one", ())]


def test_what_fails_in_a_plan_is_kept_until_its_stage(small_tree, monkeypatch):
    monkeypatch.setattr(independence, "applies", lambda base, series: [])
    bench = PlanBench(small_tree, failing=("two",), imports={})
    assert judged(bench, monkeypatch) == ("tests", ["two"])
    bench = PlanBench(small_tree, failing=("two",), imports={"vllm.b": "boom"})
    assert judged(bench, monkeypatch) == ("import", ["vllm.b does not import: boom"])


def test_what_imports_nowhere_is_not_the_patchs_doing(small_tree, monkeypatch):
    monkeypatch.setattr(independence, "applies", lambda base, series: [])
    bench = PlanBench(small_tree, imports={"vllm.b": "boom"}, broken_before=("vllm.b",))
    assert judged(bench, monkeypatch) == ("", [])
    # The pristine tree was asked, and the patched one laid out again.
    assert () in bench.laid and bench.laid[-1] == ("core/x",)


def test_tasks_run_on_every_bench_the_longest_first():
    seen = []

    def task(name, weight):
        def work(bench):
            seen.append(name)
            return f"{name} is wrong" if weight % 2 else ""

        return independence.Task(work, weight)

    tasks = [task("a", 1), task("b", 7), task("c", 4), task("d", 3)]
    assert independence.carry_out(tasks, [FakeBench(None)]) == [
        "a is wrong", "b is wrong", "d is wrong",
    ]  # fmt: skip
    assert seen == ["b", "c", "d", "a"]


def test_benches_work_beside_each_other():
    both = threading.Barrier(2, timeout=60)
    benches = [FakeBench(None), FakeBench(None)]
    used = []

    def work(bench):
        both.wait()
        used.append(bench)
        return ""

    assert independence.carry_out([independence.Task(work)] * 1 + [independence.Task(work, 1)],
                                  benches) == []  # fmt: skip
    assert set(map(id, used)) == set(map(id, benches))


@pytest.mark.stack
def test_every_patch_of_the_real_series_applies_with_what_it_declares(the_pin):
    from ci import check, patches

    series = patches.load()
    bench = ApplyBench(check.pristine(the_pin))
    assert verify_each(bench, series, series.names, ("apply",)) == []
    assert {each_cell(series, n).focus.name for n in series.names} == set(series.names)
