"""Everything that can go wrong between a play and its origin: never a hole, never a hang, always a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvabr.client.result import NothingCached
from kvabr.server.publication import BytesPublication
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, PlayError
from kvabr.types.naming import CATALOG_TRACK, PREFIX_TRACK
from tests import kvdata
from tests.client.playing import play, play_asset
from tests.client.test_play import close
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt

TOKENS = prompt(70).tokens
COST = PrefillCost(0.001, 0.002)


def level(ask):
    return ask.track in {"FP16", "Int8", "Int4"}


def on_first(fault, group=2):
    """The fault, for the first request of one group."""
    asked = []

    def faults(ask):
        if level(ask) and ask.group == group:
            asked.append(ask)
            return fault if len(asked) == 1 else None
        return None

    return faults


async def played_with(origin, faults, *, rate=2e4, **options):
    lines = []
    async with origin(rate=rate, faults=faults) as link:
        result = await play(link, TOKENS, **({"deadline": 2.0, "spec": SPEC, "log": lines.append} | options))
        assert link.downloads == 0
    return result, lines


@virtual
async def test_a_frame_of_another_model_or_prompt_is_foreign(origin, libraries, long):
    other = libraries["long"].assets[0].frame(3, "Int4")

    played, lines = await played_with(origin, on_first(Fault(replace=other)))
    reasons = [line.reason for line in lines if line.name == "failed"]
    assert len(reasons) == 1
    assert "it belongs to something else" in reasons[0]
    assert close(played.kv)


@virtual
async def test_a_publisher_that_is_busy_is_asked_again_for_the_same_track(origin):
    """However often: it has the group, and other requests of the play may be what it is busy with."""
    asked = []

    def faults(ask):
        if not level(ask) or ask.group != 2:
            return None
        asked.append(ask)
        return Fault(refuse=0x9, retry_after_s=0.02) if len(asked) <= 8 else None

    played, lines = await played_with(origin, faults, rate=1e6, policy="fixed:Int4")
    assert played.met
    assert set(played.coverage) == {"Int4"}
    assert sum(line.name == "failed" and "0x9" in line.reason for line in lines) == 8


def answering(short, change):
    """Find as the library does, but with another catalog."""

    def find(library_find):
        def changed(namespace, track):
            if track == CATALOG_TRACK or track.startswith(PREFIX_TRACK):
                return BytesPublication(change(short))
            return library_find(namespace, track)

        return changed

    return find


def other_spec(catalog):
    return replace(catalog, spec=kvdata.spec(layers=3, group_tokens=16)).dumps().encode()


def other_model(catalog):
    return replace(catalog, spec=replace(catalog.spec, model="other")).dumps().encode()


def huge(catalog):
    track = replace(catalog.tracks[0], bytes=(1 << 39,) * catalog.groups)
    return replace(catalog, tracks=(track,)).dumps().encode()


def unknown_codec(catalog):
    return replace(catalog, tracks=(replace(catalog.tracks[0], name="FP1"),)).dumps().encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"{}", "is this a catalog"),
        (lambda _: b"\xff" * 100, "not JSON"),
        (other_spec, "cannot be mixed"),
        (other_model, "cannot be mixed"),
        (huge, "no cache needs"),
        (unknown_codec, "can be decoded here"),
    ],
)
@virtual
async def test_a_catalog_that_cannot_be_is_refused(origin, short, change, message):
    async with origin() as link:
        link.find = answering(short, change)(link.find)
        with pytest.raises(PlayError, match=message):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=COST)
        assert set(played.coverage) == {"recomputed"}
        if "mixed" not in message:
            with pytest.raises(FormatError, match=message):
                await play_asset(link, short.namespace, deadline=2.0)


@virtual
async def test_a_catalog_of_another_prompt_counts_as_nothing_cached(origin, short):
    def foreign(catalog):
        chunks = tuple(f"{index:064x}" for index in range(catalog.groups))
        return replace(catalog, chunks=chunks).dumps().encode()

    async with origin() as link:
        link.find = answering(short, foreign)(link.find)
        played = await play(link, TOKENS, deadline=2.0, spec=SPEC)
        assert isinstance(played, NothingCached)
        with pytest.raises(FormatError, match="is of another prompt"):
            await play_asset(link, short.namespace, deadline=2.0)


@virtual
async def test_a_catalog_that_does_not_come_leaves_the_engine_its_time(origin, short):
    cost = PrefillCost(0.0, 1.0 / 70)
    async with origin(faults=lambda _: Fault(stall_after=10)) as link:
        played = await play(link, TOKENS, deadline=2.0, engine=ToyModel(), prefill_cost=cost)
        assert played.lookup_s == pytest.approx(2.0 - 0.04 - 1.0, abs=0.02)
        assert set(played.coverage) == {"recomputed"}
        with pytest.raises(PlayError, match="no answer within 2"):
            await play(link, TOKENS, deadline=2.0, spec=SPEC)
        with pytest.raises(PlayError, match="did not come within the deadline"):
            await play_asset(link, short.namespace, deadline=2.0)
        assert link.downloads == 0
