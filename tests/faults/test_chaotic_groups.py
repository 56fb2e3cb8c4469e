"""Short plays on loopback while groups come corrupt, late or not at all: the default policy knows what to do."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.peer import Peer
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import ModelError
from tests.faults.common import QUIET, TOKENS, engine, level, right
from tests.faults.lies import LIES
from tests.faults.rude import Answer

pytestmark = pytest.mark.process

PLAYS = int(os.environ.get("KVABR_CHAOTIC_PLAYS", "10"))
"""Of each seed."""
LATE_S = (0.01, 0.05, 0.2)


class ChaoticPeer(Peer):
    """Lies about groups, or answers them late, as its server's dice say."""

    def _fetch(self, number, message, grant, found):
        dice, answer = self._server.dice, super()._fetch
        if not level(message.track.decode()) or dice.random() >= self._server.share:
            answer(number, message, grant, found)
        elif dice.random() < 0.5:
            LIES[dice.choice(sorted(LIES))](Answer(self, number, found, message.start.group))
        else:
            late_s = dice.choice(LATE_S)
            asyncio.get_running_loop().call_later(late_s, self._late, answer, number, message, grant, found)

    def _late(self, answer, number, *request):
        if self in self._server.peers and number in self.session.responder:
            answer(number, *request)
            self.settle_and_send()


class ChaoticServer(Server):
    """An origin whose groups come to harm."""

    dice = random.Random(0)
    share = 0.0

    def make_peer(self):
        return ChaoticPeer(self)


@pytest.mark.parametrize("seed", range(3))
async def test_every_cache_is_right_and_the_policy_does_not_raise(root, tls, fingerprint, seed):
    dice, ends = random.Random(seed), []
    server = ChaoticServer(PublishedAssets(root), "127.0.0.1", 0, tls, ServerLimits(), QUIET, Metrics())
    server.dice, server.share = random.Random(f"origin {seed}"), dice.choice((0.2, 0.5, 0.9))
    async with server:
        url = f"moqt://127.0.0.1:{server.address[1]}/"
        for _ in range(PLAYS):
            cost = PrefillCost(dice.choice((1e-4, 0.01)), dice.choice((1e-5, 1e-3)))
            options = PlayOptions(prefill_cost=cost, gpu_price=dice.choice((0.0, 0.01, float("inf"))))
            deadline = dice.choice((0.15, 0.4, 1.0))
            async with AsyncClient(url, fingerprint=fingerprint, engine=engine(), options=options) as client:
                try:
                    played = await client.play(TOKENS, deadline=deadline)
                except (IncompleteError, ModelError):
                    continue  # the engine had promised to be faster than this machine is; the policy did not raise
            assert right(played)
            ends.append(played.coverage)
    assert {"recomputed"} < {track for coverage in ends for track in coverage}  # both came to something
