"""Plays that share a link with a queue, against arithmetic that can be done by hand."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import pytest

from kvabr.abr import Ladder
from kvabr.abr.estimators import HarmonicMean
from kvabr.abr.plugins import load_policy
from kvabr.cli.main import main
from kvabr.data import traces_folder
from kvabr.player.session import Session
from kvabr.player.session_types import PlayerConfig
from kvabr.replay.experiment import Experiment, ReplayOptions
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Machine
from kvabr.types.cost import PrefillCost
from kvabr.types.events import ProgressMade
from kvabr_lab.crowd import BucketModel, CacheMachine, Crowd, PlayTable, Tree, drawn, fewest, flow, loads
from kvabr_lab.packets import PACKET, Bottleneck, Sender, Stream
from kvabr_lab.sharing import SharedPlays, Sharing
from tests.catalogs import catalog
from tests.replay.worlds import world

OFFER = catalog(8)
RATE = 1e6


def shared(policies, *, sharing=None, rtt=0.05, deadline=4.0, rate=RATE, slow_start=True, logs=None, config=None):
    """Play the policies together over a flat link; return their records, sessions, and the link."""
    plays = SharedPlays(
        sharing or Sharing(queue_bytes=10**9), Capacity(world("flat", [rate])),
        rtt_s=rtt, deadline_s=deadline, window=10 * PACKET, slow_start=slow_start,
    )  # fmt: skip
    machine = partial(Machine, catalog=OFFER, cost=None, decode_scale=1.0, decoders=1)

    def build(policy, log, share):
        made = load_policy(policy)()
        return Session(Ladder(OFFER), deadline, made, share(HarmonicMean()), config=config or PlayerConfig(), log=log)

    sessions = []
    for policy in policies:
        log = None
        if logs is not None:
            logs.append([])
            log = logs[-1].append
        sessions.append(plays.add(partial(build, policy, log), machine))
    plays.run()
    return [session.record for session in sessions], sessions, plays.link


def size(track):
    return OFFER.track(track).total_bytes


@pytest.mark.parametrize("count", [2, 4])
def test_connections_share_a_link_alike(count):
    records, _, _ = shared(["fixed:Int8"] * count, deadline=8.0)
    ends = [record.delivered_s for record in records]
    assert max(ends) >= count * size("Int8") / RATE  # no byte comes twice
    assert max(ends) <= 1.15 * count * size("Int8") / RATE + 0.5
    assert min(ends) > 0.8 * max(ends)


ONE = Sharing(rivals=1, queue_bytes=10**9, one_connection=True)


def test_on_one_connection_the_play_that_is_due_first_is_served_first():
    """As in a client: of plays with the same deadline, the one that began first."""
    config = PlayerConfig(first_requests=8, min_requests=8)
    (first, last), _, _ = shared(["fixed:Int8"] * 2, sharing=ONE, deadline=8.0, config=config)
    assert first.delivered_s < 0.75 * last.delivered_s
    assert last.delivered_s <= 2.2 * size("Int8") / RATE + 0.5


def test_plays_of_one_client_estimate_the_link_together():
    rate, logs = RATE / 8, []
    (first, last), _, _ = shared(["fixed:FP16"] * 2, sharing=ONE, deadline=32.0, rate=rate, logs=logs)
    told = [[(event.t, event.rate) for event in log if isinstance(event, ProgressMade) and event.rate] for log in logs]
    seen = [rate for log in told for t, rate in log if 2.0 < t < min(first.delivered_s, last.delivered_s)]
    # Half of the link, or all of it while the other play gets nothing; never what this one happens to get.
    assert len(seen) > 30
    assert all(rate / 2 == pytest.approx(part, rel=0.15) or rate == pytest.approx(part, rel=0.15) for part in seen)


def test_on_one_connection_upgrades_come_by_what_they_save_in_all_plays():
    """Plays with the same deadline end alike, and no last layer of one comes before the first of another."""
    offer = catalog(48, layered=True)
    link = world("steady", [offer.track("base").total_bytes + 1.5 * offer.track("layer-1").total_bytes])
    options = ReplayOptions(4.0, 0.2, sharing=Sharing(3, one_connection=True))
    run = Experiment(offer, options).play(link, 0.0, "anytime").run
    losses = [run["loss"], *(rival["loss"] for rival in run["sharing"]["rivals"])]
    assert run["met"]
    assert all(rival["met"] for rival in run["sharing"]["rivals"])
    assert max(losses) < 2.0 * min(losses)


def test_what_a_short_queue_drops_is_sent_again():
    records, _, link = shared(["fixed:FP16"] * 2, sharing=Sharing(queue_bytes=8 * PACKET), deadline=8.0)
    assert link.dropped > 0
    assert link.max_queued <= 8 * PACKET
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
    assert codel.max_queued <= drop_tail.max_queued
    assert codel.dropped > 0


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
        for rival in run["sharing"]["rivals"]:
            assert rival["objective"] >= rival["loss"] + 1e-3 * rival["ttft_s"] - 1e-6
            assert rival["met"] == (rival["ttft_s"] <= 2.0)
        assert found.log[-1].name == "deliver"
        if run["feasible"]:
            assert run["regret"] >= -1e-6
        if rivals:
            by_itself = Experiment(catalog(8, layered=True), alone).play(link, 0.5, policy).run
            assert run["objective"] >= by_itself["objective"] - 1e-3


def test_the_command_shares_links(tmp_path, capsys):
    result = tmp_path / "r.json"
    trace = str(traces_folder() / "lte.csv")
    assert main(["replay", trace, "--rivals", "1", "--codel", "--load", "0.3", "--json", str(result)]) == 0
    report = json.loads(result.read_text())
    assert report["options"]["sharing"] == {"rivals": 1, "queue_bytes": None, "codel": True, "one_connection": False}
    assert report["options"]["patience"] == 10.0
    assert all(len(run["sharing"]["rivals"]) == 1 for run in report["runs"])
    assert main(["replay", "--queue", "0.1"]) == 2
    assert "at least one packet" in capsys.readouterr().err


SMALL = CacheMachine("small", 4e6, 4, 1e-9, 0.0, 1e3, 1e4, 1e9)
CROWD = Crowd(players=2000, within_s=5.0, access=2e6, deadline_s=1.0, rtt_s=0.01)


@pytest.fixture(scope="module")
def table() -> PlayTable:
    return PlayTable(catalog(6, layered=True), CROWD)


def test_an_edge_sends_no_more_than_it_carries(table: PlayTable):
    found = flow(table, Tree(SMALL, 3))
    assert (found.shares * found.active <= SMALL.carries * (1 + 1e-9)).all()
    assert (found.shares <= CROWD.access).all()


def test_real_plays_over_the_rates_of_the_flow_agree_with_it(table: PlayTable):
    edges = fewest(table, Tree(SMALL, 1))
    assert edges is not None
    for factor, least, most in ((0.25, 0.0, 0.5), (2, 0.99, 1.0)):
        found = flow(table, Tree(SMALL, max(1, round(edges * factor))))
        plays = list(drawn(table, found, 12, seed=1))
        assert least <= found.met_share <= most
        assert least <= sum(play.met for play in plays) / len(plays) <= most


def test_the_fewest_edges_are_the_fewest(table: PlayTable):
    tree = Tree(SMALL, 1)
    edges = fewest(table, tree)
    assert edges is not None
    assert edges > 1
    assert flow(table, replace(tree, edges=edges)).met_share >= 0.999
    assert flow(table, replace(tree, edges=math.floor(edges * 0.9))).met_share < 0.999


def test_a_slow_store_is_found_out(table: PlayTable):
    tree = Tree(SMALL, 8, store=BucketModel(bytes_per_s=table.asset_bytes / 20, requests_per_s=1e6))
    assert loads(table, tree)[0].resource == "store: network"
    assert fewest(table, tree) is None


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    (tmp_path / "small.json").write_text(catalog(6, layered=True).dumps())
    words = ["crowd", "--asset", str(tmp_path / "small.json"), "--players", "5000", "--within", "2", "--access", "100"]
    path = tmp_path / "crowd.json"
    assert main([*words, "--edge", "relay", "--edges", "1", "2", "--sample", "3", "--json", str(path)]) == 0
    assert "edges: network" in capsys.readouterr().out
    told = json.loads(path.read_text())
    assert told["schema"] == "kvabr.crowd/1"
    assert [row["edges"] for row in told["flows"]] == [1, 2]
    assert main([*words, "--edge", "ngnix"]) == 2
    assert "did you mean" in capsys.readouterr().err.lower()
    assert main([*words, "--middle", "nginx"]) == 2
    assert main([*words, "--edges", "0"]) == 2


class Endless(Stream):
    """More bytes than the link carries."""

    def __init__(self):
        super().__init__(10**9)

    def place(self):
        return 0

    def receive(self, size, now):
        pass


def test_codel_drops_ever_more_often_until_the_delay_is_acceptable():
    """The control law of RFC 8289: intervals of 100 ms over the root of the drops so far."""
    link = Bottleneck(Capacity(world("flat", [RATE])), 0.01, 10**9, PACKET, codel=True)
    sender = Sender(link, 5e6)  # far more than the link takes in the time
    sender.open(Endless(), 0.0)
    drops, dropped = [], 0
    while (now := link.next_s()) < 2.0:
        link.run(now)
        if link.dropped > dropped:
            drops.append(now)
        dropped = link.dropped
    gaps = [after - before for before, after in itertools.pairwise(drops)]
    assert len(gaps) > 20
    for count, gap in enumerate(gaps, start=1):
        assert gap == pytest.approx(0.1 / math.sqrt(count), abs=3 * PACKET / RATE)
