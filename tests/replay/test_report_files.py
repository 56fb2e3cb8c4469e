"""The log as JSON lines, and the trace for Perfetto."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.replay.report import write_log, write_perfetto
from kvabr.replay.report.timeline import (
    achieved,
    assign_rows,
    capacity,
    requests,
)
from kvabr.types.errors import AssetError
from kvabr.types.events import (
    DecisionMade,
    ProgressMade,
    RequestDone,
    RequestFailed,
    RequestSent,
)
from tests.replay.report_samples import HOSTILE, hostile, live_sample, sample


def test_the_log_round_trips(tmp_path):
    result, timelines = sample()
    path = tmp_path / "log.jsonl"
    write_log(path, result, timelines)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = [(timeline["run"], event) for timeline in timelines for event in timeline["log"]]
    assert len(lines) == len(expected)
    for line, (index, event) in zip(lines, expected, strict=True):
        run = result["runs"][index]
        assert (line["run"], line["trace"], line["policy"]) == (index, run["trace"], run["policy"])
        told = event.to_json()
        assert {key: line[key] for key in told} == json.loads(json.dumps(told))
    first = path.read_bytes()
    write_log(path, result, timelines)
    assert path.read_bytes() == first


def test_the_log_takes_any_name_and_any_number(tmp_path):
    result, timelines = hostile()
    log = timelines[0]["log"]
    at = next(index for index, event in enumerate(log) if isinstance(event, DecisionMade))
    log[at] = replace(log[at], rate=math.nan, slack_s=-math.inf, alternatives={"FP8": math.inf})
    write_log(tmp_path / "log.jsonl", result, timelines)
    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n") if line]
    assert lines[0]["trace"] == HOSTILE
    assert (lines[at]["rate"], lines[at]["slack_s"], lines[at]["alternatives"]) == (None, None, {"FP8": None})


def events(tmp_path, result, timelines):
    write_perfetto(tmp_path / "trace.json", result, timelines)
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    return json.loads(text, parse_constant=pytest.fail)["traceEvents"]


def test_the_trace_is_well_formed(tmp_path):
    result, timelines = hostile()
    found = events(tmp_path, result, timelines)
    for event in found:
        assert event["ph"] in {"M", "X", "i", "C"}
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert {event["pid"] for event in found} == set(range(1, len(timelines) + 1))
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"} <= named
    assert any(HOSTILE in event["args"]["name"] for event in found if event["name"] == "process_name")


def test_the_trace_shows_what_the_log_holds(tmp_path):
    result, timelines = sample()
    found = events(tmp_path, result, timelines)
    log = [event for timeline in timelines for event in timeline["log"]]

    def logged(kind):
        return sum(event.name == kind for event in log)

    requests = [e for e in found if e["ph"] == "X" and "outcome" in e["args"]]
    assert len(requests) == logged("request")
    assert sum(e["args"]["outcome"] == "cancelled" for e in requests) == logged("cancel") > 0
    assert sum(e["ph"] == "X" and "finished" in e["args"] for e in found) == logged("recompute_start") > 0
    decisions = [e for e in found if e["ph"] == "i" and "reason" in e["args"]]
    assert len(decisions) == logged("decision")
    assert all(e["args"]["reason"] for e in decisions)
    assert sum(e["name"] == "deadline" for e in found) == len(timelines)
    assert sum(e["name"] == "deliver" for e in found) == len(timelines)
    counters = {e["name"] for e in found if e["ph"] == "C"}
    assert counters == {
        "link capacity (Mbit/s)", "estimate (Mbit/s)", "lower bound (Mbit/s)", "slack (s)", "received (MB)",
    }  # fmt: skip


def test_the_trace_has_a_row_for_a_prefill_that_goes_on_meanwhile(tmp_path):
    result, timelines = live_sample()
    found = events(tmp_path, result, timelines)
    (row,) = {e["tid"] for e in found if e["name"] == "thread_name" and e["args"]["name"] == "prefill"}
    spans = [e for e in found if e["ph"] == "X" and e["tid"] == row]
    assert [span["args"]["edge"] for span in spans] == list(range(1, 13))
    assert spans[0]["ts"] == 0
    assert spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(1.2e6, rel=0.1)


@pytest.mark.parametrize("write", [write_log, write_perfetto])
def test_what_cannot_be_written_says_so(tmp_path, write):
    result, timelines = sample()
    with pytest.raises(AssetError, match="cannot be written"):
        write(tmp_path / "missing" / "out", result, timelines)


def area(line, until):
    ends = [*line["t"][1:], until]
    return sum((end - start) * rate for start, end, rate in zip(line["t"], ends, line["mean"], strict=True))


def test_a_millisecond_link_is_thinned_and_keeps_its_bytes_and_its_dips():
    link = [(i / 1000, 0.0 if i == 2500 else 1e6 + 1e5 * (i % 7)) for i in range(10_000)]
    line = capacity(link, 10.0)
    assert len(line["t"]) == len(line["mean"]) == len(line["low"]) == 1000
    assert area(line, 10.0) == pytest.approx(sum(rate for _, rate in link) / 1000, rel=1e-3)
    assert line["low"][250] == 0
    assert all(low <= mean * 1.001 for low, mean in zip(line["low"], line["mean"], strict=True))


@given(
    rates=st.lists(st.floats(0, 1e9), min_size=1, max_size=60),
    until=st.floats(0.01, 100),
    most=st.integers(1, 40),
)
def test_thinning_never_makes_or_loses_bytes(rates, until, most):
    step = until / len(rates)
    link = [(i * step, rate) for i, rate in enumerate(rates)]
    line = capacity(link, until, most)
    rounding = 1e-5 * max(rates) * (len(line["t"]) + 1)  # times are rounded to 10 microseconds
    assert area(line, until) == pytest.approx(sum(rates) * step, rel=2e-3, abs=rounding + until)
    assert len(line["t"]) <= max(most, 1)


@pytest.mark.parametrize("with_progress", [True, False])
def test_achieved_throughput_adds_up_to_the_bytes_that_came(with_progress):
    result, timelines = sample()
    for timeline in timelines:
        log = [event for event in timeline["log"] if with_progress or not isinstance(event, ProgressMade)]
        until = max(event.t for event in log) * 1.03
        line = achieved(log, until)
        step = until / len(line["t"])
        came = sum(item.received for item in requests(log))
        assert sum(line["rate"]) * step == pytest.approx(came, rel=0.01)
        assert came <= result["runs"][timeline["run"]]["bytes_fetched"] + 1


def test_a_group_that_was_refused_keeps_its_time_of_arrival_and_what_had_come():
    sent, done = RequestSent(0.0, 0, 3, "FP8", 10), RequestDone(0.3, 0, 3, "FP8", 10)
    (refused,) = requests([sent, done, RequestFailed(0.35, 0, 3, "FP8", 0, "checksum")])
    assert (refused.outcome, refused.end_s, refused.received, refused.reason) == ("failed", 0.3, 10, "checksum")


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=40))
def test_spans_in_one_row_never_overlap(pairs):
    spans = sorted((start, start + length) for start, length in pairs)
    chosen = assign_rows(spans)
    for i, (start, _) in enumerate(spans):
        assert not any(chosen[j] == chosen[i] and spans[j][1] > start for j in range(i))
    for i, (start, _) in enumerate(spans):
        busy = {chosen[j] for j in range(i) if spans[j][1] > start}
        assert chosen[i] <= len(busy), "a new row only where all others are taken"
