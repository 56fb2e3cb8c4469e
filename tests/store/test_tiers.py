"""A folder over an object store: what is used moves up, what has no room moves down, and nobody notices."""

from __future__ import annotations

import asyncio
import itertools
import shutil

import pytest
from structlog import wrap_logger
from structlog.testing import CapturingLogger

from kvabr.cli.main import main
from kvabr.server.grants import EVERYTHING
from kvabr.server.moving import moving
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset_folder import FolderAssetStore
from kvabr.store.locations import open_store
from kvabr.store.tiers import TieredAssetStore
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.naming import CATALOG_TRACK
from tests.assets import whole
from tests.store.objects.publishing import PLAIN, check, put

NUMBERS = itertools.count()


class Clock:
    """Time as the test says."""

    def __init__(self):
        self.now = 2e9

    def __call__(self):
        return self.now


class Tiers:
    """Both stores, and a server's index over them."""

    def __init__(self, root, room, **options):
        """Make them; the folder has room for this many assets of 256 tokens."""
        self.clock = Clock()
        self.warm = FolderAssetStore(root)
        self.cold = open_store(f"memory://tiers{next(NUMBERS)}")
        self.one = sum(sum(track.bytes) for track in self.put(self.cold, 99).published.values())
        self.store = TieredAssetStore(self.warm, self.cold, int((room + 0.5) * self.one), clock=self.clock, **options)
        self.served = PublishedAssets(self.store)

    @staticmethod
    def put(store, number):
        """Publish a prompt as an engine does."""
        return put(store, PLAIN, list(range(1000 * number, 1000 * number + 256)), estimated=True)[0]

    def settle(self):
        """Look, move, look."""
        self.clock.now += 10
        self.served.refresh()
        moves = self.store.settle()
        self.served.refresh()
        return moves

    def play(self, catalog):
        """Look an asset up, and read all of it."""
        assert self.served.find(EVERYTHING, catalog.namespace, CATALOG_TRACK) is not None
        self.clock.now += 1

    def where(self, catalog):
        """Say in which stores an asset is."""
        name = catalog.namespace.prompt
        return [tier for tier, store in (("warm", self.warm), ("cold", self.cold)) if store.version(name) is not None]


@pytest.fixture
def tiers(tmp_path):
    return Tiers(tmp_path, 2)


def test_both_stores_are_served(tiers):
    warm, cold = tiers.put(tiers.warm, 1), tiers.put(tiers.cold, 2)
    tiers.settle()
    assert {catalog.namespace.prompt for catalog in (warm, cold)} < {asset.name for asset in tiers.served.assets}
    for asset in tiers.served.assets:
        check(asset)
    assert (tiers.where(warm), tiers.where(cold)) == (["warm"], ["cold"])


def test_what_has_no_room_is_in_the_cold_store_before_it_is_removed(tiers):
    made = [tiers.put(tiers.warm, number) for number in (1, 2, 3)]
    tiers.served.refresh()
    before = {asset.name: asset for asset in tiers.served.assets}
    moves = tiers.settle()
    (name,) = moves.down
    assert not moves.failed
    assert [tiers.where(one) for one in made].count(["cold"]) == 1
    assert {asset.name: asset for asset in tiers.served.assets} == before  # nobody was told of another version
    check(before[name])
    assert before[name].is_current()
    assert not before[name].local


def test_what_is_used_moves_up_and_stays_the_same(tiers):
    cold = tiers.put(tiers.cold, 5)
    tiers.settle()
    name = cold.namespace.prompt
    (asset,) = [asset for asset in tiers.served.assets if asset.name == name]
    frame = whole(asset.open_frame(0, "FP16"))
    assert tiers.settle().up == []
    tiers.play(cold)
    assert tiers.settle().up == [name]
    assert tiers.where(cold) == ["warm", "cold"]
    assert asset in tiers.served.assets
    assert asset.local
    assert whole(asset.open_frame(0, "FP16")) == frame
    assert asset.catalog_bytes()
    shutil.rmtree(tiers.warm.root / name)  # while it is served
    assert whole(asset.open_frame(0, "FP16")) == asset.frame(0, "FP16") == frame
    assert asset.is_current()


def test_what_is_worth_more_takes_the_place_of_what_is_worth_less(tiers):
    idle = [tiers.put(tiers.warm, number) for number in (1, 2)]
    cold = tiers.put(tiers.cold, 5)
    tiers.settle()
    tiers.clock.now += 10_000
    for _ in range(3):
        tiers.play(cold)
        tiers.clock.now += 10
    moves = tiers.settle()
    assert (moves.up, len(moves.down)) == ([cold.namespace.prompt], 1)
    assert sorted(map(tiers.where, idle)) == [["cold"], ["warm"]]


def test_what_is_worth_less_stays_down(tiers):
    busy, cold = [tiers.put(tiers.warm, number) for number in (1, 2)], tiers.put(tiers.cold, 5)
    tiers.settle()
    tiers.play(cold)
    for _ in range(8):
        for one in busy:
            tiers.play(one)
    moves = tiers.settle()
    assert (moves.up, moves.down) == ([], [])


def test_measured_assets_and_other_names_stay(tiers):
    measured, _ = put(tiers.warm, PLAIN, list(range(256)))
    named = put(tiers.warm, PLAIN, list(range(7, 263)), estimated=True)[0]
    (tiers.warm.root / named.namespace.prompt).rename(tiers.warm.root / "book")
    for number in (1, 2, 3):
        tiers.put(tiers.warm, number)
    tiers.served.refresh()
    assert len(tiers.settle().down) == 1
    assert tiers.where(measured) == ["warm"]
    assert (tiers.warm.root / "book").is_dir()


class Dead:
    """A cold store that is out of reach."""

    look_every_s = 0.0

    def __getattr__(self, name):
        raise AssetError("out of reach")

    def list(self):
        raise AssetError("out of reach")

    version = open = writer = lambda *_, **__: Dead().list()


def test_a_cold_store_out_of_reach_loses_nothing(tiers):
    made = [tiers.put(tiers.warm, number) for number in (1, 2, 3)]
    tiers.settle()
    down = [one for one in made if tiers.where(one) == ["cold"]]
    more = [tiers.put(tiers.warm, number) for number in (11, 12)]
    tiers.served.refresh()
    tiers.store.cold = Dead()
    moves = tiers.settle()
    assert moves.down == []
    assert set(moves.failed.values()) == {"out of reach"}
    assert {one.namespace.prompt for one in (*down, *more)} < {asset.name for asset in tiers.served.assets}
    for one in more:
        check(tiers.warm.open(one.namespace.prompt))


def test_other_bytes_of_a_prompt_are_another_version(tmp_path):
    """The cold store has the prompt from another publisher, with other tracks: they replace what goes down."""
    tiers = Tiers(tmp_path, 2, order="lru")
    old = tiers.put(tiers.cold, 1)
    other = put(tiers.warm, PLAIN, list(range(1000, 1256)), estimated=True, tracks=("FP16",))[0]
    for number in (2, 3, 4):
        tiers.put(tiers.warm, number)
    tiers.served.refresh()
    (before,) = [asset for asset in tiers.served.assets if asset.name == old.namespace.prompt]
    assert before.catalog == other
    assert old.namespace.prompt in tiers.settle().down
    assert tiers.where(old) == ["cold"]
    (after,) = [asset for asset in tiers.served.assets if asset.name == old.namespace.prompt]
    assert check(after) == old
    assert not before.is_current()


async def test_a_server_moves_by_itself(tiers):
    """Without a limit of time: it ends when the asset is there."""
    cold = tiers.put(tiers.cold, 5)
    tiers.settle()
    log = CapturingLogger()
    async with moving(tiers.store, wrap_logger(log), every_s=0.001), moving(None, wrap_logger(log)):
        while tiers.where(cold) == ["cold"]:
            tiers.play(cold)
            await asyncio.sleep(0.01)
    assert tiers.where(cold) == ["warm", "cold"]


def test_a_server_that_cannot_move_says_so_at_its_start(tmp_path, capsys):
    def serve(*words):
        return main(["serve", str(tmp_path), "--dev", *words])

    assert serve("--cold", "memory://cold") == serve("--warm-mib", "5") == 2
    assert "--cold and --warm-mib belong together" in capsys.readouterr().err
    assert serve("--cold", "memory://cold", "--warm-mib", "0") == 2
    assert "a folder for 0 bytes holds nothing" in capsys.readouterr().err
    assert main(["serve", "memory://cold", "--dev", "--cold", "memory://colder", "--warm-mib", "5"]) == 2
    assert "--cold is for a folder" in capsys.readouterr().err


def test_wrong_use_is_refused(tiers):
    with pytest.raises(UsageError, match="holds nothing"):
        TieredAssetStore(tiers.warm, tiers.cold, 0)
    with pytest.raises(UsageError, match="are its bound"):
        tiers.store.quota(5)
    assert tiers.store.version("f" * 64) is None
    with pytest.raises(AssetError, match="no such asset"):
        tiers.store.open("f" * 64)
