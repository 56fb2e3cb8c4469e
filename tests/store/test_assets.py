"""Assets in stores: what is published is listed, read and shared, and survives publishers that race or die."""

import itertools
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvabr.store import names as naming
from kvabr.store.local import LocalStore
from kvabr.store.locations import open_asset, open_objects, open_store
from kvabr.store.memory import MemoryStore
from kvabr.store.pages import Page
from kvabr.types.errors import AssetError, FormatError, KvabrError, UsageError
from tests.assets import whole
from tests.client.classes import HYBRID, INDEXED, SLIDING, WINDOWS
from tests.store.noise import LONG, names, objects, publish, read_object, replace_object
from tests.store.publishing import PLAIN, check, put

TOKENS = list(range(700))
STATES = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=64)))


@pytest.mark.parametrize("spec", [PLAIN, SLIDING, INDEXED, WINDOWS, HYBRID, STATES], ids=lambda spec: spec.model[5:])
@pytest.mark.parametrize("tokens", [5, 256, 300])
def test_what_is_published_is_read(tmp_path, spec, tokens):
    url = str(tmp_path / "objects")
    catalog, writer = put(url, spec, TOKENS[:tokens])
    assert writer.published
    store, name = open_store(url), catalog.namespace.prompt
    assert store.list().keys() == {name}
    asset = store.open(name)
    assert check(asset) == catalog
    assert asset.is_current()
    track, number = catalog.address(0, "FP16")
    assert whole(asset.open_frame(number, track)) == asset.frame(number, track)
    with pytest.raises(AssetError):
        asset.prompt()
    assert open_asset(f"{url}/{name}").catalog == open_asset(url).catalog == catalog
    assert open_store(f"{url}/{name}").list().keys() == {name}


def test_a_longer_prompt_adds_only_its_own(place):
    first, _ = put(place, PLAIN, TOKENS[:512])
    before = objects(place)
    second, writer = put(place, PLAIN, TOKENS[:512] + TOKENS[:100], loss=0.7)
    added = set(objects(place)) - set(before)
    assert sorted(name[0] for name in added) == ["a", *"g" * 3, *"i" * 7]  # a pack for each track, and seven groups
    listed = check(open_store(place).open(second.namespace.prompt))
    assert listed.tracks[0].loss == (*first.tracks[0].loss[:32], *(0.7,) * 7)  # what is there is listed as it is
    assert check(open_store(place).open(first.namespace.prompt)) == first
    with pytest.raises(UsageError):
        open_store(place).writer(first.namespace.prompt)
    assert writer.read_frame(3, "FP16") == open_store(place).open(first.namespace.prompt).frame(3, "FP16")


def test_frames_are_packed_up_to_four_megabytes(tmp_path):
    for size, pack in ((200, 16), ((256 << 10), 16), ((256 << 10) + 1, 8), ((3 << 20), 1)):
        assert naming.pack_groups(size) == pack
    _, published = publish(tmp_path / "one", LONG, frame_of=lambda _, level: bytes([ord(level[0])]) * (1 << 20))
    assert published
    asset = open_asset(tmp_path / "one")
    assert [track.pack(0) for track in asset.catalog.tracks] == [4, 4]
    asset.check_frames()


def test_a_state_at_the_end_of_one_prompt_is_not_in_the_middle_of_another(place):
    for tokens in (512, 700, 300, 256):
        put(place, HYBRID, TOKENS[:tokens])
    store = open_store(place)
    assert {check(store.open(name)).tokens for name in store.list()} == {512, 700, 300, 256}
    assert [name for name in objects(place, "i/") if name.endswith(".end")]


@pytest.mark.parametrize("spec", [PLAIN, HYBRID], ids=["plain", "states"])
def test_every_group_is_found_by_its_digest(place, spec):
    catalog, _ = put(place, spec, TOKENS[:300])
    for group, digest in enumerate(catalog.chunks):
        end = spec is HYBRID and group == len(catalog.chunks) - 1
        page = Page.loads(read_object(place, naming.page_name(digest, end=end)))
        assert page.chunks[group - page.first] == digest
        assert page.fits(spec, any_dtype=False)


def test_models_are_numbered_and_those_that_cannot_be_read_skipped(place):
    open_objects(place).blocked(open_objects(place).put_new("m/0", b"nonsense"))
    for spec in (PLAIN, HYBRID, PLAIN):
        put(place, spec, TOKENS[: 20 if spec is HYBRID else len(objects(place)) + 20])
    assert objects(place, "m/") == ["m/0", "m/1", "m/2"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "another's"])
def test_an_object_that_was_changed_under_a_reader_is_found_out(small_place, damage):
    catalog, _ = put(small_place, PLAIN, TOKENS[:40])
    put(small_place, PLAIN, TOKENS[100:140])
    asset = open_store(small_place).open(catalog.namespace.prompt)
    track = catalog.tracks[-1].name
    name = asset.place(2, track).name
    data = read_object(small_place, name)
    others = [other for other in objects(small_place, "g/") if other not in asset.objects]
    place = asset.place(2, track)
    new = {
        "flipped": data[: place.first] + bytes([data[place.first] ^ 1]) + data[place.first + 1 :],
        "cut": data[: place.first + 3],
        "gone": None,
        "another's": read_object(small_place, others[0])[: len(data)],
    }[damage]
    replace_object(small_place, name, new)
    with pytest.raises(KvabrError):
        asset.frame(2, track)
    if damage in ("cut", "gone"):
        with pytest.raises(KvabrError):
            asset.open_frame(2, track)
        with pytest.raises(AssetError):
            open_store(small_place).open(catalog.namespace.prompt).check_parts()
    with pytest.raises(KvabrError):
        asset.check_frames()


@pytest.mark.parametrize("what", ["another prompt", "newer", "nonsense"])
def test_a_catalog_that_is_not_the_one_of_its_name_is_refused(small_place, what):
    one, other = (put(small_place, PLAIN, tokens)[0].namespace.prompt for tokens in (TOKENS[:40], TOKENS[:50]))
    data = read_object(small_place, f"a/{other}")
    new = {"another prompt": data, "newer": data.replace(b"catalog/1", b"catalog/2"), "nonsense": b"{}"}[what]
    replace_object(small_place, f"a/{one}", new)
    with pytest.raises(FormatError):
        open_store(small_place).open(one)


def test_a_publisher_that_stops_early_leaves_nothing_that_is_listed(monkeypatch):
    put_new, left = MemoryStore.put_new, 0
    for steps in itertools.count():
        place, writes = f"memory://early-{id(left)}-{steps}", itertools.count()

        async def dies(self, name, data, writes=writes, steps=steps):
            if next(writes) == steps:
                raise KeyboardInterrupt
            return await put_new(self, name, data)

        monkeypatch.setattr(MemoryStore, "put_new", dies)
        try:
            catalog, _ = put(place, PLAIN, TOKENS[:70])
            break
        except KeyboardInterrupt:
            left += 1
            assert open_store(place).list() == {}
        finally:
            monkeypatch.setattr(MemoryStore, "put_new", put_new)
        catalog, _ = put(place, PLAIN, TOKENS[:70])  # another goes on where it stopped
        assert check(open_store(place).open()) == catalog
    assert left > 8
    assert check(open_store(place).open(catalog.namespace.prompt)) == catalog


def test_a_folder_in_which_nothing_was_published_is_not_left(tmp_path):
    with open_store(tmp_path / "new").writer() as writer:
        writer.begin(PLAIN)
        writer.frame(0, "FP16", bytes(5 << 20), "ab" * 32)
        assert (tmp_path / "new" / "g").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_name_that_is_no_digest_is_refused(tmp_path):
    store = open_store(tmp_path / "objects")
    with pytest.raises(UsageError):
        store.writer("team/a")
    with pytest.raises(UsageError):
        store.open("team/a")
    for wrong in ("ab" * 32, None):
        with pytest.raises(AssetError):
            store.open(wrong)
    for tokens in (20, 30):
        put(store, PLAIN, TOKENS[:tokens])
    with pytest.raises(AssetError) as failed:
        store.open()
    assert "2 assets" in str(failed.value)


def test_publishers_in_threads_agree(place):
    prompts = [LONG, LONG[:128], LONG, [*LONG[:128], *LONG[:50]], LONG, LONG[:190]]
    open_store(place).prepare()

    def one(number):
        def unlike(chunk, level):
            return f"{chunk} {level} {number}".encode() * 3

        try:
            return publish(place, prompts[number], frame_of=unlike, loss=number / 8)[1]
        except UsageError:  # it was there before this one began
            return False

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(one, range(6)))
    assert sum(won) == 4
    store = open_store(place)
    assert len(names(place)) == 4
    for name in names(place):
        check(store.open(name))
    catalogs = [store.open(name).catalog for name in names(place)]
    for catalog in catalogs:  # pages and catalogs name the same frames
        for first in range(0, len(catalog.chunks) - 15, 16):
            page = Page.loads(read_object(place, naming.page_name(catalog.chunks[first + 15])))
            assert page.by_name["FP16"].digests == catalog.tracks[0].digests[first : first + 16]
    assert objects(place, "m/") == ["m/0"]


@pytest.fixture(scope="module")
def process():
    """Start a function in a process of its own, which need not load torch again: ``process(function, *arguments)``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # for the first

    def start(function, *arguments):
        started = context.Process(target=_in_environment, args=(dict(os.environ), function, *arguments))
        started.start()
        return started

    return start


def _in_environment(environment, function, *arguments):
    """Call a function with the test's environment, which has the keys of a store; the fork server has its own."""
    os.environ.update(environment)
    function(*arguments)


def _publish_in_a_process(url, number, tokens):
    put(url, PLAIN, tokens, loss=number / 8)


@pytest.mark.process
@pytest.mark.slow
def test_publishers_in_processes_agree(seaweed, process):
    url = seaweed.url()
    open_store(url).prepare()
    prompts = [TOKENS[:300], TOKENS[:300], TOKENS[:300] + TOKENS[:300], TOKENS[:256] + TOKENS[50:90]]
    started = [process(_publish_in_a_process, url, number, tokens) for number, tokens in enumerate(prompts)]
    for one in started:
        one.join(300)
    assert len(names(url)) == 3
    for name in names(url):
        check(open_store(url).open(name))


def _publish_and_die(folder, writes):
    """Publish until the last of these writes, and kill the process."""
    put_new, left = LocalStore._put_new, itertools.count(writes - 1, -1)

    def dies(self, name, data):
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return put_new(self, name, data)

    LocalStore._put_new = dies
    put(folder, PLAIN, TOKENS[:600])


@pytest.mark.process
@pytest.mark.parametrize("writes", [3, 9, 30])
def test_a_publisher_that_is_killed_harms_nobody(tmp_path, process, writes):
    dies = process(_publish_and_die, tmp_path, writes)
    dies.join(300)
    assert dies.exitcode == -signal.SIGKILL
    assert names(tmp_path) == set()
    catalog, writer = put(tmp_path, PLAIN, TOKENS[:600], loss=0.3)
    assert writer.published
    assert check(open_store(tmp_path).open()) == catalog
