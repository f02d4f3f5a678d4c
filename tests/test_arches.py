import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import arches
from ci.errors import StackError

names = st.lists(st.sampled_from(sorted(arches.ARCHES)), min_size=1)


@given(names, st.sampled_from([",", ";", " , "]), st.booleans())
def test_a_list_of_known_names_is_sorted_and_unique(chosen, separator, upper):
    text = separator.join(chosen)
    assert arches.parse(text.upper() if upper else text) == tuple(sorted(set(chosen)))


@given(st.text(max_size=30))
def test_any_text_gives_names_or_a_clear_error(text):
    try:
        assert set(arches.parse(text)) <= set(arches.ARCHES)
    except StackError as error:
        assert "\n" not in str(error)


def test_an_unknown_name_is_answered_with_those_that_are_close():
    with pytest.raises(StackError, match=r"'gfx1109'.*gfx1100.*--arch list"):
        arches.parse("gfx1201,gfx1109")


def test_the_listing_names_the_cards():
    text = arches.listing()
    for part in ("R9700", "7900 XTX", "Strix Halo"):
        assert part in text


@pytest.mark.stack
def test_the_names_are_those_of_upstreams_cmake(sdist):
    import tarfile

    with tarfile.open(sdist) as archive:
        member = next(
            m for m in archive if m.name.endswith("/CMakeLists.txt") and m.name.count("/") == 1
        )
        text = archive.extractfile(member).read().decode()
    listed = re.search(r'HIP_SUPPORTED_ARCHS "([^"]+)"', text)[1].split(";")
    assert set(listed) == set(arches.ARCHES)
