# SPDX-License-Identifier: Apache-2.0
"""What start_up makes of its children's results, without an engine."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import children
import start_up

CASES = {case.name: case for case in (*start_up.STATIC, *start_up.TUNED)}


def result(**changes: object) -> dict:
    return {
        "start_s": 9.0,
        "first_s": 0.2,
        "first_token_s": 0.1,
        "again_s": 0.1,
        "again_token_s": 0.05,
        "kernels": {"start": {"ours found": {"a": 3}, "others compiled": {"b": 2}}},
        "paths": {"segmented": 5},
        "lines": ["3 record(s) loaded, 0 measured, of 3"],
        **changes,
    }


@pytest.mark.parametrize("name", CASES)
def test_a_good_start(name: str) -> None:
    assert start_up.judge(CASES[name], result()) == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("static, warm", {"error": "it broke"}, "it broke"),
        ("static, warm", {"kernels": {}}, "not measured"),
        ("static, warm", {"kernels": {"start": {"ours compiled": {"a": 1}}}}, "in spite"),
        ("static, prebuilt", {"kernels": {"start": {"ours compiled": {"a": 1}}}}, "in spite"),
        (
            "static, empty",
            {"kernels": {"start": {"ours found": {"a": 1}}, "sweep": {"ours found": {"a": 1}}}},
            "after the start",
        ),
        ("tuned, warm", {"lines": ["1 measured"]}, "measured again"),
        ("static, warm", {"paths": {"unified: x": 2}}, "no call took"),
    ],
)
def test_a_bad_start(name: str, changes: dict, words: str) -> None:
    (wrong,) = start_up.judge(CASES[name], result(**changes))
    assert words in wrong


LOG = """
(MainProcess pid=1) INFO 11-30 22:24:54 [a.py:235] ROCM_SEGMENTED_ATTN: warmed up 24 kernel variants
(MainProcess pid=1) INFO 11-30 22:26:33 [b.py:292] ROCM_SEGMENTED_ATTN: 2 layer(s) from model on: x
(MainProcess pid=1) INFO 11-30 22:26:33 [c.py:386] Prebuilt kernels: 24 put into the Triton cache
(W pid=9) WARNING 11-30 20:18:31 [m.py:140] Triton kernel JIT compilation during inference: _one.
"""


def test_what_a_log_says() -> None:
    found = [one or other for one, other in start_up.FOLLOWED.findall(LOG)]
    assert found[:2] == [
        "ROCM_SEGMENTED_ATTN: warmed up 24 kernel variants",
        "Prebuilt kernels: 24 put into the Triton cache",
    ]
    assert found[2].endswith("Triton kernel JIT compilation during inference: _one")


def test_the_table_has_a_row_for_each_start() -> None:
    rows = start_up.table({"one": result(), "two": {"error": "x"}}).splitlines()
    assert len(rows) == 3
    assert "0/3" in rows[1]
    assert "2/0" in rows[1]
    assert "ERROR" in rows[2]


def test_a_copied_cache_lacks_the_segmented_kernels(tmp_path: Path) -> None:
    source, target = tmp_path / "one" / "triton", tmp_path / "two" / "triton"
    for name in ("_combine_kernel", "other_kernel"):
        entry = source / name.upper()
        entry.mkdir(parents=True)
        (entry / f"{name}.cubin").write_bytes(b"code")
        (entry / f"__grp__{name}.json").write_text(f'{{"child": "{entry}/{name}.cubin"}}')
    assert start_up.copy_others(source, target) == 1
    (group,) = target.glob("*/__grp__*.json")
    assert group.read_text() == f'{{"child": "{target}/OTHER_KERNEL/other_kernel.cubin"}}'
    assert start_up.copy_others(tmp_path / "none", target) == 0


def test_the_sampler_tells_where_time_went() -> None:
    with start_up.Sampler() as sampler:
        time.sleep(0.1)
    assert any("the_sampler_tells" in place for place in sampler.worst())


CHILD = """
import sys, time
sys.path.insert(0, {folder!r})
import children
what = sys.argv[2]
if "hang" in what:
    print("still here", flush=True)
    time.sleep(60)
children.answer(lambda: 1 / 0 if "fail" in what else {{"answer": 42}})
"""


def test_children_answer_fail_and_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(folder=str(Path(__file__).parent)))
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(what: str, limit: float = 20.0, budget: float = 60.0) -> dict:
        return children.run_child(
            script,
            {"what": what},
            name=what,
            gpus="",
            limit_s=limit,
            deadline=children.Deadline(budget),
        )

    assert run("well")["answer"] == 42
    assert "ZeroDivisionError" in run("fail")["error"]
    monkeypatch.setattr(children, "LEAST_S", 0.5)
    start = time.monotonic()
    assert "still here" in run("hang", limit=1.0)["error"]
    assert time.monotonic() - start < 20
    assert "not run" in run("well", budget=0.1)["error"]
    assert "ZeroDivisionError" in (tmp_path / "children.log").read_text()
