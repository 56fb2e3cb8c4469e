"""What the origin, the link and the engine do, and what comes of a play: never a hole, never a hang, always a reason.

Whatever the row of the table, a cache that is handed over has no hole and is that of its prompt, nothing is left under
way on the connection, and the play ends within its patience.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvabr.client.result import IncompleteError, NothingCached
from kvabr.server.publication import BytesPublication
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, ModelError, PlayError, UsageError
from kvabr.types.naming import CATALOG_TRACK, PREFIX_TRACK
from tests import kvdata
from tests.client.playing import play, play_asset
from tests.client.test_play import COST, TOKENS, close
from tests.client.virtual import virtual
from tests.memory_transport import Fault
from tests.toymodel import SPEC, ToyModel, prompt


def level(ask):
    return ask.track in {"FP16", "Int8", "Int4"}


@virtual
async def test_a_publisher_that_is_busy_is_asked_again_for_the_same_track(origin, short):
    """However often: it has the group, and other requests of the play may be what it is busy with."""
    asked = []

    def faults(ask):
        if not level(ask) or ask.group != 2:
            return None
        asked.append(ask)
        return Fault(refuse=0x9, retry_after_s=0.02) if len(asked) <= 8 else None

    end = await ended(origin, short, {"rate": 1e6, "faults": faults}, policy="fixed:Int4")
    check(end, tracks=["Int4"])
    assert sum("0x9" in reason for reason in end.reasons) == 8


@pytest.mark.parametrize("code", [0x6, 0x9], ids=["going away", "excessive load"])
@virtual
async def test_a_publisher_that_refuses_everything_for_now_is_asked_at_intervals(origin, short, code):
    asked = []

    def faults(ask):
        asked.append(ask)
        return Fault(refuse=code) if level(ask) else None

    end = await ended(origin, short, {"rate": 1e6, "faults": faults}, policy="fixed:Int4")
    assert isinstance(end.result, PlayError)
    assert 10 * short.groups < len(asked) < 40 * short.groups


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
        (huge, "more than a cache can need"),
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
        with pytest.raises(PlayError, match="not received within the deadline"):
            await play_asset(link, short.namespace, deadline=2.0)
        assert link.downloads == 0


LATE_S = 0.1
"""Most seconds that a play may take beyond its deadline and its patience."""


ALL = (0, 1, 2, 3, 4)


class Broken(ToyModel):
    def prefill(self, tokens, before=None):
        raise ModelError("out of memory, says the test")


class Wrong(ToyModel):
    def prefill(self, tokens, before=None):
        return super().prefill(tokens, before)[:1]


class Fewer(ToyModel):
    def prefill(self, tokens, before=None):
        return super().prefill(tokens, before)[:, :, :, :-1]


class Rude(ToyModel):
    def prefill(self, tokens, before=None):
        raise SystemExit(3)


@dataclass
class End:
    result: Any
    took_s: float
    lines: list

    @property
    def reasons(self):
        return [line.reason for line in self.lines if line.name == "failed"]

    @property
    def recomputed(self):
        return {group for group, track in enumerate(self.result.coverage) if track == "recomputed"}


async def ended(origin, short, link, *, deadline=2.0, tokens=TOKENS, engine=None, error=0.02, patience=1.0, **how):
    """Play; ``rate`` may be a track and the seconds that it shall take."""
    lines, loop = [], asyncio.get_running_loop()
    if isinstance(rate := link.get("rate"), tuple):
        link = link | {"rate": short.track(rate[0]).total_bytes / rate[1]}
    how |= {"spec": SPEC} if engine is None else {"engine": engine(), "prefill_cost": how.get("prefill_cost", COST)}
    async with origin(**link) as connection:
        begun_s = loop.time()
        try:
            result = await play(connection, tokens, deadline=deadline, log=lines.append, patience=patience, **how)
        except (PlayError, ModelError, UsageError) as failed:
            result = failed
        assert connection.downloads == 0
    end = End(result, loop.time() - begun_s, lines)
    assert end.took_s <= deadline * patience + LATE_S
    kept = getattr(result, "prefix", result)
    if getattr(kept, "kv", None) is not None:
        assert None not in kept.coverage
        assert close(kept.kv, tokens[: kept.tokens], error)
    return end


def at_groups(fault, groups=ALL):
    return lambda ask: fault if level(ask) and ask.group in groups else None


def check(end, *, met=True, tokens=70, has=(), tracks=None, recomputed=None, ttft=(0.0, 9.9), lookup=None, loss=None):
    result = end.result
    assert not isinstance(result, Exception), result
    assert (result.met, result.tokens) == (met, tokens)
    assert (end.lines[-1].met, result.record.met) == (met, met)
    assert set(has) <= set(result.coverage)
    assert tracks is None or set(result.coverage) <= set(tracks)
    assert recomputed is None or recomputed <= end.recomputed
    assert ttft[0] <= result.ttft_s <= ttft[1]
    assert lookup is None or result.lookup_s == pytest.approx(lookup, abs=0.02)
    assert loss is None or loss[0] <= result.loss <= loss[1]


def fails(kind, *words, missing=None, prefix=None, at_least_s=0.0):
    def expects(end):
        assert isinstance(end.result, kind), end.result
        assert isinstance(end.result, PlayError) == issubclass(kind, PlayError)
        assert all(word in str(end.result) for word in words), end.result
        assert missing is None or end.result.missing == missing
        assert missing is None or getattr(end.result.prefix, "tokens", None) == prefix
        assert end.took_s >= at_least_s

    return expects


def nothing(end):
    assert isinstance(end.result, NothingCached)
    assert (end.result.spec, end.result.lookup_s) == (SPEC, pytest.approx(0.02, abs=0.005))


def brings(**what):
    return lambda end: check(end, **what)


def failed_over(end):
    assert not end.recomputed
    assert any(line.name == "recompute_failed" for line in end.lines)


NEVER = at_groups(Fault(stall_after=0))
BEYOND = (*TOKENS[:64], *range(90))
"""A prompt that goes on behind what is cached."""


COMPUTES = {"engine": ToyModel}
PLAYS = {
    "a fast link brings the best track": (
        {}, {}, brings(ttft=(0.0, 0.5), loss=(0.0, 2e-4), lookup=0.02),
    ),
    "a slow link brings what it can in time": (
        {"rate": ("Int4", 1.2)}, {}, brings(has=["Int4"], ttft=(1.2, 2.0), loss=(1e-9, 9.9)),
    ),
    "a longer asset serves a prompt that begins alike": (
        {"folder": "."}, {"tokens": (*prompt(160).tokens[:48], *range(40))}, brings(tokens=48),
    ),
    "nothing cached and no engine is no error": ({}, {"tokens": range(50)}, nothing),
    "nothing cached and an engine recomputes everything": (
        {}, {**COMPUTES, "tokens": range(50), "error": 1e-5}, brings(tokens=50, tracks=["recomputed"]),
    ),
    "a dead link and an engine make the deadline together": (
        {"rate": ("Int4", 6)}, {**COMPUTES, "prefill_cost": PrefillCost(0.001, 1.0 / 70)}, brings(has=["recomputed"]),
    ),
    "a lookup counts against the deadline": (
        {"rtt_s": 0.4}, {"deadline": 1.5, "time_price": 0.0}, brings(lookup=0.4, ttft=(1.2, 1.5)),
    ),
    "time for what no cache covers is set aside": (
        {"rate": 1e5},
        {**COMPUTES, "tokens": BEYOND, "prefill_cost": PrefillCost(0.0, 0.5 / 90), "deadline": 1.0, "tail": 0},
        brings(tokens=64, ttft=(0.0, 0.5)),
    ),
    "no more than half of the deadline is, and the play is late": (
        {"rate": 1e5},
        {**COMPUTES, "tokens": BEYOND, "prefill_cost": PrefillCost(0.0, 0.9 / 90), "deadline": 1.0},
        brings(tokens=64, ttft=(0.0, 0.5), met=False),
    ),
    "patience brings a late cache": (
        {"rate": ("FP16", 3.0)}, {"policy": "fixed:FP16", "patience": 2.0, "error": 1e-5},
        brings(met=False, ttft=(2.5, 4.0)),
    ),
    # ------------------------------------------------------------------ what the publisher does
    "a track that is always bad is left for another": (
        {"rate": 2e4, "faults": lambda ask: Fault(truncate_to=9) if ask.track == "Int4" else None}, {},
        brings(tracks=("Int8", "FP16")),
    ),
    "a publisher that is always busy ends the play at the deadline": (
        {"rate": 2e4, "faults": at_groups(Fault(refuse=0x9, retry_after_s=0.1))}, {},
        fails(IncompleteError, "0x9", missing=ALL),
    ),
    **{
        f"silence ends a play by its deadline of {deadline} s": (
            {"faults": NEVER}, {"deadline": deadline},
            fails(IncompleteError, "5 of 5 groups are still not in place", missing=ALL, at_least_s=0.95 * deadline),
        )
        for deadline in (0.3, 2.0, 61.7)
    },
    "a group in the middle that does not come cuts what can be used": (
        {"faults": at_groups(Fault(stall_after=10), [2])}, {"policy": "fixed:FP16", "error": 1e-5},
        fails(IncompleteError, missing=(2,), prefix=32),
    ),
    **{
        f"an engine fills what stays silent of {sorted(silent)} in time": (
            {"rate": 2e4, "faults": at_groups(Fault(stall_after=sent), silent)},
            {**COMPUTES, "prefill_cost": PrefillCost(0.001, 0.01)}, brings(recomputed=silent),
        )
        for silent, sent in (({1}, 0), ({1, 3}, 0), ({0, 2, 4}, 0), ({2, 3, 4}, 100))
    },
    # ------------------------------------------------------------------ what the engine does
    **{
        f"an engine that is {engine.__name__.lower()} is named where the network cannot help": (
            {"faults": NEVER}, {"engine": engine}, fails(kind, word),
        )
        for engine, kind, word in (
            (Broken, ModelError, "out of memory"), (Wrong, UsageError, "shapes"), (Fewer, UsageError, "shapes"),
            (Rude, ModelError, "SystemExit"),
        )
    },
    **{
        f"an engine that is {engine.__name__.lower()} is named when nothing is cached": (
            {}, {"engine": engine, "tokens": range(50)}, fails(ModelError, words),
        )
        for engine, words in ((Broken, "out of memory"), (Rude, "SystemExit"))
    },
    "where the engine fails the network brings what it still can": (
        {"rate": ("Int4", 1.5), "faults": at_groups(Fault(first_byte_s=0.8))},
        {"engine": Broken, "prefill_cost": PrefillCost(0.001, 1.0 / 70), "patience": 3.0}, failed_over,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYS)
@virtual
async def test_a_play(origin, short, name):
    link, how, expects = PLAYS[name]
    expects(await ended(origin, short, link, **how))
