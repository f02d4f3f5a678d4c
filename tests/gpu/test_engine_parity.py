# SPDX-License-Identifier: Apache-2.0
"""The judgement of engine_parity, without an engine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import engine_parity as parity


def side(tokens: list[int], margins: list[float], chosen: list[float]) -> dict:
    return {"sequences": [dict(tokens=tokens, margins=margins, chosen=chosen)]}


def test_equal_sequences() -> None:
    one = side([1, 2, 3], [1.0, 0.0, 2.0], [-0.5, -1.0, -0.1])
    two = side([1, 2, 3], [1.0, 0.0, 2.0], [-0.5, -1.2, -0.1])
    seen = parity.compare(one, two, 0.1)
    assert (seen.equal, seen.tokens, seen.ties, seen.differ) == (1, 3, [], [])
    assert abs(seen.logprob_error - 0.2) < 1e-9


def test_a_tie_ends_the_comparison() -> None:
    one = side([1, 2, 3], [1.0, 0.05, 2.0], [-0.5, -1.0, -0.1])
    two = side([1, 9, 8], [1.0, 0.04, 3.0], [-0.5, -1.0, -0.1])
    seen = parity.compare(one, two, 0.1)
    assert (seen.equal, seen.tokens, seen.ties, seen.differ) == (0, 1, [0.04], [])


def test_a_clear_difference_is_none() -> None:
    one = side([1, 2], [1.0, 0.7], [-0.5, -1.0])
    two = side([1, 3], [1.0, 0.9], [-0.5, -1.0])
    assert parity.compare(one, two, 0.1).differ == [0.7]


def test_scenarios_name_known_models() -> None:
    names = [s.name for s in parity.SCENARIOS]
    assert len(set(names)) == len(names)
    for scenario in parity.SCENARIOS:
        assert scenario.model in parity.MODELS
        assert (scenario.spec or {}).get("model", scenario.model) in parity.MODELS


@pytest.mark.parametrize("part", ["parity", "throughput"])
def test_an_unknown_name_is_refused(part: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_parity.py", part, "--only", "FULL", "nothing"])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2
    assert "nothing" in capsys.readouterr().err
