"""An engine does not wait for a store that is silent."""

from __future__ import annotations

import threading

import pytest

from kvabr.data import default_catalog
from kvabr.publish.published_lookup import PublishedLookup
from kvabr.publish.publisher import Publisher
from kvabr.store.locations import open_store
from kvabr.types.errors import AssetError, TransportError
from tests.toymodel import SPEC, prompt

LONG_S = 300.0


def nothing(_name):
    return None


def test_answers_are_passed_on_and_what_is_there_is_touched():
    touched = threading.Event()
    lookup = PublishedLookup({"a": True, "b": False}.__getitem__, lambda _name: touched.set(), wait_s=LONG_S)
    assert lookup.ask("b") is False
    assert not touched.is_set()
    assert lookup.ask("a") is True
    assert touched.wait(LONG_S)


def test_a_silent_store_is_left_alone_until_it_has_answered():
    asked, answers = [], threading.Event()

    def published(name):
        asked.append(name)
        answers.wait(LONG_S)
        return True

    lookup = PublishedLookup(published, nothing, wait_s=0.01, pause_s=0.0)
    assert [lookup.ask(name) for name in "abc"] == [None, None, None]
    assert asked == ["a"]
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "kvabr-lookup":
            thread.join(LONG_S)
    lookup.ask("d")  # in time or not
    assert "d" in asked


def test_a_store_that_fails_is_left_alone_for_a_while():
    asked = []

    def published(name):
        asked.append(name)
        raise AssetError("no")

    lookup = PublishedLookup(published, nothing, wait_s=LONG_S, pause_s=LONG_S)
    assert [lookup.ask(name) for name in "abc"] == [None, None, None]
    assert asked == ["a"]


@pytest.mark.process
def test_an_engine_starts_although_its_store_is_out_of_reach(monkeypatch, caplog):
    pytest.importorskip("obstore", reason="obstore is not installed: tools/setup-venv")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    place = "s3://bucket/x?endpoint=http://127.0.0.1:9"
    with pytest.raises(AssetError, match="cannot be reached") as caught:
        open_store(place, create=True)
    assert isinstance(caught.value.__cause__, TransportError)
    publisher = Publisher(place, SPEC, prior=default_catalog(), tracks=("FP16",))
    assert "cannot be reached (connection refused); nothing is published until it answers" in caplog.text
    assert publisher.reserve(prompt(48).tokens) == "failed"
    publisher.close()
