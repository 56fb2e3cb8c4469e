"""Publishers say what they are about to name, wait for collectors, and do not bring back what has expired."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.store.objects import leases
from kvabr.store.objects.blocking import blocked
from kvabr.store.objects.bucket import Bucket
from kvabr.store.objects.leases import (
    LeaseTiming,
    Note,
    Runtime,
    expire,
    pin,
    read_note,
    store_time,
    tombstone_key,
    tombstones,
    unpin,
    unswept,
)
from kvabr.store.objects.writer import PublishGuard
from kvabr.types.errors import AssetError, FormatError, NotFoundError, UsageError

MODEL = "test/model"


def guard(bucket, age_s=0.0, wait_s=0.0):
    spans = ["s/offer/one", "p/profile"]
    return PublishGuard(
        bucket, model=MODEL, catalog="prompt", spans=spans, age_s=age_s, timing=LeaseTiming(wait_s=wait_s, poll_s=0.0)
    )


def keys(bucket, prefix=""):
    return [found.key for found in bucket.list_sync(prefix)]


def test_an_intent_names_what_is_published_until_that_is_done(store_url):
    bucket = Bucket.open(store_url)
    with guard(bucket) as held:
        (key,) = keys(bucket, "l/i/")
        assert Note.loads(bucket.get_sync(key, limit=1000)).keys == ("a/prompt", "s/offer/one", "p/profile")
        assert held.may_reuse(-math.inf)
        held.check_sync()
    assert not keys(bucket)


def test_a_publisher_waits_for_a_sweep_of_its_spans(store_url):
    bucket = Bucket.open(store_url)
    bucket.put_sync("x/sweep/1", Note(("s/offer/two",)).dumps())
    with guard(bucket):
        pass
    bucket.put_sync("x/sweep/2", Note(("s/offer/one",)).dumps())
    with pytest.raises(AssetError, match="a collector has been deleting"), guard(bucket):
        pass
    assert not keys(bucket, "l/")


async def test_a_dead_collectors_sweep_ends_by_the_stores_clock():
    bucket = Bucket.open("memory://sweep")
    await bucket.put("x/sweep/1", Note(("s/offer/one",)).dumps())
    written_s = (await bucket.head("x/sweep/1")).modified_s
    for age_s, free in ((0.0, False), (99.0, False), (101.0, True), (-5000.0, False)):
        timing = LeaseTiming(sweep_s=100.0, wait_s=0.0, poll_s=0.0)
        runtime = Runtime(now=itertools.count(0.0, 0.1).__next__, sleep=_none)
        assert await unswept(bucket, ["s/offer/one"], written_s + age_s, timing, runtime) == free


async def _none(_seconds):
    pass


def test_what_expired_is_not_published_again(store_url):
    bucket = Bucket.open(store_url)
    _with_folder(bucket)
    at_s = blocked(expire(bucket, MODEL, blocked(store_time(bucket)) - 5.0))
    assert blocked(tombstones(bucket)) == {MODEL: at_s}
    with guard(bucket) as held:  # computed after it
        assert not held.may_reuse(at_s - 1)
        assert "kvabr store gc" in held.stale_message("s/offer/one")
        blocked(expire(bucket, MODEL, at_s + 1e6))
        with pytest.raises(AssetError, match="from before its expiry"):
            held.check_sync()
    with pytest.raises(AssetError, match="from before its expiry"), guard(bucket, age_s=10.0):
        pass
    assert blocked(expire(bucket, MODEL, 5.0)) == at_s + 1e6, "an earlier expiry replaced a later one"
    assert keys(bucket, "x/") == [tombstone_key(MODEL)]
    with pytest.raises(UsageError, match="name the model"):
        blocked(expire(bucket, ""))


def test_what_is_computed_after_an_expiry_may_be_published_at_once(store_url):
    """The tombstone's time is the store's own to a millisecond, where that tells fractions of seconds."""
    bucket = Bucket.open(store_url)
    before_s = blocked(store_time(_with_folder(bucket)))
    at_s = blocked(expire(bucket, MODEL))
    now_s = blocked(store_time(bucket))
    assert before_s < at_s <= now_s + (0.001 if now_s % 1.0 else 1.0)


def _with_folder(bucket):
    bucket.put_sync("probe/one", b"")
    return bucket


def test_a_slow_publisher_does_not_trust_its_intent(store_url):
    bucket = Bucket.open(store_url)
    held = PublishGuard(bucket, model=MODEL, catalog="prompt", spans=[], timing=LeaseTiming(intent_s=-1.0))
    with held, pytest.raises(AssetError, match="took so long"):
        held.check_sync()


def test_only_what_is_there_is_pinned(store_url):
    bucket = Bucket.open(store_url)
    with pytest.raises(NotFoundError, match="kvabr store ls"):
        blocked(pin(bucket, "prompt", 60.0))
    assert not keys(bucket, "pin/")
    bucket.put_sync("a/prompt", b"catalog")
    until_s = blocked(pin(bucket, "prompt", 60.0))
    assert abs(until_s - 60.0 - blocked(store_time(bucket))) < 60.0
    assert blocked(unpin(bucket, "prompt"))
    assert not blocked(unpin(bucket, "prompt"))


def test_uses_are_counted(store_url):
    bucket = Bucket.open(store_url)
    bucket.put_sync("a/prompt", b"catalog")
    for _ in range(3):
        blocked(leases.touch(bucket, "prompt"))
    assert blocked(read_note(bucket, "l/a/prompt")).uses == 3
    bucket.put_sync("l/a/prompt", b"damaged")
    blocked(leases.touch(bucket, "prompt"))
    assert blocked(read_note(bucket, "l/a/prompt")).uses == 1
    assert blocked(read_note(bucket, "l/a/other")) is None


def test_a_damaged_note_says_where_it_is(store_url):
    bucket = Bucket.open(store_url)
    bucket.put_sync("x/sweep/1", b"{}")
    with pytest.raises(FormatError, match=r"x/sweep/1: note: "), guard(bucket):
        pass


@given(st.lists(st.text()), st.text(), st.floats(allow_nan=False), st.integers(0, 1 << 40))
def test_notes_survive(names, model, until_s, uses):
    note = Note(tuple(names), model, until_s, uses)
    assert Note.loads(note.dumps()) == note


@given(st.binary() | st.sampled_from([b'{"schema":"kvabr.note/2"}', b'{"schema":"kvabr.note/1","keys":5}', b"[]"]))
def test_strange_notes_are_refused(data):
    with pytest.raises(FormatError):
        Note.loads(data)


async def test_a_store_that_tells_no_fractions_of_seconds_expires_up_to_the_next_whole_one(monkeypatch):
    async def whole(_objects):
        return 1000.0

    monkeypatch.setattr(leases, "store_time", whole)
    assert await expire(Bucket.open("memory://whole"), "m") == 1001.0
