import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import pin
from ci.errors import StackError
from ci.paths import PIN_FILE


def test_the_pin_is_the_one_that_the_project_names():
    p = pin.load()
    assert (p.version, p.commit) == ("0.31.0", "db9527a46873454610df6dbedf79a36d6bf1a7f6")
    assert p.sdist_sha256 == "dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380"


def test_the_pin_stands_in_one_place_only(the_pin):
    """Nobody repeats the hashes, so that moving the pin is one edit."""
    from ci.paths import ROOT

    # This file states them too: it is what the project promises.
    for path in [*ROOT.glob("ci/**/*.py"), ROOT / "build.sh", ROOT / "Dockerfile"]:
        if path.is_file():
            text = path.read_text()
            assert the_pin.sdist_sha256 not in text, path
            assert the_pin.tree_sha256 not in text, path


def test_a_second_pin_can_stand_beside_the_first(tmp_path):
    text = PIN_FILE.read_text()
    table = text[text.index('[pins."0.31.0"]') :]
    other = table.replace("0.31.0", "0.99.1")
    path = tmp_path / "pin.toml"
    path.write_text(text + "\n" + other)
    assert pin.load(path=path).version == "0.31.0"
    assert pin.load("0.99.1", path).sdist == "vllm-0.99.1.tar.gz"
    with pytest.raises(StackError, match=r"no pin named '1.2.3'; known: 0\.31\.0, 0\.99\.1"):
        pin.load("1.2.3", path)


FIELDS = [f.name for f in dataclasses.fields(pin.Pin) if f.name not in ("name", "python")]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "", "zz zz", 7])
def test_a_missing_or_malformed_field_is_named(tmp_path, field, value):
    key = field.replace("_", "-")
    text = PIN_FILE.read_text()
    line = re.search(rf"^{key} = .*$", text, re.M)[0]
    new = "" if value is None else f"{key} = {value if isinstance(value, int) else repr(value)}"
    path = tmp_path / "pin.toml"
    path.write_text(text.replace(line, new))
    with pytest.raises(StackError, match=key):
        pin.load(path=path)


@given(st.binary(max_size=200))
def test_any_file_gives_a_pin_or_a_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("pin") / "pin.toml"
    path.write_bytes(data)
    with pytest.raises(StackError):
        pin.load(path=path)
