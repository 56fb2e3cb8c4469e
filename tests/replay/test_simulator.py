"""The simulator against arithmetic that can be done by hand, and the engines that it knows."""

import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.player.session import Session
from kvabr.player.session_types import TIME_PRICE, PlayerConfig
from kvabr.replay import experiment
from kvabr.replay.engines import ENGINES, MEASURED, engine_cost, parse_cost
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from kvabr.types.events import RequestCancelled, RequestSent
from tests.catalogs import catalog
from tests.replay.worlds import world


def simulate(
    policy, *, groups=8, rate=1e6, rtt=0.05, deadline=4.0, decode=1.0, cost=None, config=None, log=None, decoders=1
):
    offer = catalog(groups, decode=decode)
    made = load_policy(policy)() if isinstance(policy, str) else policy
    config = replace(config or PlayerConfig(), decoders=decoders)
    session = Session(Ladder(offer), deadline, made, HarmonicMean(), cost=cost, config=config, log=log)
    link = Capacity(world("flat", [rate]), 0.0, rtt, slow_start=False)
    simulator = Simulator(session, offer, link, rtt_s=rtt, cost=cost, decoders=decoders)
    return simulator.run(), offer, simulator


@pytest.mark.parametrize("track", ["FP16", "Int8", "AC-5x"])
@pytest.mark.parametrize("rtt", [0.0, 0.05, 0.2])
def test_a_fixed_track_takes_a_round_trip_the_bytes_and_one_decode(track, rtt):
    record, offer, _ = simulate(f"fixed:{track}", rtt=rtt)
    whole = offer.track(track)
    wanted = rtt + whole.total_bytes / 1e6 + whole.decode_s
    assert record.delivered_s >= wanted - 1e-5
    # Keeping enough in flight hides the other round trips, once the rate is known.
    assert record.delivered_s <= 1.02 * wanted + 0.7 * rtt


class CountedLink(Capacity):
    """Counts the simulator's questions, and ends a play that goes nowhere."""

    questions = 0

    def when(self, t0, nbytes):
        self.questions += 1
        assert self.questions < 5000, f"{nbytes} bytes are always missing"
        return super().when(t0, nbytes)


@pytest.mark.parametrize("load", [1, 30, 100])
@pytest.mark.parametrize("start_s", [0.0, 3058.447321908437, 4999.9])
def test_a_long_trace_at_a_high_load_takes_no_more_steps(load, start_s):
    offer = catalog(64)
    whole = offer.fp16_bytes
    rates = [float(whole * load * (1 + index % 7)) for index in range(5000)]
    session = Session(Ladder(offer), 4.0, load_policy("fixed:AC-5x")(), HarmonicMean())
    link = CountedLink(world("long", rates, 1.0), start_s, slow_start=False)
    assert Simulator(session, offer, link, rtt_s=0.02).run().met
    assert link.questions < 4 * offer.groups


@pytest.mark.parametrize("decoders", [1, 3, 20])
def test_several_decoders_take_a_group_each(decoders):
    record, offer, _ = simulate("fixed:Int4", decode=200.0, rate=1e7, decoders=decoders)
    rounds = -(-8 // decoders)
    assert record.delivered_s == pytest.approx(0.05 + offer.track("Int4").total_bytes / 1e7 + rounds * 0.4, abs=0.04)


def test_of_equal_priority_the_request_that_was_made_first_is_served_first():
    class Restless(Policy):
        """Asks for upgrades of every group, one after the other: more than there are priorities."""

        def decide(self, view):
            if (group := view.first_missing()) is not None:
                return Decision.fetch(group, "AC-5x", "first")
            group = next((g for g in sorted(view.settled) if view.track_of[g] == "AC-5x"), None)
            return Decision.wait("done") if group is None else Decision.upgrade(group, "Int4", "and again")

    done = []
    record, _, _ = simulate(
        Restless(), groups=160, rate=8e6, deadline=4.0, log=lambda e: e.name == "done" and done.append(e.request)
    )
    assert [group.track for group in record.groups] == ["Int4"] * 160
    assert done[-40:] == sorted(done[-40:])


def test_a_cancelled_request_still_costs_a_round_trip_of_the_link():
    class Regret(Policy):
        """Asks for one dear group, so that it must be abandoned."""

        def decide(self, view):
            group = view.first_missing()
            if group is None:
                return Decision.finish("done")
            return Decision.fetch(group, "FP16" if view.rate == 0 else "AC-5x", "test")

    record, _, simulator = simulate(Regret(), groups=2, rate=6e4, rtt=0.1, deadline=1.0)
    assert record.abandoned >= 1
    assert 0 < simulator.use.ghost_bytes <= record.abandoned * 0.1 * 6e4 + 1
    assert [group.track for group in record.groups] == ["AC-5x", "AC-5x"]


def test_the_engine_computes_one_thing_at_a_time_as_its_cost_says():
    events = []
    cost = PrefillCost(0.01, 1e-4, 1e-8)
    record, _, _ = simulate("cheapfirst", rate=1.0, deadline=1.0, cost=cost, log=events.append)
    starts = [line for line in events if line.name == "recompute_start"]
    ends = [line for line in events if line.name == "recompute_done"]
    assert [begin.first for begin in starts] == [0, *(begin.last for begin in starts[:-1])]
    assert starts[-1].last == 8
    assert len(starts) > 1
    seconds = [cost.seconds(begin.first * 128, (begin.last - begin.first) * 128) for begin in starts]
    assert [end.t - begin.t for begin, end in zip(starts, ends, strict=True)] == pytest.approx(seconds)
    assert all(b.t >= a.t for a, b in zip(ends, starts[1:], strict=False))
    assert record.recompute_s == pytest.approx(sum(seconds))


def test_a_device_decodes_all_that_waits_in_one_batch():
    offer = catalog(8, decode=10.0)
    session = Session(
        Ladder(offer), 4.0, load_policy("fixed:Int4")(), HarmonicMean(), config=PlayerConfig(together=True)
    )
    link = Capacity(world("flat", [1e9]), 0.0, 0.05, slow_start=False)
    record = Simulator(session, offer, link, rtt_s=0.05, decode_latency_s=0.1).run()
    each = offer.track("Int4").decode_s
    # The first groups' batch, and one for all that came meanwhile.
    assert record.delivered_s == pytest.approx(0.05 + 2 * 0.1 + 8 * each, abs=0.01)
    assert len({group.ready_s for group in record.groups}) == 2


@pytest.mark.parametrize("policy", ["anytime", "fixed:AC-5x", "fixed:FP16"])
@pytest.mark.parametrize("latency_s", [0.0, 0.02, 0.3])
def test_no_play_beats_the_bound_with_a_latency(policy, latency_s):
    runs = [
        Experiment(catalog(8), ReplayOptions(2.0, 0.02, decode_latency_s=each)).play(link, 0.0, policy).run
        for link in [world("flat", [4e5])]
        for each in (0.0, latency_s)
    ]
    for run in runs:
        assert not run["feasible"] or run["regret"] >= -1e-9
    assert runs[1]["ttft_s"] >= 0.02 + latency_s
    bounds = [run["clairvoyant_objective"] for run in runs]
    assert bounds[1] - bounds[0] >= 0.99 * TIME_PRICE * latency_s  # what comes last waits for its batch


@pytest.mark.parametrize(("slow", "until_s"), [(1e3, 0.3), (2e4, 0.3), (5e4, 0.3)])
def test_a_source_that_was_slow_for_a_moment_is_tried_again(slow, until_s):
    steady = Trace("steady", "made", (0.0,), (3e6,), 60.0)
    other = Trace("other", "made", (0.0, 0.1, until_s), (1e6, slow, 4e6), 60.0)
    options = ReplayOptions(4.0, 0.02, links=(other,), slow_start=False)
    outcome = Experiment(default_catalog(), options).play(steady, 0.0, "anytime", log=True)
    asked = [0, 0]
    for event in outcome.log:
        if isinstance(event, RequestSent) and event.t > 1.0:
            asked[event.source] += event.bytes
    assert asked[1] > asked[0] / 2 > 0  # nothing, if it is left alone
    assert outcome.run["objective"] < 1.35 * outcome.run["clairvoyant_objective"]  # 2.0 and 2.1 then


@pytest.mark.parametrize("offers", [[None, {"AC-L1", "FP16"}], None], ids=["few tracks", "three sources"])
def test_silent_sources_are_not_tried_without_end(monkeypatch, offers):
    """With what one does not have, or with what another is tried with already."""
    if offers:
        first = Trace("first", "made", (0.0, 0.12, 0.45), (8e6, 2e5, 1e3), 60.0)
        others = (Trace("second", "made", (0.0, 0.25), (3e6, 0.0), 60.0),)
    else:
        first = Trace("first", "made", (0.0, 0.6, 0.9), (3e6, 1e3, 0.0), 60.0)
        second = Trace("second", "made", (0.0, 0.06), (8e6, 0.0), 60.0)
        others = (second, replace(second, name="third", times=(0.0, 0.1)))

    def with_offers(*arguments, **options):
        return Session(*arguments, **options | {"offers": offers or options["offers"]})

    monkeypatch.setattr(experiment, "Session", with_offers)
    options = ReplayOptions(4.0, 0.02, 0.3 if offers else None, links=others)
    outcome = Experiment(default_catalog(), options).play(first, 0.0, "anytime", log=True)
    why = Counter(event.reason for event in outcome.log if isinstance(event, RequestCancelled))
    assert why["retrying a silent source"] < 8


@pytest.mark.parametrize("name", MEASURED)
def test_the_shipped_costs_are_those_that_were_measured(name: str) -> None:
    off = [ENGINES[name].seconds(before, new) / (ms / 1000) for before, new, ms in MEASURED[name]]
    assert all(0.85 < each < 1.2 for each in off), off
    assert math.exp(sum(abs(math.log(each)) for each in off) / len(off)) < 1.06
    fitted = PrefillCost.fit([(before, new, ms / 1000) for before, new, ms in MEASURED[name]])
    for before, new, _ in MEASURED[name]:
        assert ENGINES[name].seconds(before, new) == pytest.approx(fitted.seconds(before, new), rel=0.01)


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("8000", PrefillCost(0.0, 1 / 8000)),
        ("0.03:30e-6", PrefillCost(0.03, 30e-6)),
        ("0.03:30e-6:1e-6", PrefillCost(0.03, 30e-6, 0.0, 1e-6)),
        ("0:30e-6:1e-6:2e-10", PrefillCost(0.0, 30e-6, 2e-10, 1e-6)),
        ("0:30e-6:0:2e-10:0.02", PrefillCost(0.0, 30e-6, 2e-10, 0.0, 0.02)),
    ],
)
def test_the_notation(text: str, cost: PrefillCost) -> None:
    assert parse_cost(text, "--prefill") == cost


@pytest.mark.parametrize(
    "text", ["", "fast", "1:", "1:2:3:4:5:6", "1:-2", "nan", "1:nan", "0", "0:0", "1,2", "inf:1", "-1"]
)
def test_a_cost_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"--prefill {text}: "):
        parse_cost(text, "--prefill")


def test_an_engine_that_nobody_measured() -> None:
    with pytest.raises(UsageError, match="did you mean h200-70b"):
        engine_cost("h100-70b", "--engine")


def ttft(folder: Path, *how: str) -> float:
    out, trace = folder / "out.json", folder / "flat.csv"
    trace.write_text("t_s,mbps\n" + "".join(f"{second},1\n" for second in range(30)))
    args = ["replay", str(trace), "-d", "60", "--jobs", "1", "--json", str(out), "-p", "fixed:Int4", *how]
    assert main(args) == 0
    (run,) = json.loads(out.read_text())["runs"]
    return float(run["recompute_s"])


def test_a_replay_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = default_catalog().tokens
    seconds = ENGINES["h200-8b"].seconds(0, tokens)
    given = "0.00415:2.76e-5:1.70e-6:4.76e-10:0.0209"
    assert ttft(tmp_path, "--engine", "h200-8b") == ttft(tmp_path, "--prefill", given) >= 0.5 * seconds
    for wrong, says in (
        (["--engine", "h200-8b", "--prefill", "1:2"], "not allowed with"),
        (["--engine", "mine"], "unknown engine; choose from h200-8b"),
        (["--prefill", "1:-2"], "--prefill 1:-2"),
    ):
        with suppress(SystemExit):
            assert main(["replay", str(tmp_path / "flat.csv"), *wrong]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
