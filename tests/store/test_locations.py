"""Assets in any store: folders and a bucket of objects do the same, from encoding to playing."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from kvabr import Client, PlayOptions
from kvabr.cli.main import main
from kvabr.publish.encoder import publish
from kvabr.publish.publisher import Publisher
from kvabr.replay.verify import FetchStep, load_profile, verify_play
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_asset, open_catalog, open_store
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError, UsageError
from tests import objectstore
from tests.assets import whole
from tests.client.playing import play
from tests.client.served import Served
from tests.memory_transport import MemoryConnection
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

TRACKS = ("FP16", "Int8", "AC-5x")
NUMBERS = itertools.count()


@pytest.fixture(params=["folder", "mem"])
def location(request, tmp_path):
    """Where assets may be put."""
    return {
        "folder": str(tmp_path / "assets"),
        "mem": f"mem://bucket{next(NUMBERS)}/assets",
    }[request.param]


def encode(location, name, tokens=70, **options):
    made = prompt(tokens)
    with open_store(location).writer(name, **options) as writer:
        catalog = publish(ToyModel(), made, TRACKS, None, writer, time_engine=False)
        writer.prompt(made)
        writer.commit(catalog)
    return catalog


def test_what_is_written_is_read_listed_and_replaced(location):
    catalog = encode(location, "team/a")
    store = open_store(location)
    asset = open_asset(f"{location}/team/a")
    assert asset.catalog == catalog
    assert (asset.prompt(), load_profile(asset).digest) == (prompt(70), catalog.profile)
    for track in catalog.tracks:
        for group, size in enumerate(track.bytes):
            assert len(asset.frame(group, track.name)) == size
            assert whole(asset.open_frame(group, track.name)) == asset.frame(group, track.name)
    asset.check_parts()
    assert Catalog.loads(asset.catalog_bytes()) == catalog
    version = store.version("team/a")
    assert store.list().versions == {"team/a": version}
    assert version == asset.version
    assert store.open("team/a").name == "team/a"
    with pytest.raises(UsageError, match="--force"):
        store.writer("team/a")
    encode(location, "team/a", tokens=40, force=True)
    assert not asset.is_current()
    assert open_catalog(f"{location}/team/a")[0].tokens == 40
    with pytest.raises(AssetError, match="no longer"):
        asset.catalog_bytes()


def test_what_is_not_committed_is_not_there(location):
    def fails():
        with open_store(location).writer("a") as writer:
            writer.frame(0, "FP16", b"frame")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert open_store(location).version("a") is None
    assert open_store(location).list().versions == {}
    with pytest.raises(AssetError, match="no such asset"):
        open_asset(f"{location}/a")


async def test_an_asset_is_served_played_and_verified(location):
    catalog = encode(location, "a")
    assets = PublishedAssets(location)
    async with MemoryConnection(partial(assets.find, EVERYTHING)) as link:
        played = await play(link, prompt(70).tokens, deadline=99.0, spec=SPEC, policy="fixed:Int8")
    assert played.coverage == ("Int8",) * 5
    verified = verify_play(open_asset(f"{location}/a"), ToyModel(), [FetchStep(group, "Int8") for group in range(5)])
    assert verified.kl == pytest.approx(catalog.track("Int8").measured.kl, rel=1e-4)
    encode(location, "b", tokens=40)
    assert assets.refresh()
    assert [asset.name for asset in assets.assets] == ["a", "b"]


@pytest.mark.process
def test_a_server_reads_a_remote_store_in_threads(tmp_path):
    location = f"mem://bucket{next(NUMBERS)}"
    encode(location, "a")
    bucket = objectstore.BUCKETS[location.partition("://")[2]]
    origin = Served(location, tmp_path)
    try:
        bucket.threads.clear()
        with Client(origin.url, fingerprint=origin.fingerprint) as client:
            played = client.play(prompt(70).tokens, deadline=99.0, model=SPEC, options=PlayOptions(policy="fixed:Int8"))
        assert played.coverage == ("Int8",) * 5
        assert bucket.threads
        assert all(name.startswith("asyncio") for name in bucket.threads)
        del bucket.objects["a/FP16/2"]  # a group that cannot be read is refused; the others come
        with Client(origin.url, fingerprint=origin.fingerprint) as client:
            played = client.play(prompt(70).tokens, deadline=99.0, model=SPEC, options=PlayOptions(policy="fixed:FP16"))
        assert [track == "FP16" for track in played.coverage] == [True, True, False, True, True]
    finally:
        origin.close()


def test_commands_take_a_location(location, capsys, tmp_path):
    encode(location, "a")
    assert main(["inspect", f"{location}/a", "--check"]) == 0
    assert "0 bad" in capsys.readouterr().out
    trace = tmp_path / "t.csv"
    trace.write_text("seconds,mbps\n" + "".join(f"{second},5\n" for second in range(60)))
    assert main(["replay", str(trace), "--asset", f"{location}/a", "--deadline", "2", "--no-recompute"]) == 0
    assert "anytime" in capsys.readouterr().out


def test_an_engine_publishes_into_any_store(location):
    outcomes = []
    publisher = Publisher(location, SPEC, prior=encode(location, "prior"), tracks=("FP16", "Int8"))
    made = prompt(48).tokens
    publisher.reserve(made).fill(ToyModel().prefill(made), outcomes.append)
    publisher.close()
    assert [outcome.verdict for outcome in outcomes] == ["published"]
    assert len(PublishedAssets(location).assets) == 2


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_object_is_found_out(damage):
    location = f"mem://bucket{next(NUMBERS)}"
    encode(location, "a")
    objects = objectstore.BUCKETS[location.partition("://")[2]].objects
    data = objects.pop("a/FP16/1")
    if damage == "flipped":
        objects["a/FP16/1"] = data[:-1] + bytes([data[-1] ^ 1])
    elif damage == "cut":
        objects["a/FP16/1"] = data[:-1]
    with pytest.raises(AssetError if damage == "gone" else FormatError, match=r"a/.*FP16/1"):
        open_asset(f"{location}/a").frame(1, "FP16")
    assert bool(PublishedAssets(location).assets) == (damage == "flipped")  # frames are not read before they are sent


def test_a_folder_has_a_url_too(tmp_path):
    path = toy_asset(tmp_path / "an asset", ("FP16",)).path
    assert open_catalog(f"file://{tmp_path}/an%20asset")[1].location == str(path)
    assert open_catalog(path / "catalog.json") == (open_catalog(path)[0], None)


def test_a_scheme_that_no_store_has_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"s4://bucket: stores are folders or file://"):
        open_store("s4://bucket")
    with pytest.raises(AssetError, match="no such folder"):
        open_store(tmp_path / "nothing", must_exist=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        open_store(tmp_path / "file", create=True)
