"""Arguments, policies and estimators that make no sense are refused, and named with their place."""

import math
from functools import partial

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.player.groups import DecodeRates
from kvabr.player.session import Session
from kvabr.player.session_types import Decode, FetchGroup, PlayerConfig
from kvabr.types.errors import PolicyError, UsageError
from tests.catalogs import catalog
from tests.player.sessions import of, session


@pytest.mark.parametrize(
    "make",
    [
        *(partial(session, deadline=bad) for bad in (0.0, -1.0, math.nan, math.inf)),
        *(partial(PlayerConfig, decoders=bad) for bad in (0, -1, 1 << 20)),
        *(partial(PlayerConfig, time_price=bad) for bad in (-1e-3, math.nan, -math.inf, math.inf)),
        *(partial(PlayerConfig, gpu_price=bad) for bad in (-1e-3, math.nan, -math.inf)),
        *(partial(PlayerConfig, give_up_after=bad) for bad in (0.5, math.nan, math.inf)),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(UsageError):
        make()


@pytest.mark.parametrize("policy", ["anytime", "cheapfirst", "fixed:Int4"])
@pytest.mark.parametrize("jump_s", [-3.0, -0.01, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_play_whose_clock_jumps_ends_with_estimates_that_can_be(policy, jump_s, chunked):
    offer = catalog(6, layered=True)
    rates = DecodeRates(offer)
    play = Session(
        Ladder(offer),
        2.0,
        load_policy(policy)(),
        HarmonicMean(),
        config=PlayerConfig(chunked=chunked),
        decode_rates=rates,
    )
    now, events = 0.0, 0
    play.start(now)
    while not play.over:
        for action in play.actions():
            if isinstance(action, FetchGroup):
                play.first_byte(action.request, now + 0.01)
                play.progress(action.request, action.bytes // 2, now + 0.02)
                play.done(action.request, now + 0.03)
            elif isinstance(action, Decode):
                play.decoded(action.request, now + 0.01, seconds=jump_s if events == 2 else 0.002)
            now += 0.04 + (jump_s if events == 2 else 0.0)
            events += 1
        assert 0 <= play.view.rate < math.inf
        assert 0 <= play.view.lower_bound < math.inf
        assert all(0 < rates.seconds(track.name) < 1.0 for track in offer.tracks)
        if not play.over and not of(list(play._actions), FetchGroup | Decode):
            now = max(now, play.next_timer())
            play.timer(now)
        assert events < 1000
    assert (play.record.delivered_s is None) == (play.record.gave_up is not None)
    if jump_s < 1.0:
        assert play.record.delivered_s is not None


class Nonsense(Policy):
    def __init__(self, answer):
        self.answer = answer

    def decide(self, view):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "must return a Decision"),
        ("Int4", "must return a Decision"),
        (Decision.fetch(0, "MP3", "x"), "a track of .*, got 'MP3'"),
        (Decision.fetch(99, "Int4", "x"), "got 99"),
        (Decision.fetch(-1, "Int4", "x"), "got -1"),
        (Decision.fetch("0", "Int4", "x"), "got '0'"),
        (Decision.upgrade(0, "FP8", "x"), "upgrade group 0"),
        (Decision.finish("x"), "cannot finish"),
        (Decision.wait("x"), "must request a group"),
        (Decision.recompute(0, "x"), "cannot recompute group 0"),
        (Decision("dance", "x"), "decision of kind"),
        (Decision([], "x"), "decision of kind"),
        (Decision.fetch(0, [], "x"), "must name a track"),
        (Decision.fetch(0, "Int4", 7), "its reason"),
        (Decision.fetch(0, "Int4", "x", 5), "alternatives"),
        (Decision.fetch(0, "Int4", "x", {"Int4": float("nan")}), "alternatives"),
        (SystemExit(0), "SystemExit"),
        (ValueError("boom"), "boom"),
        (ZeroDivisionError("by zero"), "by zero"),
    ],
)
def test_nonsense_names_the_policy_the_file_and_the_line(answer, words):
    play = session(2, Nonsense(answer))
    with pytest.raises(PolicyError, match=words) as caught:
        play.start(0.0)
    assert "Nonsense" in str(caught.value)
    assert "test_session_nonsense.py, line " in str(caught.value)


def test_a_division_that_is_none_is_refused():
    class Divides(Nonsense):
        @property
        def division(self):
            return 0.5

    with pytest.raises(PolicyError, match=r"division, got 0.5.*test_session_nonsense\.py"):
        session(2, Divides(Decision.wait("x"))).start(0.0)


@pytest.mark.parametrize("fault", ["raises", "text", "nan", "negative"])
def test_a_broken_estimator_is_named_with_its_place(fault):
    class Broken(HarmonicMean):
        def rate(self):
            if fault == "raises":
                raise ZeroDivisionError
            return {"text": "fast", "nan": float("nan"), "negative": -1.0}[fault]

    play = Session(Ladder(catalog(2)), 1.0, load_policy("cheapfirst")(), Broken())
    with pytest.raises(PolicyError, match="estimator harmonic"):
        play.start(0.0)
