"""Plays whose groups are decoded in batches, as on a GPU: what has arrived together, and as right as one by one."""

from __future__ import annotations

import threading

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.driver import Driver
from kvabr.client.options import PlayOptions
from kvabr.player.assembler import Assembler, Layer, Placement
from kvabr.store.locations import open_asset
from kvabr.types.errors import FormatError
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens


def close(kv, error):
    exact = ToyModel().prefill(TOKENS)
    return float((kv.float() - exact).square().mean() / exact.square().mean()) < error


@pytest.fixture
def batches(monkeypatch):
    """Have every play decode in batches; return how many groups each had."""
    sizes, put_many, decode, came = [], Assembler.put_many, Driver._decode, threading.Event()

    def counted(self, asked):
        sizes.append(len(asked))
        if len(sizes) == 1:
            assert came.wait(30)
        return put_many(self, asked)

    def coming(self, action):
        decode(self, action)
        if not self._reads:
            came.set()

    monkeypatch.setattr(Driver, "_decode", coming)
    monkeypatch.setattr(Assembler, "together", True)
    monkeypatch.setattr(Assembler, "put_many", counted)
    return sizes


async def test_what_has_arrived_is_decoded_together(origin, batches):
    async with (
        origin(rate=1e9) as link,
        AsyncClient(link, model=SPEC, options=PlayOptions(policy="fixed:FP16")) as client,
    ):
        played = await client.play(TOKENS, deadline=120.0)
    assert close(played.kv, 1e-5)
    assert (len(batches), sum(batches)) == (2, 5)


async def test_a_bad_frame_in_a_batch_is_fetched_again_alone(origin, batches):
    asked = []

    def faults(ask):
        asked.extend([ask] if (ask.track, ask.group) == ("FP16", 2) else [])
        return Fault(corrupt_at=2000) if len(asked) == 1 and asked[0] is ask else None

    async with (
        origin(rate=1e9, faults=faults) as link,
        AsyncClient(link, model=SPEC, options=PlayOptions(policy="fixed:FP16")) as client,
    ):
        played = await client.play(TOKENS, deadline=120.0)
    assert close(played.kv, 1e-5)
    assert [damage[0] for damage in played.record.damaged] == [2]


def test_of_a_batch_each_group_has_its_own_verdict(root):
    asset = open_asset(root / "short")
    play, frames = Assembler(asset.catalog), [bytes(asset.frame(group, "FP16")) for group in range(5)]
    bad = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
    asked = [(group, [Layer("FP16", bad if group == 1 else frame)]) for group, frame in enumerate(frames)]
    first, wrong, *rest = play.put_many(asked)
    assert isinstance(wrong, FormatError)
    assert [first, *rest] == [Placement.PLACED] * 4
    assert play.coverage == ("FP16", None, "FP16", "FP16", "FP16")
    assert play.put_many(asked[:1]) == [Placement.STALE]
    assert play.put(1, "FP16", frames[1]) is Placement.PLACED
    assert close(play.take(), 1e-5)
