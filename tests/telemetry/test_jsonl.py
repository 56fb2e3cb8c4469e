"""CMCD names for what a play tells, and the file that they go to."""

import json
from dataclasses import replace

from kvabr.telemetry import JsonLines, Telemetry
from kvabr.telemetry.jsonl import Cmcd
from kvabr.telemetry.listener import MAX_PLAYS
from kvabr.types.events import (
    CacheDelivered,
    DecisionMade,
    PlayEnded,
    PlayStarted,
    RecomputeStarted,
    RequestFailed,
    RequestSent,
    SampleLimited,
)
from tests.telemetry.plays import DEADLINE_S, GROUPS, OFFER, progress, simulated

START = PlayStarted(
    0.0,
    trace="t",
    start_s=0.0,
    policy="anytime",
    estimator="ewma",
    deadline_s=2.0,
    engine_mode="hole",
    groups=10,
    asset="test/model/abcdef",
    tracks=("base", "FP16"),
    track_bytes=(10_000, 80_000),
    worth_playing=("base",),
    fp16_bytes=80_000,
    rtt_s=0.04,
)


def records(*lines, sid="s1"):
    cmcd = Cmcd(sid)
    found = []
    for line in (*lines, PlayEnded(9.0, None, None)):
        found += cmcd.records(100.0 + line.t, line)
    return found


def decided(t, request, kind="fetch", *, reason="why", rate=125_000.0, slack_s=0.85):
    return DecisionMade(t, kind, None, None, request, reason, rate, 50_000.0, 0.04, slack_s, None)


def asked(t, request, group, track="base", size=1000):
    return RequestSent(t, request, group, track, size)


def test_a_request_says_all_that_cmcd_has_a_name_for():
    start, one, _ = records(START, decided(0.5, 0), asked(0.5, 0, 3))
    assert (start["event"], start["cmcd"]) == ("start", {"sid": "s1", "cid": "abcdef"})
    assert one == {
        "ts": 100_500,
        "t": 0.5,
        "event": "request",
        "request": 0,
        "group": 3,
        "track": "base",
        "bytes": 1000,
        "kind": "fetch",
        "reason": "why",
        "rate": 125_000.0,
        "lower": 50_000.0,
        "slack_s": 0.85,
        "cmcd": {
            "sid": "s1",
            "cid": "abcdef",
            "d": 200,  # 2 s for ten groups
            "br": 40,  # 1000 bytes in 0.2 s
            "rtp": 200,
            "tb": 320,  # 80,000 bytes in 2 s
            "dl": 1500,
            "bl": 800,  # 850 ms, to the even hundred
            "mtp": 1000,
            "su": True,
            "st": "v",
            "sf": "o",
            "ot": "o",
        },
    }


def test_what_is_asked_for_together_names_the_next():
    found = records(
        START,
        decided(0.5, 0), asked(0.5, 0, 3), decided(0.5, 1), asked(0.5, 1, 4, "Int4"), decided(0.5, None, "wait"),
        decided(0.6, 2), asked(0.6, 2, 5),
    )  # fmt: skip
    requests = [record for record in found if record["event"] == "request"]
    assert [record["cmcd"].get("nor") for record in requests] == ["Int4/4", None, None]
    assert [record["t"] for record in found] == sorted(record["t"] for record in found)


def test_a_deadline_missed_is_a_starved_buffer_once():
    found = records(START, asked(1.9, 0, 1), asked(2.1, 1, 2), asked(2.2, 2, 3))
    assert [record["cmcd"].get("bs") for record in found[1:4]] == [None, True, None]
    assert [record["cmcd"]["dl"] for record in found[1:4]] == [100, 0, 0]
    late = CacheDelivered(2.3, met=False, loss=0.1)
    assert records(START, late)[1]["cmcd"]["bs"] is True
    assert "bs" not in records(START, replace(late, met=True))[1]["cmcd"]


def test_a_whole_play_goes_to_a_file_one_object_a_line(tmp_path):
    path = tmp_path / "plays.jsonl"
    for _ in range(2):
        with Telemetry(JsonLines(path)) as telemetry:
            telemetry.feed(simulated(), began_s=1e9)
    assert path.stat().st_mode & 0o777 == 0o600
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["cmcd"]["sid"] for record in found}) == 2
    assert {record["cmcd"].get("cid") for record in found} == {None, OFFER.namespace.prompt}  # None: before it is known
    mine = [record for record in found if record["cmcd"]["sid"] == found[0]["cmcd"]["sid"]]
    lines = simulated()
    for event in ("request", "done", "decoded", "deliver", "progress"):
        assert sum(record["event"] == event for record in mine) == sum(line.name == event for line in lines) > 0
    requests = [record for record in mine if record["event"] == "request"]
    assert sum("su" in record["cmcd"] for record in requests) == GROUPS
    assert all(record["cmcd"]["dl"] <= 1e3 * DEADLINE_S for record in requests)
    assert all(record["cmcd"]["br"] <= record["cmcd"]["tb"] for record in requests)
    assert mine[-1]["event"] == "ended"


def test_plays_whose_end_is_never_heard_are_forgotten(tmp_path):
    listener = JsonLines(tmp_path / "plays.jsonl")
    with Telemetry(listener, limit=100_000) as telemetry:
        plays = [telemetry.play() for _ in range(MAX_PLAYS + 50)]
        for play in plays:
            play.__enter__()(progress(0.0))
        telemetry.flush()
        assert len(listener._plays) == MAX_PLAYS


def test_what_the_engine_was_left_is_told_and_what_was_decided_in_between_is_not():
    found = records(
        START,
        decided(0.1, None, "wait"),
        decided(0.2, None, "plan", reason="the link is dead"),
        SampleLimited(0.3, "cpu", 1.0, fed=False),
        RecomputeStarted(0.3, 0, 2),
        progress(0.4),
    )
    assert [record["event"] for record in found] == ["start", "decision", "recompute_start", "progress", "ended"]
    assert found[1]["reason"] == "the link is dead"
    assert (found[3]["received"], found[3]["cmcd"]["mtp"], found[3]["cmcd"]["bl"]) == (7, 800, 300)


def test_lines_that_come_without_a_beginning_are_taken_as_they_are():
    found = records(asked(0.5, 0, 3), RequestFailed(0.6, 7, 0, "base", 3, "reset"))
    assert found[0]["cmcd"] == {"sid": "s1", "st": "v", "sf": "o", "ot": "o"}
    assert found[1]["reason"] == "reset"
