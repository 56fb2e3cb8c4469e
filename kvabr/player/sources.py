"""The sources of a play: which is asked for a group, and what is moved from one to another.

Groups are named by content, so any source that has an asset serves any of its groups. A group is asked of the source
that should deliver it first: its time to first byte, and then what it has still to bring, at its rate. What waits at a
source longer than another would take is asked there instead, and so is everything of a source that falls silent. What a
source refuses or loses is asked of the others before it counts as an attempt; one that sends something else than the
catalog names is dropped for the play.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from kvabr.abr.view import Transfer, View
from kvabr.player.requests import LEAST_SILENCE_S
from kvabr.player.throughput_sampler import SourceSamplers

Offer = Container[str] | None
"""The tracks that a source has of an asset; None: all."""


class _NotKnown:
    """Contains nothing. It is compared by identity, so no empty container of the language would do."""

    def __contains__(self, track: object, /) -> bool:
        return False


NOT_KNOWN: Container[str] = _NotKnown()
"""The offer of a source that has not answered yet."""

_SILENT_TTFB = 4.0
"""A source is silent after this multiple of its time to first byte, or `LEAST_SILENCE_S`."""
_UNKNOWN_TTFB_S = 0.25
"""That time as long as nothing is known of any source."""
_AGAIN = 3.0
"""A silent source is asked for one group after as many times that long; twice as many whenever it stays silent."""
_MOST_TRIES = 8
"""Doublings at most."""
_TELLING_BYTES = 1 << 15
"""Least size of what a source is asked for to learn its rate anew."""
_MOVED, _MOVED_S = 1.5, 0.05
"""What has not begun is moved if it would take this many times as long as elsewhere, and so many seconds longer."""
_MOVED_BEGUN = 3.0
"""The same for what has begun to arrive, whose bytes are lost."""


class Sources:
    """Those of one play, by number."""

    def __init__(
        self,
        samplers: SourceSamplers,
        view: View,
        offers: Sequence[Offer] | None,
        round_trips: Sequence[float | None] = (),
    ) -> None:
        """Begin without requests.

        Args:
            samplers: tell what each is expected to bring.
            view: the play.
            offers: what each has, which may change meanwhile; None: there is one source.
            round_trips: to each, seconds, as far as they are known before anything was asked.
        """
        self._samplers, self._view, self._in_flight = samplers, view, view.in_flight
        self._offers: Sequence[Offer] = (None,) if offers is None else offers
        self._round_trips = round_trips or (None,) * len(self._offers)
        self.several = len(self._offers) > 1
        self._refused: set[tuple[int, int, str]] = set()
        self._dropped: set[int] = set()
        self._silent: dict[int, float] = {}
        """When each source that is silent is asked again, for one group."""
        self._tried: int | None = None
        """A silent source that is asked next."""
        self._tries: dict[int, int] = {}
        """How often each of them was asked again without bringing anything."""
        self._heard_s: dict[int, float] = {}
        """When bytes of each source came last, or it was asked after a pause."""

    def choose(self, group: int, track: str, size: int, now: float) -> int:
        """Return the source to ask for a group of ``size`` bytes."""
        if not self.several:
            return 0
        having = self._having(track)
        tried, self._tried = self._tried, None
        if tried is not None and tried in having:
            self._heard_s[tried] = now
            self._tries[tried] = min(_MOST_TRIES, self._tries.get(tried, 0) + 1)
            return tried
        sound = [source for source in having if source not in self._silent]
        fresh = [source for source in sound if (source, group, track) not in self._refused]
        chosen = min(fresh or sound or having or [0], key=lambda source: (self._ends_s(source, size), source))
        idle = [source for source in fresh if source != chosen and self._idle(source, now)]
        if idle and size >= _TELLING_BYTES and self._ends_s(chosen, size) > 2 * self._ttfb_s(idle[0]):
            chosen = idle[0]
            self._tries[chosen] = min(_MOST_TRIES, self._tries.get(chosen, 0) + 1)
        elif chosen not in self._silent:
            self._tries.pop(chosen, None)
        if chosen not in self._in_flight.asked:
            self._heard_s[chosen] = now
        return chosen

    def _idle(self, source: int, now: float) -> bool:
        """Return whether a source was not asked for so long that its rate may be another by now."""
        since_s = self._heard_s.get(source, now)
        again_s = self._patience_s(source) * 2 ** self._tries.get(source, 0)
        return source not in self._in_flight.asked and now - since_s >= again_s

    def heard(self, source: int, now: float) -> None:
        """Note that bytes of a source came."""
        if self.several:
            self._heard_s[source] = now
            if self._silent.pop(source, None) is not None:
                self._tries.pop(source, None)
                self._samplers[source].revived()

    def waited(self, now: float) -> None:
        """Note that until now, other plays used the links."""
        self._heard_s = dict.fromkeys(self._heard_s, now)

    def failed(self, transfer: Transfer, *, lost: bool = False) -> bool:
        """Note that a source did not bring what it was asked for, or is ``lost``; return whether another may."""
        if not self.several:
            return False
        if lost:
            self.drop(transfer)
        self._refused.add((transfer.source, transfer.group, transfer.track))
        left = self._having(transfer.track)
        return self._awaited or any((source, transfer.group, transfer.track) not in self._refused for source in left)

    def drop(self, transfer: Transfer) -> bool:
        """Ask a source nothing more, unless it is the last one; return whether there is another."""
        if not self.several or transfer.local:
            return False
        if self._awaited or len(self._having(transfer.track)) > 1:
            self._dropped.add(transfer.source)
        return transfer.source in self._dropped

    @property
    def trying(self) -> bool:
        """Whether a silent source is asked for what is requested next."""
        return self._tried is not None

    @property
    def none_yet(self) -> bool:
        """Whether nothing can be asked of any source until another one has answered."""
        return self._awaited and all(
            source in self._dropped or offer is NOT_KNOWN for source, offer in enumerate(self._offers)
        )

    @property
    def _awaited(self) -> bool:
        return any(offer is NOT_KNOWN for offer in self._offers)

    def misplaced(self, now: float) -> Iterator[tuple[Transfer, str]]:
        """Yield transfers that are better asked elsewhere, and why; they are cancelled as they come."""
        if not self.several:
            return
        for source in list(self._in_flight.asked):
            silent = self._is_silent(source, now)
            if silent and any(self._brings(other, now) for other in range(len(self._offers)) if other != source):
                self._leave_alone(source, now)
            if source in self._dropped or source in self._silent:
                why = "its source was dropped" if source in self._dropped else "its source is silent"
                for transfer in self._of(source):
                    if self._others(transfer) and (silent or source in self._dropped):
                        yield transfer, why
            elif not silent:
                for late in self._late(source):
                    yield late, "another source brings it sooner"
        yield from self._probes(now)

    def _probes(self, now: float) -> Iterator[tuple[Transfer, str]]:
        """Yield the group that a silent source is asked for again.

        Only what waits behind something else is taken from another source, which would have to begin anew with it, or
        what that does not bring either.
        """
        self._tried = None
        for source, again_s in self._silent.items():
            if now < again_s or source in self._in_flight.asked or self._tried is not None:
                continue
            waiting = [one for one in self._in_flight.values() if self._may_try(source, one, now)]
            if waiting:
                self._tried = source
                self._leave_alone(source, now)
                # An upgrade might not be asked for again.
                last = max(waiting, key=lambda one: (not one.upgrade, one.priority, one.request))
                yield last, "a silent source is tried again"

    def _may_try(self, source: int, one: Transfer, now: float) -> bool:
        """Return whether a silent source may be tried with what another is asked for."""
        if one.local or not self._has(source, one.track) or (source, one.group, one.track) in self._refused:
            return False
        if self._is_silent(one.source, now):
            return True
        tried = one.source in self._silent
        return not tried and one.first_byte_s is None and self._brings(one.source, now)

    def _leave_alone(self, source: int, now: float) -> None:
        """Ask a silent source for nothing for a while."""
        self._silent[source] = now + _AGAIN * self._patience_s(source) * 2 ** self._tries.get(source, 0)

    def _late(self, source: int) -> list[Transfer]:
        """Return what a source would bring last, if others bring it clearly sooner."""
        found: list[Transfer] = []
        moved = dict.fromkeys(range(len(self._offers)), 0)
        asked = sorted(self._of(source), key=lambda one: (one.first_byte_s is None, one.priority, one.request))
        while asked and (others := self._others(last := asked.pop())):
            begun = last.first_byte_s is not None
            if not begun and source in self._tries:
                break  # its rate is what this is to tell
            own_s = self._ends_s(source, moved[source] if not begun else last.remaining, alone=begun)
            other_s, other = min((self._ends_s(each, moved[each] + last.bytes), each) for each in others)
            if own_s <= (_MOVED_BEGUN if begun else _MOVED) * other_s + _MOVED_S:
                break
            moved[source] -= last.remaining
            moved[other] += last.bytes
            found.append(last)
        return found

    def _of(self, source: int) -> list[Transfer]:
        return [one for one in self._in_flight.values() if one.source == source and not one.local]

    def _patience_s(self, source: int) -> float:
        return max(LEAST_SILENCE_S, _SILENT_TTFB * self._ttfb_s(source))

    def _is_silent(self, source: int, now: float) -> bool:
        return now - self._heard_s.get(source, now) >= self._patience_s(source)

    def _brings(self, source: int, now: float) -> bool:
        """Return whether bytes of a source came lately, or it is not asked; otherwise all may be in an outage."""
        return source not in self._in_flight.asked or now - self._heard_s.get(source, now) < LEAST_SILENCE_S / 2

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
        return [source for source in range(len(self._offers)) if self._has(source, track)]

    def _has(self, source: int, track: str) -> bool:
        offer = self._offers[source]
        return (offer is None or track in offer) and source not in self._dropped

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
        """Return the time to first byte of a source; as long as it is not known, its round trip or the longest time."""
        known = [self._samplers[each].estimates()[2] for each in range(len(self._offers))]
        return known[source] or self._round_trips[source] or max(known) or _UNKNOWN_TTFB_S
