"""What a play shows of itself while it runs, for progress displays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvabr.player.assembler import Assembler
from kvabr.player.session import Session
from kvabr.transfer.interface import ConnectionStats
from kvabr.types.catalog import RECOMPUTED


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A group on its way."""

    track: str
    share: float
    """Share of its bytes that have come, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a play, for progress displays."""

    now: float
    """Seconds since the play began, which is when the catalog was known."""
    deadline_s: float
    """The deadline on the same clock, seconds."""
    offers: tuple[str, ...]
    """The asset's tracks, smallest first."""
    tracks: tuple[str | None, ...]
    """Per group, the track in place, ``recomputed``, or None."""
    transfers: dict[int, TransferProgress]
    """Groups on their way, by number."""
    rate: float
    """Expected rate, bytes per second; 0.0 while it is unknown."""
    lower_bound: float
    """Rate that the link should exceed most of the time, bytes per second."""
    slack_s: float | None
    """Time left minus the time that the rest needs at the lower bound, seconds; None while it is unknown."""
    bytes_fetched: int
    bytes_wasted: int
    requests: int
    """Requests under way."""
    undecoded: int
    """Layers and groups that have come and are not decoded yet."""
    decode_backlog_s: float
    """Decoding that waits, seconds."""
    computing: bool
    """Whether any group is left to the engine and not yet in place."""
    network: ConnectionStats
    edge: int | None = None
    """Groups that are published, of a cache that is still being prefilled; None once all are."""
    ends_s: float = 0.0
    """When the last group should be published, on the clock of `now`."""

    @classmethod
    def of(cls, session: Session, assembler: Assembler, network: ConnectionStats, now: float) -> Snapshot:
        """Take a snapshot of a session."""
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
