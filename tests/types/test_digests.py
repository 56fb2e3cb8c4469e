"""Kinds of digests: their text, what is compared, and what a machine does that lacks the package of one."""

import sys

import pytest

from kvabr.types import digests
from kvabr.types.digests import BLAKE3, KINDS, SHA256, check_kind, digest_of, has_digest, is_digest, kind_of
from kvabr.types.errors import FormatError, UsageError

EMPTY = {
    SHA256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    BLAKE3: "b3-af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
}
"""Of no bytes, as the standards have them."""


@pytest.fixture
def without(monkeypatch):
    digests._hasher.cache_clear()
    monkeypatch.setitem(sys.modules, "blake3", None)
    yield
    digests._hasher.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_says_its_kind(kind):
    assert digest_of(b"", kind) == EMPTY[kind]
    data = memoryview(b"groups of a cache" * 9999)
    digest = digest_of(data, kind)
    assert is_digest(digest)
    assert kind_of(digest) == kind
    assert digests.from_raw(digests.raw(digest), kind) == digest
    assert has_digest(digest, data)
    assert not has_digest(digest, data[1:])
    assert kind_of(digests.unknown(kind)) == kind
    assert check_kind(kind) == kind


def test_the_same_hex_digits_of_another_kind_are_another_digest():
    data = b"a frame"
    assert not has_digest(digest_of(data, BLAKE3).removeprefix("b3-"), data)
    assert not has_digest(f"b3-{digest_of(data)}", data)


@pytest.mark.parametrize(
    "text", ["", "b3-", "0" * 63, "0" * 65, "b3-" + "0" * 63, "b4-" + "0" * 64, "B3-" + "0" * 64, "A" * 64, " " * 64, 7]
)
def test_what_is_no_digest(text):
    assert not is_digest(text)
    with pytest.raises(FormatError, match="64 hex digits"):
        digests.raw(text)
    assert not isinstance(text, str) or not has_digest(text, b"")


def test_without_the_package_nothing_passes_unchecked(without):
    assert has_digest(digest_of(b"x"), b"x")
    for check in (lambda: has_digest(EMPTY[BLAKE3], b""), lambda: digests.require(BLAKE3)):
        with pytest.raises(FormatError, match=r"'\.\[fast\]'"):
            check()
    with pytest.raises(UsageError, match=r"'\.\[fast\]'"):
        check_kind(BLAKE3)
