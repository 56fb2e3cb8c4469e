"""`OpenTelemetry`: a span for every play, with child spans for lookup, transfers, decoding and prefill.

The span of a play is a child of the caller's current span. The application chooses the exporter; kvabr needs only
``opentelemetry-api`` (extra ``otel``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from kvabr.telemetry.listener import EventRecord, Listener, PlayStates
from kvabr.types import events
from kvabr.types.errors import UsageError
from kvabr.types.installing import WHERE, extra

_MAX_SPANS = 2000
"""Maximum number of spans per play; ``kvabr.spans_left_out`` counts the rest."""
_MAX_EVENTS = 100
"""Maximum events per kind on a play's span (live: one event per group); ``kvabr.events_left_out`` counts the rest."""
_STARTED = ("policy", "estimator", "deadline_s", "engine_mode", "groups", "fp16_bytes", "asset", "rtt_s")
_REQUESTED = ("group", "track", "bytes")
_DECIDED = ("kind", "reason", "rate", "lower", "slack_s")
_LOOKUP, _TOKENS = ("lookup", 0), ("recompute tokens", 0)

Key = tuple[str, int]


class OpenTelemetry(Listener):
    """Creates a trace of every play."""

    name: ClassVar[str] = "opentelemetry"

    def __init__(self, tracer_provider: Any = None) -> None:
        """``tracer_provider`` is an `opentelemetry.trace.TracerProvider`; None: the application's global provider."""
        try:
            from opentelemetry import trace  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise UsageError(f"spans need OpenTelemetry ({error}): {extra('otel')} ({WHERE})") from error
        from kvabr import __version__  # noqa: PLC0415

        self._trace = trace
        self._tracer = trace.get_tracer("kvabr", __version__, tracer_provider)
        self._plays: PlayStates[_Spans] = PlayStates(lambda sid: _Spans(trace, self._tracer, sid))

    def receive(self, record: EventRecord) -> None:
        """Start, end or annotate a span."""
        self._plays.of(record).receive(round(1e9 * record.wall_s), record.event)


class _Spans:
    def __init__(self, trace: Any, tracer: Any, sid: str) -> None:
        self._trace, self._tracer, self._sid = trace, tracer, sid
        self._root: Any = None
        self._below: Any = None
        self._open: dict[Key, Any] = {}
        self._spans = 0
        self._spans_left_out = self._events_left_out = 0
        self._event_counts: Counter[str] = Counter()
        self._decision: events.DecisionMade | None = None

    def receive(self, now: int, event: events.PlayEvent) -> None:
        if self._root is None:
            self._root = self._tracer.start_span("kvabr.play", start_time=now, attributes={"kvabr.sid": self._sid})
            self._below = self._trace.set_span_in_context(self._root)
        match event:
            case events.DecisionMade():
                self._decision = event
            case events.FirstByteReceived():
                if (fetch := ("fetch", event.request)) in self._open:
                    self._open[fetch].add_event("first byte", timestamp=now)
            case events.TransferEvent():
                self._transfer(now, event)
            case events.TokensStarted():
                self._begin(_TOKENS, now, _named(event, ("tokens", "share", "reason")))
            case events.TokensDone() | events.TokensFailed():
                self._end(_TOKENS, now, error=event.reason if isinstance(event, events.TokensFailed) else None)
            case events.RecomputeEvent():
                self._engine(now, event)
            case events.ProgressMade() | events.SampleLimited():
                pass  # too frequent for a trace
            case _:
                self._course(now, event)

    def _course(self, now: int, event: events.PlayEvent) -> None:
        match event:
            case events.PlayCalled():
                self._begin(_LOOKUP, now)
            case events.PlayStarted():
                self._end(_LOOKUP, now)
                self._root.set_attributes(_named(event, _STARTED))
            case events.CacheDelivered():
                self._root.set_attributes(_named(event, ("met", "loss")))
            case events.PlayEnded():
                self._over(now, event)
            case _:
                self._annotate(now, event)
                if isinstance(event, events.LookupFailed):
                    self._end(_LOOKUP, now, error=event.reason)

    def _annotate(self, now: int, event: events.PlayEvent) -> None:
        self._event_counts[event.name] += 1
        if self._event_counts[event.name] > _MAX_EVENTS:
            self._events_left_out += 1
            return
        fields = tuple(key for key in event.to_json() if key not in {"t", "event"})
        self._root.add_event(f"kvabr.{event.name}", _named(event, fields), timestamp=now)

    def _engine(self, now: int, event: events.RecomputeEvent) -> None:
        if isinstance(event, events.RecomputeStarted):
            self._end(_LOOKUP, now)  # if no prefix is cached, no other event ends the lookup
            self._begin(("recompute", 0), now, _named(event, ("first", "last")))
        else:
            self._end(("recompute", 0), now, error=event.reason if isinstance(event, events.RecomputeFailed) else None)

    def _transfer(self, now: int, event: events.TransferEvent) -> None:
        fetch, decode = ("fetch", event.request), ("decode", event.request)
        match event:
            case events.RequestSent():
                decision = self._decision
                decided = {} if decision is None or decision.request != event.request else _named(decision, _DECIDED)
                self._begin(fetch, now, _named(event, _REQUESTED) | decided)
            case events.RequestDone():
                self._end(fetch, now)
                self._begin(decode, now, _named(event, _REQUESTED))
            case events.GroupDecoded():
                self._end(decode, now)
            case events.RequestCancelled() | events.RequestFailed():
                # A failed request is an error, no matter if transfer or decoder failed; a cancelled request is not.
                failed = isinstance(event, events.RequestFailed)
                outcome = {"kvabr.outcome": "failed" if failed else "cancelled"}
                attributes = outcome | _named(event, ("received", "reason"))
                key = decode if decode in self._open else fetch
                self._end(key, now, attributes, error=event.reason if failed else None)

    def _begin(self, key: Key, now: int, attributes: Mapping[str, Any] | None = None) -> None:
        if self._spans >= _MAX_SPANS:
            self._spans_left_out += 1
            return
        self._spans += 1
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

    def _over(self, now: int, event: events.PlayEnded) -> None:
        for key in list(self._open):
            self._end(key, now, {"kvabr.outcome": "unfinished"})
        if self._spans_left_out:
            self._root.set_attribute("kvabr.spans_left_out", self._spans_left_out)
        if self._events_left_out:
            self._root.set_attribute("kvabr.events_left_out", self._events_left_out)
        if event.error is not None:
            self._root.set_status(self._trace.StatusCode.ERROR, f"{event.error}: {event.reason}")
        self._root.end(end_time=now)


def _named(event: events.PlayEvent, fields: tuple[str, ...]) -> dict[str, Any]:
    return {f"kvabr.{key}": value for key in fields if (value := getattr(event, key)) is not None}
