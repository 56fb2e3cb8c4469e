"""The best cache that any schedule can reach, found by trying them all: small cases only.

One link carries one item after the other in any order, and a decoder takes what has arrived. An item is one layer of
one group. With an engine, a group may be computed instead, when all before it is in place.
"""

from itertools import combinations, permutations, product

from kvabr.abr.ladder import stack
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.loss import predicted_loss


def best_loss(offer, capacity, deadline_s, cost=None, mode="hole"):
    """Least expected loss of any schedule that meets the deadline; infinite if none does."""
    found = schedules(offer, capacity, cost, mode, deadline_s)
    return min((loss for loss, end_s in found if end_s <= deadline_s + 1e-9), default=float("inf"))


def schedules(offer, capacity, cost, mode, within_s):
    """Yield the loss and the end of every schedule."""
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
                (group, layer.bytes[group], layer.decode_s * share(offer, group))
                for group, track in tracks.items()
                for layer in stack(offer, track)
            ]
            if sum(size for _, size, _ in items) > capacity.between(0.0, within_s):
                continue
            names = [tracks[group].name if group in tracks else RECOMPUTED for group in groups]
            loss = predicted_loss(offer, names)
            for order in orders(items):
                yield loss, timed(offer, order, free, capacity, cost)


def share(offer, group):
    return offer.group_tokens(group) / offer.spec.group_tokens


def orders(items):
    """Every order in which a group's layers come bottom first."""
    slots = [group for group, _, _ in items]
    for shape in dict.fromkeys(permutations(slots)):
        left = {group: [item for item in items if item[0] == group] for group in slots}
        yield [left[group].pop(0) for group in shape]


def timed(offer, order, free, capacity, cost):
    """When all is in place if the link carries the items in this order."""
    link = busy = engine = 0.0
    ready, usable = {}, {}
    for group, size, decode_s in order:
        link = capacity.when(link, size)
        ready[group] = link
        if decode_s:
            ready[group] = busy = max(busy, link) + decode_s
        usable.setdefault(group, ready[group])  # what was decoded first: the engine can go on from there
    for group in free:
        before = max((usable[other] for other in range(group)), default=0.0)
        first = group * offer.spec.group_tokens
        engine = max(engine, before) + cost.seconds(first, offer.group_tokens(group))
        ready[group] = usable[group] = engine
    return max(ready.values())
