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

from collections.abc import Iterator, Mapping
from typing import Any

from kvabr.telemetry.listener import CALLED, ENDED

Line = Mapping[str, Any]
Record = dict[str, Any]

_ENOUGH = 5
"""How many times its rate an object should be sent with."""
_PASSED_ON = frozenset(
    {
        CALLED, ENDED, "start", "cancel", "failed", "decoded", "recompute_start", "recompute_done", "recompute_failed",
        "lookup_failed", "profile_failed", "deliver", "gave_up",
    }
)  # fmt: skip
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
        self._decision: Line = {}
        self._requests: dict[int, tuple[float, float | None]] = {}
        """Of each request under way, when it was sent and when its first byte came."""
        self._pending: Record | None = None
        """The last request's record: it waits for the next line, to tell what was asked for behind it."""
        self._starved = False

    def records(self, wall_s: float, line: Line) -> Iterator[Record]:
        """What a line amounts to: mostly one record, none for what is of no interest alone.

        Args:
            wall_s: when it happened, seconds since 1970.
            line: of the play's log.
        """
        event = line["event"]
        if self._pending is not None and event != "request":
            # A decision at the same time may lead to the request behind it.
            behind = event == "decision" and line["kind"] not in _TOLD and line["t"] == self._pending["t"]
            if not behind:
                yield self._sent()
        if event == "request":
            yield from self._request(wall_s, line)
        elif event == "decision":
            if line["kind"] in _TOLD:
                yield self._record(wall_s, line, self._buffer(line), *_NUMBERS, "kind", "group", "reason")
            self._decision = line
        elif event == "first_byte":
            sent_s, first_s = self._requests.get(line["request"], (line["t"], None))
            self._requests[line["request"]] = (sent_s, line["t"] if first_s is None else first_s)
        elif event == "progress":
            yield self._record(wall_s, line, self._buffer(line), "received", *_NUMBERS)
        elif event == "done":
            yield self._record(wall_s, line, self._times(line), "request", "group", "track", "bytes")
        elif event in _PASSED_ON:
            yield self._other(wall_s, line)

    def _sent(self) -> Record:
        pending, self._pending = self._pending, None
        assert pending is not None  # noqa: S101  # its callers have looked
        return pending

    def _request(self, wall_s: float, line: Line) -> Iterator[Record]:
        decision = self._decision if self._decision.get("request") == line["request"] else {}
        cmcd = self._buffer({**decision, "t": line["t"]})
        rate = 8.0 * line["bytes"] / self._segment_s if self._segment_s else 0.0
        if rate:
            cmcd |= {"br": round(rate / 1e3), "d": round(1e3 * self._segment_s), "rtp": _hundreds(_ENOUGH * rate / 1e3)}
        if self._top and self._segment_s:
            cmcd["tb"] = round(8.0 * self._top / self._deadline_s / 1e3)
        if decision.get("kind") == "fetch":
            cmcd["su"] = True
        if line["t"] > self._deadline_s > 0 and not self._starved:
            cmcd["bs"] = self._starved = True
        cmcd |= {"st": "v", "sf": "o", "ot": "o"}
        if self._pending is not None:
            if self._pending["t"] == line["t"]:
                self._pending["cmcd"]["nor"] = f"{line['track']}/{line['group']}"
            yield self._sent()
        if len(self._requests) < _MOST_REQUESTS:
            self._requests[line["request"]] = (line["t"], None)
        more = {key: decision[key] for key in (*_NUMBERS, "kind", "reason") if key in decision}
        self._pending = self._record(wall_s, line, cmcd, "request", "group", "track", "bytes") | more

    def _times(self, line: Line) -> Record:
        sent_s, first_s = self._requests.pop(line["request"], (None, None))
        cmcd: Record = {}
        if sent_s is not None:
            cmcd["ttlb"] = round(1e3 * (line["t"] - sent_s))
            if first_s is not None:
                cmcd["ttfb"] = round(1e3 * (first_s - sent_s))
        return cmcd

    def _buffer(self, line: Line) -> Record:
        """What is known of time and rate at a line."""
        cmcd: Record = {}
        if self._deadline_s:
            cmcd["dl"] = _hundreds(1e3 * (self._deadline_s - line["t"]))
        if (slack := line.get("slack_s")) is not None:
            cmcd["bl"] = _hundreds(1e3 * slack)
        if rate := line.get("rate"):
            cmcd["mtp"] = _hundreds(8.0 * rate / 1e3)
        return cmcd

    def _other(self, wall_s: float, line: Line) -> Record:
        event, cmcd = line["event"], Record()
        if event == "start":
            self._begin(line)
        elif event in {"cancel", "failed"}:
            self._requests.pop(line["request"], None)
        elif event == "deliver" and not line["met"]:
            cmcd["bs"] = True
        return self._record(wall_s, line, cmcd, *(key for key in line if key not in {"t", "event"}))

    def _begin(self, line: Line) -> None:
        self._deadline_s = line["deadline_s"]
        self._segment_s = line["deadline_s"] / max(1, line["groups"])
        self._top = max(line.get("track_bytes") or (line.get("fp16_bytes", 0),))
        asset = line.get("asset")
        if isinstance(asset, str):
            self._who["cid"] = asset.rpartition("/")[2]

    def _record(self, wall_s: float, line: Line, cmcd: Record, *keys: str) -> Record:
        record: Record = {"ts": round(1e3 * wall_s), "t": line["t"], "event": line["event"], "cmcd": self._who | cmcd}
        record.update((key, line[key]) for key in keys if key in line)
        return record


_NUMBERS = ("slack_s", "rate", "lower")


def _hundreds(value: float) -> int:
    """Rounded to hundreds, never below 0: as CTA-5004 wants its times and rates."""
    return max(0, 100 * round(value / 100.0))
