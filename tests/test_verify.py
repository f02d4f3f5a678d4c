"""Test plans are read and run as upstream would type them."""

import sys
from pathlib import Path

import pytest

from ci import patches, verify
from ci.errors import StackError


def test_a_plan_line_is_split_into_environment_and_words():
    command = verify.parse_command("core/x", "A=1 B='x y' pytest tests/a.py -k 'p or q'")
    assert command.env == (("A", "1"), ("B", "x y"))
    assert command.words == ("pytest", "tests/a.py", "-k", "p or q")
    assert verify.parse_command("core/x", command.text) == command


@pytest.mark.parametrize("line", ["", "A=1", "rm -rf x", "python -c pass"])
def test_a_line_that_is_no_pytest_command_is_refused(line):
    with pytest.raises(StackError, match="is no pytest command"):
        verify.parse_command("core/x", line)


def test_every_plan_of_the_series_can_be_run():
    for patch in patches.load():
        assert [verify.parse_command(patch.name, line) for line in patch.test_plan]


def test_a_deselected_upstream_test_needs_a_reason(tmp_path):
    path = tmp_path / "tests.toml"
    path.write_text('[[tests]]\npath = "tests/a.py"\ndeselect = [{ test = "t" }]\n')
    with pytest.raises(StackError, match="without a reason"):
        verify.upstream_commands(path)
    assert verify.upstream_commands()


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ("def test_a(): pass", True),
        ("def test_a(): assert False", False),
        ("", False),
        ("import pytest\n@pytest.mark.skip(reason='x')\ndef test_a(): pass", False),
        ("def test_a(", False),
    ],
)
def test_a_command_is_good_only_when_a_test_passed(tmp_path, body, good):
    (tmp_path / "test_it.py").write_text(body)
    command = verify.parse_command("core/x", "pytest test_it.py -q")
    assert verify.run_command(command, tmp_path, Path(sys.executable)).good == good


def test_the_stand_in_is_there_only_for_rocm(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\n\ndef test_a():\n"
        "    standin = '_fake_amdsmi' in os.environ['PYTHONPATH']\n"
        "    assert standin == ('VLLM_TARGET_DEVICE' not in os.environ)\n"
        "    assert ('FAKE_GFX' in os.environ) == standin\n"
    )
    for prefix in ("", "VLLM_TARGET_DEVICE=cpu "):
        command = verify.parse_command("core/x", f"{prefix}pytest test_it.py -q")
        outcome = verify.run_command(command, tmp_path, Path(sys.executable))
        assert outcome.good, outcome.output
