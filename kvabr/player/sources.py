"""The sources of a play: which is asked for a group, and what is moved from one to another.

Groups are named by content, so any source that has an asset serves any of its groups. A group is asked of the source
that should deliver it first: its time to first byte, and then what it has still to bring, at its rate. What waits at a
source longer than another would take is asked there instead, and so is everything of a source that falls silent. What a
source refuses or loses is asked of the others before it counts as an attempt; one that sends something else than the
catalog names is dropped for the play.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvabr.abr.view import InFlight, Transfer
from kvabr.player.requests import LEAST_SILENCE_S
from kvabr.player.throughput_sampler import SourceSamplers

Offer = Container[str] | None
"""The tracks that a source has of an asset; None: all."""

_SILENT_TTFB = 4.0
"""A source is silent after this multiple of its time to first byte, or `LEAST_SILENCE_S`."""
_UNKNOWN_TTFB_S = 0.25
"""That time as long as nothing is known of any source."""
_MOVED, _MOVED_S = 1.5, 0.05
"""What has not begun is moved if it would take this many times as long as elsewhere, and so many seconds longer."""
_MOVED_BEGUN = 3.0
"""The same for what has begun to arrive, whose bytes are lost."""


class Sources:
    """Those of one play, by number."""

    def __init__(self, samplers: SourceSamplers, in_flight: InFlight, offers: Sequence[Offer] | None) -> None:
        """Begin without requests; ``offers``: what each has, which may change meanwhile; None: there is one source."""
        self._samplers, self._in_flight = samplers, in_flight
        self._offers: Sequence[Offer] = (None,) if offers is None else offers
        self.several = len(self._offers) > 1
        self._refused: set[tuple[int, int, str]] = set()
        self._dropped: set[int] = set()
        self._silent: set[int] = set()
        self._heard_s: dict[int, float] = {}
        """When bytes of each source came last, or it was asked after a pause."""

    def choose(self, group: int, track: str, size: int, now: float) -> int:
        """Return the source to ask for a group of ``size`` bytes."""
        if not self.several:
            return 0
        having = self._having(track)
        sound = [source for source in having if source not in self._silent]
        fresh = [source for source in sound if (source, group, track) not in self._refused]
        chosen = min(fresh or sound or having or [0], key=lambda source: (self._ends_s(source, size), source))
        if chosen not in self._in_flight.asked:
            self._heard_s[chosen] = now
        return chosen

    def heard(self, source: int, now: float) -> None:
        """Note that bytes of a source came."""
        if self.several:
            self._heard_s[source] = now
            self._silent.discard(source)

    def waited(self, now: float) -> None:
        """Note that until now, other plays used the links."""
        self._heard_s = dict.fromkeys(self._heard_s, now)

    def failed(self, transfer: Transfer) -> bool:
        """Note that a source did not bring what it was asked for; return whether another may."""
        if not self.several:
            return False
        self._refused.add((transfer.source, transfer.group, transfer.track))
        return any(
            (source, transfer.group, transfer.track) not in self._refused for source in self._having(transfer.track)
        )

    def drop(self, transfer: Transfer) -> bool:
        """Ask a source nothing more, unless it is the last one; return whether there is another."""
        if not self.several or transfer.local:
            return False
        if len(self._having(transfer.track)) > 1:
            self._dropped.add(transfer.source)
        return transfer.source in self._dropped

    def misplaced(self, now: float) -> Iterator[tuple[Transfer, str]]:
        """Yield transfers that are better asked elsewhere, and why; they are cancelled as they come."""
        if not self.several:
            return
        for source in list(self._in_flight.asked):
            after_s = max(LEAST_SILENCE_S, _SILENT_TTFB * self._ttfb_s(source))
            if source in self._dropped or now - self._heard_s.get(source, now) >= after_s:
                self._silent.add(source)
                why = "its source was dropped" if source in self._dropped else "its source is silent"
                for transfer in [one for one in self._in_flight.values() if one.source == source and not one.local]:
                    if self._others(transfer):
                        yield transfer, why
            elif (late := self._late(source)) is not None:
                yield late, "another source brings it sooner"

    def _late(self, source: int) -> Transfer | None:
        """Return what a source would bring last, if another brings it clearly sooner."""
        last = max(
            (one for one in self._in_flight.values() if one.source == source and not one.local),
            key=lambda one: (one.first_byte_s is None, one.priority, one.request),
            default=None,
        )
        if last is None or not (others := self._others(last)):
            return None
        begun = last.first_byte_s is not None
        own_s = self._ends_s(source, last.remaining, alone=begun)
        other_s = min(self._ends_s(other, last.bytes) for other in others)
        return last if own_s > (_MOVED_BEGUN if begun else _MOVED) * other_s + _MOVED_S else None

    def _others(self, transfer: Transfer) -> list[int]:
        """Return the sources that could bring what one is asked for."""
        return [
            source
            for source in self._having(transfer.track)
            if source != transfer.source
            and source not in self._silent
            and (source, transfer.group, transfer.track) not in self._refused
        ]

    def _having(self, track: str) -> list[int]:
        """Return the sources that have a track, but for those that were dropped."""
        offers = enumerate(self._offers)
        return [source for source, offer in offers if (offer is None or track in offer) and source not in self._dropped]

    def _ends_s(self, source: int, nbytes: int, *, alone: bool = False) -> float:
        """Return the seconds until a source has brought as many bytes more, behind all else or ``alone``.

        As long as its rate is not known, it is taken to be that of the slowest; if none is known, bytes count.
        """
        rate, _, ttfb_s = self._samplers[source].estimates()
        if rate <= 0:
            others = (self._samplers[each].estimates()[0] for each in range(len(self._offers)))
            rate = min((one for one in others if one > 0), default=1.0)
        left = 0 if alone else self._in_flight.left.get(source, 0)
        return (left + nbytes) / rate + ttfb_s

    def _ttfb_s(self, source: int) -> float:
        """Return the time to first byte of a source; as long as it is not known, the longest of the others."""
        known = [self._samplers[each].estimates()[2] for each in range(len(self._offers))]
        return known[source] or max(known) or _UNKNOWN_TTFB_S
