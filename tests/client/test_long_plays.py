"""Plays of prompts of many small groups: what they do when they begin and when they end, whatever the machine."""

from __future__ import annotations

import random

import pytest
import torch

from kvabr.client.result import IncompleteError
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.kv import KVSpec, RopeSpec
from tests.client.playing import play
from tests.client.test_faults import level
from tests.client.virtual import virtual

SPEC = KVSpec.uniform("test/long", "test", 1, 1, 8, "float16", RopeSpec(10000.0, 8), group_tokens=16)
GROUPS = 400
TOKENS = [random.Random(1).randrange(1000) for _ in range(16 * GROUPS)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    publisher = Publisher(folder, SPEC, prior=default_catalog(), tracks=("FP16", "Int8", "Int4"))
    kv = torch.randn(SPEC.shape(len(TOKENS)), generator=torch.Generator().manual_seed(1)).half()
    publisher.reserve(TOKENS).fill((kv,), lambda _: None)
    publisher.close()
    return PublishedAssets(folder)


@virtual
async def test_a_play_that_ends_requests_nothing_more(library_origin):
    """At the deadline the requests under way are cancelled; those that were to follow must not begin then."""
    asked_s = []

    def faults(ask):
        if level(ask):
            asked_s.append(link.loop.time() - began_s)

    async with library_origin(rate=4e5, rtt_s=0.3, faults=faults) as link:
        began_s = link.loop.time()
        with pytest.raises(IncompleteError):
            await play(link, TOKENS, deadline=0.9, spec=SPEC)
        assert 0.6 < max(asked_s) < 0.8
        assert link.downloads == 0
