"""The rivals among selectors."""

import pytest

from kvabr.blend import Selection, choose
from kvabr.blend.selectors import load_selector
from kvabr.types.errors import UsageError
from tests.blend.test_selectors import PROMPT


@pytest.mark.parametrize(
    ("name", "share", "chosen"),
    [
        ("hkvd", 0.28, (2, 9)),
        ("legolink", 0.28, (2, 6)),
        ("legolink", 0.5, (2, 3, 6, 7)),
        ("oracle", 0.1, (9,)),
    ],
)
def test_what_each_selector_chooses(name, share, chosen):
    assert choose(PROMPT, load_selector(name)().scores(PROMPT), share) == chosen


@pytest.mark.parametrize("name", ["hkvd", "oracle"])
def test_without_what_it_needs_a_selector_says_so(name):
    with pytest.raises(UsageError, match="was given none"):
        load_selector(name)().scores(Selection(tokens=10, passages=((0, 10),), layers=2))
