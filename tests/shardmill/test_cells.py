"""A text survives a spreadsheet, which takes no cell for a formula."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmill.cells import FORMULA_STARTS, from_cell, to_cell


@given(st.text(alphabet=st.sampled_from("ab'=\\0\0+-@\t\r/.")))
def test_every_text_comes_back(text: str):
    cell = to_cell(text)
    assert from_cell(cell) == text
    assert "\0" not in cell and not cell.startswith(FORMULA_STARTS)


def test_what_somebody_types_is_taken_as_it_is():
    assert from_cell("cats/it's.png") == "cats/it's.png"
    assert from_cell("'quoted'") == "'quoted'"
    assert from_cell(r"a\b") == r"a\b"
    assert from_cell(r"photos.zip\0cats/1.png") == "photos.zip\0cats/1.png"
