"""Plays on one side, listeners on the other: nothing that a listener does comes back to a play."""

import contextvars
import logging
import threading

import pytest

from kvabr.telemetry import Listener, Telemetry
from kvabr.types.events import CacheDelivered
from tests.telemetry.plays import Ear, progress, simulated


def test_a_play_is_told_of_from_its_call_to_its_end_and_its_own_log_too():
    ear, mine = Ear(), []
    with Telemetry(ear) as telemetry:
        with telemetry.play(mine.append) as log:
            log(progress(0.5))
            log(CacheDelivered(0.75, met=True, loss=0.0))
        log(progress(3.0))  # the play is over
        with pytest.raises(ValueError, match="gone"), telemetry.play() as log:
            raise ValueError("gone")
    events = [(record.event.t, record.event.name) for record in ear.records]
    assert events[:4] == [(0.0, "called"), (0.5, "progress"), (0.75, "deliver"), (0.75, "ended")]
    assert [event.name for event in mine] == ["progress", "deliver", "progress"]
    assert events[4:] == [(0.0, "called"), (0.0, "ended")]
    assert (ear.records[-1].event.error, ear.records[-1].event.reason) == ("ValueError", "gone")
    assert ear.records[0].play != ear.records[-1].play


class Slow(Ear):
    """Hears nothing until it is let go."""

    def __init__(self):
        super().__init__()
        self.go, self.begun = threading.Event(), threading.Event()

    def receive(self, record):
        self.begun.set()
        self.go.wait(300.0)
        super().receive(record)


def test_what_comes_faster_than_it_is_heard_is_dropped_and_counted_but_not_the_ends_of_plays():
    slow, quick = Slow(), Ear()
    with Telemetry(slow, quick, limit=4) as telemetry:
        with telemetry.play() as log:
            assert slow.begun.wait(300.0)
            for number in range(100):
                log(progress(0.01 * number))
                assert telemetry._queues[1].wait(300.0)
        slow.go.set()
        assert telemetry.flush(300.0)
        counts = telemetry.counts
    assert [record.event.name for record in slow.records] == ["called", *["progress"] * 4, "ended"]
    assert len(quick.records) == 102
    assert (counts["ear"].dropped, counts["ear-2"].dropped) == (96, 0)


def test_a_listener_that_raises_is_counted_and_told_of_once(caplog):
    class Bad(Listener):
        name = "bad"

        def receive(self, record):
            raise SystemExit(f"no room for {record.event.name}")

        def close(self):
            raise OSError("disk full")

    ear = Ear()
    with caplog.at_level(logging.WARNING, logger="kvabr.telemetry"), Telemetry(Bad(), ear) as telemetry:
        telemetry.feed(simulated())
        telemetry.feed(simulated())
    counts = telemetry.counts["bad"]
    assert counts.errors == counts.delivered == len(ear.records) == 2 * (len(simulated()) + 2)
    (record,) = [each for each in caplog.records if each.name == "kvabr.telemetry"]
    assert "bad raised SystemExit('no room for called')" in record.getMessage()


def test_a_listener_that_hangs_is_left_behind(caplog):
    slow = Slow()
    telemetry = Telemetry(slow)
    telemetry.feed([])
    assert slow.begun.wait(300.0)
    assert not telemetry.flush(0.01)
    with caplog.at_level(logging.WARNING, logger="kvabr.telemetry"):
        telemetry.close(0.01)
    assert "ear is stuck; " in caplog.records[0].getMessage()
    with telemetry.play() as log:  # closed: told to nobody, and no one is disturbed
        log(progress(0.0))
    assert telemetry.counts["ear"].dropped == 3
    slow.go.set()


def test_listeners_hear_in_the_context_of_the_call():
    who = contextvars.ContextVar("who", default="nobody")
    asked = []

    class Asks(Ear):
        def receive(self, record):
            asked.append((who.get(), threading.current_thread().name))

    with Telemetry(Asks(), Asks()) as telemetry:
        token = who.set("the caller")
        with telemetry.play() as log:
            who.reset(token)
            log(progress(0.0))
    assert {name for name, _ in asked} == {"the caller"}
    assert len(asked) == 6
    assert {thread for _, thread in asked} == {"kvabr-telemetry-ear"}


def test_plays_in_many_threads_are_kept_apart():
    ear = Ear()
    with Telemetry(ear) as telemetry:

        def play(number):
            with telemetry.play() as log:
                for step in range(50):
                    log(progress(float(step), received=number))

        threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    by_play = {}
    for record in ear.records:
        by_play.setdefault(record.play, []).append(record.event)
    assert len(by_play) == 8
    for events in by_play.values():
        assert len({event.received for event in events[1:-1]}) == 1
        assert [event.t for event in events[1:-1]] == [float(step) for step in range(50)]
