"""Simulated TTFT on steady links with idle engines, if a cache is computed, fetched, or both.

Groups have the sizes of SmolLM2's tracks in proportion to the model's FP16, and its losses by distance from the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from kvabr.abr.estimators import Prior
from kvabr.data import default_catalog
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.trace import BYTES_PER_MBIT, Trace
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import TrackNamespace, chain

BESIDE, BEFORE, UNKNOWN, FETCHED, BOUND = "kvabr", "kvabr, prefix", "link unknown", "nothing computed", "bound"
"""Ways to get a cache: with an engine in parallel to the network; with an engine after a prefix (vLLM); on an unknown
link; without an engine; and the bound, which knows the link and has an engine that fills holes. Other ways are fixed
tracks.
"""
_H200_S = MappingProxyType({"AC-L0": 0.09e-3, "AC-L1": 0.14e-3, "AC-L2": 0.17e-3, "AC-L3": 0.2e-3, "AC-5x": 0.25e-3})
"""Decode seconds per group of Llama-3.1-8B in a batch."""
_PATIENT_S = 1e4


@dataclass(frozen=True, eq=False)
class Node:
    """Where plays end: the model's shape, decode times, and the link's round trip."""

    spec: KVSpec
    rtt_s: float
    group_s: Mapping[str, float] | None = None
    """Decode seconds per group in a batch, by track, and `plain_s` for other tracks; None: SmolLM2's on one core."""
    plain_s: float = 0.0
    batch_s: float = 0.0
    decoders: int = 1
    warm: bool = False
    """True if earlier plays have opened the connection's window."""
    deadline_s: float | None = None
    """Deadline of kvabr's plays; None: twice the minimum of the time to compute everything and the time to fetch Int4.
    """


@cache
def h200(layers: int) -> Node:
    """Return an H200 with a model of 8 KV heads of 128 dimensions, such as Llama-3.1-8B with 32 layers."""
    spec = KVSpec.uniform("llama", "llama", layers, 8, 128, "bfloat16", RopeSpec(500_000.0, 128))
    share = layers / 32
    return Node(spec, 2e-3, {name: share * each for name, each in _H200_S.items()}, share * 0.05e-3, 4e-3)


@cache
def two_cores() -> Node:
    """Return two server cores with SmolLM2-135M, and the link and deadline of tools/bench-speeds."""
    return Node(default_catalog().spec, 20e-3, decoders=2, warm=True, deadline_s=4.0)


@cache
def catalog(node: Node, tokens: int) -> Catalog:
    """Return a catalog for a model's shape, based on the sizes and losses of the shipped catalog."""
    shipped, spec = default_catalog(), node.spec
    larger = spec.fp16_bytes(128) / shipped.spec.fp16_bytes(128)
    groups, known = spec.groups(tokens), shipped.groups

    def laid_out(values: tuple[float, ...]) -> list[float]:
        """Return the values by distance from the end; they are constant beyond the last value."""
        far = values[1 : known // 4]
        middle = [far[group % len(far)] for group in range(max(0, groups - known))]
        return [values[0], *middle, *values[1 - min(groups, known) :]][:groups]

    tracks = tuple(
        replace(
            track,
            bytes=tuple(round(larger * size) for size in laid_out(track.bytes)),
            loss=tuple(laid_out(track.loss)),
            digests=("0" * 64,) * groups,
            decode_s=track.decode_s if node.group_s is None else node.group_s.get(track.name, node.plain_s),
            tails=(),
        )
        for track in shipped.tracks
    )
    chunks = tuple(chain(list(range(tokens)), model=spec.model, tokenizer=spec.tokenizer))
    return Catalog(TrackNamespace(spec.model, chunks[-1]), spec, tokens, chunks, tracks)


@dataclass(frozen=True)
class FirstToken:
    """TTFT and loss of a way."""

    seconds: float
    loss: float
    """Expected loss, nats per generated token."""
    bytes: int


def simulate(node: Node, cost: PrefillCost, tokens: int, mbit: float, way: str) -> FirstToken:
    """Simulate one play on a steady link with an idle engine; the link is known unless the way says otherwise."""
    offer, rate = catalog(node, tokens), mbit * BYTES_PER_MBIT
    computes = way in {BESIDE, BEFORE, UNKNOWN, BOUND}
    deadline_s = node.deadline_s
    if not computes and way != FETCHED:
        deadline_s = _PATIENT_S
    elif deadline_s is None:
        deadline_s = 2.0 * min(cost.seconds(0, tokens), offer.track("Int4").total_bytes / rate + 0.05)
    options = ReplayOptions(
        deadline_s,
        rtt_s=node.rtt_s,
        cost=cost if computes else None,
        mode="suffix" if way == BEFORE else "hole",
        prefix=way == BEFORE,
        decode_latency_s=node.batch_s,
        decoders=node.decoders,
        slow_start=not node.warm,
        config=PlayerConfig(gpu_price=0.0, give_up_after=max(10.0, _PATIENT_S / deadline_s)),
        prior=None if way == UNKNOWN else Prior(rate, node.rtt_s),
    )
    experiment = Experiment(offer, options)
    trace = Trace("steady", "steady", (0.0,), (rate,), _PATIENT_S)
    capacity, rtt_s, bound = experiment.prepare(trace, 0.0)
    if way == BOUND:
        return FirstToken(bound.end_s, bound.loss, 0)
    policy = "anytime" if computes or way == FETCHED else f"fixed:{way}"
    run = experiment.play_on(trace, 0.0, policy, capacity, rtt_s, bound, log=False).run
    return FirstToken(run["ttft_s"], run["loss"], run["bytes_fetched"])
