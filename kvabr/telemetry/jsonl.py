"""`JsonLines`: one JSON object per event, with CMCD names (CTA-5004, Common Media Client Data) where they fit.

Unlike segments of a video, all groups of a cache have the same deadline, so the names mean:

============  ========================================================================================================
``sid``       The play: random.
``cid``       The digest of the prompt, as in the asset's name.
``d``         A group's duration: its equal share of the deadline, ms.
``br``        Rate of the requested object over that duration, kbit/s. ``tb``: of the asset's largest track.
``dl``        Time to the deadline, ms.
``bl``        Buffer: time to the deadline less the time for the rest at the lower bound of the rate, ms.
``mtp``       The expected rate, kbit/s.
``rtp``       Five times ``br``, the factor of dash.js and Shaka, kbit/s.
``su``        The group is missing; the cache cannot be delivered without it.
``bs``        The deadline has passed since the previous request; on a delivery: it was late.
``nor``       The next object, requested together with this one: ``track/group``.
``st sf ot``  ``v``, ``o``, ``o``: video on demand; other format; other kind of object.
============  ========================================================================================================

Responses have ``ttfb`` and ``ttlb`` of version 2: ms from the request to its first and last byte. As CTA-5004 requires,
``dl`` and ``bl`` are rounded to 100 ms, ``mtp`` and ``rtp`` to 100 kbit/s, and a buffer is at least 0. ``slack_s``,
``rate`` and ``lower`` (bytes per second) are additional, unrounded values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar

from kvabr.store.files import PRIVATE
from kvabr.telemetry.listener import EventRecord, Listener, PlayStates
from kvabr.types import events
from kvabr.types.errors import AssetError

Record = dict[str, Any]

_RATE_FACTOR = 5
_RECORDED = frozenset({"plan", "recompute"})
"""Kinds of decisions to record; others are recorded with the request that they cause."""
_MAX_REQUESTS = 4096


class JsonLines(Listener):
    """Appends to a file, which plays can share: every line has the ``sid`` of a play."""

    name: ClassVar[str] = "jsonl"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file for appending; raise `AssetError` if it cannot be written."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE)
            self._file = os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise AssetError(f"{path}: cannot be written ({error.strerror}); give another file") from error
        self._plays = PlayStates(Cmcd)

    def receive(self, record: EventRecord) -> None:
        """Write the records of an event; flush the file when a play ends."""
        play = self._plays.of(record)
        self._file.writelines(json.dumps(line) + "\n" for line in play.records(record.wall_s, record.event))
        if isinstance(record.event, events.PlayEnded):
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Cmcd:
    """Converts the events of one play to records."""

    def __init__(self, sid: str) -> None:
        self._who: Record = {"sid": sid}
        self._deadline_s = 0.0
        self._segment_s = 0.0
        self._top = 0
        self._decision: events.DecisionMade | None = None
        self._requests: dict[int, tuple[float, float | None]] = {}
        """Time sent, and time of the first byte, of each open request."""
        self._pending: Record | None = None
        """Record of the last request, held until the next event shows if another request follows."""
        self._starved = False

    def records(self, wall_s: float, event: events.PlayEvent) -> Iterator[Record]:
        """Yield the records of an event at ``wall_s`` (seconds since 1970): the held record and at most one more."""
        if self._pending is not None and not isinstance(event, events.RequestSent):
            # If a decision has the same time, the next request may follow from it.
            decided = isinstance(event, events.DecisionMade) and event.kind not in _RECORDED
            if not (decided and event.t == self._pending["t"]):
                yield self._pending
                self._pending = None
        match event:
            case events.RequestSent():
                yield from self._request(wall_s, event)
            case events.DecisionMade():
                if event.kind in _RECORDED:
                    yield self._record(wall_s, event, self._buffer(event), *_NUMBERS, "kind", "group", "reason")
                self._decision = event
            case events.FirstByteReceived():
                sent_s, first_s = self._requests.get(event.request, (event.t, None))
                self._requests[event.request] = (sent_s, event.t if first_s is None else first_s)
            case events.ProgressMade():
                yield self._record(wall_s, event, self._buffer(event), "received", *_NUMBERS)
            case events.RequestDone():
                yield self._record(wall_s, event, self._times(event), "request", "group", "track", "bytes")
            case events.SampleLimited():
                pass
            case _:
                yield self._other(wall_s, event)

    def _request(self, wall_s: float, event: events.RequestSent) -> Iterator[Record]:
        decision = self._decision
        if decision is not None and decision.request != event.request:
            decision = None
        cmcd = self._buffer(decision, event.t)
        rate = 8.0 * event.bytes / self._segment_s if self._segment_s else 0.0
        if rate:
            cmcd |= {
                "br": round(rate / 1e3),
                "d": round(1e3 * self._segment_s),
                "rtp": _hundreds(_RATE_FACTOR * rate / 1e3),
            }
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
            yield self._pending
        if len(self._requests) < _MAX_REQUESTS:
            self._requests[event.request] = (event.t, None)
        record = self._record(wall_s, event, cmcd, "request", "group", "track", "bytes")
        if decision is not None:
            record |= {key: getattr(decision, key) for key in (*_NUMBERS, "kind", "reason")}
        self._pending = record

    def _times(self, event: events.RequestDone) -> Record:
        sent_s, first_s = self._requests.pop(event.request, (None, None))
        if sent_s is None:
            return {}
        ttlb = {"ttlb": round(1e3 * (event.t - sent_s))}
        return ttlb if first_s is None else ttlb | {"ttfb": round(1e3 * (first_s - sent_s))}

    def _buffer(self, event: events.DecisionMade | events.ProgressMade | None, t: float | None = None) -> Record:
        cmcd: Record = {}
        now = event.t if t is None and event is not None else t
        if self._deadline_s and now is not None:
            cmcd["dl"] = _hundreds(1e3 * (self._deadline_s - now))
        if event is not None and event.slack_s is not None:
            cmcd["bl"] = _hundreds(1e3 * event.slack_s)
        if event is not None and event.rate:
            cmcd["mtp"] = _hundreds(8.0 * event.rate / 1e3)
        return cmcd

    def _other(self, wall_s: float, event: events.PlayEvent) -> Record:
        cmcd = Record()
        match event:
            case events.PlayStarted():
                self._deadline_s = event.deadline_s
                self._segment_s = event.deadline_s / max(1, event.groups)
                self._top = max(event.track_bytes, default=event.fp16_bytes)
                self._who["cid"] = event.asset.rpartition("/")[2]
            case events.RequestCancelled() | events.RequestFailed():
                self._requests.pop(event.request, None)
            case events.CacheDelivered(met=False):
                cmcd["bs"] = True
        return self._record(wall_s, event, cmcd)

    def _record(self, wall_s: float, event: events.PlayEvent, cmcd: Record, *keys: str) -> Record:
        line = event.to_json()
        record: Record = {"ts": round(1e3 * wall_s), "t": event.t, "event": event.name, "cmcd": self._who | cmcd}
        record.update((key, line[key]) for key in keys or line if key not in record)
        return record


_NUMBERS = ("slack_s", "rate", "lower")


def _hundreds(value: float) -> int:
    """Round to hundreds, as CTA-5004 requires."""
    return max(0, 100 * round(value / 100.0))
