"""Layers that are requested as a stack: decoded together, in any order of arrival, and what happens if one is bad."""

import itertools

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import HarmonicMean
from kvabr.player.session import Session
from kvabr.player.session_types import Cancel, Decode, Deliver, FetchGroup, Recompute
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PolicyError
from tests.catalogs import catalog
from tests.player.sessions import decode_all, of

OFFER = catalog(1, layered=True)


class Scripted(Policy):
    """Requests what it was given, one after the other."""

    paces = True

    def __init__(self, *decisions):
        self._left = list(decisions)

    def decide(self, view):
        if self._left and (self._left[0].kind == "fetch" or view.settled):
            return self._left.pop(0)
        if view.missing:
            return Decision.fetch(0, "base", "it is missing again")
        return Decision.wait("that was all")


def begun(*decisions):
    play = Session(Ladder(OFFER), 10.0, Scripted(*decisions), HarmonicMean())
    play.start(0.0)
    return play, of(play.actions(), FetchGroup)


STACK = Decision.fetch(0, "layer-2", "all layers")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_stack_is_decoded_once_in_whatever_order_it_arrives(order):
    play, fetches = begun(STACK)
    assert [fetch.track for fetch in fetches] == ["base", "layer-1", "layer-2"]
    assert len({fetch.priority for fetch in fetches}) == 1
    decodes = []
    for number in order:
        play.done(fetches[number].request, 0.1)
        decodes += of(play.actions(), Decode)
    assert [(one.request, one.track, one.below) for one in decodes] == [(2, "layer-2", (0, 1))]
    play.decoded(2, 0.2)
    (record,) = play.record.groups
    assert (record.track, record.bytes) == ("layer-2", sum(fetch.bytes for fetch in fetches))
    assert [track for _, _, track in play.record.steps] == ["base", "layer-1", "layer-2"]
    assert play.record.bytes_wasted == 0


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bad_layer_takes_those_above_it_with_it_and_no_other(bad):
    play, fetches = begun(STACK)
    for fetch in fetches:
        play.done(fetch.request, 0.1)
    of(play.actions(), Decode)
    play.refused(bad, "checksum", 0.2)
    actions = decode_all(play, play.actions(), 0.2)
    wasted = sum(fetch.bytes for fetch in fetches[bad:])
    assert play.record.bytes_wasted == wasted
    if bad:
        assert of(actions, Deliver)
        assert play.record.groups[0].track == fetches[bad - 1].track
    else:
        assert [fetch.track for fetch in of(actions, FetchGroup)] == ["base"]


def test_a_layer_that_fails_in_flight_cancels_those_above_it():
    play, fetches = begun(STACK)
    play.done(fetches[2].request, 0.1)
    play.failed(fetches[0].request, "reset", 0.2)
    actions = play.actions()
    assert {cancel.request for cancel in of(actions, Cancel)} == {1, 2}
    (again,) = of(actions, FetchGroup)
    assert (again.track, play.view.outstanding_bytes) == ("base", again.bytes)


def test_what_is_replaced_is_kept_until_the_replacement_is_decoded():
    play, fetches = begun(STACK, Decision.upgrade(0, "Int8", "instead"))
    for fetch in fetches:
        play.done(fetch.request, 0.1)
    (other,) = of(play.actions(), FetchGroup)
    play.done(other.request, 0.2)
    (decode,) = of(play.actions(), Decode)
    assert (decode.track, decode.below) == ("Int8", ())
    play.refused(decode.request, "checksum", 0.3)
    assert of(decode_all(play, play.actions(), 0.3), Deliver)
    assert play.record.groups[0].track == "layer-2"
    assert play.record.bytes_wasted == other.bytes


def test_layers_worse_than_another_track_in_place_are_decoded_once_the_next_is_here():
    play, (fetch,) = begun(Decision.fetch(0, "FP4", "first"), Decision.upgrade(0, "layer-2", "better"))
    play.done(fetch.request, 0.1)
    base, middle, top = of(play.actions(), FetchGroup)
    play.done(base.request, 0.2)
    play.timer(9.0)
    assert [decode.track for decode in of(decode_all(play, play.actions(), 9.0), Decode)] == ["FP4"]
    assert not play.view.undecoded
    play.done(middle.request, 9.1)
    play.timer(9.9)
    (decode,) = of(play.actions(), Decode)
    assert (decode.track, decode.below) == ("layer-1", (base.request,))
    play.failed(top.request, "reset", 9.91)
    play.decoded(decode.request, 9.92)
    play.timer(10.0)
    assert of(play.actions(), Deliver)
    (record,) = play.record.groups
    assert (record.track, record.bytes) == ("layer-1", base.bytes + middle.bytes)
    assert play.record.bytes_wasted == fetch.bytes


def test_a_group_computed_while_its_layers_are_decoded_needs_none_of_them():
    play = Session(Ladder(OFFER), 10.0, Scripted(STACK), HarmonicMean(), cost=PrefillCost.from_rate(OFFER.tokens))
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    for fetch in reversed(fetches):
        play.done(fetch.request, 0.1)
    (decode,) = of(play.actions(), Decode)
    play.obey(Decision.recompute(0, "the engine is idle"), 0.2)
    assert of(play.actions(), Recompute)
    play.computed(0, 1, 0.3)
    assert not play.over  # the decoders are busy
    play.refused(fetches[1].request, "checksum", 0.4)
    actions = play.actions()
    assert {cancel.request for cancel in of(actions, Cancel)} == {fetches[0].request, fetches[2].request}
    assert of(actions, Deliver)
    assert play.record.bytes_wasted == play.record.bytes_fetched
    assert decode.request == fetches[2].request


def test_a_replacement_that_arrives_while_the_old_track_is_decoded_is_not_lost():
    play, (fetch,) = begun(Decision.fetch(0, "base", "first"), Decision.upgrade(0, "FP16", "better"))
    play.done(fetch.request, 0.1)
    actions = play.actions()
    (better,) = of(actions, FetchGroup)
    play.timer(1.5)  # it has waited long enough for the replacement
    (decode,) = of([*actions, *play.actions()], Decode)
    play.done(better.request, 1.6)
    play.decoded(decode.request, 1.7)
    assert of(decode_all(play, play.actions(), 1.7), Deliver)
    assert play.record.groups[0].track == "FP16"


def test_a_policy_may_not_deliver_what_has_not_arrived():
    play = Session(Ladder(OFFER), 10.0, Scripted(STACK), HarmonicMean())
    play.start(0.0)
    play.guard.policy.decide = lambda _: Decision.deliver("now")
    with pytest.raises(PolicyError, match="cannot deliver: some groups are still missing"):
        play.timer(0.2)


class Replacing(Policy):
    """Requests the base of every group, and says that it will replace one."""

    paces = True

    def decide(self, view):
        if (group := view.first_missing()) is not None:
            return Decision.fetch(group, "base", "the base comes first")
        return Decision.wait("that was all")

    def __init__(self, replaced=None):
        self._replaced = replaced

    def will_replace(self, view, group):
        return group == self._replaced


def decoded_in_order(policy):
    play = Session(Ladder(catalog(3, layered=True)), 10.0, policy, HarmonicMean())
    play.start(0.0)
    fetches = of(play.actions(), FetchGroup)
    for fetch in reversed(fetches):  # the last arrives first, and keeps the one decoder busy meanwhile
        play.done(fetch.request, 0.1)
    order, actions = [], play.actions()
    while decodes := of(actions, Decode):
        (decode,) = decodes
        order.append(decode.group)
        play.decoded(decode.request, 0.2)
        actions = play.actions()
    assert of(actions, Deliver)
    return order


def test_what_the_policy_will_replace_is_decoded_last():
    assert decoded_in_order(Replacing()) == [2, 1, 0]
    assert decoded_in_order(Replacing(1)) == [2, 0, 1]


def test_a_policy_that_cannot_say_what_it_will_replace_is_named():
    policy = Replacing()
    policy.will_replace = lambda view, _: view.nothing
    with pytest.raises(PolicyError, match="Replacing raised AttributeError"):
        decoded_in_order(policy)


class Restless(Policy):
    """Requests another track as soon as one has arrived."""

    paces = True

    def decide(self, view):
        if view.missing:
            return Decision.fetch(0, "base", "it is missing")
        if view.settled:
            return Decision.upgrade(0, "Int8" if view.track_of[0] == "FP16" else "FP16", "another")
        return Decision.wait("it is on its way")


def test_a_group_that_is_requested_again_and_again_is_decoded_all_the_same():
    play = Session(Ladder(OFFER), 100.0, Restless(), HarmonicMean())
    play.start(0.0)
    actions, now = play.actions(), 0.0
    while not of(actions, Decode):
        (fetch,) = of(actions, FetchGroup)
        now += 0.1
        assert now < 2.0
        play.done(fetch.request, now)
        actions = play.actions()
