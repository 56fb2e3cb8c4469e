"""Sessions with a goal: prefixes, what is in the store, suffixes of a catalog."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.abr import Ladder
from kvabr.abr.estimators import Tracking
from kvabr.player.prefixes import longest_prefix
from kvabr.player.session import Session
from kvabr.player.session_types import Cancel, Deliver, FetchGroup, GiveUp, PrefixGoal, Recompute
from kvabr.types.catalog import Catalog, Track
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import units_of
from tests.catalogs import catalog
from tests.player.sessions import bring, of, session

SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""


def prefix(cost=SLOW, policy="fixed:Int4"):
    play = session(policy=policy, goal=PrefixGoal(), cost=cost, mode="suffix")
    play.start(0.0)
    return play, of(play.actions(), FetchGroup)


def until_over(play):
    actions = []
    while (now := play.next_timer()) is not None:
        play.timer(now)
        actions += play.actions()
    return actions


def test_a_prefix_that_comes_whole_is_not_cut():
    play, todo = prefix()
    actions = []
    for number, fetch in enumerate(todo):
        actions += bring(play, fetch, 0.1 * (number + 1))
    assert of(actions, Deliver) == [Deliver(pytest.approx(0.401), met=True, cut=None)]
    assert play.record.cut is None


def test_a_prefix_is_cut_at_the_deadline_and_starts_no_engine():
    play, todo = prefix()
    bring(play, todo[0], 0.1)
    actions = until_over(play)
    (end,) = of(actions, Deliver)
    assert (end.now, end.met, end.cut) == (1.0, True, "the deadline has passed")
    assert not of(actions, Recompute)
    assert sorted(cancel.request for cancel in of(actions, Cancel)) == [1, 2, 3]
    assert play.record.cut == end.cut
    assert play.record.tokens_recomputed == 0


def almost_whole():
    """At the deadline, half of the last group is there."""
    play, todo = prefix()
    for number, fetch in enumerate(todo[:3]):
        bring(play, fetch, 0.3 * (number + 1))
    play.first_byte(todo[3].request, 0.901)
    play.progress(todo[3].request, play.view.in_flight[todo[3].request].bytes // 2, 0.99)
    play.actions()
    play.timer(1.0)
    assert not of(play.actions(), Deliver)
    return play, todo[3]


def test_a_prefix_is_not_cut_while_the_rest_comes_sooner_than_it_is_computed():
    play, last = almost_whole()
    (end,) = of(bring(play, last, 1.1), Deliver)
    assert (end.now, end.met, end.cut) == (pytest.approx(1.101), False, None)


def test_a_prefix_is_cut_once_the_rest_does_not_come():
    play, _ = almost_whole()
    (end,) = of(until_over(play), Deliver)
    assert 1.0 < end.now < 2.0


def test_a_prefix_is_cut_when_computing_is_sooner_than_fetching():
    play, todo = prefix(PrefillCost.from_rate(16 * 40))
    bring(play, todo[0], 0.1)
    actions = until_over(play)
    (end,) = of(actions, Deliver)
    assert end.now < 1.0
    assert "faster to compute than to fetch" in end.cut
    assert not of(actions, Recompute)


def test_a_prefix_is_cut_when_no_track_of_a_group_can_be_had():
    play, todo = prefix()
    bring(play, todo[0], 0.01)
    now, end = 0.02, []
    waiting = [fetch for fetch in todo[1:] if fetch.group == 1]
    others = [fetch for fetch in todo[1:] if fetch.group > 1]
    for fetch in others:
        bring(play, fetch, now)
    while waiting:
        now += 0.01
        play.failed(waiting.pop().request, "corrupt", now)
        actions = play.actions()
        waiting, end = of(actions, FetchGroup), of(actions, Deliver)
    assert end
    assert end[0].now < 0.5
    assert end[0].cut is not None
    assert [record.ready_s is not None for record in play.record.groups] == [True, False, True, True]


def test_a_prefix_needs_the_cost_of_what_it_protects():
    with pytest.raises(UsageError, match="prefill cost"):
        session(goal=PrefixGoal())


def test_a_play_that_is_stopped_ends_as_its_goal_says():
    cut, _ = prefix()
    cut.stop(0.2, "the request is gone")
    assert of(cut.actions(), Deliver) == [Deliver(0.2, met=True, cut="the request is gone")]
    whole = session()
    whole.start(0.0)
    whole.stop(0.2, "the request is gone")
    assert of(whole.actions(), GiveUp) == [GiveUp(0.2, "the request is gone")]
    whole.stop(0.3, "again")
    assert whole.actions() == []


def test_a_suffix_of_a_catalog_counts_the_engine_time_from_the_first_token():
    whole, cost = catalog(4), PrefillCost(0.0, 1e-3, 1e-6)
    play = Session(Ladder(whole.suffix(3)), 1.0, "fixed:Int4", Tracking(), goal=PrefixGoal(), cost=cost)
    first, tokens = 3 * whole.spec.group_tokens, whole.group_tokens(3)
    assert play.view.cost.seconds(0, tokens) == pytest.approx(cost.seconds(first, tokens))


def test_what_is_at_hand_is_counted_from_the_first_group_of_a_suffix():
    whole = catalog(4)
    kept = {"FP16": [1, 3]}
    rest = Ladder(whole.suffix(2))
    play = Session(rest, 1.0, "cheapfirst", Tracking(), cached_groups=lambda _, track: kept.get(track, []))
    play.start(0.0)
    first = of(play.actions(), FetchGroup)[0]
    assert (first.group, first.track) == (1, "FP16")


def test_a_policy_that_computes_from_the_front_plays_no_prefix():
    with pytest.raises(UsageError, match="from the front"):
        Session(Ladder(catalog(4)), 1.0, "cake", Tracking(), goal=PrefixGoal(), cost=SLOW)


def seen(only, end):
    """Return the tokens of a class that a prompt needs which goes on behind ``end`` tokens: one more than it sees."""
    if only.kind == "window":
        return range(max(0, end - only.window), end)
    if only.kind == "chunked":
        return range((end - 1) // only.window * only.window, end)
    return range(end)


@st.composite
def specs(draw):
    size = draw(st.integers(1, 6))
    classes = []
    for layer in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["full", "window", "chunked", "latent", "state"]))
        window = draw(st.integers(1, 20)) if kind in ("window", "chunked") else None
        interval = draw(st.sampled_from([None, size, 2 * size])) if kind == "state" else None
        values = 0 if kind == "latent" else 2
        classes.append(LayerClass(kind, (layer,), 1, 2, values, "float16", window=window, interval=interval))
    return KVSpec("m", "t", tuple(classes), size)


def catalog_of(spec, tokens):
    units = units_of(spec, tokens)
    count = len(units) if len(spec.classes) > 1 or spec.only.kind not in ("full", "latent") else spec.groups(tokens)
    track = Track("FP16", (100,) * count, (0.5,) * count, ("ab" * 32,) * count)
    chunks = tuple(chain(list(range(tokens)), model="m", tokenizer="t", group_tokens=spec.group_tokens))
    return Catalog(TrackNamespace("m", chunks[-1]), spec, tokens, chunks, (track,))


def snapshot_at(spec, part, end, tokens):
    return any(unit.part == part and unit.first == end for unit in units_of(spec, tokens))


@given(specs(), st.integers(1, 40), st.data())
def test_a_prefix_is_the_longest_for_which_every_token_that_is_seen_is_there(spec, tokens, data):
    whole, size = catalog_of(spec, tokens), spec.group_tokens
    groups, limit = whole.playable(data.draw(st.integers(1, len(whole.chunks))))
    ends = [min(count * size, tokens) for count in range(1, len(whole.chunks) + 1)]
    states = [part for part, only in enumerate(spec.classes) if only.kind == "state"]
    assert all(snapshot_at(spec, part, ends[groups - 1], tokens) for part in states if groups)
    assert limit is None or spec.classes[spec.names.index(limit)].kind == "state"
    if not groups:
        return
    tokens, skip = ends[groups - 1], data.draw(st.integers(0, groups - 1))
    end = tokens if states else data.draw(st.integers(max((groups - 1) * size + 1, 1), tokens))
    play = whole.prefix(groups, end=end).suffix(skip)
    first = skip * size
    assert (play.first_token, play.first_token + play.tokens) == (first, tokens)

    # What is fetched is what can be seen behind ``end`` and is not there yet.
    units = [play.unit(group) for group in range(play.groups)]
    for part, only in enumerate(spec.classes):
        have = {token for unit in units if unit.part == part for token in range(unit.first, unit.first + unit.tokens)}
        if only.kind == "state":
            assert [unit.first for unit in units if unit.part == part] == [tokens]
        else:
            groups_seen = {token // size for token in (*seen(only, end), *range(end, tokens)) if token >= first}
            assert {token // size for token in have} == groups_seen

    # Of what came, the longest prefix is handed over.
    placed = data.draw(st.lists(st.booleans() | st.just(True), min_size=play.groups, max_size=play.groups))
    block = data.draw(st.integers(1, 9))
    found = longest_prefix(play, placed, block)
    there = [unit for unit, here in zip(units, placed, strict=True) if here]

    def holds(stop):
        for part, only in enumerate(spec.classes):
            own = [unit for unit in there if unit.part == part]
            if only.kind == "state":
                if stop not in {unit.first for unit in own}:
                    return False
            elif {token for token in seen(only, stop) if token >= first} - {
                token for unit in own for token in range(unit.first, unit.first + unit.tokens)
            }:
                return False
        return True

    longest = max((stop for stop in range(first + 1, tokens + 1) if stop % block == 0 and holds(stop)), default=first)
    assert first + found.tokens == longest
    assert all(placed[group] for group in found.groups)
    for part, (only, span) in enumerate(zip(spec.classes, found.spans, strict=True)):
        if not found.tokens:
            assert span.tokens == 0
        elif only.kind == "state":
            assert span == (longest, only.k_dim)
        else:
            assert span.first + span.tokens == longest
            assert first <= span.first <= max(first, min(seen(only, longest)))
            own = [units[group] for group in found.groups if units[group].part == part]
            assert own[0].first == span.first

    # An engine can compute from a group on if all that it sees from there is in the catalog, in groups before.
    for group in range(play.groups):
        cut = play.cut(group)
        assert cut <= group
        if play.every_token:
            continue
        begin = first + play.tokens_before(cut)
        assert cut == 0 or longest_prefix(play, [each < cut for each in range(play.groups)]).tokens == begin - first
