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


def test_modules_are_imported_on_the_way_and_the_tests_do_not_see_them(tmp_path):
    (tmp_path / "good_one.py").write_text("import json\n")
    (tmp_path / "bad_one.py").write_text("import no_such_library\n")
    (tmp_path / "dying.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_a():\n"
        "    assert 'good_one' not in sys.modules and 'bad_one' not in sys.modules\n"
    )
    command = verify.parse_command("core/x", "pytest test_it.py -q")

    def run(*modules):
        outcome = verify.run_command(command, tmp_path, Path(sys.executable), modules)
        assert outcome.good, outcome.output
        return outcome.imports

    assert run() is None
    assert run("good_one") == {}
    reason = "ModuleNotFoundError: No module named 'no_such_library'"
    assert run("good_one", "bad_one") == {"bad_one": reason}
    assert run("dying") is None


def test_modules_are_tried_even_where_a_test_file_does_not_import(tmp_path):
    (tmp_path / "test_it.py").write_text("import no_such_library\n")
    command = verify.parse_command("core/x", "pytest test_it.py -q")
    outcome = verify.run_command(command, tmp_path, Path(sys.executable), ["no_such_library"])
    assert not outcome.good and list(outcome.imports or {}) == ["no_such_library"]


def test_one_part_of_the_work_can_be_asked_for(monkeypatch):
    from ci import independence

    asked = []

    def run(pin, series, origin, jobs, parts, only):
        asked.append((dict(parts), only))
        return [], []

    monkeypatch.setattr(independence, "run", run)
    first = patches.load().names[0]
    for words in ([], ["--each"], ["--each", "--prefixes", "--sample", "3"], ["--only", first]):
        assert verify.main(words) == 0
    assert asked == [
        (dict(independence.CI), None),
        ({"each": None}, None),
        ({"each": 3, "prefixes": 3}, None),
        ({"whole": None}, first),
    ]
    assert verify.main(["--jobs", "0"]) == 1


def test_ci_runs_every_test_once_and_leaves_the_rest_of_the_machine_to_vllms_tree():
    from ci import test

    full = test.chains("python", "lint", quick=False)
    selections = [step.words[step.words.index("-m", 2) + 1] for chain in full for step in chain
                  if step.words[-1] == "tests" and "pytest" in step.words]  # fmt: skip
    assert sorted(selections) == ["build", "not build"]
    assert [s.title for chain in full for s in chain if s.yields] == ["vLLM's tree"]
    (quick,) = test.chains("python", "lint", quick=True)
    assert quick == full[0]


def test_a_steps_output_is_shown_with_its_mark_and_its_last_line_kept(capsys):
    from ci import test

    code = "print('one'); print('2 passed'); raise SystemExit(3)"
    step = test.Step("some", [sys.executable, "-c", code], mark="some: ", yields=True)
    assert test._run(step) == (3, "2 passed\n")
    shown = capsys.readouterr().out
    assert "some: one\nsome: 2 passed\n" in shown and "-- some: FAILED" in shown
