"""Catalogs for tests of the player: the sizes and losses that a real cache has, any number of groups."""

from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import TrackNamespace, chain

SPEC = KVSpec.uniform("test/model", "tokenizer", 4, 2, 32, "float16", RopeSpec(10000.0, 32))

# name, share of FP16's bytes, loss of the whole cache, seconds to decode a group
LEVELS = (
    ("FP16", 1.0, 1e-7, 0.001),
    ("BF16", 1.0, 1e-5, 0.001),
    ("FP8", 0.5, 0.0018, 0.002),
    ("Int8", 0.52, 0.00003, 0.002),
    ("FP4", 0.266, 0.0215, 0.002),
    ("Int4", 0.265, 0.0070, 0.002),
    ("AC-5x", 0.19, 0.0082, 0.004),
)


def catalog(groups: int = 16, *, short: int = 0, decode: float = 1.0, layered: bool = False) -> Catalog:
    """A catalog of ``groups`` groups; the last is ``short`` tokens shorter."""
    tokens = groups * SPEC.group_tokens - short
    weights = [3.0 if group == 0 else 1.0 + (group * 7 % 5) / 4 for group in range(groups)]
    total = sum(weights)
    tracks = [
        _track(name, share, loss, seconds * decode, tokens, weights, total) for name, share, loss, seconds in LEVELS
    ]
    if layered:
        base = _track("base", 0.06, 0.09, 0.002 * decode, tokens, weights, total)
        middle = _track("layer-1", 0.07, 0.012, 0.002 * decode, tokens, weights, total, "base")
        top = _track("layer-2", 0.12, 0.0004, 0.002 * decode, tokens, weights, total, "layer-1")
        tracks += [base, middle, top]
    chunks = chain(list(range(tokens)), model=SPEC.model, tokenizer=SPEC.tokenizer)
    return Catalog(TrackNamespace(SPEC.model, chunks[-1]), SPEC, tokens, tuple(chunks), tuple(tracks))


def _track(
    name: str,
    share: float,
    loss: float,
    seconds: float,
    tokens: int,
    weights: list[float],
    total: float,
    refines: str | None = None,
) -> Track:
    sizes = []
    for group in range(len(weights)):
        first, last = SPEC.group_range(group, tokens)
        sizes.append(int(SPEC.fp16_bytes(last - first) * share) + 100)
    losses = tuple(loss * weight / total for weight in weights)
    return Track(name, tuple(sizes), losses, ("0" * 64,) * len(weights), refines=refines, decode_s=seconds)
