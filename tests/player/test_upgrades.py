"""Upgrades of a cache in use, by hand: what a session asks for, and when it ends."""

import dataclasses
import math

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.policies import BUILTIN
from kvabr.player.session import Session
from kvabr.player.session_types import Decode, Deliver, FetchGroup, UpgradeGoal
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.player.sessions import bring, decode_all, of

_OFFER = catalog(6, layered=True)
LAYERED = Ladder(dataclasses.replace(_OFFER, tracks=tuple(t for t in _OFFER.tracks if t.refines or t.name == "base")))
RATE = 1e7


def late(tracks=("base",) * 6, until_s=math.inf, policy="anytime", horizon_s=2.0, rate=RATE):
    made = BUILTIN[policy]() if isinstance(policy, str) else policy
    session = Session(LAYERED, horizon_s, made, HarmonicMean(), goal=UpgradeGoal(tracks, until_s, rate))
    session.start(0.0)
    return session


def play_on(session, now=0.0, each_s=0.01, most=200):
    """Bring everything that is asked for, in the order of priority; what was asked for, and when it was over."""
    todo = of(session.actions(), FetchGroup)
    asked = list(todo)
    for _ in range(most):
        if todo:
            now += each_s
            todo.sort(key=lambda fetch: fetch.priority)
            more = of(bring(session, todo.pop(0), now), FetchGroup)
        elif not session.over:
            now = session.next_timer()
            session.timer(now)
            more = of(session.actions(), FetchGroup)
        todo += more
        asked += more
        if session.over:
            break
    return asked, now


def test_it_fetches_every_layer_that_is_missing_the_most_worth_first():
    session = late()
    asked, _ = play_on(session)
    assert session.over
    asset = LAYERED.catalog
    first = [fetch for fetch in asked if fetch.track == "layer-1"]
    assert sorted(fetch.group for fetch in first) == list(range(6))
    base, layer = asset.track("base"), asset.track("layer-1")
    worth = [(base.loss[f.group] - layer.loss[f.group]) / layer.bytes[f.group] for f in first]
    assert worth == sorted(worth, reverse=True)
    for record in session.record.groups:
        assert asset.track(record.track).loss[record.group] < base.loss[record.group] / 100


def test_it_ends_when_nothing_that_was_asked_for_ever_comes():
    session, now = late(horizon_s=2.0), 0.0
    assert of(session.actions(), FetchGroup)
    while not session.over and now < 100.0:
        now = session.next_timer()
        session.timer(now)
        session.actions()
    assert 10.0 <= now < 11.0
    assert session.record.delivered_s == now


def test_recomputed_groups_stay_as_they_are():
    session = late(("base", RECOMPUTED, "base", "layer-2", "base", RECOMPUTED))
    asked, _ = play_on(session)
    assert {fetch.group for fetch in asked if fetch.track.startswith("layer")} == {0, 2, 4}
    assert session.record.groups[1].track == RECOMPUTED


def test_it_asks_for_no_more_while_groups_wait_for_the_engine():
    session = late()
    todo, decoding, asked, now = of(session.actions(), FetchGroup), [], 0, 0.0
    while todo:
        asked += len(todo)
        more = []
        for fetch in todo:
            now += 0.01
            session.first_byte(fetch.request, now - 0.001)
            session.done(fetch.request, now)
            actions = session.actions()
            decoding += of(actions, Decode)
            more += of(actions, FetchGroup)
        todo = more
    for tick in range(100):
        session.timer(now + tick * 0.04)
    assert not of(session.actions(), FetchGroup)
    assert not session.over
    assert asked <= 12
    decode_all(session, decoding, now + 5.0)
    assert session.undecoded() == 0


def test_it_ends_when_time_is_up_with_what_is_there():
    session = late(until_s=1.0)
    first = of(session.actions(), FetchGroup)[0]
    bring(session, first, 0.5)
    while not session.over:
        now = session.next_timer()
        session.timer(now)
        actions = decode_all(session, session.actions(), now)
    assert now == pytest.approx(1.0)
    ended = of(actions, Deliver)
    assert len(ended) == 1
    assert session.record.groups[first.group].track == first.track
    assert session.next_timer() is None


def test_it_asks_for_nothing_that_would_come_behind_the_end():
    session = late(until_s=0.004)  # some 40 kB at this rate
    assert sum(fetch.bytes for fetch in of(session.actions(), FetchGroup)) < 0.004 * RATE * 4


def test_it_is_over_at_once_if_nothing_can_get_better():
    best = min(LAYERED.catalog.tracks, key=lambda track: sum(track.loss)).name
    assert late((best,) * 6).over


def test_it_is_over_when_the_policy_finishes_or_wants_nothing_for_long():
    class Finishes(Policy):
        def decide(self, view):
            return Decision.finish("enough")

    class Waits(Policy):
        def decide(self, view):
            return Decision.wait("perhaps later")

    assert late(policy=Finishes()).over
    session = late(policy=Waits())
    assert not session.over
    _, now = play_on(session)
    assert session.over
    assert now == pytest.approx(2.0, abs=0.1)


def test_it_can_be_stopped():
    session = late()
    session.stop(0.1, "not wanted")
    assert session.over
    assert of(session.actions(), Deliver)
    session.stop(0.2, "again")
    assert not session.actions()


@pytest.mark.parametrize(("tracks", "until_s"), [(("base",) * 5, 1.0), (("base",) * 6, 0.0), (("base",) * 6, math.nan)])
def test_what_makes_no_sense_is_refused(tracks, until_s):
    with pytest.raises(UsageError):
        late(tracks, until_s)
