"""What a node is asked to fetch, in the name of a track; and its answer."""

from __future__ import annotations

import pytest

from kvabr.types.errors import FormatError
from kvabr.types.hints import HintAnswer, HintRequest


def test_a_request_is_in_the_name_and_bounded():
    asked = HintRequest(1.5, 600.0, 32)
    assert asked.track == "kvabr.hint.1500.600000.32"
    assert HintRequest.of(asked.track) == asked
    assert HintRequest.of(HintRequest(1e9, 1e9, 0).track) == (60.0, 1e6, 0)
    assert HintRequest.of("kvabr.hint.9999999999.9999999999.0").within_s == 60.0


@pytest.mark.parametrize(
    "rest", ["", "1.2", "1.2.3.4", "-1.2.3", "1.2.x", "1.2.3\n", "\u0661.2.3", "9" * 11 + ".2.3", "1..3"]
)
def test_another_name_is_no_request(rest):
    assert HintRequest.of(f"kvabr.hint.{rest}") is None


def test_an_answer_from_anybody_is_checked():
    answer = HintAnswer(128, 1 << 20, 0.001)
    assert HintAnswer.loads(answer.dumps()) == answer
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b'{"tokens": -1, "nbytes": 0, "loss": 0}',
        b'{"tokens": 1, "nbytes": 1, "loss": "x"}',
    ):
        with pytest.raises(FormatError, match="answer to a hint"):
            HintAnswer.loads(wrong)
