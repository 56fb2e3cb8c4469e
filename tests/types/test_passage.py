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
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.live import LiveCatalog
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
from tests.catalogs import SPEC, catalog

NOTES = PassageNotes("mean", 4, b"", ((0.0, 0.152), (0.15, 0.08), (0.3, 0.048)), "held-out contexts")
IDS = list(range(5 * SPEC.group_tokens - 40))
NAMED = {"model": SPEC.model, "tokenizer": SPEC.tokenizer}


def passage(groups=5, *, short=40, notes=NOTES):
    """A catalog of a passage with true digests."""
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
    with pytest.raises(FormatError, match="131073 tokens"):
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
