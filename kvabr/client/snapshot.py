"""Snapshots of a running play, for progress displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvabr.player.assembler import Assembler
from kvabr.player.session import Session
from kvabr.transfer.interface import ConnectionStats
from kvabr.types.catalog import RECOMPUTED


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A group in transfer."""

    track: str
    share: float
    """Received fraction of its bytes, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a play at one moment."""

    now: float
    """Seconds since the start of the play, after its lookup."""
    deadline_s: float
    """Deadline in seconds since the start."""
    offers: tuple[str, ...]
    """The asset's tracks, smallest first."""
    tracks: tuple[str | None, ...]
    """Per group, the track in place, ``recomputed``, or None."""
    transfers: dict[int, TransferProgress]
    """Groups in transfer, by number."""
    rate: float
    """Expected rate in bytes per second; 0.0 if unknown."""
    lower_bound: float
    """Rate that the link should usually exceed, in bytes per second."""
    slack_s: float | None
    """Seconds left, minus the seconds that the rest takes at the lower bound; None if unknown."""
    bytes_fetched: int
    bytes_wasted: int
    requests: int
    undecoded: int
    """Number of layers and groups received but not yet decoded."""
    decode_backlog_s: float
    """Seconds of decoding that wait."""
    computing: bool
    """True if the engine has groups to compute."""
    network: ConnectionStats
    edge: int | None = None
    """Number of published groups of a cache still being prefilled; None once all are published."""
    ends_s: float = 0.0
    """Expected publication of the last group, seconds since the start."""

    @classmethod
    def of(cls, session: Session, assembler: Assembler, network: ConnectionStats, now: float) -> Snapshot:
        view, record = session.view, session.record
        slack = view.slack_s()
        tracks = assembler.coverage
        return cls(
            now=now,
            deadline_s=view.deadline_s,
            offers=tuple(track.name for track in sorted(view.catalog.tracks, key=lambda track: track.total_bytes)),
            tracks=tracks,
            transfers={
                transfer.group: TransferProgress(transfer.track, transfer.received / transfer.bytes)
                for transfer in view.in_flight.values()
            },
            rate=view.rate,
            lower_bound=view.lower_bound,
            slack_s=None if slack == float("-inf") else slack,
            bytes_fetched=record.bytes_fetched,
            bytes_wasted=record.bytes_wasted,
            requests=len(view.in_flight),
            undecoded=session.undecoded(),
            decode_backlog_s=view.decode_backlog_s,
            computing=any(
                wanted == RECOMPUTED and there is None for wanted, there in zip(view.track_of, tracks, strict=True)
            ),
            network=network,
            edge=view.edge if view.coming else None,
            ends_s=view.ends_s,
        )


Watch = Callable[[Snapshot], None]
