"""Stores behind the commands and servers: publish, inspect, replay, serve, play."""

import json

import pytest
import structlog

from kvabr import Client, PlayOptions
from kvabr.cli.main import main
from kvabr.data import default_catalog
from kvabr.publish.encoder import publish
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset_index import AssetIndex
from kvabr.store.locations import open_asset, open_store
from kvabr.store.store_tree import StoreTree
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.peer import PeerOptions
from tests.client.classes import HYBRID
from tests.client.served import Served
from tests.store.noise import replace_object
from tests.store.publishing import check, put
from tests.toymodel import SPEC, ToyModel, prompt

TRACKS = ("FP16", "Int8", "AC-5x")


def encode(url, tokens=70, **options):
    made = prompt(tokens)
    with open_store(url).writer(**options) as writer:
        catalog = publish(ToyModel(), made, TRACKS, None, writer, time_engine=False)
        writer.prompt(made)
        writer.commit(catalog)
    return catalog


def test_commands_take_a_store(store_url, capsys, tmp_path):
    catalog = encode(store_url)
    asset = open_asset(store_url)
    assert check(asset).chunks == catalog.chunks
    assert main(["inspect", str(store_url), "--check"]) == 0
    assert "0 bad" in capsys.readouterr().out
    trace = tmp_path / "t.csv"
    trace.write_text("seconds,mbps\n" + "".join(f"{second},5\n" for second in range(60)))
    replay = ["replay", str(trace), "--asset", str(store_url), "--deadline", "2", "--no-recompute"]
    assert main([*replay, "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["runs"]
    with pytest.raises(UsageError, match="--force"):
        encode(store_url)
    assert encode(store_url, force=True).chunks == catalog.chunks
    location, _, options = str(store_url).partition("?")
    assert main(["inspect", f"{location}/{'0' * 64}{options and '?' + options}"]) == 2
    assert "no such asset" in capsys.readouterr().err


def test_an_engine_publishes_into_a_store(store_url):
    outcomes, prior = [], encode(store_url)
    publisher = Publisher(store_url, SPEC, prior=prior, tracks=("FP16", "Int8"))
    made = prompt(48).tokens
    publisher.reserve(made).fill(ToyModel().prefill(made), outcomes.append)
    publisher.close()
    assert [outcome.verdict for outcome in outcomes] == ["published"]
    again = Publisher(store_url, SPEC, prior=prior, tracks=("FP16", "Int8"))
    assert again.reserve(made) == "known"
    again.close()
    assert len(PublishedAssets(store_url).assets) == 2


def test_an_engine_that_may_not_write_says_so_at_once(seaweed, monkeypatch):
    url = seaweed.url()
    prior = encode(url)
    for name, value in seaweed.environment("reader").items():
        monkeypatch.setenv(name, value)
    other = seaweed.url()  # not the one that was probed
    with pytest.raises(AssetError, match="refuses these credentials"):
        Publisher(other, SPEC, prior=prior, tracks=("FP16",))
    with pytest.raises(AssetError, match="refuses these credentials"):
        PublishedAssets(url)  # which must list
    where, _, options = url.partition("?")
    asset = open_asset(f"{where}/{prior.namespace.prompt}?{options}")  # that needs no list
    asset.check_frames()
    assert asset.catalog.chunks == prior.chunks


def test_an_index_sees_what_comes_goes_and_is_damaged(store_url):
    first, _ = put(store_url, HYBRID, list(range(300)))
    index = AssetIndex(StoreTree(store_url), structlog.wrap_logger(structlog.ReturnLogger(), processors=[]))
    assert index.refresh()
    assert not index.refresh()
    second, _ = put(store_url, HYBRID, list(range(40)))
    assert index.refresh()
    assert {asset.catalog.namespace.prompt for asset in index.assets} == {
        first.namespace.prompt,
        second.namespace.prompt,
    }
    asset = next(one for one in index.assets if one.catalog.chunks == second.chunks)
    replace_object(store_url, f"a/{second.namespace.prompt}", None)
    assert index.refresh()
    assert len(index.assets) == 1
    index.renew(asset)
    replace_object(store_url, f"a/{'0' * 64}", b"junk")
    replace_object(store_url, "a/junk", b"junk")
    assert not index.refresh()
    assert (len(index.assets), index.damaged) == (1, 1)


@pytest.mark.process
def test_a_server_reads_a_store_and_clients_play_it(store_url, tmp_path):
    encode(store_url, 100)  # AC and its profile are then smaller than Int8
    with Served(store_url, tmp_path) as origin:
        for policy, coverage in (("fixed:Int8", "Int8"), ("fixed:AC-5x", "AC-5x")):
            with Client(origin.url, PeerOptions(fingerprint=origin.fingerprint, timeout_s=300.0)) as client:
                options = PlayOptions(policy=policy)
                played = client.play(prompt(100).tokens, deadline=300.0, model=SPEC, options=options)
            assert played.coverage == (coverage,) * 7


def test_a_copy_takes_the_beginning_of_a_name(store_url, tmp_path, capsys):
    name = encode(store_url).namespace.prompt
    assert main(["store", "copy", store_url, str(tmp_path / "a"), "--name", name[:10]]) == 0
    assert list(open_store(tmp_path / "a").list()) == [name]
    assert main(["store", "copy", store_url, str(tmp_path / "a"), "--name", "x"]) == 1
    assert "no asset of that name" in capsys.readouterr().err


def test_an_engine_cannot_bound_a_bucket():
    with pytest.raises(UsageError):
        Publisher("memory://unbounded", SPEC, prior=default_catalog(), tracks=("FP16",), max_bytes=1 << 20)
