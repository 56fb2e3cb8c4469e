"""Spans of plays, made with the real OpenTelemetry SDK and its exporter into memory."""

import pytest

from kvabr.telemetry import OpenTelemetry, Telemetry, otel
from kvabr.types.errors import UsageError
from kvabr.types.events import GroupsPublished, PlayGaveUp, RequestCancelled, RequestDone, RequestFailed, RequestSent
from tests.telemetry.plays import GROUPS, OFFER, broken, simulated

NEEDED = "opentelemetry-sdk is not installed: tools/setup-venv"
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=NEEDED)
export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=NEEDED)
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=NEEDED)


@pytest.fixture
def tracing():
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def spans(exporter):
    """The spans by name, each list in the order of their beginnings."""
    found = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
        found.setdefault(span.name, []).append(span)
    return found


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_play_is_a_span_with_one_below_it_for_all_that_takes_time(tracing):
    provider, exporter = tracing
    lines = simulated()
    with Telemetry(OpenTelemetry(provider)) as telemetry:
        sid = telemetry.feed(lines, began_s=1e9)
    assert telemetry.counts["opentelemetry"].errors == 0
    found = spans(exporter)
    (play,) = found["kvabr.play"]
    assert play.parent is None
    assert play.start_time == 10**18
    assert seconds(play) == pytest.approx(lines[-1].t, abs=1e-6)
    attributes = play.attributes
    assert attributes["kvabr.sid"] == sid
    assert attributes["kvabr.asset"].endswith(OFFER.namespace.prompt)
    assert attributes["kvabr.policy"] == "anytime"
    assert attributes["kvabr.groups"] == GROUPS
    assert attributes["kvabr.met"] is True
    assert attributes["kvabr.loss"] == pytest.approx(lines[-1].loss)
    assert play.instrumentation_scope.name == "kvabr"

    fetches = found["kvabr.fetch"]
    asked = [line for line in lines if line.name == "request"]
    assert [(span.attributes["kvabr.group"], span.attributes["kvabr.track"]) for span in fetches] == [
        (line.group, line.track) for line in asked
    ]
    assert {span.attributes["kvabr.kind"] for span in fetches} == {"fetch", "upgrade"}
    assert all(span.attributes["kvabr.reason"] for span in fetches)
    done = {line.request: line.t for line in lines if line.name == "done"}
    for span, line in zip(fetches, asked, strict=True):
        if line.request in done:
            assert seconds(span) == pytest.approx(done[line.request] - line.t, abs=1e-6)
            assert [event.name for event in span.events] == ["first byte"]
    assert len(found["kvabr.decode"]) == len(done)
    (lookup,) = found["kvabr.lookup"]
    for span in (lookup, *fetches, *found["kvabr.decode"]):
        assert span.parent.span_id == play.context.span_id
        assert span.context.trace_id == play.context.trace_id
        assert play.start_time <= span.start_time <= span.end_time <= play.end_time


def test_what_fails_is_an_error_and_what_was_given_up_is_none(tracing):
    provider, exporter = tracing
    status = provider.get_tracer("x").start_span("x").status.status_code.__class__
    lines = [
        *(RequestSent(0.1, request, 1, "base", 10) for request in range(4)),
        RequestFailed(0.2, 0, 1, "base", 3, "reset"),
        RequestCancelled(0.2, 1, 1, "base", 5, "too slow"),
        RequestDone(0.3, 2, 1, "base", 10),
        RequestFailed(0.4, 2, 1, "base", 10, "corrupt"),
        PlayGaveUp(0.5, "nothing came"),
    ]
    with Telemetry(OpenTelemetry(provider)) as telemetry, pytest.raises(RuntimeError):
        broken(telemetry, lines, RuntimeError("no cache"))
    found = spans(exporter)
    outcomes = [(span.attributes.get("kvabr.outcome"), span.status.status_code) for span in found["kvabr.fetch"]]
    assert outcomes == [
        ("failed", status.ERROR), ("cancelled", status.UNSET), (None, status.UNSET), ("unfinished", status.UNSET),
    ]  # fmt: skip
    (decode,) = found["kvabr.decode"]
    assert (decode.status.status_code, decode.status.description) == (status.ERROR, "corrupt")
    (play,) = found["kvabr.play"]
    assert (play.status.status_code, play.status.description) == (status.ERROR, "RuntimeError: no cache")
    assert [event.name for event in play.events] == ["kvabr.gave_up"]


def test_a_play_of_very_many_groups_has_spans_up_to_a_bound(tracing, monkeypatch):
    monkeypatch.setattr(otel, "_MAX_SPANS", 5)
    provider, exporter = tracing
    with Telemetry(OpenTelemetry(provider)) as telemetry:
        telemetry.feed(lines := simulated())
    (play,) = spans(exporter)["kvabr.play"]
    made = sum(line.name in {"request", "done"} for line in lines) + 1
    assert play.attributes["kvabr.spans_left_out"] == made - 5
    assert len(exporter.get_finished_spans()) == 6


def test_a_live_play_of_a_million_tokens_has_events_up_to_a_bound(tracing):
    provider, exporter = tracing
    events = [GroupsPublished(0.001 * group, group, 8.192) for group in range(1, 8193)]
    sent = [RequestSent(9.0, group, group, "Int4", 100) for group in range(8192)]
    with Telemetry(OpenTelemetry(provider)) as telemetry:
        telemetry.feed([*events, *sent, PlayGaveUp(9.0, "too late")])
    (play,) = spans(exporter)["kvabr.play"]
    assert play.attributes["kvabr.events_left_out"] == 8192 - 100
    assert play.events[-1].name == "kvabr.gave_up"
    assert sum(len(span.to_json(indent=None)) for span in exporter.get_finished_spans()) < 2_500_000


def test_prefill_is_a_span(tracing):
    provider, exporter = tracing
    with Telemetry(OpenTelemetry(provider)) as telemetry:
        telemetry.feed(lines := simulated((2e5, *[0.0] * 40, 1.0), engine=True))
    computed = spans(exporter)["kvabr.recompute"]
    ends = [line for line in lines if line.name == "recompute_done"]
    assert [(span.attributes["kvabr.first"], span.attributes["kvabr.last"]) for span in computed] == [
        (line.first, line.last) for line in ends
    ]


def test_without_the_package_it_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"'\.\[otel\]'"):
        OpenTelemetry()
