"""What a server publishes: what is found in a folder, when it changes, and who may see it."""

import gc
import hashlib
import itertools
import os
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
import structlog

from kvabr.server import published_assets
from kvabr.server.grants import EVERYTHING, Grant, Grants
from kvabr.server.publication import BytesPublication
from kvabr.server.published_assets import PublishedAssets
from kvabr.store import asset_index
from kvabr.store.asset_store import AssetStore
from kvabr.store.locations import open_asset
from kvabr.store.names import catalog_name, profile_name
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, RequestError
from kvabr.types.naming import CATALOG_TRACK, PROFILE_TRACK, TrackNamespace, prefix_gap, prefix_track
from tests.assets import digests, frame_file, make_asset, whole
from tests.toymodel import toy_asset


@pytest.fixture
def events():
    with structlog.testing.capture_logs() as entries:
        yield entries


def token(text):
    return hashlib.sha256(text.encode()).hexdigest()


def read(library, namespace, track, group=0, grant=EVERYTHING):
    found = library.find(grant, namespace, track)
    return None if found is None else whole(found.open(group))


def lookup(library, tokens, *, grant=EVERYTHING, salt=b""):
    """The catalog that a client finds for a prompt, and the round trips it took."""
    mine = digests(tokens, salt=salt)
    space = TrackNamespace("test/model", mine[0])
    trips, data = 1, read(library, space, prefix_track(mine), grant=grant)
    if data is None:
        return None, trips
    best = Catalog.loads(data)
    gap = prefix_gap(shared(best, mine), len(mine))
    if gap:
        trips += 1
        best = Catalog.loads(read(library, space, prefix_track(mine, gap.start, gap.stop), grant=grant))
    return best, trips


def names_of(library, grant):
    """Every namespace under which a grant may read something."""
    view = library._view(grant)
    return {*view.assets, *view.profiles, *view.prefixes}


def shared(catalog, mine):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(catalog.chunks, mine, strict=False)))


def test_what_is_served_is_what_lies_on_disk(root):
    asset = make_asset(root / "one", range(18), profile=b"side information")
    library = PublishedAssets(root)
    space = asset.catalog.namespace
    assert read(library, space, CATALOG_TRACK) == asset.catalog_bytes()
    assert read(library, TrackNamespace(space.model, asset.catalog.profile), PROFILE_TRACK) == b"side information"
    for level in asset.catalog.tracks:
        publication = library.find(EVERYTHING, space, level.name)
        assert publication.groups == 5
        for group in range(5):
            opened = publication.open(group)
            assert whole(opened) == asset.frame(group, level.name)
            assert opened.digest == level.digests[group]
    assert library.find(EVERYTHING, space, "FP8") is None
    assert library.find(EVERYTHING, space, PROFILE_TRACK) is None
    assert library.find(EVERYTHING, TrackNamespace(space.model, "0" * 64), CATALOG_TRACK) is None


def test_assets_lie_a_few_levels_down_and_hidden_folders_are_not_looked_into(root):
    made = {
        place: make_asset(root / place, range(index, index + 8)).name
        for index, place in enumerate(["one", "t/b", "t/u/v/c", "t/u/v/w/too-deep", ".hidden", "t/.partial"])
    }
    (root / "file").write_text("x")
    found = [asset.name for asset in PublishedAssets(root).assets]
    assert found == [f"{place}/{made[place]}" for place in ("one", "t/b", "t/u/v/c")]
    assert [asset.name for asset in PublishedAssets(root / "one").assets] == [made["one"]]


def test_an_asset_appears_is_replaced_and_vanishes_while_served(root, events):
    library = PublishedAssets(root)
    assert not library.refresh()
    asset = toy_asset(root / "one", ("FP16", "Int4"))
    space = asset.catalog.namespace
    assert library.find(EVERYTHING, space, CATALOG_TRACK) is None
    assert library.refresh()
    assert not library.refresh()
    old = library.find(EVERYTHING, space, "FP16")
    under_way = old.open(1)
    frame = bytes(under_way.read(0, under_way.size))

    shutil.rmtree(root / "one")
    asset = toy_asset(root / "one", ("FP16", "Int8"))
    # Before anyone looked again: what is on disk now is found, and a request of before does not get other bytes.
    assert read(library, space, CATALOG_TRACK) == asset.catalog_bytes()
    assert read(library, space, "Int8", 2) == asset.frame(2, "Int8")
    assert library.find(EVERYTHING, space, "Int4") is None
    with pytest.raises(AssetError, match="replaced or removed"):
        old.open(2)
    assert whole(under_way) == frame

    shutil.rmtree(root / "one")
    assert library.find(EVERYTHING, space, CATALOG_TRACK) is None
    assert not library.refresh()
    assert not names_of(library, EVERYTHING)
    names = [entry["event"] for entry in events]
    assert names == ["asset added", "asset replaced", "asset removed"]


NAMESPACE = '"namespace": {\n  "model": "'
BAD = digests(range(8))


def catalog_file(path):
    """The file of the catalog of the only asset in a store."""
    (found,) = (path / "a").iterdir()
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda a: a.catalog.write_text("{"), "not JSON"),
        (lambda a: edit(a.catalog, "kvabr.catalog/1", "kvabr.catalog/9"), "upgrade"),
        (lambda a: edit(a.catalog, '"name": "Int4"', '"name": "kvabr.catalog"'), "is reserved"),
        (lambda a: edit(a.catalog, '"name": "Int4"', '"name": "prefix.AA"'), "is reserved"),
        (lambda a: edit(a.catalog, NAMESPACE, NAMESPACE + "m" * 4000), "at most 4096"),
        (lambda a: edit(a.catalog, NAMESPACE, NAMESPACE + "m"), "its namespace has 'mtest/model'"),
        (lambda a: edit(a.catalog, BAD[0], "x"), "64 hex digits"),
        (lambda a: edit(a.catalog, "    42,\n", f"    {1 << 23},\n"), "more than a cache can need"),
        (lambda a: edit(a.catalog, f'"prompt": "{BAD[1]}', f'"prompt": "{"0" * 64}'), "of another prompt"),
        (lambda a: flip(a.profile), "SHA-256 differs"),
        (lambda a: a.profile.unlink(), "no such object"),
        (lambda a: a.frame.unlink(), "is missing"),
        (lambda a: a.frame.write_bytes(b"short"), "has 5 bytes"),
        (lambda a: link(a.frame), "is missing"),
        (lambda a: link(a.frame.parent), "is missing"),
    ],
)
def test_a_damaged_asset_is_logged_once_and_left_out(root, events, damage, words):
    good = make_asset(root / "good", range(100, 108))
    bad = make_asset(root / "bad", range(8), profile=b"p")
    files = [root / "bad" / name for name in (catalog_name(bad.name), profile_name(bad.catalog.profile))]
    damage(SimpleNamespace(catalog=files[0], profile=files[1], frame=frame_file(root / "bad", 1, "Int4")))
    library = PublishedAssets(root)
    library.refresh()
    library.refresh()
    assert [asset.name for asset in library.assets] == [f"good/{good.name}"]
    assert library.damaged == 1
    assert read(library, good.catalog.namespace, CATALOG_TRACK)
    (entry,) = [entry for entry in events if entry["log_level"] == "warning"]
    assert (entry["event"], entry["asset"]) == ("asset left out", f"bad/{bad.name}")
    assert words in entry["error"]
    # Mended without its catalog being touched, or with: noticed either way.
    shutil.rmtree(root / "bad")
    make_asset(root / "bad", range(8), profile=b"p")
    assert library.refresh()
    assert (len(library.assets), library.damaged) == (2, 0)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(asset_index, "time", clock)
    return clock


@pytest.fixture
def opened(clock, monkeypatch):
    """The times at which a server opened assets, and their stores; it takes two seconds."""
    found, openly = [], AssetStore.open

    def slowly(store, *of_server):
        if of_server:
            found.append((clock.now_s, store.store.folder.name))
            clock.now_s += 2.0
        return openly(store, *of_server)

    monkeypatch.setattr(AssetStore, "open", slowly)
    return found


def test_a_damaged_asset_is_checked_again_after_pauses_that_double(root, clock, opened):
    make_asset(root / "bad", range(8))
    frame = frame_file(root / "bad", 1, "Int4")
    data = frame.read_bytes()
    frame.unlink()
    library = PublishedAssets(root)
    for clock.now_s in range(10, 400, 10):
        library.refresh()
    assert [at for at, _ in opened] == [0, 10, 30, 70, 140, 210, 280, 350]
    frame.write_bytes(data)
    clock.now_s = 412.0
    assert library.refresh()


def test_damaged_assets_do_not_delay_others(root, clock, opened):
    for name in ("bad-1", "bad-2"):
        make_asset(root / name, range(8))
        frame_file(root / name, 1, "Int4").unlink()
    library = PublishedAssets(root)
    good = make_asset(root / "good", range(8))
    opened.clear()
    clock.now_s = 10.0
    assert library.refresh()
    assert len(opened) == 2  # one damaged asset, and the new one in any case
    assert [asset.name for asset in library.assets] == [f"good/{good.name}"]
    library.refresh()
    assert {name for _, name in opened} == {"bad-1", "good", "bad-2"}
    for name in ("bad-1", "bad-2"):
        os.utime(catalog_file(root / name), ns=(2**62, 2**62))  # changed, so it is not too early
    library.refresh()
    assert len(opened) == 4
    assert library.damaged == 2


def link(path):
    aside = path.parents[2] / f".aside-{path.name}"
    path.rename(aside)
    path.symlink_to(aside)


def test_of_two_stores_with_one_prompt_the_newer_answers(root):
    asset = make_asset(root / "one", range(8))
    copy = root / "two"
    shutil.copytree(root / "one" / "a", copy / "a")
    library = PublishedAssets(root)
    assert len(library.assets) == 1  # frames are missing in the other
    shutil.copytree(root / "one" / "g", copy / "g")
    assert library.refresh()
    assert len(library.assets) == 2
    os.utime(catalog_file(copy), ns=(2**62, 2**62))
    library.refresh()
    flip(frame_file(copy, 0, "FP16"))
    assert read(library, asset.catalog.namespace, "FP16") == frame_file(copy, 0, "FP16").read_bytes()


def test_the_longest_prefix_is_found_and_of_several_the_newest(root):
    base = list(range(1000, 1064))
    prompts = {"short": base[:16], "long": base[:48], "branch": base[:32] + [7] * 16}
    catalogs = {name: make_asset(root / name, tokens).catalog for name, tokens in prompts.items()}
    os.utime(catalog_file(root / "branch"), ns=(2**62, 2**62))
    library = PublishedAssets(root)
    assert lookup(library, base) == (catalogs["long"], 1)
    assert lookup(library, base[:32] + [7] * 40) == (catalogs["branch"], 1)
    # All three share these 16 tokens, two of them 32: the newest.
    assert lookup(library, [*base[:16], 5, 5, 5, 5]) == (catalogs["branch"], 1)
    assert lookup(library, [*base[:32], 5, 5, 5, 5]) == (catalogs["branch"], 1)
    assert lookup(library, base[:4]) == (catalogs["branch"], 1)
    assert lookup(library, [1, *base[1:]]) == (None, 1)
    assert lookup(library, base[:2]) == (None, 1)


def test_names_of_lookups_that_nobody_makes_find_nothing(root):
    space = make_asset(root / "one", range(8)).catalog.namespace
    first = TrackNamespace(space.model, digests(range(8))[0])
    library = PublishedAssets(root)
    for name in ("prefix.", "prefix", "prefix.A", "prefix.AAAA", "prefix.ä", "prefix." + "A" * 10**6, "", "\0", "../a"):
        found = library.find(EVERYTHING, first, name)
        assert (found is not None) == (name == "prefix.")
    assert library.find(EVERYTHING, TrackNamespace("other", first.prompt), "prefix.") is None


@pytest.fixture
def two_tenants(root):
    """Folders of two tenants, a grant for each, and one that opens all of one model."""
    for team, start in (("team-a", 0), ("team-b", 500)):
        make_asset(root / team / "x", range(start, start + 16), profile=team.encode())
        make_asset(root / team / "y", range(start, start + 32), salt=team.encode())
    make_asset(root / "shared", range(900, 908), model="other")
    return Grants(
        [
            Grant("a", ("team-a/*",), ("*",), token("a")),
            Grant("b", ("team-b/*",), ("*",), token("b")),
            Grant("other", ("*",), ("oth*",), token("o")),
            Grant("nothing", (), ("*",), token("n")),
        ]
    )


def test_each_grant_sees_its_own_and_nothing_else(root, two_tenants):
    library = PublishedAssets(root, two_tenants)
    a, b, *_ = two_tenants
    assert library.admit(b"a") is a
    assert library.admit(b"x") is library.admit(None) is library.admit(b"") is None
    every = {grant.name: names_of(library, grant) for grant in two_tenants}
    # Two assets, their first digests, and a profile each.
    assert [len(every[name]) for name in ("a", "b", "other", "nothing")] == [5, 5, 2, 0]
    assert not every["a"] & every["b"]
    for grant, space in itertools.product(two_tenants, set().union(*every.values())):
        tracks = (CATALOG_TRACK, PROFILE_TRACK, "FP16", "Int4", "prefix.")
        found = [library.find(grant, space, track) for track in tracks]
        assert any(found) == (space in every[grant.name])
    assert lookup(library, range(32), grant=a)[0].tokens == 16
    assert lookup(library, range(32), grant=b)[0] is None
    # The salted one only by who has the salt, whatever the grant.
    assert lookup(library, range(32), grant=a, salt=b"team-a")[0].tokens == 32
    with pytest.raises(RequestError, match="no longer accepted"):
        library.find(Grant("forged"), next(iter(every["a"])), CATALOG_TRACK)


def test_forbidden_and_missing_take_the_same_steps(root, two_tenants, monkeypatch):
    library = PublishedAssets(root, two_tenants)
    a = library.admit(b"a")
    theirs = open_asset(root / "team-b" / "x").catalog
    first = TrackNamespace("test/model", theirs.chunks[0])
    forbidden = [
        (theirs.namespace, CATALOG_TRACK),
        (theirs.namespace, "FP16"),
        (TrackNamespace("test/model", theirs.profile), PROFILE_TRACK),
        (first, prefix_track(theirs.chunks)),
    ]
    absent = TrackNamespace("test/model", "e" * 64)

    def steps(space, track):
        seen = []
        gc.disable()  # others are told when it runs
        sys.setprofile(lambda frame, event, _: seen.append((event, frame.f_code.co_qualname, frame.f_lineno)))
        try:
            assert library.find(a, space, track) is None
        finally:
            sys.setprofile(None)
            gc.enable()
        return seen

    for space, track in forbidden:
        assert steps(space, track) == steps(absent, track)


def test_catalogs_in_memory_are_bounded(root, monkeypatch):
    monkeypatch.setattr(published_assets, "MAX_CACHED_BYTES", 20_000)
    spaces = [make_asset(root / f"a{n}", range(n, n + 40)).catalog.namespace for n in range(20)]
    library = PublishedAssets(root)
    for space in spaces * 2:
        assert isinstance(library.find(EVERYTHING, space, CATALOG_TRACK), BytesPublication)
        assert library._cached.currsize <= 20_000
    assert library._cached.currsize > 10_000


@pytest.mark.slow
def test_requests_while_assets_come_and_go(root):
    stay = make_asset(root / "stay", range(8)).catalog.namespace
    library = PublishedAssets(root)
    going = TrackNamespace("test/model", digests(range(50, 58))[-1])
    done = threading.Event()
    failures = []

    def change():
        try:
            for turn in range(25):
                make_asset(root / "go", range(50, 58), seed=turn)
                library.refresh()
                shutil.rmtree(root / "go")
                library.refresh()
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=change)
    thread.start()
    seen = set()
    while not done.is_set():
        assert read(library, stay, CATALOG_TRACK)
        found = library.find(EVERYTHING, going, "Int4")
        seen.add(found is None)
        if found is not None:
            try:
                opened = found.open(1)
            except AssetError:
                continue
            assert hashlib.sha256(whole(opened)).hexdigest() == opened.digest
    thread.join()
    assert not failures
    assert not library.refresh()
    assert [asset.catalog.namespace for asset in library.assets] == [stay]
