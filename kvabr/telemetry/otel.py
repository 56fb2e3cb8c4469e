"""`OpenTelemetry`: a span for every play, with one below it for each lookup, transfer, decoding and prefill.

The span of a play is a child of the span that is current where the play is called, so that it appears in the trace of
the request that it serves. Which exporter gets the spans is the application's business: kvabr only needs the package
``opentelemetry-api`` (extra ``otel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvabr.telemetry.listener import CALLED, ENDED, Heard, Listener
from kvabr.telemetry.plays import Plays
from kvabr.types.errors import UsageError

_MOST_SPANS = 2000
"""Spans below that of one play; what comes beyond is counted in ``kvabr.spans_left_out``."""
_STARTED = ("policy", "estimator", "deadline_s", "engine_mode", "groups", "fp16_bytes", "asset", "rtt_s")
_REQUESTED = ("group", "track", "bytes")
_DECIDED = ("kind", "reason", "rate", "lower", "slack_s")
_OUTCOMES = {"cancel": "cancelled", "failed": "failed"}

Key = tuple[str, int]
"""What a span is of, and which one: the number of the request, or of the first group."""


class OpenTelemetry(Listener):
    """Makes spans of plays."""

    name: ClassVar[str] = "opentelemetry"

    def __init__(self, tracer_provider: Any = None) -> None:
        """Take a tracer.

        Args:
            tracer_provider: an `opentelemetry.trace.TracerProvider`; None: the application's global one.

        Raises:
            UsageError: the package opentelemetry-api is not installed.
        """
        try:
            from opentelemetry import trace  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise UsageError(f"spans need OpenTelemetry ({error}): pip install 'kvabr[otel]'") from error
        from kvabr import __version__  # noqa: PLC0415

        self._trace = trace
        self._tracer = trace.get_tracer("kvabr", __version__, tracer_provider)
        self._plays: Plays[_Spans] = Plays(lambda sid: _Spans(trace, self._tracer, sid))

    def hear(self, heard: Heard) -> None:
        """Begin, end or annotate a span."""
        self._plays.of(heard).hear(round(1e9 * heard.wall_s), heard.line)


class _Spans:
    """The spans of one play."""

    def __init__(self, trace: Any, tracer: Any, sid: str) -> None:
        self._trace, self._tracer, self._sid = trace, tracer, sid
        self._root: Any = None
        self._below: Any = None
        self._open: dict[Key, Any] = {}
        self._made = 0
        self._left_out = 0
        self._decision: Mapping[str, Any] = {}

    def hear(self, now: int, line: Mapping[str, Any]) -> None:
        """One event, at so many nanoseconds since 1970."""
        event = line["event"]
        if self._root is None:
            self._root = self._tracer.start_span("kvabr.play", start_time=now, attributes={"kvabr.sid": self._sid})
            self._below = self._trace.set_span_in_context(self._root)
        if event == "decision":
            self._decision = line
        elif event in {"request", "first_byte", "done", "cancel", "failed", "decoded"}:
            self._transfer(now, line)
        elif event in {"recompute_start", "recompute_done", "recompute_failed"}:
            self._engine(now, line)
        else:
            self._course(now, line)

    def _course(self, now: int, line: Mapping[str, Any]) -> None:
        """How the play as a whole goes on."""
        event = line["event"]
        if event == CALLED:
            self._begin(("lookup", 0), now)
        elif event == "start":
            self._end(("lookup", 0), now)
            self._root.set_attributes(_named(line, _STARTED))
        elif event == "deliver":
            self._root.set_attributes(_named(line, ("met", "loss")))
        elif event in {"gave_up", "lookup_failed", "profile_failed"}:
            self._root.add_event(f"kvabr.{event}", _named(line, ("reason",)), timestamp=now)
            if event == "lookup_failed":
                self._end(("lookup", 0), now, error=line["reason"])
        elif event == ENDED:
            self._over(now, line)

    def _engine(self, now: int, line: Mapping[str, Any]) -> None:
        if line["event"] == "recompute_start":
            self._end(("lookup", 0), now)  # where nothing is cached there is no other end of it
            self._begin(("recompute", 0), now, _named(line, ("first", "last")))
        else:
            self._end(("recompute", 0), now, error=line.get("reason"))

    def _transfer(self, now: int, line: Mapping[str, Any]) -> None:
        event, request = line["event"], line["request"]
        fetch, decode = ("fetch", request), ("decode", request)
        if event == "request":
            decided = self._decision if self._decision.get("request") == request else {}
            self._begin(fetch, now, _named(line, _REQUESTED) | _named(decided, _DECIDED))
        elif event == "first_byte":
            if fetch in self._open:
                self._open[fetch].add_event("first byte", timestamp=now)
        elif event == "done":
            self._end(fetch, now)
            self._begin(decode, now, _named(line, _REQUESTED))
        elif event == "decoded":
            self._end(decode, now)
        else:
            # What was given up is no error; what failed is, be it on its way or in the decoder.
            attributes = {"kvabr.outcome": _OUTCOMES[event], **_named(line, ("received", "reason"))}
            key = decode if decode in self._open else fetch
            self._end(key, now, attributes, error=line["reason"] if event == "failed" else None)

    def _begin(self, key: Key, now: int, attributes: Mapping[str, Any] | None = None) -> None:
        if self._made >= _MOST_SPANS:
            self._left_out += 1
            return
        self._made += 1
        self._open[key] = self._tracer.start_span(
            f"kvabr.{key[0]}", context=self._below, start_time=now, attributes=attributes
        )

    def _end(
        self, key: Key, now: int, attributes: Mapping[str, Any] | None = None, *, error: str | None = None
    ) -> None:
        span = self._open.pop(key, None)
        if span is not None:
            if attributes:
                span.set_attributes(attributes)
            if error is not None:
                span.set_status(self._trace.StatusCode.ERROR, error)
            span.end(end_time=now)

    def _over(self, now: int, line: Mapping[str, Any]) -> None:
        for key in list(self._open):
            self._end(key, now, {"kvabr.outcome": "unfinished"})
        if self._left_out:
            self._root.set_attribute("kvabr.spans_left_out", self._left_out)
        if line["error"] is not None:
            self._root.set_status(self._trace.StatusCode.ERROR, f"{line['error']}: {line['reason']}")
        self._root.end(end_time=now)


def _named(line: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The attributes that a line gives a span: what is None says nothing."""
    return {f"kvabr.{key}": line[key] for key in keys if line.get(key) is not None}
