"""kvabr's own reasons of failures, and the codes by which peers are told."""

from __future__ import annotations

import pytest

from kvabr.moqt.codes import RequestCode, code_of, reason_of
from kvabr.server.limits import refusal
from kvabr.types.errors import Reason, RequestError


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_survives_the_wire_and_a_relay(reason):
    code = code_of(reason)
    assert reason_of(code) == (Reason.INTERNAL if reason is Reason.OTHER else reason)
    assert refusal(RequestError("why", reason=reason))[0] == code


def test_codes_that_answer_no_request_of_ours_are_other():
    assert reason_of(RequestCode.PREFIX_OVERLAP) is reason_of(0x7777) is Reason.OTHER
    assert code_of(Reason.OTHER) is RequestCode.INTERNAL_ERROR
