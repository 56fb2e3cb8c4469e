"""A crowd of players as a flow: nothing is carried twice, real plays agree with it, and more machines do no harm."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kvabr.cli.main import main
from kvabr_lab.crowd import MACHINES, BucketModel, CacheMachine, Crowd, PlayTable, Tree, drawn, fewest, flow, loads
from tests.catalogs import catalog

SMALL = CacheMachine("small", 4e6, 4, 1e-9, 0.0, 1e3, 1e4, 1e9)
CROWD = Crowd(players=2000, within_s=5.0, access=2e6, deadline_s=1.0, rtt_s=0.01)


@pytest.fixture(scope="module")
def table() -> PlayTable:
    return PlayTable(catalog(6, layered=True), CROWD)


def test_an_edge_sends_no_more_than_it_carries(table: PlayTable):
    found = flow(table, Tree(SMALL, 3))
    assert (found.shares * found.active <= SMALL.carries * (1 + 1e-9)).all()
    assert (found.shares <= CROWD.access).all()


def test_alone_a_player_gets_its_own_link(table: PlayTable):
    found = flow(table, Tree(MACHINES["nginx"], 1000, store=BucketModel(1e15)))
    assert found.met_share == 1.0
    assert found.loss == pytest.approx(table.plays[-1].loss, abs=1e-4)


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
