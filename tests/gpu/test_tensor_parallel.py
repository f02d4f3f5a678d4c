# SPDX-License-Identifier: Apache-2.0
"""What tensor_parallel makes of its children's results, without an engine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tensor_parallel as tp

LINE = "ROCM_SEGMENTED_ATTN: {} record(s) loaded, {} measured, of 2 kind(s) of layer, in 3.50 s"
WAITED = LINE + "; longest wait for another rank {:.2f} s, longest step {:.2f} s"


def engine(count: int = 2, /, **changes: object) -> dict:
    rank = {"nan": 0, "paths": {"segmented": 9}, "tiles": ["(a, b)"]}
    return {
        "sequences": [dict(tokens=[1, 2], margins=[1.0, 1.0], chosen=[-0.1, -0.2])],
        "ranks": [dict(rank) for _ in range(count)],
        "records": ["one", "two"],
        "left": [],
        "start_s": 20.0,
        "exit_s": 0.5,
        "tuning": tp.tuning_lines("\n".join([WAITED.format(0, 2, 0.2, 0.5)] * 2)),
        **changes,
    }


def test_the_log_tells_how_ranks_tuned() -> None:
    alone, second = tp.tuning_lines(
        "(Worker) INFO " + LINE.format(1, 1) + "\nx\n" + WAITED.format(2, 0, 0.25, 1.5) + "\n"
    )
    assert alone == dict(loaded=1, measured=1, kinds=2, seconds=3.5, wait=0, step=0)
    assert (second["wait"], second["step"], second["measured"]) == (0.25, 1.5, 0)


def test_equal_tokens_are_well() -> None:
    row, good = tp.parity_row("name", tp.TESTED, engine(1), engine(), 0.1)
    assert good, row


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "it broke"}, "it broke"),
        ({"left": ["python worker"]}, "left behind"),
        ({"ranks": [{"nan": 0, "paths": {"segmented": 1}}]}, "1 ranks answered"),
        ({"ranks": [{"nan": 2, "paths": {"segmented": 1}}] * 2}, "NaN"),
        ({"ranks": [{"nan": 0, "paths": {}}] * 2}, "no segmented kernel"),
        ({"ranks": [{"nan": 0, "paths": {"segmented": 1, "unified: x": 1}}] * 2}, "unified: x"),
        (
            {"sequences": [dict(tokens=[1, 3], margins=[1.0, 0.9], chosen=[-0.1, -0.2])]},
            "tokens differ",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict, words: str) -> None:
    row, good = tp.parity_row("name", tp.TESTED, engine(1), engine(**changes), 0.1)
    assert not good
    assert words in row


def test_good_tuning() -> None:
    assert tp.wrong_tuning(engine(), 2, 2, again=False) == []
    again = tp.tuning_lines("\n".join([WAITED.format(2, 0, 0.0, 0.0)] * 2))
    assert tp.wrong_tuning(engine(tuning=again), 2, 2, again=True) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": [{"nan": 0, "paths": {"segmented": 1}, "tiles": t} for t in "ab"]}, "different"),
        ({"records": ["one"]}, "1 records"),
        ({"records": ["one", "BAD two"]}, "BAD"),
        ({"tuning": []}, "0 ranks said"),
        ({"tuning": tp.tuning_lines(WAITED.format(2, 0, 0, 0) * 2)}, "0 kinds measured"),
        ({"tuning": tp.tuning_lines(WAITED.format(0, 2, 9.0, 1.0) * 2)}, "waited"),
        ({"error": "it broke"}, "it broke"),
    ],
)
def test_bad_tuning(changes: dict, words: str) -> None:
    assert words in "; ".join(tp.wrong_tuning(engine(**changes), 2, 2, again=False))


def test_scenarios_name_known_models() -> None:
    assert {s.model for s in tp.SCENARIOS} <= set(tp.MODELS)
    heads = [m["num_key_value_heads"] for m in tp.MODELS.values()]
    assert 1 in heads
    assert all(m["num_attention_heads"] % 2 == 0 for m in tp.MODELS.values())
