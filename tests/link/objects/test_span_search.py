"""The search for a prompt's spans: which objects are asked for, and in how many rounds."""

from __future__ import annotations

import hashlib

import pytest
from kvabr.link.objects.span_search import SpanSearch
from kvabr.store.objects.spans import SpanHead, SpanTrack

SIZE = 16


def digests(*names):
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


def prompt(groups, *, own_from=None):
    """Digests of a prompt; from a group on they are not those of the other prompts."""
    return digests(*(g if own_from is None or g < own_from else f"own {g}" for g in range(groups)))


class Store:
    """Spans and pointers as publishers leave them; counts what is asked for."""

    def __init__(self, *assets, states=False):
        self.objects, self.asked = {}, []
        for chunks in assets:
            for first in range(0, len(chunks), SIZE):
                own = tuple(chunks[first : first + SIZE])
                end = states and first + SIZE >= len(chunks)
                head = SpanHead(own, first, len(own), 0, (SpanTrack("FP16", first, (1,), own[:1], (0.0,)),))
                self.objects.setdefault(("end" if end else "span", own[-1]), head)
                for each in own if len(own) < SIZE else own[:-1]:
                    self.objects.setdefault(("pointer", each), head)

    def search(self, chunks, *, states=False):
        search = SpanSearch(chunks, SIZE, states=states)
        while asks := search.wanted():
            self.asked += asks
            search.take({ask: self.objects.get((ask.kind, chunks[ask.group])) for ask in asks})
        self.rounds = search.rounds
        return [(head.first, head.digests) for head in search.found]


def spans(chunks):
    return [(first, tuple(chunks[first : first + SIZE])) for first in range(0, len(chunks), SIZE)]


@pytest.mark.parametrize("groups", [1, 5, 15, 16, 17, 31, 32, 320, 327, 511])
def test_a_prompt_that_was_played_before_takes_one_round(groups):
    asset = prompt(groups)
    store = Store(asset)
    assert store.search(asset) == spans(asset)
    assert store.rounds == 1
    assert len(store.asked) == -(-groups // SIZE)


@pytest.mark.parametrize(("shared", "groups"), [(320, 330), (325, 330), (320, 336), (300, 320), (3, 320), (17, 40)])
def test_the_longest_prefix_takes_two_rounds_and_at_most_fifteen_pointers(shared, groups):
    asset = prompt(shared + 6)
    store = Store(asset)
    found = store.search(prompt(groups, own_from=shared))
    assert found == spans(asset)[: -(-shared // SIZE)]
    assert store.rounds <= 2
    assert len(store.asked) <= groups // SIZE + 1 + SIZE - 1


def test_a_lookup_of_320_groups_takes_at_most_40_requests():
    store = Store(prompt(307))
    assert store.search(prompt(320, own_from=306))[-1][0] == 304
    assert (store.rounds, len(store.asked)) == (2, 35)


def test_nothing_is_found_of_a_prompt_that_nobody_has():
    store = Store(prompt(40))
    assert store.search(digests(*(f"other {g}" for g in range(50)))) == []
    assert store.rounds == 2


def test_a_span_in_the_middle_that_is_gone_ends_the_prefix():
    asset = prompt(64)
    store = Store(asset)
    del store.objects["span", asset[31]]
    assert store.search(asset) == [*spans(asset)[:1], (16, tuple(asset[16:32]))]  # a pointer has the copy of its head
    for group in range(16, 31):
        del store.objects["pointer", asset[group]]
    assert store.search(asset) == spans(asset)[:1]


def test_of_two_spans_that_share_groups_the_one_that_shares_more_is_taken():
    first, second = prompt(12, own_from=3), prompt(10)
    store = Store(first, second)
    assert store.search(prompt(14, own_from=9)) == spans(second)


@pytest.mark.parametrize("there", [0, 1, 5, 31, 40, 63, 64])
def test_a_long_prompt_is_searched_for_in_few_rounds(there):
    chunks = prompt(64 * SIZE)
    store = Store(chunks[: there * SIZE])
    assert store.search(chunks) == spans(chunks)[:there]
    assert store.rounds <= 3
    assert len(store.asked) <= 64 + SIZE


def test_little_of_a_very_long_prompt_takes_few_requests():
    chunks = prompt(512 * SIZE)
    store = Store(chunks[: 2 * SIZE])
    assert store.search(chunks) == spans(chunks)[:2]
    assert len(store.asked) < 100


def test_a_span_under_the_name_of_another_is_not_believed():
    asset, other = prompt(32), digests(*(f"x{g}" for g in range(32)))
    store = Store(asset)
    wrong = Store(other).objects["span", other[15]]
    for place in (15, 31):
        store.objects["span", asset[place]] = wrong
    assert store.search(asset) == spans(asset)[:1]  # by a pointer
    store.objects = {("span", asset[15]): wrong, ("span", asset[31]): wrong}
    assert store.search(asset) == []


def test_of_an_asset_with_states_the_span_that_ends_it_is_found():
    asset = prompt(21)
    store = Store(asset, states=True)
    assert store.search(asset, states=True) == spans(asset)
    assert store.rounds == 1
    longer = [*asset, *digests("more", "and more")]
    assert store.search(longer, states=True) == spans(asset)


def test_a_full_span_that_ends_an_asset_with_states_is_found_behind_the_others():
    asset = prompt(32)
    store = Store(asset, states=True)
    longer = [*asset, *digests(*(f"more {g}" for g in range(20)))]
    assert store.search(longer, states=True) == spans(asset)
    assert store.rounds == 2
