"""The forward port on small made-up trees where the right answer is known."""

import ast
import dataclasses
import json
import tarfile
import textwrap

import pytest
from conftest import HEADER, run_module
from hypothesis import given
from hypothesis import strategies as st

from ci import forward, gitstack, source
from ci.errors import StackError
from ci.forward import __main__ as command_line
from ci.forward import equivalent, facts, port, report, tables, target
from ci.forward.port import Hunk

ROCM = """\
import torch

_GCN_ARCH = _get_gcn_arch()
_ON_RDNA = any(arch in _GCN_ARCH for arch in ["gfx11", "gfx12"])


def on_rdna() -> bool:
    return _ON_RDNA


@cache
def _get_backend_priorities(use_mla: bool) -> list[AttentionBackendEnum]:
    from vllm._aiter_ops import ops

    if use_mla:
        return [AttentionBackendEnum.MLA]
    backends: list = []
    if on_rdna():
        backends.append(AttentionBackendEnum.RDNA)
    if ops.is_enabled():
        backends.insert(0, AttentionBackendEnum.AITER)
    backends.append(AttentionBackendEnum.TRITON)
    return backends
"""
BASE = """\
from abc import ABC, abstractmethod
from enum import Enum

LIMIT = 4


class Kind(Enum):
    FAST = 1
    SLOW = 2


class Base(ABC):
    def scores(self, query, scale=1.0):
        return query * scale

    @abstractmethod
    def name(self):
        ...

    def _pages(self, length):
        pages = length // LIMIT
        return pages + 1


def _helper(values, step=2):
    return values[::step]
"""
CONFIG = """\
from vllm.config.cache import CacheConfig


class VllmConfig:
    cache_config: CacheConfig
"""
CACHE = """\
class CacheConfig:
    block_size: int = 16
    dtype: str = "auto"
"""
PIN = {
    "setup.py": "\n",
    "vllm/__init__.py": "",
    "vllm/platforms/__init__.py": "",
    "vllm/platforms/rocm.py": ROCM,
    "vllm/base.py": BASE,
    "vllm/config/__init__.py": CONFIG,
    "vllm/config/cache.py": CACHE,
    "vllm/long.py": "".join(f"x{i} = {i}\n" for i in range(1, 41)),
}
OURS = """\
from vllm.base import LIMIT, Base, Kind, _helper
from vllm.config import VllmConfig


class Ours(Base):
    def __init__(self, vllm_config: VllmConfig):
        self.block_size = vllm_config.cache_config.block_size
        self.kind = Kind.FAST

    def scores(self, query, scale=1.0):
        return _helper(query, step=LIMIT) * scale + self._pages(8)

    def name(self):
        return "ours"
"""
TEST = "def test_it():\n    pass\n"


def lay(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def edit(path, old, new, files=PIN):
    assert old in files[path]
    return {**files, path: files[path].replace(old, new)}


class World:
    """A pin, a series on it, and what becomes of it on a target."""

    def __init__(self, the_pin, folder):
        self.folder = folder
        self.base = lay(folder / "pin", PIN)
        self.pin = dataclasses.replace(the_pin, tree_sha256=source.tree_digest(self.base))
        self.work = folder / "series"
        gitstack.copy_tree(self.base, self.work)
        gitstack.init(self.work, self.pin)
        gitstack.git(self.work, "checkout", "-q", "-b", gitstack.BRANCH)

    def patch(self, name, files, depends="none"):
        for path, text in files.items():
            if text is None:
                (self.work / path).unlink()
            else:
                lay(self.work, {path: text})
        lay(self.work, {f"tests/test_{name.split('/')[1].replace('-', '_')}.py": TEST})
        gitstack.git(self.work, "add", "-A", "-f")
        message = HEADER.format(name=name, depends=depends, subject="s").split("\n\n", 1)[1]
        gitstack.git(self.work, "commit", "-q", "-m", f"[ROCm] Do {name}\n\n{message}")
        return self

    def onto(self, files):
        goal = target.Target("9.9.9", "made up", lay(self.folder / "target", files))
        series = gitstack.from_branch(self.work)
        assert series.problems() == []
        self.data = forward.forward(self.pin, series, self.base, goal, self.folder / "forward")
        return [p["verdict"] for p in self.data["patches"]]

    @property
    def last(self):
        return self.data["patches"][-1]

    def findings(self, level):
        return {f["key"]: f["what"] for f in self.last["findings"] if f["level"] == level}

    def ported(self, path):
        return (self.folder / "forward" / "ported" / path).read_text()


@pytest.fixture
def world(the_pin, tmp_path):
    return World(the_pin, tmp_path)


LINE = edit("vllm/long.py", "x20 = 20\n", "x20 = 20\nours = 1\n")["vllm/long.py"]


def test_a_patch_that_still_fits_is_applied(world):
    assert world.patch("core/line", {"vllm/long.py": LINE}).onto(PIN) == ["applied"]
    assert world.ported("vllm/long.py") == LINE


def test_lines_above_are_an_offset(world):
    world.patch("core/line", {"vllm/long.py": LINE})
    assert world.onto(edit("vllm/long.py", "x3 = 3\n", "a = 1\nb = 2\nc = 3\nx3 = 3\n")) == [
        "applied with offset"
    ]
    assert world.last["notes"] == ["vllm/long.py: hunk 1 by +3 lines"]


def test_a_changed_neighbour_is_merged_three_way(world):
    # Within the three lines of context, not adjacent.
    world.patch("core/line", {"vllm/long.py": LINE})
    assert world.onto(edit("vllm/long.py", "x18 = 18", "x18 = 1800")) == ["merged three-way"]
    assert "x18 = 1800\nx19 = 19\nx20 = 20\nours = 1\n" in world.ported("vllm/long.py")


def test_a_moved_file_is_followed(world):
    world.patch("core/line", {"vllm/long.py": LINE})
    moved = {k: v for k, v in PIN.items() if k != "vllm/long.py"}
    moved["vllm/deep/down.py"] = PIN["vllm/long.py"]
    assert world.onto(moved) == ["merged three-way"]
    assert world.last["notes"] == ["vllm/long.py is vllm/deep/down.py there"]
    assert world.ported("vllm/deep/down.py") == LINE


def test_a_conflict_shows_both_sides_and_what_follows_is_provisional(world):
    first = edit("vllm/long.py", "x20 = 20", "x20 = 'ours'")["vllm/long.py"]
    world.patch("core/first", {"vllm/long.py": first})
    second = first.replace("x21 = 21", "x21 = 'ours'")
    world.patch("core/second", {"vllm/long.py": second}, depends="core/first")
    world.patch("core/third", {"vllm/base.py": BASE + "\nTHIRD = 3\n"})
    verdicts = world.onto(edit("vllm/long.py", "x20 = 20", "x20 = 'theirs'"))
    assert verdicts == ["conflict", "applied", "applied"]
    (hunk,) = world.data["patches"][0]["conflicts"]
    assert hunk == {
        "path": "vllm/long.py", "line": 20, "kind": "content", "base": ["x20 = 20"],
        "upstream": ["x20 = 'theirs'"], "patch": ["x20 = 'ours'"],
    }  # fmt: skip
    assert [p["on_trial"] for p in world.data["patches"]] == [[], ["core/first"], []]
    text = report.as_markdown(world.data)
    assert "x20 = 20 | x20 = 'theirs' | x20 = 'ours'" in text
    assert "Provisional" in text and "line 20 of the target" in text


def test_a_file_that_both_add_is_a_conflict_without_its_content(world):
    world.patch("core/new", {"vllm/new.py": "OURS = 1\n" * 30})
    assert world.onto({**PIN, "vllm/new.py": "THEIRS = 2\n" * 30}) == ["conflict"]
    (hunk,) = world.last["conflicts"]
    assert (hunk["path"], hunk["kind"]) == ("vllm/new.py", "both add it")
    assert "THEIRS" not in json.dumps(world.data)
    assert world.ported("vllm/new.py") == "OURS = 1\n" * 30


def test_a_file_that_upstream_deleted_is_a_conflict(world):
    world.patch("core/line", {"vllm/long.py": LINE})
    assert world.onto({k: v for k, v in PIN.items() if k != "vllm/long.py"}) == ["conflict"]
    assert world.last["conflicts"][0]["kind"] == "upstream deleted it"


FIX = """
    def _pages(self, length):
        full = length // LIMIT
        if full > 100:
            return 100
        return full + 1
"""
SAME_FIX_IN_OTHER_WORDS = '''
    def _pages(self, length: int) -> int:
        """How many pages a length takes."""
        n = length // LIMIT
        # Never more than the table holds.
        if not 100 >= n:
            result = 100
            return result
        else:
            return n + 1
'''
PAGES = BASE[BASE.index("\n    def _pages") : BASE.index("\n\ndef _helper")]


def test_a_patch_that_is_upstream_word_for_word(world):
    fixed = edit("vllm/base.py", PAGES, FIX)["vllm/base.py"]
    world.patch("core/fix", {"vllm/base.py": fixed})
    assert world.onto({**PIN, "vllm/base.py": fixed}) == ["already upstream"]
    assert world.last["upstream_has"] == [
        ["vllm/base.py:Base._pages", "the same place, word for word"]
    ]


def test_a_patch_that_is_upstream_in_other_words(world):
    world.patch("core/fix", edit("vllm/base.py", PAGES, FIX))
    other = SAME_FIX_IN_OTHER_WORDS.replace("not 100 >= n", "100 < n")
    assert world.onto(edit("vllm/base.py", PAGES, other)) == ["already upstream"]
    assert world.last["upstream_has"][0][1] == "the same place, in other words"
    assert world.last["conflicts"] == []


def test_a_patch_that_is_upstream_elsewhere_under_another_name(world):
    ours = (
        "def fold(values, by):\n    return [v // by for v in values if v.ready and v.size > by]\n"
    )
    world.patch("core/fold", {"vllm/fold.py": ours})
    theirs = ours.replace("fold", "shrink").replace("v", "w").replace("walues", "values")
    assert world.onto({**PIN, "vllm/tools.py": theirs}) == ["already upstream"]
    assert world.last["upstream_has"] == [["vllm/fold.py:fold", "vllm/tools.py:shrink, by content"]]


def test_the_same_name_with_other_content_is_not_upstream(world):
    world.patch("core/fix", edit("vllm/base.py", PAGES, FIX))
    assert world.onto(edit("vllm/base.py", PAGES, FIX.replace("100", "200"))) == ["conflict"]
    assert world.last["upstream_has"] == []


def test_a_patch_that_is_upstream_in_part_says_how_much(world):
    first = "        check(length)\n        pages = length"
    both = first.replace("check(length)\n", "check(length)\n        announce(length, LIMIT)\n")
    world.patch("core/fix", edit("vllm/base.py", "        pages = length", both))
    world.onto(edit("vllm/base.py", "        pages = length", first))
    assert world.last["upstream_has"] == []
    assert world.last["upstream_has_partly"] == [["vllm/base.py:Base._pages", 1, 2]]


OVERRIDE = "applied, but upstream changed what it relies on"


@pytest.fixture
def ours(world):
    return world.patch("attention/ours", {"vllm/ours.py": OURS})


def test_what_did_not_change_gives_no_finding(ours):
    assert ours.onto(PIN) == ["applied"]
    assert ours.last["findings"] == [] and ours.last["unresolved"] == []
    assert ours.last["uses"] >= 9


def test_a_renamed_method_that_is_overridden(ours):
    assert ours.onto(edit("vllm/base.py", "def scores", "def logits")) == [OVERRIDE]
    assert ours.findings("breaks") == {
        "vllm.base:Base.scores": "is gone from Base; new there with the same body or value: logits"
    }
    assert ours.last["findings"][0]["where"] == ["vllm/ours.py:10"]


def test_a_renamed_private_helper_that_is_called(ours):
    assert ours.onto(edit("vllm/base.py", "def _pages", "def _page_count")) == [OVERRIDE]
    assert "_page_count" in ours.findings("breaks")["vllm.base:Base._pages"]


def test_a_changed_default(ours):
    assert ours.onto(edit("vllm/base.py", "scale=1.0", "scale=0.5")) == [OVERRIDE]
    assert ours.findings("changed") == {
        "vllm.base:Base.scores": "overridden: default of scale: 1.0 is now 0.5"
    }
    assert ours.findings("breaks") == {}


def test_a_new_parameter_of_an_overridden_method_breaks(ours):
    ours.onto(edit("vllm/base.py", "query, scale=1.0", "query, mask, scale=1.0"))
    assert ours.findings("breaks") == {
        "vllm.base:Base.scores": "overridden: new required parameter mask"
    }


def test_reordered_parameters(ours):
    ours.onto(edit("vllm/base.py", "self, query, scale=1.0", "self, scale=1.0, query=None"))
    whats = [f["what"] for f in ours.last["findings"]]
    assert "overridden: order of parameters: self, scale, query" in whats


def test_a_call_that_no_longer_binds(ours):
    ours.onto(edit("vllm/base.py", "values, step=2", "values, stride=2"))
    whats = {f["what"] for f in ours.last["findings"] if f["key"] == "vllm.base:_helper"}
    assert "the call passes step=, which is not taken" in whats
    assert "parameter step is gone" not in whats  # another default: not the same parameter


def test_a_new_abstract_method(ours):
    ours.onto(
        edit("vllm/base.py", "    def _pages", "    @abstractmethod\n    def layout(self, kind):\n"
             "        ...\n\n    def _pages")
    )  # fmt: skip
    assert ours.findings("breaks") == {
        "vllm.base:Base": "subclasses must define layout(self, kind) there"
    }


def test_enum_members_are_compared_by_value(ours):
    ours.onto(edit("vllm/base.py", "FAST = 1\n    SLOW = 2", "SLOW = 1\n    FAST = 2"))
    assert ours.findings("changed")["vllm.base:Kind.FAST"] == "`1` is now `2`"
    whats = {f["what"] for f in ours.last["findings"] if f["key"] == "vllm.base:Kind"}
    assert "order: SLOW, FAST" in whats


def test_an_enum_member_that_is_gone(ours):
    ours.onto(edit("vllm/base.py", "FAST = 1", "QUICK = 1"))
    assert "is gone from Kind" in ours.findings("breaks")["vllm.base:Kind.FAST"]
    assert "QUICK" in ours.findings("breaks")["vllm.base:Kind.FAST"]


def test_config_fields_are_followed_through_annotations(ours):
    ours.onto(edit("vllm/config/cache.py", "block_size: int = 16", "block_size: int | None = None"))
    assert ours.findings("changed") == {
        "vllm.config.cache:CacheConfig.block_size": "`int = 16` is now `int | None = None`"
    }


def test_a_config_field_that_is_gone(ours):
    ours.onto(edit("vllm/config/cache.py", "block_size: int = 16", "page_size: int = 16"))
    assert ours.findings("breaks") == {
        "vllm.config.cache:CacheConfig.block_size": "is gone from CacheConfig; new there with "
        "the same body or value: page_size"
    }


def test_a_moved_definition_is_found(ours):
    helper = BASE[BASE.index("def _helper") :]
    files = edit("vllm/base.py", helper, "")
    ours.onto({**files, "vllm/tools.py": helper})
    assert ours.findings("breaks") == {"vllm.base:_helper": "is gone; vllm.tools defines _helper"}


def test_a_definition_that_is_still_importable(ours):
    helper = BASE[BASE.index("def _helper") :]
    files = edit("vllm/base.py", helper, "from vllm.tools import _helper\n")
    ours.onto({**files, "vllm/tools.py": helper})
    assert ours.findings("breaks") == {}
    assert "vllm.tools" in ours.findings("changed")["vllm.base:_helper"]


def test_a_changed_value(ours):
    ours.onto(edit("vllm/base.py", "LIMIT = 4", "LIMIT = 8"))
    assert ours.findings("changed") == {"vllm.base:LIMIT": "`4` is now `8`"}


def test_another_body_is_something_to_look_at_and_no_more(ours):
    assert ours.onto(edit("vllm/base.py", "pages + 1", "pages + 2")) == ["applied"]
    assert ours.findings("look") == {"vllm.base:Base._pages": "its body changed"}


def test_comments_docstrings_and_local_names_are_no_change(ours):
    other = PAGES.replace("pages", "n").replace("n + 1", "n + 1  # one is open")
    assert ours.onto(edit("vllm/base.py", PAGES, other.replace("_n", "_pages"))) == ["applied"]
    assert ours.last["findings"] == []


def test_code_around_a_hook(world):
    hooked = edit("vllm/base.py", "return pages + 1", "return pages + hook()")
    world.patch("core/hook", hooked)
    text = PAGES.replace("self, length", "self, length, spare=0")
    assert world.onto(edit("vllm/base.py", PAGES, text)) == [
        "merged three-way, but upstream changed what it relies on"
    ]
    assert world.findings("changed") == {"vllm.base:Base._pages": "new parameter spare = 0"}


def test_what_the_stack_itself_adds_is_no_use_of_upstream(world):
    world.patch("core/mine", {"vllm/base.py": BASE + "\n\ndef mine():\n    return 1\n"})
    world.patch(
        "core/user", {"vllm/user.py": "from vllm.base import mine\n\nmine()\n"}, depends="core/mine"
    )
    world.onto(PIN)
    assert world.last["uses"] == 0 and world.last["unresolved"] == []


def test_names_that_cannot_be_resolved_are_listed(world):
    world.patch("core/odd", {"vllm/odd.py": "from vllm.base import no_such_thing\n"})
    world.onto(PIN)
    assert world.last["unresolved"] == ["vllm.base:no_such_thing"]


# Tables


def test_the_whole_priority_table_is_compared_for_every_architecture(world):
    hooked = edit(
        "vllm/platforms/rocm.py", "    if on_rdna():", "    if on_rdna() and not use_mla:"
    )
    world.patch("core/hook", hooked)
    world.onto(edit("vllm/platforms/rocm.py", "backends.insert(0, ", "backends.append("))
    (entry,) = world.data["priorities"]
    groups = {name: g["rows"] for g in entry["groups"] for name in g["arches"]}
    assert set(groups) >= {"gfx942", "gfx1100", "gfx1151", "gfx1201"}
    rows = {
        tuple(map(tuple, r["conditions"])): (r["pin"], r["target"], r["target_with_series"])
        for r in groups["gfx1201"]
    }
    mla, no = (("use_mla", True),), ("use_mla", False)
    assert rows == {
        mla: (["MLA"],) * 3,
        (no, ("ops.is_enabled()", False)): (["RDNA", "TRITON"],) * 3,
        (no, ("ops.is_enabled()", True)): (
            ["AITER", "RDNA", "TRITON"], ["RDNA", "AITER", "TRITON"], ["RDNA", "AITER", "TRITON"],
        ),
    }  # fmt: skip
    assert [r["pin"] for r in groups["gfx942"]] == [
        ["TRITON"], ["AITER", "TRITON"], ["MLA"],
    ]  # fmt: skip
    text = report.as_markdown(world.data)
    assert "pin = pin with series: AITER, RDNA, TRITON" in text
    assert "target = target with series: RDNA, AITER, TRITON" in text


def test_a_reordered_list_is_seen_in_every_row_that_has_it():
    other = ROCM.replace(
        "    backends: list = []\n", "    backends: list = [AttentionBackendEnum.TRITON]\n"
    ).replace("    backends.append(AttentionBackendEnum.TRITON)\n", "")
    for arch in ("gfx942", "gfx1201"):
        rows = tables.table([tables.Priorities(ROCM, arch), tables.Priorities(other, arch)])
        assert [sorted(r.lists[0]) == sorted(r.lists[1]) for r in rows] == [True] * 3
        changed = [dict(r.conditions) for r in rows if r.lists[0] != r.lists[1]]
        assert all(not c["use_mla"] for c in changed)
        assert len(changed) == (2 if arch == "gfx1201" else 0)


def test_a_condition_that_only_one_tree_has_splits_the_rows_of_both():
    other = ROCM.replace("if use_mla:", "if use_mla and envs.NEW_FLAG:")
    rows = tables.table([tables.Priorities(ROCM, "gfx942"), tables.Priorities(other, "gfx942")])
    cases = [dict(r.conditions) for r in rows]
    assert len({tuple(sorted(c.items())) for c in cases}) == len(rows)
    changed = [c for c, r in zip(cases, rows, strict=True) if r.lists[0] != r.lists[1]]
    assert changed and all(c["use_mla"] and not c["envs.NEW_FLAG"] for c in changed)


def test_comparisons_become_conditions():
    text = textwrap.dedent("""
        def _get_backend_priorities(capability):
            if capability.major == 10:
                return [AttentionBackendEnum.A]
            elif capability.major >= 9 and "x" in capability.features:
                return [AttentionBackendEnum.B]
            return []
    """)
    rows = {tuple(c for c, yes in r.conditions if yes): r.lists[0] for r in
            tables.table([tables.Priorities(text)])}  # fmt: skip
    assert rows == {
        ("capability.major == 10",): ("A",),
        ("capability.major >= 9", "'x' in capability.features"): ("B",),
        ("capability.major >= 9",): (),
        (): (),
    }


def test_a_function_that_is_gone_or_cannot_be_evaluated_says_so():
    (row,) = tables.table([None])
    assert row.lists == (("<no such function>",),)
    broken = "def _get_backend_priorities(x):\n    return [b for b in x.all()]\n"
    (row,) = tables.table([tables.Priorities(broken)])
    assert row.lists[0][0].startswith("<not evaluated: it iterates over x.all()")
    with pytest.raises(tables.NotEvaluated, match="0 functions"):
        tables.find_function("x = 1\n")
    many = " + ".join(f"[AttentionBackendEnum.A] * bool(f{i}())" for i in range(14))
    with pytest.raises(tables.NotEvaluated, match="cases"):
        tables.table([tables.Priorities(f"def _get_backend_priorities():\n    return {many}\n")])


# Normal forms


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=3, unique=True)


@given(NAMES, st.integers(0, 9), st.integers(0, 9))
def test_local_names_do_not_matter_and_constants_do(names, one, two):
    template = (
        "def f(x):\n  {0} = x + {n}\n  {1} = {0} * {0}\n  {2} = {1} - {0}\n  return {2} * 2\n"
    )

    def form(n, chosen):
        return equivalent.normal_form(ast.parse(template.format(*chosen, n=n)).body[0])

    assert form(one, names) == form(one, ["p", "q", "r"])
    assert (form(one, names) == form(two, names)) == (one == two)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("return a != b", "return not a == b"),
        ("return a < b", "return b > a"),
        ("if a:\n  return 1\nreturn 2", "if a:\n  return 1\nelse:\n  return 2"),
        ("if a:\n  return 1\nreturn 2", "return 1 if a else 2"),
        ("if not a:\n  return 2\nreturn 1", "return 1 if a else 2"),
        ("return g(x=1, y=2)", "return g(y=2, x=1)"),
        ("v = g()\nreturn v", "return g()"),
        ("v: int = g()\nuse(v)\nreturn v + 1", "'''Doc.'''\nw = g()\nuse(w)\nreturn w + 1"),
        ("if a is not None:\n  g()\nelse:\n  h()", "if a is None:\n  h()\nelse:\n  g()"),
    ],
)
def test_the_same_in_other_words(one, other):
    def form(body):
        text = "def f(a, b):\n" + textwrap.indent(body, "  ")
        return equivalent.normal_form(ast.parse(text).body[0])

    assert form(one) == form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("return a < b", "return a <= b"),
        ("return a - b", "return b - a"),
        ("return g(1, 2)", "return g(2, 1)"),
        ("return a and b", "return a or b"),
        ("return g(a)", "return h(a)"),
        ("v = g()\nw = h()\nreturn v - w", "v = g()\nw = h()\nreturn w - v"),
        ("return a != b != 1", "return a == b != 1"),
        ("for x in a:\n  if x:\n    break\n  g()", "for x in a:\n  if x:\n    continue\n  g()"),
    ],
)
def test_what_only_looks_the_same(one, other):
    def form(body):
        text = "def f(a, b):\n" + textwrap.indent(body, "  ")
        return equivalent.normal_form(ast.parse(text).body[0])

    assert form(one) != form(other)


# Facts


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("a, b", "a, c", ["parameter b is now called c"]),
        ("a, b=1", "a", ["parameter b is gone"]),
        ("a", "a, *, b", ["new required parameter b"]),
        ("a, b=1", "a, *, b=1", ["parameter b: positional is now keyword-only"]),
        ("a: int", "a: str", ["annotation of a: int is now str"]),
        ("a, b", "b, a", ["order of parameters: b, a"]),
        ("a, *, b=1, c=2", "a, *, c=2, b=1", []),
    ],
)
def test_signature_changes(old, new, said):
    one, other = (ast.parse(f"def f({text}): ...").body[0] for text in (old, new))
    assert facts.signature_changes(one, other) == said


def test_names_are_followed_through_modules(tmp_path):
    tree = facts.Tree(
        lay(
            tmp_path,
            {
                "vllm/__init__.py": "MODULE_ATTRS = {'Lazy': '.deep.mod:Thing'}\n"
                "def __getattr__(name): ...\n",
                "vllm/deep/__init__.py": "from .mod import Thing as Renamed\nfrom .star import *\n",
                "vllm/deep/mod.py": "class Thing:\n    pass\n",
                "vllm/deep/star.py": "def starred(): ...\n",
                "vllm/loop.py": "from vllm.loop2 import x\n",
                "vllm/loop2.py": "from vllm.loop import x\n",
            },
        )
    )
    assert tree.find("vllm.deep", "Renamed").key == "vllm.deep.mod:Thing"
    assert tree.find("vllm.deep", "starred").key == "vllm.deep.star:starred"
    assert tree.find("vllm", "Lazy").key == "vllm.deep.mod:Thing"
    assert tree.find("vllm", "deep").key == "vllm.deep"
    assert tree.find("vllm.loop", "x") is None and tree.find("vllm.deep", "absent") is None


def test_conflict_markers_give_lines_of_the_upstream_side():
    text = "a\n<<<<<<< HEAD\nb\nc\n||||||| base\nd\n=======\ne\n>>>>>>> patch\nf\n"
    text += "<<<<<<< HEAD\n||||||| base\ng\n=======\nh\n>>>>>>> patch\n"
    assert port.read_markers("p", text) == [
        Hunk("p", 2, "content", ("d",), ("b", "c"), ("e",)),
        Hunk("p", 5, "content", ("g",), (), ("h",)),
    ]


# The command


def test_the_same_inputs_give_the_same_report(ours):
    ours.onto(edit("vllm/base.py", "scale=1.0", "scale=0.5"))
    first = json.dumps(ours.data), report.as_markdown(ours.data)
    ours.onto(edit("vllm/base.py", "scale=1.0", "scale=0.5"))
    assert (json.dumps(ours.data), report.as_markdown(ours.data)) == first
    assert str(ours.folder) not in "".join(first)


def test_the_plan_keeps_what_a_person_wrote(ours):
    ours.onto(edit("vllm/base.py", "def scores", "def logits"))
    table = command_line.plan_table([ours.data, ours.data])
    assert "| `attention/ours` | applied, but upstream changed" in table and "(1 breaks)" in table
    begin, end = command_line._BEGIN, command_line._END
    text = command_line.set_between(f"Mine.\n{begin}\nold\n{end}\nMine too.\n", table)
    assert text.startswith("Mine.\n") and text.endswith("\nMine too.\n") and "old" not in text
    with pytest.raises(StackError, match="no marks"):
        command_line.set_between("no marks", table)


def test_targets(the_pin, tmp_path):
    tree = lay(tmp_path / "vllm-1.2.3", {**PIN, "PKG-INFO": "made", "vllm/_version.py": "made"})
    folder = tmp_path / "out"
    found = target.bring(str(tree), the_pin, folder)
    assert found.name == "vllm-1.2.3" and not (folder / "PKG-INFO").exists()
    assert not (folder / "vllm" / "_version.py").exists() and "digest" in found.origin
    sdist = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tree, arcname="vllm-1.2.3")
    digest = source.sha256(sdist)
    assert target.bring(str(sdist), the_pin, folder, digest).origin == f"sdist, sha256 {digest}"
    with pytest.raises(StackError, match="sha256 is"):
        target.bring(str(sdist), the_pin, folder, "0" * 64)
    gitstack.init(tree, the_pin)
    gitstack.git(tree, "tag", "v1.2.3")
    head = gitstack.git(tree, "rev-parse", "HEAD").strip()
    by_tag = target.bring("v1.2.3", the_pin, folder, repository=str(tree))
    assert by_tag.origin == f"commit {head}" and not (folder / ".git").exists()
    with pytest.raises(StackError, match="git cannot fetch it"):
        target.bring("no-such-ref", the_pin, folder, repository=str(tree))
    with pytest.raises(StackError, match="no vllm folder"):
        target.bring(str(lay(tmp_path / "empty", {"x": ""})), the_pin, folder)


def test_no_network_is_one_clear_line(the_pin, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.delenv("UV_INDEX_URL", raising=False)
    with pytest.raises(StackError, match="cannot ask the package index"):
        target.bring("9.8.7", the_pin, tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one target"),
        (["0.33.0", "--docs"], "name one target"),
        (["0.33.0", "--out", "x.txt"], "must end in .md or .json"),
    ],
)
def test_bad_command_lines(arguments, said):
    result = run_module("ci.forward", *arguments)
    assert result.returncode == 1 and said in result.stderr and "Traceback" not in result.stderr
