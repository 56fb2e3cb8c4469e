"""Catalogs with round numbers, and views set by hand, for decisions that can be worked out on paper."""

from kvabr.abr import Ladder, View
from kvabr.abr.view import Transfer
from kvabr.player.session import Session
from kvabr.player.session_types import PlayRecord
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.types.catalog import Catalog, Track
from kvabr.types.naming import TrackNamespace, chain
from tests.catalogs import SPEC
from tests.replay.worlds import world

TRACKS = (("A", 1000, 0.1, None), ("B", 2000, 0.01, None), ("C", 4000, 0.001, None))
"""Name, bytes and loss of each group, and what it refines."""


def offer(groups: int = 10, tracks=TRACKS) -> Catalog:
    """All groups are alike, and decoding takes no time."""
    made = tuple(
        Track(name, (size,) * groups, (loss,) * groups, ("0" * 64,) * groups, refines=refines)
        for name, size, loss, refines in tracks
    )
    tokens = groups * SPEC.group_tokens
    chunks = chain(list(range(tokens)), model=SPEC.model, tokenizer=SPEC.tokenizer)
    return Catalog(TrackNamespace(SPEC.model, chunks[-1]), SPEC, tokens, tuple(chunks), made)


def view(groups: int = 10, deadline: float = 10.0, tracks=TRACKS, **more) -> View:
    return View(Ladder(offer(groups, tracks)), deadline, **more)


def bring(seen: View, group: int, track: str, now: float) -> None:
    seen.missing_groups.discard(group)
    seen.track_of[group] = track
    seen.settled.add(group)
    seen.now = now


def fly(seen: View, group: int, track: str) -> Transfer:
    transfer = Transfer(len(seen.in_flight), group, track, seen.bytes(group, track), False, seen.now)
    seen.in_flight[transfer.request] = transfer
    seen.outstanding_bytes += transfer.bytes
    seen.missing_groups.discard(group)
    return transfer


def steady(policy, catalog: Catalog, rate: float, deadline: float = 4.0, rtt: float = 0.02, **more) -> PlayRecord:
    """Return a play over a link of constant rate."""
    from kvabr.abr.plugins import load_estimator, load_policy

    made = load_policy(policy)()
    session = Session(Ladder(catalog), deadline, made, load_estimator(made.estimator)(), **more)
    link = Capacity(world("flat", [rate]), 0.0, rtt, slow_start=False)
    return Simulator(session, catalog, link, rtt_s=rtt, cost=more.get("cost")).run()
