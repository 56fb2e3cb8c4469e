"""Arguments, policies and estimators that make no sense are refused, and named with their place."""

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import DualEwma
from kvabr.abr.plugins import load_policy
from kvabr.player.session import Session
from kvabr.player.session_types import PlayerConfig
from kvabr.types.errors import PolicyError, UsageError
from tests.catalogs import catalog
from tests.player.sessions import session


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_makes_no_sense_is_refused(deadline):
    with pytest.raises(UsageError, match="deadline"):
        session(deadline=deadline)


@pytest.mark.parametrize("decoders", [0, -1, 1 << 20])
def test_a_number_of_decoders_that_makes_no_sense_is_refused(decoders):
    with pytest.raises(UsageError, match="threads that decode"):
        PlayerConfig(decoders=decoders)


@pytest.mark.parametrize("price", [-1e-3, float("nan")])
@pytest.mark.parametrize("name", ["time_price", "gpu_price"])
def test_a_price_that_makes_no_sense_is_refused(name, price):
    with pytest.raises(UsageError, match="price"):
        PlayerConfig(**{name: price})


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
        (None, "not a Decision"),
        ("Int4", "not a Decision"),
        (Decision.fetch(0, "MP3", "x"), "unknown track 'MP3'"),
        (Decision.fetch(99, "Int4", "x"), "group 99"),
        (Decision.fetch(-1, "Int4", "x"), "group -1"),
        (Decision.fetch("0", "Int4", "x"), "group '0'"),
        (Decision.upgrade(0, "FP8", "x"), "upgrade group 0"),
        (Decision.finish("x"), "finish while"),
        (Decision.wait("x"), "waits while"),
        (Decision.recompute(0, "x"), "not possible"),
        (Decision("dance", "x"), "unknown kind"),
        (Decision([], "x"), "unknown kind"),
        (Decision.fetch(0, [], "x"), "unknown track"),
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


@pytest.mark.parametrize("fault", ["raises", "text", "nan", "negative"])
def test_a_broken_estimator_is_named_with_its_place(fault):
    class Broken(DualEwma):
        def rate(self):
            if fault == "raises":
                raise ZeroDivisionError
            return {"text": "fast", "nan": float("nan"), "negative": -1.0}[fault]

    play = Session(Ladder(catalog(2)), 1.0, load_policy("cheapfirst")(), Broken())
    with pytest.raises(PolicyError, match=r"estimator ewma .*test_session_nonsense\.py"):
        play.start(0.0)
