"""Sending a patch upstream: what is refused, what the branch and the text hold."""

import os
import shutil
import subprocess

import pytest
from conftest import HEADER, make_series, run_module

from ci import gitstack, patches, paths, upstream
from ci.errors import StackError

WHO = upstream.Person("Some One", "some.one@users.noreply.github.com")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
TEMPLATE = """\
Fill it in.

## Purpose

## Test Plan

## Test Result

---
- [ ] upstream's own box
"""


def message(
    name, depends="none", forwarded="no", plan=None, subject="[ROCm] Do it", why="because."
):
    short = name.split("/")[1].replace("-", "_")
    text = HEADER.format(name=name, depends=depends, subject=subject).split("\n\n", 1)[1]
    text = text.replace(" pytest tests/test_x.py -q", plan or f" pytest tests/test_{short}.py -q")
    text = text.replace("Forwarded: no", f"Forwarded: {forwarded}").replace("because.", why)
    return f"{subject}\n\n{text}"


class Maker:
    """Makes real patches: commits on a small tree, exported."""

    def __init__(self, small_tree, pin, folder):
        self.base, self.pin, self.work = small_tree, pin, folder / "maker"
        gitstack.copy_tree(small_tree, self.work)
        gitstack.init(self.work, pin)
        gitstack.git(self.work, "checkout", "-q", "-b", gitstack.BRANCH)

    def add(self, name, files=None, test=True, **kwargs):
        short = name.split("/")[1].replace("-", "_")
        files = dict(files or {f"vllm/{short}.py": f"{SPDX}\nx = 1\n"})
        if test:
            files[f"tests/test_{short}.py"] = f"{SPDX}\ndef test_it():\n    pass\n"
        for path, text in files.items():
            (self.work / path).parent.mkdir(parents=True, exist_ok=True)
            (self.work / path).write_text(text)
        gitstack.git(self.work, "add", "-A", "-f")
        gitstack.git(self.work, "commit", "-q", "-m", message(name, **kwargs))
        return self

    @property
    def series(self):
        return gitstack.from_branch(self.work)

    def reasons(self, name, who=WHO, again=False):
        series = self.series
        return upstream.reasons_against(series.get(name), series.closure(name), who, again)


@pytest.fixture
def maker(small_tree, the_pin, tmp_path):
    return Maker(small_tree, the_pin, tmp_path)


def test_a_patch_in_order_is_not_refused(maker):
    maker.add("core/good", {"vllm/good.py": f"{SPDX}\nregister(fake_impl=_fake)\n"})
    assert maker.reasons("core/good") == []


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (upstream.Person("", ""), "no user.name and user.email"),
        (upstream.Person("X", ""), "no user.name and user.email"),
        (upstream.Person("X", "x@example.invalid"), "nobody's address"),
        (upstream.Person("X", "x@example.com"), "nobody's address"),
        (upstream.Person("X", "root@localhost"), "nobody's address"),
    ],
)
def test_nobody_signs_off(maker, who, said):
    (reason,) = maker.add("core/good").reasons("core/good", who)
    assert reason.startswith("no sign-off") and said in reason


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"test": False, "files": {"tests/data.json": "{}\n"}}, "brings no tests"),
        ({"plan": " pytest tests/other.py"}, "runs none of its own tests"),
        ({"forwarded": "not-needed, because it is ours alone"}, "is not for upstream"),
        ({"forwarded": "https://github.com/vllm-project/vllm/pull/1"}, "was sent already"),
        ({"subject": "[ROCm]Do it"}, "no [Tag] and a space"),
        ({"why": "the hipstack needs it."}, "its message speaks of this stack"),
        ({"files": {"vllm/x.py": f"{SPDX}\nimport vllm.hipstack\n"}}, "vllm/x.py speaks of this"),
        ({"files": {"vllm/x.py": f"{SPDX}\nos.environ['FAKE_GFX']\n"}}, "vllm/x.py speaks of this"),
        ({"files": {"vllm/x.py": "x = 1\n"}}, "vllm/x.py does not begin with upstream's SPDX"),
        ({"files": {"vllm/x.py": f"{SPDX}\nx = 1 \n"}}, "trailing blanks"),
    ],
)
def test_what_upstream_would_not_take(maker, kwargs, said):
    (reason,) = maker.add("core/bad", **kwargs).reasons("core/bad")
    assert reason.startswith("core/bad: ") and said in reason


def test_a_dependency_that_upstream_would_not_take_counts_too(maker):
    maker.add("core/ours", forwarded="not-needed, because it is ours alone")
    maker.add("core/sent", forwarded="https://github.com/vllm-project/vllm/pull/1")
    maker.add("core/top", depends="core/ours, core/sent")
    (reason,) = maker.reasons("core/top")  # a dependency that was sent is no obstacle
    assert reason.startswith("core/ours: is not for upstream")


def test_a_patch_that_was_sent_can_be_made_anew(maker):
    maker.add("core/sent", forwarded="https://github.com/vllm-project/vllm/pull/1")
    assert maker.reasons("core/sent", again=True) == []


def test_the_message_is_upstreams_form(maker):
    (patch,) = maker.add("core/good").series
    text = upstream.message(patch, WHO, "A Tool")
    assert text == (
        "[ROCm] Do it\n\nBecause.\n\nAssisted-by: A Tool\n"
        "Signed-off-by: Some One <some.one@users.noreply.github.com>\n"
    )
    for field in patches.FIELDS:
        assert f"{field}:" not in text


def test_the_branch_holds_the_dependencies_first_and_can_be_mailed(maker, small_tree, tmp_path):
    lines = (small_tree / "vllm" / "a.py").read_text()
    unrelated = lines.replace("line 3\n", "line 3\nunrelated\n")
    maker.add("core/other", {"vllm/a.py": unrelated})
    first = unrelated.replace("line 20\n", "line 20\nfirst\n")
    maker.add("core/first", {"vllm/a.py": first})
    maker.add("attention/top", {"vllm/top.py": f"{SPDX}\ny = 2\n"}, depends="core/first")
    chain = maker.series.closure("attention/top")
    repo, out = tmp_path / "clone", tmp_path / "out"
    gitstack.copy_tree(small_tree, repo)
    gitstack.init(repo, maker.pin)
    head = gitstack.git(repo, "rev-parse", "HEAD")
    out.mkdir()
    (out / "0009-old.patch").write_text("stale")
    files = upstream.make_branch(maker.pin, chain, WHO, repo, gitstack.BASE, "top", out, "")
    assert [f.name[:5] for f in files] == ["0001-", "0002-"] and len(list(out.iterdir())) == 2
    log = gitstack.git(repo, "log", "--format=%an <%ae>|%cn|%s|%b", f"{gitstack.BASE}..top")
    assert log.count("Some One <some.one@users.noreply.github.com>|Some One|[ROCm] Do it|") == 2
    assert log.count("Signed-off-by: Some One") == 2 and "Hipstack" not in log
    # What the user has checked out stays, and no worktree is left.
    assert gitstack.git(repo, "rev-parse", "HEAD") == head
    assert gitstack.git(repo, "worktree", "list").count("\n") == 1
    assert gitstack.git(repo, "show", "top:vllm/a.py") == lines.replace(
        "line 20\n", "line 20\nfirst\n"
    )
    again = tmp_path / "again"
    gitstack.copy_tree(small_tree, again)
    gitstack.init(again, maker.pin)
    for file in files:
        gitstack.git(again, "am", "-q", "--no-3way", str(file))
    trees = [gitstack.git(r, "rev-parse", f"{b}^{{tree}}") for r, b in
             ((again, "HEAD"), (repo, "top"))]  # fmt: skip
    assert trees[0] == trees[1]
    with pytest.raises(StackError, match="branch top exists"):
        upstream.make_branch(maker.pin, chain, WHO, repo, gitstack.BASE, "top", out, "")


def test_a_hidden_dependency_stops_the_branch_and_leaves_nothing(maker, small_tree, tmp_path):
    lines = (small_tree / "vllm" / "a.py").read_text()
    maker.add("core/first", {"vllm/a.py": lines.replace("line 9\n", "line 9\nfirst\n")})
    maker.add("core/top", {"vllm/a.py": lines.replace("line 9\n", "line 9\nfirst\ntop\n")})
    repo = tmp_path / "clone"
    gitstack.copy_tree(small_tree, repo)
    gitstack.init(repo, maker.pin)
    chain = maker.series.closure("core/top")
    with pytest.raises(StackError, match="core/top does not apply with only what it depends on"):
        upstream.make_branch(maker.pin, chain, WHO, repo, gitstack.BASE, "top", tmp_path / "o", "")
    assert gitstack.git(repo, "branch", "--list", "top") == ""
    assert gitstack.git(repo, "worktree", "list").count("\n") == 1


def test_the_text_has_places_that_only_a_person_can_fill(maker):
    maker.add("core/first", subject="[Core] Go first")
    maker.add(
        "core/top", depends="core/first",
        plan=" FAKE_GFX=gfx1100 pytest tests/test_top.py -q\n pytest tests/test_top.py -q\n"
        " TRITON_INTERPRET=1 pytest tests/test_top.py -k x",
    )  # fmt: skip
    chain = maker.series.closure("core/top")
    text = upstream.pull_request(chain.get("core/top"), chain, TEMPLATE, linted=True)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Purpose", "## Test Plan", "## Test Result"]
    assert "Because." in text and "- [Core] Go first" in text
    assert "AI assistance was used" in text and "gh pr list" in text and "ruff and mypy" in text
    assert "FAKE_GFX" not in text
    assert text.count("| `pytest tests/test_top.py -q` | FILL IN |") == 1
    assert "| `TRITON_INTERPRET=1 pytest tests/test_top.py -k x` |" in text
    assert text.rstrip().endswith("- [ ] upstream's own box")
    open_places = upstream.unready(text)
    assert len(open_places) == 8 and not any("upstream's own" in p for p in open_places)
    filled = text.replace("FILL IN", "done").replace("- [ ] ", "- [x] ")
    assert upstream.unready(filled) == []
    half = filled.replace("- [x] I am the human", "- [ ] I am the human")
    (place,) = upstream.unready(half)
    assert "not ticked: I am the human submitter" in place


def test_a_template_with_other_headings_is_not_guessed_at(maker):
    (patch,) = maker.add("core/good").series
    with pytest.raises(StackError, match="other headings"):
        upstream.pull_request(patch, make_series(patch), "## Motivation\n", linted=False)


def test_a_clone_without_the_pinned_commit_is_refused(the_pin, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(StackError, match="is no git repository with commit"):
        upstream._repository(tmp_path, the_pin)


def test_ready(tmp_path):
    path = tmp_path / "pull-request.md"
    path.write_text("- [ ] read it\nFILL IN here\n")
    result = run_module("ci.upstream", "ready", str(path))
    assert result.returncode == 1 and "2 place(s) are not filled in" in result.stderr
    path.write_text("- [x] read it\n")
    assert run_module("ci.upstream", "ready", str(path)).stdout == "filled in\n"
    assert "does not exist" in run_module("ci.upstream", "ready", "absent").stderr


@pytest.mark.stack
def test_every_patch_is_exported_or_refused_for_its_own_reasons(the_pin, sdist, tmp_path):
    """All patches of the real series that are meant for upstream can go there today."""
    from ci import check

    series = patches.load()
    base, repo = check.pristine(the_pin, str(sdist)), tmp_path / "repo"
    # The files that patches touch stand for the tree: the whole of it is slow to check out.
    for path in {c.path for patch in series for c in patch.changes}:
        if (base / path).is_file():
            (repo / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(base / path, repo / path)
    gitstack.init(repo, the_pin)
    template = (base / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()
    for patch in series:
        chain = series.closure(patch.name)
        reasons = upstream.reasons_against(patch, chain, WHO, again=True)
        ours = [p for p in chain if p.fields["Forwarded"].startswith("not-needed")]
        assert bool(reasons) == bool(ours), reasons
        if not reasons:
            short = patch.name.split("/")[1]
            files = upstream.make_branch(
                the_pin, chain, WHO, repo, gitstack.BASE, short, tmp_path / short, ""
            )
            assert len(files) == len(chain)
            text = upstream.pull_request(patch, chain, template, linted=False)
            assert len(upstream.unready(text)) >= 6


@pytest.mark.stack
def test_the_command_refuses_with_all_reasons(tmp_path):
    config = tmp_path / "gitconfig"
    config.write_text("[user]\nname = Nobody\nemail = nobody@example.invalid\n")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": str(config), "GIT_CONFIG_NOSYSTEM": "1"}
    result = run_module("ci.upstream", "export", "core/stack-identity", env=env)
    assert result.returncode == 1
    assert "refused: core/stack-identity: is not for upstream" in result.stderr
    assert not (paths.BUILD / "upstream" / "stack-identity").exists()
