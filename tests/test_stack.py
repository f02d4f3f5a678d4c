"""Apply, branch, export, check: on a small made-up tree, and on the real series."""

import dataclasses
import os
import re
import subprocess

import pytest
from conftest import HEADER, make_patch, make_series, run_module

from ci import check, gitstack, patches, source, tree
from ci.errors import StackError
from ci.paths import QUILTRC

EDIT = """\
diff --git a/vllm/a.py b/vllm/a.py
index {old}..{new} 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -{at},7 +{at},8 @@
 line {a}
 line {b}
 line {c}
+added by {name}
 line {d}
 line {e}
 line {f}
 line {g}
"""


@pytest.fixture
def repo(small_tree, the_pin, tmp_path):
    """A repository of the small tree with two commits; its series is canonical."""
    pin = dataclasses.replace(the_pin, tree_sha256=source.tree_digest(small_tree))
    work = tmp_path / "repo"
    gitstack.copy_tree(small_tree, work)
    gitstack.init(work, pin)
    gitstack.git(work, "checkout", "-q", "-b", gitstack.BRANCH)
    for name in ("core/first", "attention/second"):
        path = work / "vllm" / "a.py"
        lines = path.read_text().splitlines()
        at = 10 if name == "core/first" else 30
        lines.insert(at, f"added by {name}")
        path.write_text("\n".join(lines) + "\n")
        test = work / "tests" / f"test_{name.split('/')[1]}.py"
        test.parent.mkdir(exist_ok=True)
        test.write_text("def test_it():\n    pass\n")
        gitstack.git(work, "add", "-A")
        message = HEADER.format(name=name, depends="none", subject="s").split("\n\n", 1)[1]
        gitstack.git(work, "commit", "-q", "-m", f"[ROCm] Do {name} (é)\n\n{message}")
    return pin, work


def test_branch_and_back_is_byte_identical(repo, small_tree, tmp_path):
    pin, work = repo
    series = gitstack.from_branch(work)
    assert series.names == ("core/first", "attention/second")
    assert series.problems() == []
    again = tmp_path / "again"
    gitstack.copy_tree(small_tree, again)
    gitstack.to_branch(again, series, pin)
    assert [p.data for p in gitstack.from_branch(again)] == [p.data for p in series]


def test_quilt_and_git_give_the_same_tree(repo, small_tree, tmp_path):
    _, work = repo
    series = gitstack.from_branch(work)
    quilted = tmp_path / "quilted"
    gitstack.copy_tree(small_tree, quilted)
    tree.apply(quilted, series, tmp_path / "p")
    assert source.tree_digest(quilted) == source.tree_digest(work)
    assert check.round_trip_problems(series, repo[0], small_tree, tmp_path / "corrected") == []


def test_a_users_git_configuration_does_not_leak(repo, monkeypatch, tmp_path):
    _, work = repo
    before = gitstack.from_branch(work)
    config = tmp_path / "gitconfig"
    config.write_text(
        "[diff]\nnoprefix = true\ncontext = 9\nalgorithm = patience\nrenames = copies\n"
        "[format]\nsignature = x\nsubjectPrefix = RFC\nattach = true\npretty = oneline\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    for line in ("diff.noprefix true", "diff.context 9", "diff.algorithm patience"):
        gitstack.git(work, "config", *line.split())
    assert [p.data for p in gitstack.from_branch(work)] == [p.data for p in before]


def test_offset_and_fuzz_are_refused(repo, small_tree, tmp_path):
    _, work = repo
    first, second = gitstack.from_branch(work)
    moved = patches.Patch(
        second.name, second.data.replace(b"@@ -28,6 +28,7 @@", b"@@ -20,6 +20,7 @@")
    )
    assert moved.data != second.data
    target = tmp_path / "t1"
    gitstack.copy_tree(small_tree, target)
    with pytest.raises(StackError, match=r"attention/second applies only with drift.*offset"):
        tree.apply(target, make_series(first, moved), tmp_path / "p1")
    fuzzy = patches.Patch(second.name, second.data.replace(b" line 29\n", b" line XX\n", 1))
    target = tmp_path / "t2"
    gitstack.copy_tree(small_tree, target)
    with pytest.raises(StackError, match="attention/second does not apply"):
        tree.apply(target, make_series(first, fuzzy), tmp_path / "p2")


def test_a_patch_that_no_longer_applies_is_named(repo, small_tree, tmp_path):
    pin, work = repo
    series = gitstack.from_branch(work)
    (small_tree / "vllm" / "a.py").write_text("upstream moved on\n")
    target = tmp_path / "t"
    gitstack.copy_tree(small_tree, target)
    with pytest.raises(StackError, match="patch core/first does not apply"):
        tree.apply(target, series, tmp_path / "p")
    target = tmp_path / "g"
    gitstack.copy_tree(small_tree, target)
    with pytest.raises(StackError, match="patch core/first does not apply with git am"):
        gitstack.to_branch(target, series, pin)


def test_a_differing_export_leaves_the_corrected_file(repo, small_tree, tmp_path):
    pin, work = repo
    first, second = gitstack.from_branch(work)
    untidy = patches.Patch(first.name, re.sub(rb"\nindex .*", b"", first.data, count=1))
    corrected = tmp_path / "corrected"
    problems = check.round_trip_problems(make_series(untidy, second), pin, small_tree, corrected)
    assert len(problems) == 1 and "core/first: its export differs" in problems[0]
    assert (corrected / "core" / "first.patch").read_bytes() == first.data


def test_a_quilt_refresh_is_brought_into_final_form(repo, small_tree, tmp_path):
    """quilt writes other diff headers than git; the checker hands back git's."""
    pin, work = repo
    series = gitstack.from_branch(work)
    folder, names = tmp_path / "patches", tmp_path / "series"
    gitstack.write(series, folder, names)
    target = tmp_path / "t"
    gitstack.copy_tree(small_tree, target)
    env = {**os.environ, **tree.quilt_env(folder, names)}
    quilt = ["quilt", "--quiltrc", str(QUILTRC)]
    subprocess.run([*quilt, "push"], cwd=target, env=env, check=True, capture_output=True)
    path = target / "vllm" / "a.py"
    path.write_text(path.read_text().replace("added by core/first", "improved core/first"))
    subprocess.run([*quilt, "refresh"], cwd=target, env=env, check=True, capture_output=True)
    refreshed = patches.load(names, folder)
    assert b"improved core/first" in refreshed.patches[0].data
    assert refreshed.patches[0].fields == series.patches[0].fields
    corrected = tmp_path / "corrected"
    check.round_trip_problems(refreshed, pin, small_tree, corrected)
    final = patches.Patch("core/first", (corrected / "core" / "first.patch").read_bytes())
    assert final.problems() == [] and b"improved core/first" in final.data


def test_commits_without_a_name_and_merges_are_refused(repo):
    _, work = repo
    (work / "vllm" / "b.py").write_text("x\n")
    gitstack.git(work, "commit", "-q", "-a", "-m", "[X] nameless")
    with pytest.raises(StackError, match=r"nameless.*Hipstack-Patch"):
        gitstack.from_branch(work)
    gitstack.git(work, "reset", "-q", "--hard", "HEAD~1")
    gitstack.git(work, "commit", "-q", "--allow-empty", "-m", "[X] empty")
    with pytest.raises(StackError, match="changes nothing"):
        gitstack.from_branch(work)
    gitstack.git(work, "reset", "-q", "--hard", "HEAD~1")
    gitstack.git(work, "checkout", "-q", "-b", "side", "HEAD~1")
    gitstack.git(work, "commit", "-q", "--allow-empty", "-m", "[X] side")
    gitstack.git(work, "merge", "-q", "--no-ff", "-m", "merge", gitstack.BRANCH)
    with pytest.raises(StackError, match="is a merge"):
        gitstack.from_branch(work)


def test_write_replaces_removes_and_keeps_the_comment(repo, tmp_path):
    _, work = repo
    series = gitstack.from_branch(work)
    folder, names = tmp_path / "patches", tmp_path / "series"
    names.write_text("# The order matters.\n\ncore/gone.patch\n")
    (folder / "core").mkdir(parents=True)
    (folder / "core" / "gone.patch").write_text("x")
    assert set(gitstack.write(series, folder, names)) == {*series.names, "core/gone"}
    assert names.read_text() == "# The order matters.\n\ncore/first.patch\nattention/second.patch\n"
    assert patches.load(names, folder).set_hash == series.set_hash
    assert gitstack.write(series, folder, names) == []
    assert not list(folder.rglob(".*"))


AREAS = {
    "core": check.Area("core", "x", ("vllm/own/*", "tests/*"), ("vllm/a.py",), 2),
    "attention": check.Area("attention", "x", ("tests/*",), (), 0),
}


def test_a_patch_may_touch_only_what_its_area_owns(repo):
    _, work = repo
    series = gitstack.from_branch(work)
    problems = check.ownership_problems(series, AREAS)
    assert problems == ["attention/second: touches vllm/a.py, which attention does not own"]
    strict = {**AREAS, "core": dataclasses.replace(AREAS["core"], hook_lines=0)}
    assert "a hook of area core may change 0" in check.ownership_problems(series, strict)[0]
    assert "no area core" in check.ownership_problems(series, {"attention": AREAS["attention"]})[0]


@pytest.mark.parametrize(
    "line", ["x = 1 ", "x\t", " \tx = 1", "<<<<<<< HEAD", "=======", ">>>>>>> y"]
)
def test_whitespace_damage_is_named(line):
    diff = make_patch("core/x").data.decode().split("\n\n")[-1].replace("+x = 'core/x'", f"+{line}")
    assert check.whitespace_problems(make_patch("core/x", diff=diff))
    assert not check.whitespace_problems(make_patch("core/x"))


def test_lines_touched_in_upstream_files_are_counted(repo):
    _, work = repo
    table = check.touched_table(gitstack.from_branch(work)).splitlines()
    assert table[1].split() == ["core/first", "1", "2", "1", "1", "0"]
    assert table[-1].split() == ["total", "2", "4", "2", "2", "0"]


@pytest.mark.stack
def test_the_real_series_is_in_order(the_pin):
    assert check.check(patches.load(), the_pin) == []


@pytest.mark.stack
def test_the_command_line(tmp_path, sdist):
    listing = run_module("ci.stack", "list")
    assert listing.returncode == 0
    assert len(listing.stdout.splitlines()) == len(patches.load())
    assert run_module("ci.stack", "hash").stdout.strip() == patches.load().set_hash
    made = run_module("ci.stack", "branch", str(tmp_path / "b"), "--source", str(sdist))
    assert made.returncode == 0, made.stderr
    exported = gitstack.from_branch(tmp_path / "b")
    assert exported.set_hash == patches.load().set_hash
    aside = run_module("ci.stack", "branch", str(tmp_path / "b"), "--source", str(sdist))
    assert aside.returncode == 1 and "exists already" in aside.stderr
    gitstack.git(tmp_path / "b", "checkout", "-q", gitstack.BASE)
    elsewhere = run_module("ci.stack", "export", str(tmp_path / "b"))
    assert elsewhere.returncode == 1 and "is on 'pin', not on 'stack'" in elsewhere.stderr
    gitstack.git(tmp_path / "b", "checkout", "-q", gitstack.BRANCH)
    gitstack.git(tmp_path / "b", "reset", "-q", "--hard", "HEAD~1")
    shorter = run_module("ci.stack", "export", str(tmp_path / "b"))
    assert shorter.returncode == 1 and f"--drop {exported.names[-1]}" in shorter.stderr
    assert patches.load().set_hash == exported.set_hash, "nothing may be lost"
    (tmp_path / "b" / "setup.py").write_text("x")
    dirty = run_module("ci.stack", "export", str(tmp_path / "b"))
    assert dirty.returncode == 1 and "uncommitted changes" in dirty.stderr
    tree_ = run_module("ci.stack", "tree", str(tmp_path / "t"), "--source", str(sdist))
    assert tree_.returncode == 0 and "quilt push" in tree_.stdout
    quilt = subprocess.run(
        ["quilt", "push"], cwd=tmp_path / "t", env={**os.environ, "QUILTRC": str(QUILTRC)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert quilt.returncode == 0 and patches.load().names[0] in quilt.stdout
    absent = run_module("ci.stack", "--pin", "9.9.9", "check")
    assert absent.returncode == 1 and "no pin named" in absent.stderr
    assert "Traceback" not in absent.stderr
