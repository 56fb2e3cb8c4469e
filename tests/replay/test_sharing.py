"""Plays that share a link with a queue, against arithmetic that can be done by hand."""

import json

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import DualEwma
from kvabr.abr.plugins import load_policy
from kvabr.cli.main import main
from kvabr.player.session import Session
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.sharing import PACKET, Sharing, play_shared
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError
from tests.catalogs import catalog
from tests.replay.worlds import world

OFFER = catalog(8)
RATE = 1e6


def shared(policies, *, sharing=None, rtt=0.05, deadline=4.0, rate=RATE, slow_start=True):
    """Play the policies together over a flat link; return their records, sessions, and the link."""
    sessions = [
        Session(Ladder(OFFER), deadline, load_policy(policy)(), DualEwma(), config=PlayerConfig())
        for policy in policies
    ]
    link = play_shared(
        sharing or Sharing(queue_bytes=10**9), sessions, OFFER, Capacity(world("flat", [rate])),
        rtt_s=rtt, window=10 * PACKET, slow_start=slow_start,
    )  # fmt: skip
    return [session.record for session in sessions], sessions, link


def size(track):
    return OFFER.track(track).total_bytes


@pytest.mark.parametrize("rtt", [0.0, 0.05, 0.2])
def test_alone_a_play_takes_what_its_bytes_take(rtt):
    (record,), _, link = shared(["fixed:Int8"], rtt=rtt, slow_start=False)
    least = rtt + size("Int8") / RATE
    assert least <= record.delivered_s <= 1.1 * least + 2 * rtt
    assert link.dropped == 0
    assert all(group.track == "Int8" for group in record.groups)


def test_slow_start_takes_round_trips():
    (slow,), _, _ = shared(["fixed:Int8"], rtt=0.2, rate=1e8)
    (quick,), _, _ = shared(["fixed:Int8"], rtt=0.2, rate=1e8, slow_start=False)
    rounds, window, left = 0, 10 * PACKET, size("Int8")
    while left > 0:
        rounds, left, window = rounds + 1, left - window, 2 * window
    assert quick.delivered_s < 0.5 < slow.delivered_s
    assert slow.delivered_s == pytest.approx(0.2 * rounds, abs=0.4)


@pytest.mark.parametrize("count", [2, 4])
def test_connections_share_a_link_alike(count):
    records, _, _ = shared(["fixed:Int8"] * count, deadline=8.0)
    ends = [record.delivered_s for record in records]
    assert max(ends) >= count * size("Int8") / RATE  # no byte comes twice
    assert max(ends) <= 1.15 * count * size("Int8") / RATE + 0.5
    assert min(ends) > 0.8 * max(ends)


def test_on_one_connection_what_is_urgent_comes_first():
    """Both plays' groups are served in the order of their priorities, and the window is grown once for both."""
    records, _, _ = shared(["fixed:Int8"] * 2, sharing=Sharing(queue_bytes=10**9, one_connection=True), deadline=8.0)
    firsts = [max(record.groups[group].done_s for record in records) for group in range(8)]
    assert firsts == sorted(firsts)
    assert max(record.delivered_s for record in records) <= 2.2 * size("Int8") / RATE + 0.5


def test_what_a_short_queue_drops_is_sent_again():
    records, _, link = shared(["fixed:FP16"] * 2, sharing=Sharing(queue_bytes=8 * PACKET), deadline=8.0)
    assert link.dropped > 0
    assert link.most_queued <= 8 * PACKET
    for record in records:
        assert record.delivered_s is not None
        assert record.bytes_fetched == size("FP16")
    assert max(record.delivered_s for record in records) >= 2 * size("FP16") / RATE


def late_by(sharing):
    """Return the longest time to a first byte of a play beside one that fills the queue."""
    records, _, link = shared(["anytime", "fixed:FP16"], sharing=sharing, rtt=0.02, deadline=8.0)
    waits = [group.first_byte_s - group.requested_s for group in records[0].groups]
    return max(waits), link


def test_a_long_queue_delays_every_request_and_codel_keeps_it_short():
    bloated, drop_tail = late_by(Sharing(queue_bytes=500_000))
    controlled, codel = late_by(Sharing(queue_bytes=500_000, codel=True))
    assert bloated > 0.2
    assert controlled < 0.6 * bloated
    assert codel.most_queued <= drop_tail.most_queued
    assert codel.dropped > 0


def test_the_same_plays_have_the_same_outcome():
    one, two = (shared(["anytime"] * 3, sharing=Sharing(codel=True))[0] for _ in range(2))
    assert [record.delivered_s for record in one] == [record.delivered_s for record in two]
    assert [record.steps for record in one] == [record.steps for record in two]


@pytest.mark.parametrize("engine", [None, "hole", "suffix"])
@pytest.mark.parametrize("rivals", [0, 3])
def test_an_experiment_shares_its_link(rivals, engine):
    cost = None if engine is None else PrefillCost(0.001, 1 / 800)
    alone = ReplayOptions(2.0, 0.05, 0.5, cost, engine or "hole")
    link = world("walk", [1e6, 3e5, 2e6, 5e5] * 20)
    for policy in ("anytime", "cheapfirst"):
        found = Experiment(
            catalog(8, layered=True), ReplayOptions(2.0, 0.05, 0.5, cost, engine or "hole", sharing=Sharing(rivals))
        ).play(link, 0.5, policy, log=True)
        run = found.run
        assert len(run["sharing"]["rivals"]) == rivals
        assert found.log[-1].name == "deliver"
        if run["feasible"]:
            assert run["regret"] >= -1e-6
        if rivals:
            by_itself = Experiment(catalog(8, layered=True), alone).play(link, 0.5, policy).run
            assert run["objective"] >= by_itself["objective"] - 1e-3


@pytest.mark.parametrize("options", [{"rivals": -1}, {"rivals": 1000}, {"queue_bytes": 0}, {"queue_bytes": 1000}])
def test_sharing_that_makes_no_sense_is_refused(options):
    with pytest.raises(UsageError):
        Sharing(**options)


def test_the_command_shares_links(tmp_path, capsys):
    result = tmp_path / "r.json"
    assert main(["replay", "--rivals", "1", "--codel", "--load", "0.3", "--json", str(result), "-j", "1"]) == 0
    report = json.loads(result.read_text())
    assert report["options"]["sharing"] == {"rivals": 1, "queue_bytes": None, "codel": True, "one_connection": False}
    assert report["options"]["patience"] == 10.0
    assert all(len(run["sharing"]["rivals"]) == 1 for run in report["runs"])
    assert main(["replay", "--queue", "0.1"]) == 2
    assert "at least one packet" in capsys.readouterr().err
