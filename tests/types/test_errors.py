"""What a process that has run out of something is told."""

import errno
import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from kvabr.replay.report import write_log, write_perfetto
from kvabr.telemetry import JsonLines, Telemetry
from kvabr.types.errors import (
    ExhaustedError,
    PlayError,
    TransportError,
    exhausted,
    exhaustion_as_error,
    may_pass,
)
from kvabr.types.events import DecisionMade, PlayEvent, RequestFailed
from tests.replay.report_samples import sample


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory is left"),
        (MemoryError(), "no memory is left"),
        (RuntimeError("can't start new thread"), "no thread can be started"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), "no memory"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("another"), None),
        (ValueError("another"), None),
        (PlayError("ours"), None),
    ],
)
def test_what_has_run_out_is_told(error, said):
    for raised in (error, wrapped(error)):
        told = exhausted(raised)
        assert (told is None) == (said is None)
        if said is not None:
            assert isinstance(told, PlayError | TransportError)
            assert may_pass(told)
            assert said in str(told)


def wrapped(error):
    """Return an error that another caused, which caused itself."""
    made = ImportError("a module cannot be loaded")
    made.__cause__ = error
    if not isinstance(error, PlayError):
        error.__cause__ = error
    return made


def test_only_what_is_exhausted_is_told_so():
    with pytest.raises(ExhaustedError), exhaustion_as_error():
        raise MemoryError
    with pytest.raises(KeyError), exhaustion_as_error():
        raise KeyError


@dataclass(frozen=True, slots=True)
class CacheWarmed(PlayEvent):
    """An event that only this test knows."""

    name: ClassVar[str] = "warmed"
    group: int
    heat: float | None


NEW = CacheWarmed(0.25, 3, 0.5)


def test_json_has_time_name_and_fields_in_order_and_no_options_that_are_unset():
    failed = RequestFailed(1.5, 2, 3, "Int4", 400, "reset")
    assert json.dumps(failed.to_json()) == (
        '{"t": 1.5, "event": "failed", "request": 2, "group": 3, "track": "Int4", "received": 400, "reason": "reset"}'
    )
    wait = DecisionMade(0.0, "wait", None, None, None, "full", 0.0, 0.0, 0.0, None, None)
    assert wait.to_json()["group"] is None
    assert "late" not in wait.to_json()
    assert list(replace(wait, late=True).to_json().items())[-1] == ("late", True)


def test_a_new_event_reaches_the_log_the_trace_and_telemetry(tmp_path):
    result, timelines = sample()
    timelines = [{**timelines[0], "log": [*timelines[0]["log"], NEW]}]
    write_log(tmp_path / "log.jsonl", result, timelines)
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert {key: last[key] for key in ("t", "event", "group", "heat")} == NEW.to_json()
    write_perfetto(tmp_path / "trace.json", result, timelines)
    shown = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"] for event in shown if event["name"] == "warmed"] == [{"group": 3, "heat": 0.5}]
    with Telemetry(JsonLines(tmp_path / "plays.jsonl")) as telemetry:
        telemetry.feed([NEW])
    told = [json.loads(line) for line in (tmp_path / "plays.jsonl").read_text().splitlines()]
    assert [(record["event"], record.get("heat")) for record in told] == [
        ("called", None),
        ("warmed", 0.5),
        ("ended", None),
    ]
