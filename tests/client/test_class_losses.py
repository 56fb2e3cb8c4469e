"""Random models whose groups are lost at random: what is handed over is exact, complete, and what was needed."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, NothingCached
from kvabr.publish.frames import FrameEncoder
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import chain
from kvabr.types.units import snapshot_ends
from tests.client.classes import Computer, link, numbers
from tests.client.virtual import virtual
from tests.examples import examples
from tests.memory_transport import Fault

SLOW, QUICK = PrefillCost.from_rate(1.0), PrefillCost.from_rate(1000.0)


@st.composite
def specs(draw):
    size, classes = draw(st.integers(2, 8)), []
    for layer in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["full", "window", "window", "chunked", "latent", "state"]))
        window = draw(st.integers(1, 24)) if kind in ("window", "chunked") else None
        interval = draw(st.sampled_from([None, size, 2 * size])) if kind == "state" else None
        values = 0 if kind == "latent" else draw(st.integers(1, 3))
        classes.append(LayerClass(kind, (layer,), 1, 2, values, "float16", window=window, interval=interval))
    return KVSpec("test/random", "tokenizer", tuple(classes), size)


def exact(spec: KVSpec, part: int, first: int, end: int) -> torch.Tensor:
    """What the model makes of the tokens from ``first`` on; of a state what it is behind ``end`` tokens."""
    whole = numbers(spec, list(range(end)))[part]
    return whole if spec.classes[part].kind == "state" else whole[:, :, :, first:]


def publish(root: Path, spec: KVSpec, tokens: int) -> PublishedAssets:
    ids = list(range(tokens))
    chunks = chain(ids, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    parts = [
        torch.cat([exact(spec, part, 0, end) for end in snapshot_ends(one, tokens) or [tokens]], dim=3)
        for part, one in enumerate(spec.parts)
    ]
    with open_store(root).writer() as writer:
        frames = FrameEncoder(spec, chunks, tokens, ["FP16"], None, writer)
        frames.encode(tuple(parts))
        losses = {"FP16": [0.001] * len(frames.units)}
        writer.commit(frames.catalog(losses, {"FP16": 0.0}, loss_method="made up", source="test"))
    return PublishedAssets(root)


def reach(spec: KVSpec, tokens: int, shared: int) -> int:
    """How many of the first ``shared`` tokens of an asset can be played: there is a snapshot of every state."""
    size, states = spec.group_tokens, [part for part in spec.parts if part.only.kind == "state"]
    ends = [end for end in (*range(size, tokens, size), tokens) if end <= shared]
    return max((end for end in ends if all(end in snapshot_ends(part, tokens) for part in states)), default=0)


def wanted(spec: KVSpec, end: int) -> set[tuple[str, int]]:
    """The groups that a prompt needs which goes on behind ``end`` tokens: one token more than it sees."""
    found = set()
    for part, only in zip(spec.parts, spec.classes, strict=True):
        name = part.track_name("FP16")
        first = {"window": end - (only.window or 0), "chunked": (end - 1) // (only.window or 1) * (only.window or 1)}
        if only.kind != "state":
            seen = range(max(0, first.get(only.kind, 0)), end)
            found |= {(name, token // spec.group_tokens) for token in seen}
        else:
            found.add((name, -(-end // only.interval) - 1 if only.interval else 0))
    return found


def check(spec, parts, spans, end):
    """Every class has, to the bit, all that a prompt needs which goes on behind ``end`` tokens."""
    for part, (kv, span, only) in enumerate(zip(parts, spans, spec.classes, strict=True)):
        if only.kind == "state":
            assert span == (end, only.k_dim)
        else:
            assert (
                span.first <= max(0, end - only.window)
                if only.kind == "window"
                else span.first <= only.first_needed(end)
            )
            assert span.first + span.tokens == end
        assert torch.equal(kv.float(), exact(spec, part, span.first, end))


@pytest.mark.slow
@examples(24)
@given(specs(), st.integers(1, 60), st.data())
def test_whatever_is_lost_what_is_handed_over_is_exact_and_complete(spec, tokens, data):
    ends = data.draw(st.integers(1, tokens))
    prompt = [*range(ends), *[10_000] * data.draw(st.integers(0, 5))]
    whole = ends == tokens
    shared = tokens if whole else ends // spec.group_tokens * spec.group_tokens
    end = reach(spec, tokens, shared)
    needs = wanted(spec, end) if end else set()
    lost = set(data.draw(st.lists(st.sampled_from(sorted(needs)), max_size=3))) if needs else set()
    fault = data.draw(st.sampled_from([Fault(refuse=0x10), Fault(corrupt_at=20)]))
    block = data.draw(st.integers(1, 9))
    asked: set[tuple[str, int]] = set()

    def faults(ask):
        if ask.track.startswith("FP16"):
            asked.add((ask.track, ask.group))
        return fault if (ask.track, ask.group) in lost else None

    @virtual
    async def plays(folder):
        library = publish(folder, spec, tokens)
        options = PlayOptions(policy="fixed:FP16", prefill_cost=SLOW, tail=0)
        async with link(library, faults=faults) as peer, AsyncClient(peer, model=spec, options=options) as client:
            try:
                played = await client.play(prompt, deadline=2.0)
            except IncompleteError as error:
                assert lost
                played = error.prefix
            else:
                assert not lost
                assert isinstance(played, NothingCached) == (not end)
                assert asked == needs
            if played and end:
                check(spec, played.parts, played.spans, played.tokens)
                assert played.tokens == end or lost
            found = await client.find(prompt, within_s=60)
            assert (0 if found is None else found.catalog.tokens) == end
            if found is not None:
                prefix = await client.play_prefix(found, deadline=2.0, cost=SLOW, block=block)
                assert prefix.tokens % block == 0
                if prefix.tokens:
                    check(spec, prefix.parts, prefix.spans, prefix.tokens)
                elif not lost:
                    assert block > 1
        engine, quick = Computer(spec), PlayOptions(policy="fixed:FP16", prefill_cost=QUICK, tail=0)
        async with link(library, faults=faults) as peer, AsyncClient(peer, engine=engine, options=quick) as client:
            # The engine of these tests knows no tokens but those that count up.
            played = await client.play(prompt[:ends], deadline=2.0)
            check(spec, played.parts, played.spans, played.tokens)
            assert played.tokens in (end, ends)
            assert bool(engine.calls) == bool(lost or not end)

    with tempfile.TemporaryDirectory() as folder:
        plays(Path(folder))
