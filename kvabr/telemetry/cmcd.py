"""A play's events under the names of CMCD (CTA-5004, Common Media Client Data), where one fits.

What the names mean for a cache, whose groups are not played but must all be in place by one deadline:

==========  ==========================================================================================================
``sid``     The play: random.
``cid``     The digest of the prompt, as in the asset's name.
``d``       A group's duration: its equal share of the deadline, ms.
``br``      Rate of the object asked for over that duration, kbit/s. ``tb``: that of the asset's largest track.
``dl``      Time to the deadline, ms.
``bl``      Buffer: the slack, time to the deadline less what the rest needs at the lower bound of the rate, ms.
``mtp``     The expected rate, kbit/s.
``rtp``     The rate that would do: five times ``br``, the factor of dash.js and Shaka, kbit/s.
``su``      The group is missing, so that the cache cannot be handed over before it is in place.
``bs``      The deadline has passed since the request before this one, or, of the delivery: it was late.
``nor``     What was asked for together with this one and right behind it: ``track/group``.
``st sf ot``  ``v``, ``o``, ``o``: all of it is known beforehand; the format and the kind of object are others.
==========  ==========================================================================================================

Of responses, as in version 2, ``ttfb`` and ``ttlb``: ms from the request to its first and its last byte. Numbers are
rounded as CTA-5004 wants it: ``dl`` and ``bl`` to 100 ms, ``mtp`` and ``rtp`` to 100 kbit/s, and a buffer is never
below 0; beside them stand ``slack_s``, ``rate`` and ``lower`` (bytes per second) as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvabr.types.events import (
    CacheDelivered,
    DecisionMade,
    FirstByteReceived,
    PlayEvent,
    PlayStarted,
    ProgressMade,
    RequestCancelled,
    RequestDone,
    RequestFailed,
    RequestSent,
    SampleLimited,
)

Record = dict[str, Any]

_ENOUGH = 5
"""How many times its rate an object should be sent with."""
_TOLD = frozenset({"plan", "recompute"})
"""Kinds of decisions that have a record of their own; those that led to a request are told with it."""
_MOST_REQUESTS = 4096


class Cmcd:
    """Turns the lines of one play into records."""

    def __init__(self, sid: str) -> None:
        """Nothing is known of the play but its name."""
        self._who: Record = {"sid": sid}
        self._deadline_s = 0.0
        self._segment_s = 0.0
        self._top = 0
        self._decision: DecisionMade | None = None
        self._requests: dict[int, tuple[float, float | None]] = {}
        """Of each request under way, when it was sent and when its first byte came."""
        self._pending: Record | None = None
        """The last request's record: it waits for the next line, to tell what was asked for behind it."""
        self._starved = False

    def records(self, wall_s: float, event: PlayEvent) -> Iterator[Record]:
        """Yield the records that an event makes: mostly one, none for events of no interest alone.

        Args:
            wall_s: when it happened, seconds since 1970.
            event: from the play's log.
        """
        if self._pending is not None and not isinstance(event, RequestSent):
            # A decision at the same time may lead to the next request.
            decided = isinstance(event, DecisionMade) and event.kind not in _TOLD
            if not (decided and event.t == self._pending["t"]):
                yield self._sent()
        match event:
            case RequestSent():
                yield from self._request(wall_s, event)
            case DecisionMade():
                if event.kind in _TOLD:
                    yield self._record(wall_s, event, self._buffer(event), *_NUMBERS, "kind", "group", "reason")
                self._decision = event
            case FirstByteReceived():
                sent_s, first_s = self._requests.get(event.request, (event.t, None))
                self._requests[event.request] = (sent_s, event.t if first_s is None else first_s)
            case ProgressMade():
                yield self._record(wall_s, event, self._buffer(event), "received", *_NUMBERS)
            case RequestDone():
                yield self._record(wall_s, event, self._times(event), "request", "group", "track", "bytes")
            case SampleLimited():
                pass
            case _:
                yield self._other(wall_s, event)

    def _sent(self) -> Record:
        pending, self._pending = self._pending, None
        assert pending is not None  # noqa: S101  # its callers have looked
        return pending

    def _request(self, wall_s: float, event: RequestSent) -> Iterator[Record]:
        decision = self._decision
        if decision is not None and decision.request != event.request:
            decision = None
        cmcd = self._buffer(decision, event.t)
        rate = 8.0 * event.bytes / self._segment_s if self._segment_s else 0.0
        if rate:
            cmcd |= {"br": round(rate / 1e3), "d": round(1e3 * self._segment_s), "rtp": _hundreds(_ENOUGH * rate / 1e3)}
        if self._top and self._segment_s:
            cmcd["tb"] = round(8.0 * self._top / self._deadline_s / 1e3)
        if decision is not None and decision.kind == "fetch":
            cmcd["su"] = True
        if event.t > self._deadline_s > 0 and not self._starved:
            cmcd["bs"] = self._starved = True
        cmcd |= {"st": "v", "sf": "o", "ot": "o"}
        if self._pending is not None:
            if self._pending["t"] == event.t:
                self._pending["cmcd"]["nor"] = f"{event.track}/{event.group}"
            yield self._sent()
        if len(self._requests) < _MOST_REQUESTS:
            self._requests[event.request] = (event.t, None)
        record = self._record(wall_s, event, cmcd, "request", "group", "track", "bytes")
        if decision is not None:
            record |= {key: getattr(decision, key) for key in (*_NUMBERS, "kind", "reason")}
        self._pending = record

    def _times(self, event: RequestDone) -> Record:
        sent_s, first_s = self._requests.pop(event.request, (None, None))
        cmcd: Record = {}
        if sent_s is not None:
            cmcd["ttlb"] = round(1e3 * (event.t - sent_s))
            if first_s is not None:
                cmcd["ttfb"] = round(1e3 * (first_s - sent_s))
        return cmcd

    def _buffer(self, event: DecisionMade | ProgressMade | None, t: float | None = None) -> Record:
        """Return what an event says of time and rate, at time ``t`` or its own."""
        cmcd: Record = {}
        now = event.t if t is None and event is not None else t
        if self._deadline_s and now is not None:
            cmcd["dl"] = _hundreds(1e3 * (self._deadline_s - now))
        if event is not None and event.slack_s is not None:
            cmcd["bl"] = _hundreds(1e3 * event.slack_s)
        if event is not None and event.rate:
            cmcd["mtp"] = _hundreds(8.0 * event.rate / 1e3)
        return cmcd

    def _other(self, wall_s: float, event: PlayEvent) -> Record:
        cmcd = Record()
        match event:
            case PlayStarted():
                self._begin(event)
            case RequestCancelled() | RequestFailed():
                self._requests.pop(event.request, None)
            case CacheDelivered(met=False):
                cmcd["bs"] = True
        return self._record(wall_s, event, cmcd)

    def _begin(self, event: PlayStarted) -> None:
        self._deadline_s = event.deadline_s
        self._segment_s = event.deadline_s / max(1, event.groups)
        self._top = max(event.track_bytes, default=event.fp16_bytes)
        self._who["cid"] = event.asset.rpartition("/")[2]

    def _record(self, wall_s: float, event: PlayEvent, cmcd: Record, *keys: str) -> Record:
        """Return a record with the named fields of an event; with all of them if none is named."""
        line = event.to_json()
        record: Record = {"ts": round(1e3 * wall_s), "t": event.t, "event": event.name, "cmcd": self._who | cmcd}
        record.update((key, line[key]) for key in keys or line if key not in record)
        return record


_NUMBERS = ("slack_s", "rate", "lower")


def _hundreds(value: float) -> int:
    """Rounded to hundreds, never below 0: as CTA-5004 wants its times and rates."""
    return max(0, 100 * round(value / 100.0))
