"""The best cache that any schedule can reach, found by trying them all: small cases only.

Two machines: one link, which carries one item after the other in any order, and one decoder. An item is one layer of
one group. With an engine, a group may be computed instead, when all before it is in place.
"""

from __future__ import annotations

from itertools import combinations, permutations, product

from kvabr.abr.ladder import stack
from kvabr.types.catalog import RECOMPUTED, predicted_loss


def best_loss(offer, capacity, deadline_s, cost=None, mode="hole"):
    """Least expected loss of any schedule that meets the deadline; infinite if none does."""
    groups = range(offer.groups)
    best = float("inf")
    computable = [()]
    if cost is not None and mode == "hole":
        computable = [free for count in range(offer.groups + 1) for free in combinations(groups, count)]
    elif cost is not None:
        computable = [tuple(range(cut, offer.groups)) for cut in range(offer.groups + 1)]
    carried = capacity.between(0.0, deadline_s)
    for free in computable:
        fetched = [group for group in groups if group not in free]
        for choice in product(offer.tracks, repeat=len(fetched)):
            tracks = dict(zip(fetched, choice, strict=True))
            items = [
                (group, layer.bytes[group], layer.decode_s * share(offer, group))
                for group, track in tracks.items()
                for layer in stack(offer, track)
            ]
            if sum(size for _, size, _ in items) > carried:
                continue
            names = [tracks[group].name if group in tracks else RECOMPUTED for group in groups]
            loss = predicted_loss(offer, names)
            if loss < best and any(in_time(offer, order, free, capacity, deadline_s, cost) for order in orders(items)):
                best = loss
    return best


def share(offer, group):
    return offer.group_tokens(group) / offer.spec.group_tokens


def orders(items):
    """Every order in which a group's layers come bottom first."""
    slots = [group for group, _, _ in items]
    for shape in dict.fromkeys(permutations(slots)):
        left = {group: [item for item in items if item[0] == group] for group in slots}
        yield [left[group].pop(0) for group in shape]


def in_time(offer, order, free, capacity, deadline_s, cost):
    """Whether all is in place by the deadline if the link carries the items in this order."""
    link = decoder = 0.0
    ready, usable = {}, {}
    for group, size, decode_s in order:
        link = capacity.when(link, size)
        decoder = max(decoder, link) + decode_s
        ready[group] = decoder
        usable.setdefault(group, decoder)  # its lowest layer: the engine can go on from there
    engine = 0.0
    for group in free:
        before = max((usable[other] for other in range(group)), default=0.0)
        first = group * offer.spec.group_tokens
        engine = max(engine, before) + cost.seconds(first, offer.group_tokens(group))
        ready[group] = usable[group] = engine
    return max(ready.values()) <= deadline_s + 1e-9
