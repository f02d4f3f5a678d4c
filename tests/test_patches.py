import pytest
from conftest import HEADER, make_patch, make_series
from hypothesis import given
from hypothesis import strategies as st

from ci import patches
from ci.errors import StackError

words = st.from_regex(r"[a-z0-9]{1,6}(-[a-z0-9]{1,6}){0,2}", fullmatch=True)
patch_names = st.builds("{}/{}".format, words, words)


@given(
    st.lists(patch_names, unique=True, max_size=8),
    st.lists(st.sampled_from(["", "# comment", "   "]), max_size=5),
)
def test_a_series_file_keeps_its_order(names, noise):
    lines = [*noise, *(f"{n}.patch  # why" for n in names)]
    assert patches.parse_series("\n".join(lines)) == tuple(names)


@given(st.text(max_size=80))
def test_any_series_text_gives_names_or_a_clear_error(text):
    try:
        for name in patches.parse_series(text):
            assert patches.NAME.fullmatch(name)
    except StackError as error:
        assert "series line" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    "line",
    ["a.patch", "core/a", "core/a.patch -p0", "../core/a.patch", "Core/A.patch", "/x/a.patch"],
)
def test_a_line_that_is_no_patch_is_refused(line):
    with pytest.raises(StackError, match="series line 2"):
        patches.parse_series(f"core/good.patch\n{line}\n")


def test_twice_the_same_is_refused():
    with pytest.raises(StackError, match="twice"):
        patches.parse_series("core/a.patch\ncore/a.patch\n")


def test_folder_and_series_must_agree(tmp_path):
    folder = tmp_path / "patches"
    (folder / "core").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / "core" / f"{name}.patch").write_bytes(make_patch(f"core/{name}").data)
    series = tmp_path / "series"
    series.write_text("core/a.patch\n")
    with pytest.raises(StackError, match="not listed in series: core/b"):
        patches.load(series, folder)
    series.write_text("core/a.patch\ncore/b.patch\ncore/c.patch\n")
    with pytest.raises(StackError, match="absent: core/c"):
        patches.load(series, folder)
    series.write_text("core/b.patch\ncore/a.patch\n")
    assert patches.load(series, folder).names == ("core/b", "core/a")


def test_a_header_is_read_field_by_field():
    patch = make_patch("core/x", subject="[ROCm][Attention] A subject that git folds because of é")
    assert patch.subject == "[ROCm][Attention] A subject that git folds because of é"
    assert patch.fields["Why"] == "because."
    assert patch.test_plan == ("pytest tests/test_x.py -q",)
    assert patch.depends == ()
    assert patch.area == "core"
    assert patch.problems() == []
    assert [c.path for c in patch.changes] == ["tests/x.py"]
    assert patch.changes[0].is_new and patch.changes[0].added == ("x = 'core/x'",)


@pytest.mark.parametrize("field", patches.FIELDS)
def test_a_missing_field_is_named(field):
    lines = HEADER.splitlines(keepends=True)
    header = "".join(x for x in lines if not x.startswith((f"{field}:", " pytest")))
    assert any(f"{field}:" in p for p in make_patch("core/x", header=header).problems())


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("From 0000", "From 1234", "mailbox"),
        ("[PATCH] {subject}", "[PATCH] no tag", r"\[Area\] tag"),
        ("Forwarded: no\n", "Forwarded: later\n", "Forwarded"),
        ("Forwarded: no\n", "Forwarded: not-needed\n", "Forwarded"),
        ("Hipstack-Patch: {name}", "Hipstack-Patch: core/other", "core/other"),
    ],
)
def test_a_wrong_header_is_named(old, new, complaint):
    patch = make_patch("core/x", header=HEADER.replace(old, new))
    import re

    assert any(re.search(complaint, p) for p in patch.problems())


@pytest.mark.parametrize("text", ["https://example.org/pull/1", "not-needed, because it is ours"])
def test_the_other_forms_of_forwarded(text):
    header = HEADER.replace("Forwarded: no", f"Forwarded: {text}")
    assert make_patch("core/x", header=header).problems() == []


def test_a_patch_without_tests_is_named():
    diff = make_patch("core/x").data.decode().split("\n\n")[-1].replace("tests/", "vllm/")
    assert any("tests/" in p for p in make_patch("core/x", diff=diff).problems())


def test_dependencies_must_come_earlier():
    first, second = make_patch("core/a"), make_patch("core/b", depends="core/a")
    assert make_series(first, second).problems() == []
    assert any("not earlier" in p for p in make_series(second, first).problems())
    assert any(
        "core/zz" in p for p in make_series(make_patch("core/c", depends="core/zz")).problems()
    )


def test_closure_takes_what_is_needed_in_order():
    series = make_series(
        make_patch("core/a"),
        make_patch("core/b"),
        make_patch("x/c", depends="core/a"),
        make_patch("x/d", depends="x/c"),
    )
    assert series.closure("x/d").names == ("core/a", "x/c", "x/d")
    assert series.until("core/b").names == ("core/a", "core/b")
    assert series.get("patches/x/c.patch").name == series.get("c").name == "x/c"
    with pytest.raises(StackError, match="no patch is named 'nope'"):
        series.until("nope")


@given(st.lists(patch_names, unique=True, min_size=2, max_size=5))
def test_the_set_hash_knows_order_names_and_content(names):
    series = make_series(*(make_patch(n) for n in names))
    assert series.set_hash != make_series(*reversed(series.patches)).set_hash
    assert series.set_hash != series.until(names[0]).set_hash
    other = patches.Patch(names[0], series.patches[0].data + b"\n")
    assert series.set_hash != make_series(other, *series.patches[1:]).set_hash
    assert series.set_hash == make_series(*series.patches).set_hash
