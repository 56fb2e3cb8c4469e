"""The best cache that any schedule can reach, found by trying them all: small cases only.

One link carries one item after the other in any order, and decoders take what has arrived. An item is one layer of one
group. With an engine, a group may be computed instead, when all before it is in place.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import combinations, permutations, product

from kvabr.abr.ladder import stack
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.cost import objective
from kvabr.types.loss import predicted_loss


def best_loss(offer, capacity, deadline_s, cost=None, mode="hole"):
    """Least expected loss of any schedule that meets the deadline; infinite if none does."""
    found = schedules(offer, capacity, cost, mode, within_s=deadline_s)
    return min((loss for loss, end_s, _ in found if end_s <= deadline_s + 1e-9), default=float("inf"))


def best_objective(offer, capacity, deadline_s, cost=None, mode="hole", *, time_price, gpu_price, decoders=1):
    """Least objective of any schedule, late ones included, if a group is decoded once; infinite if there is none."""
    return min(
        (
            objective(loss, end_s, deadline_s, met=end_s <= deadline_s, engine_s=engine_s, time_price=time_price,
                      gpu_price=gpu_price)
            for loss, end_s, engine_s in schedules(offer, capacity, cost, mode, decoders=decoders, once=True)
        ),
        default=float("inf"),
    )  # fmt: skip


def schedules(offer, capacity, cost, mode, *, within_s=None, decoders=1, once=False):
    """Yield (loss, end, engine seconds) of every schedule; ``once``: all layers of a group are decoded together."""
    groups = range(offer.groups)
    computable = [()]
    if cost is not None and mode == "hole":
        computable = [free for count in range(offer.groups + 1) for free in combinations(groups, count)]
    elif cost is not None:
        computable = [tuple(range(cut, offer.groups)) for cut in range(offer.groups + 1)]
    for free in computable:
        fetched = [group for group in groups if group not in free]
        for choice in product(offer.tracks, repeat=len(fetched)):
            tracks = dict(zip(fetched, choice, strict=True))
            items = [
                (group, layer.bytes[group], (layer is track or not once) * layer.decode_s * share(offer, group))
                for group, track in tracks.items()
                for layer in stack(offer, track)
            ]
            if within_s is not None and sum(size for _, size, _ in items) > capacity.between(0.0, within_s):
                continue
            names = [tracks[group].name if group in tracks else RECOMPUTED for group in groups]
            loss = predicted_loss(offer, names)
            for order in orders(items):
                yield loss, *timed(offer, order, free, capacity, cost, decoders, once=once)


def share(offer, group):
    return offer.group_tokens(group) / offer.spec.group_tokens


def orders(items):
    """Every order in which a group's layers come bottom first."""
    slots = [group for group, _, _ in items]
    for shape in dict.fromkeys(permutations(slots)):
        left = {group: [item for item in items if item[0] == group] for group in slots}
        yield [left[group].pop(0) for group in shape]


def timed(offer, order, free, capacity, cost, decoders, *, once):
    """When all is in place if the link carries the items in this order, and the engine's seconds."""
    link, busy = 0.0, [0.0] * decoders
    ready, usable = {}, {}
    for group, size, decode_s in order:
        link = capacity.when(link, size)
        ready[group] = link
        if decode_s:
            ready[group] = max(heappop(busy), link) + decode_s
            heappush(busy, ready[group])
        if once or group not in usable:
            usable[group] = ready[group]  # what was decoded first: the engine can go on from there
    engine = spent = 0.0
    for group in free:
        before = max((usable[other] for other in range(group)), default=0.0)
        first = group * offer.spec.group_tokens
        takes_s = cost.seconds(first, offer.group_tokens(group))
        engine, spent = max(engine, before) + takes_s, spent + takes_s
        ready[group] = usable[group] = engine
    return max(ready.values()), spent
