"""Caches with NaN, infinity, and numbers that not every track holds, by way of every publisher."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from kvabr.player.assembler import Assembler
from kvabr.publish.live_publisher import LivePublisher
from kvabr.store.locations import open_asset
from tests import kvdata
from tests.client.classes import HYBRID, numbers
from tests.store.publishing import outcome_of, publisher
from tests.toymodel import SPEC

TOKENS = list(range(48))
BFLOAT = SPEC.changed(dtype="bfloat16")
BAD = [float("nan"), float("inf"), -float("inf")]


def cache(value, dtype=torch.bfloat16, token=37):
    kv = kvdata.related(SPEC, 48).to(dtype)
    kv[1, 1, 0, token, 5] = value
    return kv


def played(asset, track, dtype=torch.bfloat16):
    assembler = Assembler(asset.catalog, dtype=dtype)
    for group in range(asset.catalog.groups):
        assembler.put(group, track, asset.frame(group, track))
    return assembler.take()


@pytest.mark.parametrize("value", BAD)
def test_a_cache_that_is_not_finite_is_refused_counted_and_logged_once(tmp_path, caplog, value):
    made = publisher(tmp_path, BFLOAT, tracks=("Raw", "Int8"))
    with caplog.at_level(logging.WARNING):
        outcome = outcome_of(made, made.reserve(TOKENS), cache(value))
    assert (outcome.verdict, outcome.tokens, outcome.not_finite) == ("failed", 0, True)
    assert "values of layer 1" in outcome.why
    assert "between tokens 37 and 37" in outcome.why
    assert made.not_finite == 1
    assert [line for line in caplog.messages if "NaN" in line] == [f"kvabr: {outcome.why}"]
    assert not (tmp_path / "a").exists()


def test_a_refused_prompt_may_be_published_later(tmp_path):
    made, outcomes = publisher(tmp_path, BFLOAT, tracks=("Raw",)), []
    made.reserve(TOKENS).fill(cache(math.nan), outcomes.append)
    while not outcomes:
        made.prepare()
    made._thread.submit(int).result()
    made.reserve(TOKENS).fill(cache(1.0), outcomes.append)
    made.close()
    assert [each.verdict for each in outcomes] == ["failed", "published"]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("value", BAD[:2])
def test_every_layer_class_is_looked_at(tmp_path, part, value):
    tokens = list(range(64))
    kv = [tensor.clone() for tensor in numbers(HYBRID, tokens)]
    kv[part].view(-1)[-1] = value
    made = publisher(tmp_path, HYBRID, tracks=("Int8",))
    outcome = outcome_of(made, made.reserve(tokens), tuple(kv))
    assert (outcome.verdict, outcome.not_finite) == ("failed", True)
    assert f"of layer {HYBRID.classes[part].layers[-1]} " in outcome.why


@pytest.mark.parametrize("value", BAD)
def test_a_cache_that_grows_ends_before_the_group_that_is_not_finite(tmp_path, value):
    live, outcomes = LivePublisher(publisher(tmp_path, BFLOAT, tracks=("Raw",))), []
    slot = live.begin(TOKENS, pace=[1.0, 2.0, 3.0], done=outcomes.append)
    kv = cache(value)
    for first in range(0, 48, 16):
        slot.groups(first, kv[:, :, :, first : first + 16])
    slot.end()
    live.close()
    assert (outcomes[0].verdict, outcomes[0].tokens, outcomes[0].not_finite) == ("failed", 32, True)
    assert live.publisher.not_finite == 1
    assert torch.equal(played(open_asset(tmp_path), "Raw"), kv[:, :, :, :32])


@pytest.mark.parametrize("value", [1e5, -3.3e38, -0.0, 1e-40])
def test_raw_and_bf16_keep_bfloat16_to_the_bit(tmp_path, value):
    kv = cache(value)
    made = publisher(tmp_path, BFLOAT, tracks=("Raw", "BF16", "FP16", "Int8", "Int4"))
    slot = made.reserve(TOKENS)
    outcome = outcome_of(made, slot, kv)
    assert (outcome.verdict, outcome.not_finite) == ("published", False)
    asset = open_asset(tmp_path / slot.chunks[-1])
    exact = ["Raw", "BF16"]
    assert [track.name for track in asset.catalog.tracks] == exact + ["FP16", "Int8", "Int4"] * (abs(value) < 65504)
    for track in exact:
        assert torch.equal(played(asset, track).view(torch.int16), kv.view(torch.int16))
    asset.check_frames()


def test_a_cache_that_no_track_holds_is_refused_with_a_reason(tmp_path):
    made = publisher(tmp_path, BFLOAT, tracks=("FP16", "Int8"))
    outcome = outcome_of(made, made.reserve(TOKENS), cache(1e5))
    assert (outcome.verdict, outcome.not_finite) == ("failed", False)
    assert "FP16 ends at 65504" in outcome.why
    assert not (tmp_path / "a").exists()


def test_a_cache_that_grows_ends_before_a_group_that_an_announced_track_cannot_hold(tmp_path):
    live, outcomes = LivePublisher(publisher(tmp_path, BFLOAT, tracks=("Raw", "Int8"))), []
    slot = live.begin(TOKENS, pace=[1.0, 2.0, 3.0], done=outcomes.append)
    slot.groups(0, cache(1e5))
    slot.end()
    live.close()
    assert (outcomes[0].verdict, outcomes[0].tokens, outcomes[0].not_finite) == ("failed", 32, False)


def test_states_in_float32_keep_their_range_on_raw(tmp_path):
    tokens = list(range(64))
    kv = [tensor.clone() for tensor in numbers(HYBRID, tokens)]
    wide = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], dtype="float32")))
    kv[2] = kv[2].float()
    kv[2].view(-1)[3] = 1e30
    made = publisher(tmp_path, wide, tracks=("Raw", "Int8"))
    slot = made.reserve(tokens)
    assert outcome_of(made, slot, tuple(kv)).verdict == "published"
    assert [track.name for track in open_asset(tmp_path / slot.chunks[-1]).catalog.tracks] == ["Raw"]
