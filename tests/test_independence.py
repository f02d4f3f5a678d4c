"""Patches stand on what they declare, prefixes work: on made-up series, and by sample."""

import pytest
from conftest import make_patch, make_series

from ci import independence
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
    assert independence.verify_each(bench, series, ["core/c"], independence.STAGES) == []
    assert bench.calls == [(("core/a", "core/c"), s) for s in independence.STAGES]


@pytest.mark.parametrize("stage", independence.STAGES)
@pytest.mark.parametrize("hidden", ["core/a", "core/b", "core/c", "core/d"])
def test_a_hidden_dependency_fails_by_name(stage, hidden):
    series = series_of("core/a", "core/b", "core/c", "core/d", "core/z")
    bench = needs("core/z", stage, hidden)
    (text,) = independence.verify_each(bench, series, ["core/z"], independence.STAGES)
    assert text == (
        f"core/z: needs {hidden}, which its Depends: does not name ({stage}): no {hidden} here"
    )


def test_several_hidden_dependencies_are_all_named():
    series = series_of("core/a", "core/b", "core/c", "core/d", "core/z")
    bench = needs("core/z", "tests", "core/b", "core/d")
    (text,) = independence.verify_each(bench, series, ["core/z"], independence.STAGES)
    assert "needs core/d, core/b, which" in text


def test_a_hidden_dependency_brings_what_it_declares_itself():
    series = series_of("core/a", "core/b", "core/z", depends={"core/b": "core/a"})
    bench = needs("core/z", "import", "core/b", "core/a")
    (text,) = independence.verify_each(bench, series, ["core/z"], independence.STAGES)
    assert "needs core/b, which" in text


def test_a_patch_that_is_broken_anyway_hides_nothing():
    series = series_of("core/a", "core/z")
    bench = FakeBench(lambda cell, stage: ["broken"] if stage == "lint" else [])
    (text,) = independence.verify_each(bench, series, ["core/z"], independence.STAGES)
    assert text == "core/z: fails with all patches before it, too (lint): broken"


def test_a_later_patch_is_no_candidate():
    series = series_of("core/z", "core/a")
    (text,) = independence.verify_each(
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
    (text,) = independence.verify_each(bench, series, series.names, ("apply",))
    assert text.startswith("core/hiding: needs core/first, which its Depends: does not name")
    declared = adds(
        "core/hiding", "hiding", [*LINES[10:12], "first", *LINES[12:15]], 11, 11, "core/first"
    )
    assert independence.verify_each(
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

    independence.verify_prefixes(FakeBench(rule), series, ["core/far"])
    independence.verify_prefixes(FakeBench(rule), series, ["core/far"], sharing=False)
    assert seen == [["core/first"]] * 4 + [[]] * 4


def test_a_prefix_that_does_not_work_is_named():
    series = series_of("core/a", "core/b", "core/c")
    bench = FakeBench(
        lambda cell, stage: ["dies"] if cell.focus.name == "core/b" and stage == "import" else []
    )
    assert independence.verify_prefixes(bench, series, series.names) == [
        "series until core/b: import: dies"
    ]


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


@pytest.mark.stack
def test_every_patch_of_the_real_series_applies_with_what_it_declares(the_pin):
    from ci import check, patches

    series = patches.load()
    bench = ApplyBench(check.pristine(the_pin))
    assert independence.verify_each(bench, series, series.names, ("apply",)) == []
    assert {each_cell(series, n).focus.name for n in series.names} == set(series.names)
