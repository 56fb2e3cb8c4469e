"""Losses behind tails: shares between those listed, and where a group counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvabr.data import default_catalog
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError
from kvabr.types.tails import TailLoss, losses_behind, share_behind

TAILS = (TailLoss(16, 0.5), TailLoss(128, 0.2, 0.7), TailLoss(512, 0.06))


def test_shares_are_those_listed_and_fall_between_them():
    assert share_behind(TAILS, 0) == 1.0
    assert share_behind((), 128) == 1.0
    for tail in TAILS:
        assert share_behind(TAILS, tail.tokens) == pytest.approx(tail.share)
    between = [share_behind(TAILS, tokens) for tokens in (0, 1, 8, 16, 20, 128, 300, 512)]
    assert between == sorted(between, reverse=True)
    assert share_behind(TAILS, 5000) == pytest.approx(0.06)


def test_groups_lose_by_their_distance_from_the_reader():
    losses = (0.02, 0.005, 0.005, 0.01, 0.02, 0.14)
    whole = sum(losses)
    assert losses_behind(losses, TAILS, 6, 0, 128) == losses
    behind = losses_behind(losses, TAILS, 5, 128, 128)
    assert sum(behind) == pytest.approx(0.2 * whole)
    # Some of it is spread evenly: which groups a question is about is not known.
    assert behind == pytest.approx([0.04 * (0.85 * loss / 0.06 + 0.15 / 5) for loss in losses[:5]])
    # A shorter prefix of the same cache ends as the whole does.
    shorter = losses_behind(losses, TAILS, 3, 0, 128)
    assert sum(shorter) == pytest.approx(whole)
    assert shorter == pytest.approx((0.02, 0.02, 0.16))
    # A question is a tail, too.
    asked = losses_behind(losses, TAILS, 6, 16, 128)
    assert sum(asked) == pytest.approx(0.5 * whole)
    assert sorted(range(6), key=asked.__getitem__) == sorted(range(6), key=losses.__getitem__)
    # Of older assets nothing is known but the groups' own losses.
    assert losses_behind(losses, (), 5, 128, 128) == losses[:5]


@pytest.mark.parametrize("asked", [(0.0,) * 6, (5e-324, 0, 0, 0, 0, 0), (1e6,) * 6, (0, 0, 0, 0, 0, 1.0)])
def test_whatever_a_catalog_says_of_questions_the_whole_loss_stays(asked):
    losses = (0.02, 0.005, 0.005, 0.01, 0.02, 0.14)
    for groups in (5, 6):
        behind = losses_behind(losses, TAILS, groups, 144, 128, asked)
        assert sum(behind) == pytest.approx(share_behind(TAILS, 144) * sum(losses))
        assert min(behind) > 0


def _tailed() -> Catalog:
    catalog = default_catalog()
    return replace(catalog, tracks=tuple(replace(track, tails=TAILS) for track in catalog.tracks))


def test_what_a_play_fetches_before_a_tail():
    catalog = _tailed()
    fetched = catalog.behind(catalog.groups - 1, 148)
    assert (fetched.groups, fetched.tail) == (catalog.groups - 1, 148)
    for track, whole in zip(fetched.tracks, catalog.tracks, strict=True):
        assert track.total_loss == pytest.approx(whole.total_loss * share_behind(TAILS, 148))
        assert track.bytes == whole.bytes[:-1]
    assert catalog.behind(catalog.groups, 0) is catalog


def test_a_part_of_a_catalog_keeps_its_part_of_what_questions_are_about():
    catalog = _tailed()
    asked = tuple(1.0 + group for group in range(catalog.groups))
    known = replace(catalog, asked=asked)
    assert Catalog.loads(known.dumps()) == known
    assert known.prefix(3).asked == asked[:3]
    assert known.suffix(2).asked == asked[2:]
    behind = known.behind(catalog.groups, 16)
    assert behind.asked == ()  # its losses are those behind a question already
    for track, without in zip(behind.tracks, catalog.behind(catalog.groups, 16).tracks, strict=True):
        assert track.total_loss == pytest.approx(without.total_loss)
        assert track.loss != without.loss
    with pytest.raises(FormatError, match="shares of"):
        replace(catalog, asked=asked[:3])
    value = json.loads(known.dumps())
    value["asked"][0] = -1.0
    with pytest.raises(FormatError, match="asked"):
        Catalog.loads(json.dumps(value))


@pytest.mark.parametrize(
    "tails",
    [
        [[16, -0.1, 0]],
        [[16, float("nan"), 0]],
        [[16, 0.5, float("inf")]],
        [[0, 0.5, 0]],
        [[128, 0.5, 0], [16, 0.2, 0]],
        [[tokens, 0.5, 0] for tokens in range(1, 40)],
        [[16]],
        *([[tokens, 0.5, 0.0]] for tokens in (1.5, True, "16")),
        ["long"],
        7,
        None,
        {"16": 0.5},
    ],
)
def test_what_a_peer_makes_up_is_refused(tails):
    value = json.loads(_tailed().dumps())
    value["tracks"][0]["tails"] = tails
    with pytest.raises(FormatError):
        Catalog.loads(json.dumps(value))
