"""JSON in pieces: the same values as from the standard library, and never much at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.types.errors import FormatError
from kvabr.types.json_pieces import PIECE_BYTES, JsonPieces
from tests.examples import examples


def every(text, read):
    """Read all members of an object by a method of `JsonPieces`."""
    for _ in text.members():
        read(text)


def all_elements(text, most):
    for _ in text.elements(most):
        text.value()


def pieces(text):
    return JsonPieces(text.encode() if isinstance(text, str) else text, "test")


@examples(200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=400),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
        max_leaves=20,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_values_are_those_of_the_standard_library(value, indent, ascii_only):
    text = pieces(" \n" + json.dumps(value, indent=indent, ensure_ascii=ascii_only) + "\r\t ")
    assert text.value() == value
    text.finish()


@pytest.mark.parametrize("spare", range(-3, 4))
def test_a_value_may_end_where_a_piece_does(spare):
    for kind in ('"{}"', "[{}1]", "{}"):
        filling = {'"{}"': "x", "[{}1]": "1,", "{}": "7"}[kind]
        size = 64 + spare if kind == "{}" else PIECE_BYTES + spare
        text = kind.format(filling * ((size - len(kind) + 2) // len(filling)))
        if len(text) <= PIECE_BYTES:
            assert pieces(text).value() == json.loads(text)
        else:
            with pytest.raises(FormatError):
                pieces(text + "  ").value()


def test_objects_and_lists_are_read_step_by_step():
    text = pieces('{"a": [1, 2.5], "b": [{"x": 1}, {}], "c": {"d": null}, "e": [], "f": [ ]}')
    found = {}
    for name in text.members():
        if name == "a":
            found[name] = text.scalars({int, float}, 2)
        elif name == "b":
            found[name] = [text.value() for _ in text.elements(2)]
        elif name == "c":
            text.skip()
        elif name == "e":
            found[name] = text.scalars({int}, 0)
        else:
            found[name] = list(text.elements(0))
    text.finish()
    assert found == {"a": [1.0, 2.5], "b": [{"x": 1}, {}], "e": [], "f": []}


def test_long_lists_come_piece_by_piece(monkeypatch):
    sizes = []
    decode = json.JSONDecoder.raw_decode
    monkeypatch.setattr(
        json.JSONDecoder, "raw_decode", lambda self, text, idx=0: sizes.append(len(text)) or decode(self, text, idx)
    )
    values = [str(number) * 9 for number in range(30_000)]
    for indent in (None, 1):
        sizes.clear()
        data = json.dumps(values, indent=indent)
        assert pieces(data).scalars({str}, 30_000) == values
        assert max(sizes) <= PIECE_BYTES + 2
        assert len(sizes) <= len(data) / PIECE_BYTES * 1.1 + 1


@pytest.mark.parametrize(
    "text", ["[1,]", "[,1]", "[1,,2]", "[", "[1", "[1 2]", '["a"]', "[true]", "[[1]]", "[1.5]", "1", "[ , ]", "[1}", ""]
)
def test_a_list_of_whole_numbers_is_nothing_else(text):
    with pytest.raises(FormatError, match=r"^test: .*at byte \d+$"):
        pieces(text).scalars({int}, 9)


@pytest.mark.parametrize("text", ["[]", "{", '{"a"}', '{"a" 1}', '{"a":1,}', '{"a":1 "b":2}', "{1:2}", '{"a":1]', ""])
def test_an_object_is_nothing_else(text):
    with pytest.raises(FormatError, match=r"^test: "):
        every(pieces(text), JsonPieces.value)


def test_what_comes_twice_or_too_often_or_too_late():
    with pytest.raises(FormatError, match="'a' is there twice"):
        every(pieces('{"a":1,"a":2}'), JsonPieces.value)
    with pytest.raises(FormatError, match="a list of more than 2"):
        pieces("[1,2,3]").scalars({int}, 2)
    with pytest.raises(FormatError, match="a list of more than 2"):
        all_elements(pieces("[1,2,3]"), 2)
    text = pieces("1 2")
    text.value()
    with pytest.raises(FormatError, match="something follows"):
        text.finish()
    text = pieces(json.dumps({f"new {number}": "x" * 1000 for number in range(50)}))
    with pytest.raises(FormatError, match="what this version does not know"):
        every(text, JsonPieces.skip)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 5000, "nested too deeply"),
        (b"\xff", "not JSON"),
        (b'"\xe2\x98', "not JSON"),
        (b'"' + b"x" * PIECE_BYTES + b'"', "not JSON"),
        ("7" * 5000, "not JSON"),
        (" " * 2 * PIECE_BYTES + "1", "white space"),
        ("nul", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_what_is_no_value(text, why):
    with pytest.raises(FormatError, match=why):
        pieces(text).value()
