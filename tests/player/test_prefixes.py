"""The longest prefix in place, and what a play fetches for it, against a definition token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvabr.player.prefixes import longest_prefix
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import TrackNamespace, chain
from kvabr.types.units import units_of


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
