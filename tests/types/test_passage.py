"""Passages: their names, what their catalogs say, and that none is ever taken for a prompt."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.client.lookup import check_tokens, shared_groups
from kvabr.server.relay_catalogs import check_small
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.joined import at_share, fusion_loss, is_joined, join, joined_with_tail, last_groups
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.live import LiveCatalog
from kvabr.types.loss import played_loss, predicted_loss
from kvabr.types.naming import CATALOG_TRACK, TrackNamespace, chain, prefix_track
from kvabr.types.passage import (
    MAX_PASSAGE_TOKENS,
    Exact,
    Passage,
    PassageNotes,
    check_movable,
    check_parts,
    passage_chain,
)
from kvabr.types.tails import TailLoss, losses_with_tail
from tests.catalogs import SPEC, catalog

NOTES = PassageNotes("mean", 4, b"", ((0.0, 0.152), (0.15, 0.08), (0.3, 0.048)), "held-out contexts")
IDS = list(range(5 * SPEC.group_tokens - 40))
NAMED = {"model": SPEC.model, "tokenizer": SPEC.tokenizer}


def passage(groups=5, *, short=40, notes=NOTES):
    made = catalog(groups, short=short)
    chunks = tuple(passage_chain(range(made.tokens), **NAMED))
    return replace(made, namespace=TrackNamespace(SPEC.model, chunks[-1]), chunks=chunks, passage=notes)


tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@given(tokens, st.binary(max_size=9), st.binary(max_size=9))
def test_no_digest_of_a_passage_is_one_of_a_prompt_or_of_another_tenants_passage(ids, salt, other):
    def named(make, salt):
        return make(ids, model="m", tokenizer="t", group_tokens=8, salt=salt)

    mine = named(passage_chain, salt)
    assert len(mine) == -(-len(ids) // 8)
    assert named(passage_chain, salt) == mine
    assert not {*mine} & {*named(chain, salt)}
    assert salt == other or not {*mine} & {*named(passage_chain, other)}
    spec = replace(SPEC, model="m", tokenizer="t", group_tokens=8)
    assert Passage(tuple(ids)).name(spec, salt) == TrackNamespace("m", mine[-1])


@given(
    st.binary(max_size=5000),
    st.dictionaries(st.floats(0, 1), st.floats(0, 100), max_size=64),
    st.integers(0, 100),
    st.text(max_size=40),
)
def test_notes_survive_the_catalogs_json(order, fusion, contexts, method):
    # Seven groups of tokens, so that an order may be longer than one string of the JSON.
    made = passage(max(1, SPEC.groups(len(order))), short=-len(order) % 128 if order else 3, notes=None)
    notes = PassageNotes("mean", contexts, order, tuple(sorted(fusion.items())), method)
    made = replace(made, passage=notes)
    assert Catalog.loads(made.dumps()) == made


@pytest.mark.parametrize(
    "change",
    [
        *({"base": bad} for bad in ("", 7, "x" * 300)),
        *({"contexts": bad} for bad in (-1, True, 1 << 40)),
        {"method": "x" * 5000},
        *({"order": bad} for bad in (["AAAA"], ["A"], ["A?=="], ["A" * 2048] * 90, "AAAA", [["AAAA"]])),
        *({"fusion": bad} for bad in ([[0.5, 0.1], [0.5, 0.1]], [[0.5, -0.1]], [[1.5, 0.1]], [[0.1, float("nan")]])),
        *({"fusion": bad} for bad in ([[0.1]], [[0.1, 0.2, 0.3]], [[n / 100, 0.1] for n in range(70)], {})),
    ],
)
def test_hostile_notes_are_refused(change):
    value = json.loads(passage().dumps())
    with pytest.raises(FormatError):
        Catalog.loads(json.dumps(value | {"passage": value["passage"] | change}))
    for bad in (*({"passage": notes} for notes in ([], "mean", 7, {}, {"contexts": 7})), {"position": 128}):
        with pytest.raises(FormatError):
            Catalog.loads(json.dumps(value | bad))


def test_a_passage_is_as_long_as_one_may_be():
    with pytest.raises(FormatError, match="got 131073"):
        passage(MAX_PASSAGE_TOKENS // 128 + 1, short=127)
    with pytest.raises(UsageError, match="cut it"):
        Passage((1,) * (MAX_PASSAGE_TOKENS + 1))


def test_caches_that_cannot_be_moved_are_no_passages():
    window = KVSpec(
        "m",
        "t",
        (LayerClass("window", (0,), 1, 8, 8, "float16", SPEC.rope and replace(SPEC.rope, rotary_dim=8), window=64),),
    )
    for spec, words in ((SPEC.changed(rope=None), "rotated"), (window, "full attention")):
        with pytest.raises(FormatError, match=words):
            check_movable(spec)
        with pytest.raises(FormatError, match=words):
            replace(passage(), spec=spec)


def test_it_is_played_at_any_position_and_keeps_its_own_first_tokens():
    found = passage().at(1000)
    assert [found.unit(group)[2:6] for group in range(5)] == [
        (group, 1000 + 128 * group, 128 if group < 4 else 88, 128 * group) for group in range(5)
    ]
    assert found.address(3, "Int4") == ("Int4", 3)
    assert found.spans[0] == (1000, 600)
    assert catalog(5).unit(2).free is None
    with pytest.raises(UsageError, match="cannot be moved"):
        catalog(5).at(1000)


def test_no_play_of_a_prompt_takes_a_passage():
    found = passage()
    for play in (lambda: found.to_play, lambda: found.prefix(2), lambda: found.prefix(5), lambda: found.suffix(1)):
        with pytest.raises(UsageError, match="passage"):
            play()


def test_a_passage_shares_nothing_with_a_prompt_even_if_it_claims_its_digests():
    digests = chain(range(600), **NAMED)
    liar = replace(passage(), namespace=TrackNamespace(SPEC.model, digests[-1]), chunks=tuple(digests))
    assert shared_groups(replace(liar, passage=None), range(600), digests) == 5
    assert shared_groups(liar, range(600), digests) == 0
    with pytest.raises(UsageError, match="is a passage"):
        asyncio.run(check_tokens(liar, range(600), b""))
    with pytest.raises(UsageError, match="is a passage"):
        asyncio.run(check_tokens(passage(), range(600), b""))
    # A relay passes a passage on by its own name, but not as the answer to a lookup of a prompt.
    data = liar.dumps().encode()
    assert check_small(liar.namespace, CATALOG_TRACK, data) is not None
    with pytest.raises(FormatError, match="another prompt"):
        check_small(TrackNamespace(SPEC.model, digests[0]), prefix_track(digests), data)


def test_a_passage_is_not_played_while_it_is_prefilled():
    with pytest.raises(FormatError, match="complete"):
        LiveCatalog(passage(), (0.0,) * 5, "0" * 16)


@pytest.mark.parametrize(
    ("share", "loss"),
    [(0.0, 0.152), (0.075, 0.116), (0.15, 0.08), (0.225, 0.064), (0.3, 0.048), (0.65, 0.024), (1.0, 0.0)],
)
def test_fusion_losses_are_interpolated(share, loss):
    assert NOTES.fusion_loss(share) == pytest.approx(loss)
    assert replace(NOTES, fusion=((0.2, 0.1),)).fusion_loss(share) == pytest.approx(min(0.1, (1 - share) / 8))
    assert replace(NOTES, fusion=((0.2, 0.1), (1.0, 0.01))).fusion_loss(1.0) == 0.01
    assert replace(NOTES, fusion=()).fusion_loss(share) is None


def test_parts_of_a_prompt_are_checked():
    parts = [Exact([1, 2]), Passage(range(3))]
    assert check_parts(parts) == (Exact((1, 2)), Passage((0, 1, 2)))
    for wrong in ((), (-1,), (1 << 32,), (1.5, 2.0), "12", 7):
        with pytest.raises(UsageError, match="token"):
            Exact(wrong)
    assert Passage(np.arange(3)).ids == Passage(torch.arange(3)).ids == (0, 1, 2)
    for wrong in ([], [(1, 2)], [Exact((1,))] * 5000):
        with pytest.raises(UsageError, match="parts"):
            check_parts(wrong)


PASSAGES = PassageNotes("mean", 4, b"", ((0.0, 0.1), (0.15, 0.02)))


def published(ids, *, layered=False, notes=PASSAGES):
    groups = SPEC.groups(len(ids))
    made = catalog(groups, short=groups * SPEC.group_tokens - len(ids), layered=layered)
    chunks = tuple(passage_chain(ids, model=SPEC.model, tokenizer=SPEC.tokenizer))
    return replace(made, namespace=TrackNamespace(SPEC.model, chunks[-1]), chunks=chunks, passage=notes)


SYSTEM, BETWEEN, QUESTION = Exact(range(20)), Exact((7,)), Exact((1, 2, 3))
ONE, OTHER, THIRD = Passage(range(300)), Passage(range(50, 90)), Passage(range(128))
FOUND = {each: published(each.ids) for each in (ONE, OTHER, THIRD)}
PARTS = (SYSTEM, ONE, OTHER, BETWEEN, ONE, QUESTION)


def test_groups_are_those_of_the_passages_and_the_text_between_them():
    joined = join(PARTS, FOUND, SPEC)
    assert joined.tokens == 20 + 300 + 40 + 1 + 300  # not the question
    assert [(unit.source, unit.group, unit.first, unit.tokens, unit.free) for unit in joined.units] == [
        (-1, 0, 0, 20, None),
        (0, 0, 20, 128, 0), (0, 1, 148, 128, 128), (0, 2, 276, 44, 256),
        (1, 0, 320, 40, 0),
        (-1, 0, 360, 1, None),
        (2, 0, 361, 128, 0), (2, 1, 489, 128, 128), (2, 2, 617, 44, 256),
    ]  # fmt: skip
    assert joined.computed == (0, 5)
    assert joined.groups == len(joined.chunks) == 9
    assert [joined.tokens_before(group) for group in range(10)] == [0, 20, 148, 276, 320, 360, 361, 489, 617, 661]
    assert [joined.cut(group) for group in range(9)] == list(range(9))
    assert joined.spans == ((0, 661),)
    assert joined.every_token
    assert not joined.even
    assert joined.to_play is joined
    assert joined.suffix(0) is joined
    for group, passage in ((1, ONE), (4, OTHER), (8, ONE)):
        unit, own = joined.unit(group), FOUND[passage]
        assert joined.namespace_of(group) == own.namespace
        assert joined.address(group, "Int4") == ("Int4", unit.group)
        assert joined.chunks[unit.chunk] == own.chunks[unit.group]
        for track in joined.tracks:
            theirs = own.track(track.name)
            assert track.bytes[group] == theirs.bytes[unit.group]
            fusion = 0.1 * unit.tokens / own.tokens
            assert track.loss[group] == pytest.approx(theirs.loss[unit.group] * own.tokens / 640 + fusion)
    assert joined.namespace_of(0) == joined.namespace
    assert len({joined.title(group) for group in range(9)}) == 9


def test_what_was_not_found_is_computed_and_so_is_a_passage_that_begins_the_prompt():
    joined = join((THIRD, BETWEEN, OTHER, ONE, QUESTION), {ONE: FOUND[ONE], THIRD: FOUND[THIRD]}, SPEC)
    assert [(unit.source, unit.first, unit.tokens) for unit in joined.units][:2] == [(-1, 0, 169), (0, 169, 128)]
    assert join((SYSTEM, OTHER, QUESTION), {ONE: FOUND[ONE]}, SPEC) is None
    assert join((ONE, QUESTION), FOUND, SPEC) is None
    assert join((ONE, ONE, QUESTION), FOUND, SPEC).computed == (0,)


def test_only_tracks_that_all_passages_have_are_played():
    layered = published(ONE.ids, layered=True)
    joined = join((SYSTEM, ONE, OTHER), FOUND | {ONE: layered}, SPEC)
    assert "base" not in joined.by_name
    both = join((SYSTEM, ONE, OTHER), {ONE: layered, OTHER: published(OTHER.ids, layered=True)}, SPEC)
    assert [track.refines for track in both.tracks][-3:] == [None, "base", "layer-1"]
    few = [replace(FOUND[each], tracks=FOUND[each].tracks[at : at + 1]) for each, at in ((ONE, 0), (OTHER, 1))]
    with pytest.raises(FormatError, match="no track in common"):
        join((SYSTEM, ONE, OTHER), dict(zip((ONE, OTHER), few, strict=True)), SPEC)
    # An enhancement of which one passage lacks what it refines is left out.
    short = replace(both.sources[1], tracks=both.sources[1].tracks[:-2])
    assert "layer-2" not in join((SYSTEM, ONE, OTHER), {ONE: layered, OTHER: short}, SPEC).by_name


def test_passages_of_two_profiles_are_not_joined():
    found = {
        each: replace(FOUND[each], profile=name * 64, profile_bytes=9) for each, name in ((ONE, "1"), (OTHER, "2"))
    }
    with pytest.raises(FormatError, match="profiles"):
        join((SYSTEM, ONE, OTHER), found, SPEC)
    same = join((SYSTEM, ONE, OTHER, THIRD), found | {OTHER: FOUND[OTHER], THIRD: FOUND[THIRD]}, SPEC)
    assert (same.profile, same.profile_bytes) == ("1" * 64, 9)


def test_losses_of_codec_and_of_joining():
    joined = join(PARTS, FOUND, SPEC)
    tracks = ["Int4"] * 9
    tracks[0] = tracks[5] = RECOMPUTED
    own = [sum(FOUND[each].track("Int4").loss) * len(each.ids) / 640 for each in (ONE, OTHER, ONE)]
    assert predicted_loss(joined, tracks) == pytest.approx(sum(own) + 0.3)
    steps = [("compute", 0, 1), *(("fetch", group, "Int4") for group in (1, 2, 3, 4)), ("compute", 5, 6)]
    steps += [("fetch", group, "Int4") for group in (6, 7, 8)]
    assert played_loss(joined, steps) == pytest.approx(sum(own) + 0.3)
    assert fusion_loss(joined, tracks) == pytest.approx(0.3)
    tracks[4] = RECOMPUTED  # the whole second passage: it is as exact as what comes before it
    assert fusion_loss(joined, tracks) == pytest.approx(0.2)
    assert fusion_loss(joined, [RECOMPUTED] * 9) == 0.0
    unknown = join(PARTS, FOUND | {OTHER: published(OTHER.ids, notes=PassageNotes("alone"))}, SPEC)
    assert fusion_loss(unknown, ["Int4"] * 9) is None
    assert fusion_loss(unknown, tracks) == pytest.approx(0.2)


def test_a_joined_prompt_is_not_published():
    with pytest.raises(UsageError, match="not published"):
        join(PARTS, FOUND, SPEC).dumps()


def test_it_is_cut_between_any_two_groups():
    joined = join(PARTS, FOUND, SPEC)
    rest = joined.suffix(2)
    assert (rest.first_token, rest.tokens, rest.groups, rest.spans) == (148, 661 - 148, 7, ((148, 513),))
    assert [rest.tokens_before(group) for group in range(8)] == [0, 128, 172, 212, 213, 341, 469, 513]
    both = rest.prefix(2)
    assert (both.first_token, both.tokens, both.groups) == (148, 172, 2)
    for cut, skipped in ((rest, 2), (both, 2)):
        for group in range(cut.groups):
            assert cut.unit(group)._replace(chunk=0) == joined.unit(group + skipped)._replace(chunk=0)
            assert cut.unit(group).chunk == group
            assert cut.namespace_of(group) == joined.namespace_of(group + skipped)
            assert cut.chunks[group] == joined.chunks[group + skipped]
            assert cut.track("Int4").loss[group] == joined.track("Int4").loss[group + skipped]
    with pytest.raises(UsageError, match="whole"):
        FOUND[ONE].suffix(1)


def test_what_is_computed_over_a_passage_is_no_more_the_prompts_own_than_that():
    joined = join(PARTS, FOUND, SPEC)
    fetched = [("fetch", group, "Int8") for group in range(9) if group not in (0, 5)]
    own = [("compute", 0, 1), ("compute", 5, 6)]
    assert is_joined(joined, [*fetched, *own])
    every = [("compute", group, group + 1) for group in range(9)]
    assert not is_joined(joined, every)
    assert not is_joined(joined, [("compute", 0, 9)])
    assert not is_joined(joined, [*fetched, *every])
    assert is_joined(joined, [*fetched, *reversed(every)])  # each was computed over a passage, and none is left
    assert is_joined(joined, [*every, ("fetch", 8, "FP16")])
    assert is_joined(joined, [*every[:1], *fetched[:1], *every[2:], *every[1:2]])
    assert not is_joined(joined, [*every[:1], *fetched[:1], *every[2:], *every[1:]])


def test_a_tail_behind_the_last_passage_lessens_what_its_codec_costs():
    tails = (TailLoss(16, 0.5), TailLoss(128, 0.2), TailLoss(512, 0.06))
    known = {
        passage: replace(one, tracks=tuple(replace(track, tails=tails) for track in one.tracks))
        for passage, one in FOUND.items()
    }
    joined = join(PARTS, known, SPEC)
    assert last_groups(joined) == range(6, 9)
    assert last_groups(joined.prefix(6)) == range(0)  # a text ends it
    assert joined_with_tail(joined, 9, 0) is joined
    asked, shorter = joined_with_tail(joined, 9, 20), joined_with_tail(joined, 7, 20 + 172)
    assert (asked.tail, shorter.tail) == (20, 192)
    assert (asked.groups, shorter.groups, shorter.tokens) == (9, 7, 361 + 128)
    for track in joined.tracks:
        for made in (asked, shorter):
            assert made.track(track.name).loss[:6] == pytest.approx(track.loss[:6])
        whole = known[ONE].track(track.name)
        own = losses_with_tail(whole.loss, tails, 1, 192, SPEC.group_tokens)
        part = 300 / (300 + 40 + 300)
        assert shorter.track(track.name).loss[6] == pytest.approx(own[0] * part + 0.1 * 128 / 300)
        assert sum(asked.track(track.name).loss) <= track.total_loss + 1e-12
    every = [""] * 7
    assert fusion_loss(shorter, every) == pytest.approx(0.1 + 0.1 + 0.1 * 128 / 300)
    left = replace(joined, tracks=tuple(track for track in joined.tracks if track.name == "Int4"))
    assert [track.name for track in joined_with_tail(left, 7, 192).tracks] == ["Int4"]
    # The losses of a share that is computed again are those behind the tail, too.
    assert at_share(shorter, 0.0).tracks == shorter.tracks
