"""Small catalogs and links whose best caches can be found by trying everything."""

import random

from kvabr.replay.link import Capacity
from kvabr.replay.trace import Trace
from kvabr.types.catalog import Catalog, Track
from kvabr.types.naming import TrackNamespace, chain
from tests.catalogs import SPEC


def offer(groups=3, seed=0, *, layered=True, decode=1.0, short=0):
    """Random sizes and losses: two tracks that stand alone, and one layer upon the cheaper one."""
    dice = random.Random(seed)
    tokens = groups * SPEC.group_tokens - short
    exact = [SPEC.fp16_bytes(SPEC.group_tokens)] * groups

    def track(name, share, loss, refines=None):
        sizes = tuple(int(size * share * dice.uniform(0.7, 1.4)) + 50 for size in exact)
        losses = tuple(loss * dice.uniform(0.3, 2.0) / groups for _ in exact)
        return Track(
            name, sizes, losses, ("0" * 64,) * groups, refines=refines, decode_s=decode * dice.uniform(0.001, 0.01)
        )

    tracks = [track("wide", 0.5, 0.001), track("base", 0.1, 0.2)]
    if layered:
        tracks.append(track("layer", 0.15, 0.03, "base"))
    chunks = chain(list(range(tokens)), model=SPEC.model, tokenizer=SPEC.tokenizer)
    return Catalog(TrackNamespace(SPEC.model, chunks[-1]), SPEC, tokens, tuple(chunks), tuple(tracks))


def link(offer, share, seed=0, deadline_s=1.0):
    """A link of random steps whose mean carries ``share`` of FP16 by the deadline."""
    dice = random.Random(f"link {seed}")
    rates = [dice.choice((0.0, 0.3, 1.0, 2.5)) + 0.01 for _ in range(20)]
    mean = sum(rates) / len(rates)
    scale = share * offer.fp16_bytes / deadline_s / mean
    times = tuple(deadline_s * index / len(rates) for index in range(len(rates)))
    return Capacity(Trace("steps", "test", times, tuple(rate * scale for rate in rates), deadline_s))
