"""Caches with groups from several tracks: what a player really hands over. Are their losses what a catalog predicts?"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from kvabr.codec.group import clean
from kvabr.publish.quality import Decoder
from kvabr.publish.score import Reference
from kvabr.types.catalog import RECOMPUTED, Catalog, Mix, predicted_loss


def sample_mixes(catalog: Catalog, seed: int = 0) -> list[list[str]]:
    """Seeded assignments of tracks to groups, like those that plays end with. Layers count as the tracks they are.

    Two random ones; a good beginning with a cheap rest; and runs of groups that were recomputed: at the end, in the
    middle, at the beginning, and scattered over a cheap cache.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    groups = catalog.groups
    by_size = sorted(catalog.tracks, key=lambda track: track.total_bytes)
    names = [track.name for track in by_size]
    lossy = sorted(names, key=lambda name: -sum(catalog.track(name).loss))[: max(2, len(names) // 2)]
    cheap = names[0]
    best = min(names, key=lambda name: sum(catalog.track(name).loss))
    third = max(1, groups // 3)

    def scattered(choice: Sequence[str]) -> list[str]:
        mix = [rng.choice(choice) for _ in range(groups)]
        if len(set(mix)) == 1:  # one track alone is no mix
            mix[rng.randrange(groups)] = next((name for name in choice if name != mix[0]), mix[0])
        return mix

    hole = scattered(lossy)
    hole[third : 2 * third] = [RECOMPUTED] * len(hole[third : 2 * third])
    mixes = [
        scattered(names),
        scattered(lossy),
        [best] * third + [cheap] * (groups - third),
        scattered(lossy)[: groups - third] + [RECOMPUTED] * third,
        hole,
        [RECOMPUTED] * third + scattered(lossy)[: groups - third],
        [cheap, *scattered((cheap, cheap, RECOMPUTED))[1:]],
    ]
    return [list(mix) for mix in dict.fromkeys(map(tuple, mixes)) if len(set(mix)) > 1]


def measure_mixes(
    catalog: Catalog,
    mixes: Sequence[Sequence[str]],
    reference: Reference,
    prompt: Sequence[int],
    decode: Decoder,
    *,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Mix]:
    """Put each mixed cache together, recomputing what is to be recomputed behind what is in place, and score it.

    Args:
        catalog: the asset, for what it predicts.
        mixes: per mix, one track per group, or `RECOMPUTED`.
        reference: scores of the exact cache, with the engine that recomputes.
        prompt: token ids.
        decode: decodes one group of one track.
        progress: called after every mix.
    """
    spec = catalog.spec
    engine = reference.engine
    work = torch.empty(spec.shape(catalog.tokens), dtype=engine.prefill(prompt[:1]).dtype)
    out = []
    for number, mix in enumerate(mixes):
        for name, run in groupby(range(catalog.groups), key=lambda group, mix=mix: mix[group]):  # type: ignore[misc]
            groups = list(run)
            begin = spec.group_range(groups[0], catalog.tokens)[0]
            end = spec.group_range(groups[-1], catalog.tokens)[1]
            if name == RECOMPUTED:
                # A cache of 16 bits may hold infinities; the exact one is measured without them as well.
                work[:, :, :, begin:end] = clean(engine.prefill(prompt[begin:end], work[:, :, :, :begin]))[0]
            else:
                for group in groups:
                    first, last = spec.group_range(group, catalog.tokens)
                    decode(group, name, work[:, :, :, first:last])
        out.append(Mix(tuple(mix), predicted_loss(catalog, mix), reference.measure(work).kl))
        progress(number + 1, len(mixes))
    return out
