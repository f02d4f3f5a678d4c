"""Is it us or upstream: on made-up series, and on a real tree."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import make_patch, make_series, run_module
from hypothesis import given
from hypothesis import strategies as st

from ci import bisect, patches, paths
from ci.bisect import Family, Outcome, outcome_of
from ci.errors import StackError

GOOD, BAD, OTHER = Outcome("passes"), Outcome("exit 1: boom"), Outcome("exit 2: else")
SKIP = Outcome("cannot be judged", judged=False)


def names(count):
    return [f"core/p{i}" for i in range(count)]


def series_of(*all_names, depends=None):
    return make_series(*(make_patch(n, depends=(depends or {}).get(n, "none")) for n in all_names))


class FakeTrial:
    def __init__(self, rule):
        self.rule, self.runs = rule, []

    def __call__(self, series, env):
        self.runs.append((series.names, dict(env)))
        return self.rule(series, env)


def breaks_with(culprit, skip=()):
    def rule(series, env):
        if series.names and series.names[-1] in skip:
            return SKIP
        return BAD if culprit in series.names else GOOD

    return FakeTrial(rule)


def quiet(_):
    pass


@pytest.mark.parametrize("linear", [False, True])
@given(st.integers(1, 20), st.data())
def test_the_first_bad_prefix_is_named(linear, count, data):
    culprit = data.draw(st.sampled_from(names(count)))
    trial = breaks_with(culprit)
    verdict = bisect.by_prefix(series_of(*names(count)), trial, linear, quiet)
    assert verdict.culprit == culprit
    assert verdict.text.endswith("before it passes; with it exit 1: boom")
    if not linear:
        assert len(trial.runs) <= 2 + count.bit_length()


def test_the_same_on_the_pin_is_not_the_stack():
    verdict = bisect.by_prefix(series_of(*names(3)), FakeTrial(lambda s, e: BAD), False, quiet)
    assert verdict.culprit == "" and "not the stack" in verdict.text
    verdict = bisect.by_family(series_of(*names(3)), [], FakeTrial(lambda s, e: GOOD), False, quiet)
    assert verdict.text == "the command passes, with the series and without"


def test_another_failure_on_the_pin_is_not_the_same():
    trial = FakeTrial(lambda s, e: BAD if "core/p1" in s.names else OTHER)
    assert bisect.by_prefix(series_of(*names(4)), trial, False, quiet).culprit == "core/p1"


def test_cuts_that_cannot_be_judged_are_passed_over():
    trial = breaks_with("core/p5", skip=("core/p3", "core/p4"))
    verdict = bisect.by_prefix(series_of(*names(9)), trial, False, quiet)
    assert verdict.culprit == "" and "core/p3, core/p4, core/p5" in verdict.text
    trial = breaks_with("core/p5", skip=("core/p3",))
    assert bisect.by_prefix(series_of(*names(9)), trial, False, quiet).culprit == "core/p5"
    with pytest.raises(StackError, match="cannot be judged"):
        bisect.by_prefix(series_of(*names(2)), FakeTrial(lambda s, e: SKIP), False, quiet)


FAMILIES = [
    Family("one", ("core/*",), {}, "x"),
    Family("two", ("attention/s*",), {"OFF": "1"}, "x"),
    Family("three", ("hipdnn/*",), {"THREE": "0"}, "x"),
]
SERIES = series_of("core/a", "attention/s", "hipdnn/h", depends={"attention/s": "core/a"})


def test_a_family_is_switched_off_by_its_variable():
    trial = FakeTrial(lambda s, e: GOOD if not s.names or e.get("THREE") == "0" else BAD)
    verdict = bisect.by_family(SERIES, FAMILIES, trial, False, quiet)
    assert verdict.culprit == "three" and "off (THREE=0) passes" in verdict.text
    # Without a variable its patches are left out, and so is what depends on them.
    assert (("hipdnn/h",), {}) in trial.runs


def test_families_can_be_left_out_even_where_there_is_a_variable():
    trial = FakeTrial(lambda s, e: BAD if "attention/s" in s.names else GOOD)
    assert bisect.by_family(SERIES, FAMILIES[1:], trial, True, quiet).culprit == "two"
    assert all(not env for _, env in trial.runs)
    # The variable alone would not have found it.
    trial = FakeTrial(lambda s, e: BAD if "attention/s" in s.names else GOOD)
    verdict = bisect.by_family(SERIES, FAMILIES[1:], trial, False, quiet)
    assert verdict.culprit == "" and "no family alone" in verdict.text


def test_a_family_that_cannot_be_left_out_is_passed_over():
    def rule(series, env):
        if series.names == ("hipdnn/h",):
            raise StackError("hipdnn/h does not apply")
        return BAD if "attention/s" in series.names and not env else GOOD

    verdict = bisect.by_family(SERIES, FAMILIES, FakeTrial(rule), False, quiet)
    assert verdict.culprit == "two"


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (0, "fine", "passes"),
        (1, "at 0x7f12\nValueError: 12 of 17.5\n\n", "exit 1: ValueError: N of N"),
        (1, "see /tree/vllm/x.py", "exit 1: see /vllm/x.py"),
        (2, "", "exit 2: "),
        (-11, "", "killed by SIGSEGV"),
        (None, "", "ran out of time"),
    ],
)
def test_outcomes(code, output, text):
    assert outcome_of(code, output, root="/tree") == Outcome(text)


def test_a_pattern_decides_alone():
    assert outcome_of(1, "an NaN", match="NaN") == outcome_of(0, "NaN", match="NaN")
    assert outcome_of(1, "x", match="NaN") != outcome_of(1, "NaN", match="NaN")
    assert not outcome_of(125, "NaN", match="NaN").judged


def test_every_patch_of_the_series_has_one_family_and_the_readme_its_switch():
    series, table = patches.load(), bisect.families()
    assert bisect.family_problems(series, table) == []
    readme = (paths.ROOT / "README.md").read_text()
    for row in bisect.switches_table(series, table).splitlines():
        assert row in readme  # python3 -m ci.bisect --switches prints the table


def test_a_switch_is_a_variable_that_the_series_defines():
    series = patches.load()
    added = "\n".join(
        line for p in series for c in p.changes if c.path == "vllm/envs.py" for line in c.added
    )
    for family in bisect.families():
        if family.patches(series):
            for name in family.env:
                assert f'"{name}"' in added


def test_patches_without_a_family_and_with_two_are_named():
    table = [Family("one", ("core/*",), {}, ""), Family("two", ("core/b",), {}, "")]
    assert bisect.family_problems(series_of("core/a", "core/b", "attention/c"), table) == [
        "core/b: belongs to one, two", "attention/c: belongs to no family",
    ]  # fmt: skip


def test_a_malformed_table_is_refused(tmp_path):
    path = tmp_path / "switches.toml"
    path.write_text("[x]\nabout = 'no patches'\n")
    with pytest.raises(StackError, match="x: 'patches' is missing or wrong"):
        bisect.families(path)


def test_compiled_ops_are_lent_and_nothing_is_overwritten(tmp_path):
    installed, package = tmp_path / "site" / "vllm", tmp_path / "tree" / "vllm"
    for path in (installed / "_C.so", installed / "deep" / "_D.so", package / "_E.so"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("library")
    (installed / "_E.so").write_text("other")
    assert bisect.lend_ops(installed, package) == 2
    assert (package / "deep" / "_D.so").resolve() == installed / "deep" / "_D.so"
    assert (package / "_E.so").read_text() == "library"


def test_what_a_command_leaves_running_is_ended(tmp_path):
    mark = tmp_path / "pid"
    child = f"import os,time; open({str(mark)!r},'w').write(str(os.getpid())); time.sleep(60)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    process.wait()
    while not mark.exists() or not mark.read_text():
        pass
    bisect._end_group(process)
    pid = int(mark.read_text())
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        os.sched_yield()
    raise AssertionError("it still runs")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "there is no command"), (["--match", "(", "--", "true"], "--match")],
)
def test_bad_command_lines(arguments, said):
    result = run_module("ci.bisect", *arguments)
    assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.stack
def test_on_the_real_tree(tmp_path, sdist):
    """The probe fails as soon as the tree has a file that the last patch of the series adds."""
    series = patches.load()
    last = next(c.path for c in reversed(series.patches[-1].changes) if c.is_new)
    probe = tmp_path / "probe.py"
    probe.write_text(
        textwrap.dedent(f"""
        import importlib.util, pathlib, sys
        root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent.parent
        sys.exit("it is there" if (root / {last!r}).exists() else 0)
        """)
    )
    result = run_module(
        "ci.bisect", "--source", str(sdist), "--python", sys.executable,
        "--", sys.executable, str(probe),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"{series.names[-1]} changes the outcome: before it passes" in result.stdout


@pytest.mark.stack
def test_a_tree_that_is_changed_is_the_tree_that_is_made(the_pin, tmp_path):
    from ci import source, verify

    series = patches.load()
    half = patches.Series(series.patches[: len(series) // 2])
    changed, made = tmp_path / "changed", tmp_path / "made"
    verify.make_tree(the_pin, series, changed, exact=False)
    verify.change_tree(the_pin, series, half, changed)
    verify.make_tree(the_pin, half, made, exact=False)
    assert source.tree_digest(changed) == source.tree_digest(made)
    verify.change_tree(the_pin, half, series, changed)
    verify.change_tree(the_pin, series, patches.Series(()), changed)
    shutil.rmtree(next(changed.glob("vllm-*.dist-info")))
    assert source.tree_digest(changed) == the_pin.tree_sha256
