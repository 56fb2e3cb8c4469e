"""Codes, kvabr's own reasons of failures, and drafts."""

import pytest

from kvabr.moqt.codes import RequestCode, code_of, name_of, reason_of
from kvabr.moqt.wire import DRAFT_20, DRAFTS, by_alpn
from kvabr.server.limits import refusal
from kvabr.types.errors import Reason, RequestError


def test_codes_for_people():
    """Codes that nobody knows are no error (draft 18, section 14)."""
    assert name_of(0x10, RequestCode) == "DOES_NOT_EXIST"
    assert name_of(0x9D, RequestCode) == "code 0x9d"


def test_drafts():
    assert [draft.alpn for draft in DRAFTS] == ["moqt-22", "moqt-20"]
    assert by_alpn("moqt-20") is DRAFT_20
    assert by_alpn("moqt-18") is None
    assert by_alpn("moqt-21") is None


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_survives_the_wire_and_a_relay(reason):
    code = code_of(reason)
    assert reason_of(code) == (Reason.INTERNAL if reason is Reason.OTHER else reason)
    assert refusal(RequestError("why", reason=reason))[0] == code


def test_codes_that_answer_no_request_of_ours_are_other():
    assert reason_of(RequestCode.PREFIX_OVERLAP) is reason_of(0x7777) is Reason.OTHER
    assert code_of(Reason.OTHER) is RequestCode.INTERNAL_ERROR
