"""Small catalogs of random sizes."""

import random

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
