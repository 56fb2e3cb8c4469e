"""Expected loss of a mixed cache: sums, and what recomputed groups inherit."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from kvabr.data import default_catalog
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import FormatError
from kvabr.types.loss import (
    INHERITED,
    factors_if_rest_computed,
    inherited_later,
    played_loss,
    predicted_loss,
    promised_loss,
)
from kvabr.types.tails import TailLoss, losses_with_tail, share_after_tail
from tests.catalogs import catalog
from tests.counting import lines


def test_recomputed_from_the_start_is_exact():
    made = catalog(6)
    assert predicted_loss(made, [RECOMPUTED] * 6) == 0.0
    front = predicted_loss(made, [RECOMPUTED] * 3 + ["Int4"] * 3)
    assert front == pytest.approx(sum(made.track("Int4").loss[3:]))


def test_recomputed_behind_lossy_groups_inherits_a_share():
    made = catalog(4)
    loss = predicted_loss(made, ["Int4", "FP4", RECOMPUTED, RECOMPUTED])
    four, block = made.track("Int4").loss, made.track("FP4").loss
    # Two groups before it: the first is as far from it as the third is from the end, the second as the last.
    inherited = four[2] * four[2] / (four[2] + four[3]) + block[2] * block[3] / (block[2] + block[3])
    inherited += four[3] * four[1] / sum(four[1:]) + block[3] * block[2] / sum(block[1:])
    assert loss == pytest.approx(four[0] + block[1] + INHERITED * inherited)


def test_what_was_computed_early_does_not_gain_by_upgrades_that_come_later():
    made = catalog(4)
    rest = [("fetch", 2, "Int4"), ("fetch", 3, "Int4")]
    early = played_loss(made, [("fetch", 0, "FP4"), ("compute", 1, 2), ("fetch", 0, "FP16"), *rest])
    late = played_loss(made, [("fetch", 0, "FP4"), ("fetch", 0, "FP16"), ("compute", 1, 2), *rest])
    plain = predicted_loss(made, ["FP16", RECOMPUTED, "Int4", "Int4"])
    assert late == pytest.approx(plain)
    worse, better = made.track("FP4").loss[0], made.track("FP16").loss[0]
    assert early == pytest.approx(predicted_loss(made, ["FP4", RECOMPUTED, "Int4", "Int4"]) - worse + better)
    assert early > late


def test_a_group_computed_first_and_fetched_then_counts_as_fetched():
    made = catalog(3)
    steps = [("compute", 0, 3), ("fetch", 1, "Int4")]
    assert played_loss(made, steps) == pytest.approx(made.track("Int4").loss[1])


@pytest.mark.parametrize(
    "steps", [[("fetch", 0, "FP16")], [("fetch", 5, "FP16")], [("compute", 0, 9)], [("bake", 0, 2)]]
)
def test_steps_that_leave_a_hole_or_the_asset_are_refused(steps):
    with pytest.raises(FormatError):
        played_loss(catalog(2), steps)
    for tracks in (["FP16"], ["FP16", "Int2"]):
        with pytest.raises(FormatError):
            predicted_loss(catalog(2), tracks)


def test_the_work_per_group_does_not_grow_where_fetched_and_computed_groups_alternate():
    def work(groups):
        made = catalog(groups)
        fetched = [("fetch", group, "Int4") for group in range(0, groups, 2)]
        computed = [("compute", group, group + 1) for group in range(1, groups, 2)]
        return lines(lambda: played_loss(made, fetched + computed)) / groups

    work(64)
    assert work(8192) <= 1.1 * work(64)


TAILS = (TailLoss(20, 0.4, 0.5), TailLoss(150, 0.2, 0.4), TailLoss(540, 0.1, 0.4))


def tailed(groups, **options):
    made = catalog(groups, **options)
    return replace(made, tracks=tuple(replace(track, tails=TAILS) for track in made.tracks))


def test_groups_computed_at_the_end_are_a_tail():
    made = tailed(8)
    for name in ("Int4", "AC-5x"):
        whole = made.track(name).total_loss
        mix = [name] * 6 + [RECOMPUTED] * 2
        assert predicted_loss(made, mix) == pytest.approx(share_after_tail(TAILS, 256) * whole)
        assert predicted_loss(made, mix) == pytest.approx(made.with_tail(6, 256).track(name).total_loss)
        steps = [("fetch", group, name) for group in range(6)]
        assert played_loss(made, [*steps, ("compute", 6, 7), ("compute", 7, 8)]) == pytest.approx(
            predicted_loss(made, mix)
        )
    assert predicted_loss(made, [RECOMPUTED] * 8) == 0.0
    both = predicted_loss(made, ["AC-5x"] * 3 + ["Int4"] * 3 + [RECOMPUTED] * 2)
    each = [predicted_loss(made, [name] * 6 + [RECOMPUTED] * 2) for name in ("AC-5x", "Int4")]
    assert min(each) < both < max(each)


@pytest.mark.parametrize(
    ("made", "names"),
    [(tailed(8), ("Int4", "AC-5x")), (tailed(4, short=100), ("Int4", "AC-5x")), (catalog(6), ("FP4",))],
)
def test_what_a_prefix_loses_in_front_of_what_is_computed_is_known_for_every_length(made, names):
    groups, behind = made.groups, {name: factors_if_rest_computed(made, name) for name in names}
    for count in range(groups + 1):
        played = [names[group % 3 == 1 and len(names) > 1] for group in range(count)]  # a mixture
        expected = predicted_loss(made, [*played, *[RECOMPUTED] * (groups - count)])
        found = sum(
            behind[name][0][count] * made.track(name).loss[group] + behind[name][1][count]
            for group, name in enumerate(played)
        )
        assert found == pytest.approx(expected, rel=0.02)  # a short last group moves what is left a little


def test_a_tail_keeps_the_errors_that_it_was_computed_on():
    made = tailed(4)
    first = [("fetch", group, "FP4") for group in range(3)]
    better = [("fetch", group, "FP16") for group in range(3)]
    late = played_loss(made, [*first, *better, ("compute", 3, 4)])
    early = played_loss(made, [*first, ("compute", 3, 4), *better])
    assert late == pytest.approx(predicted_loss(made, ["FP16"] * 3 + [RECOMPUTED]))
    assert late < early < predicted_loss(made, ["FP4"] * 3 + [RECOMPUTED])


def promised(made, mix):
    return promised_loss(made, mix, predicted_loss(made, mix))


@pytest.mark.parametrize("made", [catalog(8), tailed(8), catalog(5, layered=True), default_catalog()])
def test_what_is_promised_of_one_track_is_its_loss_and_of_an_exact_cache_nothing(made):
    for track in made.tracks:
        assert promised(made, [track.name] * made.groups) == pytest.approx(track.total_loss, rel=1e-9)
        mix = [track.name] * (made.groups - 2) + [RECOMPUTED] * 2
        assert not track.tails or promised(made, mix) == pytest.approx(predicted_loss(made, mix), rel=1e-9)
        # Of a prefix, too.
        assert promised_loss(made, [track.name] * 3, sum(track.loss[:3])) == pytest.approx(sum(track.loss[:3]))
    assert promised(made, [RECOMPUTED] * made.groups) == 0.0


@pytest.mark.parametrize("made", [catalog(8), tailed(8), catalog(5, layered=True), default_catalog()])
def test_a_finer_track_never_raises_what_is_promised(made):
    dice, finest_first = random.Random(1), sorted(made.tracks, key=lambda track: track.total_loss)
    for _ in range(40):
        mix = [dice.choice(finest_first).name for _ in range(made.groups)]
        before, group = promised(made, mix), dice.randrange(made.groups)
        assert before <= predicted_loss(made, mix)
        held = made.track(mix[group])
        for track in finest_first[: finest_first.index(held)]:
            if track.loss[group] <= held.loss[group]:
                finer = [*mix[:group], track.name, *mix[group + 1 :]]
                assert promised(made, finer) <= before + 1e-12


LONG_TAILS = (TailLoss(16, 0.5), TailLoss(128, 0.2, 0.7), TailLoss(512, 0.06))


def test_shares_are_those_listed_and_fall_between_them():
    assert share_after_tail(LONG_TAILS, 0) == 1.0
    assert share_after_tail((), 128) == 1.0
    for tail in LONG_TAILS:
        assert share_after_tail(LONG_TAILS, tail.tokens) == pytest.approx(tail.share)
    between = [share_after_tail(LONG_TAILS, tokens) for tokens in (0, 1, 8, 16, 20, 128, 300, 512)]
    assert between == sorted(between, reverse=True)
    assert share_after_tail(LONG_TAILS, 5000) == pytest.approx(0.06)


def test_groups_lose_by_their_distance_from_the_reader():
    losses = (0.02, 0.005, 0.005, 0.01, 0.02, 0.14)
    whole = sum(losses)
    assert losses_with_tail(losses, LONG_TAILS, 6, 0, 128) == losses
    behind = losses_with_tail(losses, LONG_TAILS, 5, 128, 128)
    assert sum(behind) == pytest.approx(0.2 * whole)
    # Some of it is spread evenly: which groups a question is about is not known.
    assert behind == pytest.approx([0.04 * (0.85 * loss / 0.06 + 0.15 / 5) for loss in losses[:5]])
    # A shorter prefix of the same cache ends as the whole does.
    shorter = losses_with_tail(losses, LONG_TAILS, 3, 0, 128)
    assert sum(shorter) == pytest.approx(whole)
    assert shorter == pytest.approx((0.02, 0.02, 0.16))
    # A question is a tail, too.
    asked = losses_with_tail(losses, LONG_TAILS, 6, 16, 128)
    assert sum(asked) == pytest.approx(0.5 * whole)
    assert sorted(range(6), key=asked.__getitem__) == sorted(range(6), key=losses.__getitem__)
    # Of older assets nothing is known but the groups' own losses.
    assert losses_with_tail(losses, (), 5, 128, 128) == losses[:5]


@pytest.mark.parametrize("asked", [(0.0,) * 6, (5e-324, 0, 0, 0, 0, 0), (1e6,) * 6, (0, 0, 0, 0, 0, 1.0)])
def test_whatever_a_catalog_says_of_questions_the_whole_loss_stays(asked):
    losses = (0.02, 0.005, 0.005, 0.01, 0.02, 0.14)
    for groups in (5, 6):
        behind = losses_with_tail(losses, LONG_TAILS, groups, 144, 128, asked)
        assert sum(behind) == pytest.approx(share_after_tail(LONG_TAILS, 144) * sum(losses))
        assert min(behind) > 0


def _tailed() -> Catalog:
    catalog = default_catalog()
    return replace(catalog, tracks=tuple(replace(track, tails=LONG_TAILS) for track in catalog.tracks))


def test_what_a_play_fetches_before_a_tail():
    catalog = _tailed()
    fetched = catalog.with_tail(catalog.groups - 1, 148)
    assert (fetched.groups, fetched.tail) == (catalog.groups - 1, 148)
    for track, whole in zip(fetched.tracks, catalog.tracks, strict=True):
        assert track.total_loss == pytest.approx(whole.total_loss * share_after_tail(LONG_TAILS, 148))
        assert track.bytes == whole.bytes[:-1]
    assert catalog.with_tail(catalog.groups, 0) is catalog


def test_a_part_of_a_catalog_keeps_its_part_of_what_questions_are_about():
    catalog = _tailed()
    asked = tuple(1.0 + group for group in range(catalog.groups))
    known = replace(catalog, asked=asked)
    assert Catalog.loads(known.dumps()) == known
    assert known.prefix(3).asked == asked[:3]
    assert known.suffix(2).asked == asked[2:]
    behind = known.with_tail(catalog.groups, 16)
    assert behind.asked == ()  # its losses are those behind a question already
    for track, without in zip(behind.tracks, catalog.with_tail(catalog.groups, 16).tracks, strict=True):
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


@pytest.mark.parametrize("first", [1, 2, 7, 15])
def test_the_planner_expects_the_inherited_loss_that_the_result_reports(first):
    offer, dice = catalog(16, layered=True), random.Random(first)
    tracks = [RECOMPUTED, *(dice.choice([*offer.by_name, RECOMPUTED]) for _ in range(first - 1))]
    tracks = [RECOMPUTED] * tracks.count(RECOMPUTED) + [
        name for name in tracks if name != RECOMPUTED
    ]  # exact ones first
    fetched = sum(offer.track(name).loss[group] for group, name in enumerate(tracks) if name != RECOMPUTED)
    later = sum(
        float(inherited_later(np.array([offer.track(name).loss]), np.array([[one == name for one in tracks]])).sum())
        for name in set(tracks) - {RECOMPUTED}
    )
    assert predicted_loss(offer, [*tracks, *[RECOMPUTED] * (16 - first)]) == pytest.approx(fetched + later)
    assert later > 0.0 or fetched == 0.0
