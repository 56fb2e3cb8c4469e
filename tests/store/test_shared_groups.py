"""Groups in shared memory: one writer each, a bound over all processes, and nothing that a reader cannot survive."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from kvabr.store import shared_folder
from kvabr.store.locations import open_groups
from kvabr.store.shared_folder import GroupClaim, NeighbourGroup, SharedFolder
from kvabr.store.shared_groups import SharedGroupStore, shared_path
from kvabr.types.errors import AssetError, UsageError
from tests.client.served import LIMIT_S

DICE = random.Random(11)
LARGE = 300_000
"""Bytes of a group that is mapped."""
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__])


def group(size=LARGE, dice=DICE):
    data = dice.randbytes(size)
    return hashlib.sha256(data).hexdigest(), memoryview(data)


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.glob("*.group"))


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@contextlib.contextmanager
def opened(path, max_bytes=1 << 30):
    folder = SharedFolder(path, max_bytes)
    try:
        yield folder
    finally:
        folder.close()


def started(function, *given):
    """Start a process, and wait until it says that it is as far as it was to come."""
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=function, args=(there, *given), daemon=True)
    process.start()
    assert here.poll(LIMIT_S)
    assert here.recv() == "ready"
    return process, here


@pytest.mark.parametrize("size", [100, LARGE])
async def test_what_one_writes_others_read(shm, size):
    digest, data = group(size)
    one, other = (open_groups(f"shm://{shm}", 1 << 20) for _ in range(2))
    assert isinstance(one, SharedGroupStore)
    assert await one.put(digest, data)
    assert not await other.put(digest, data)
    assert digest in other
    assert await other.get(digest) == data
    assert await other.get(digest, 10, 20) == data[10:20]
    assert (len(other), other.total_bytes) == (1, size)
    await one.close()
    await one.close()
    assert await other.get(digest) == data
    await other.close()
    assert stat.S_IMODE(shm.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in shm.iterdir()} == {0}


async def test_what_is_mapped_stays_when_the_group_is_deleted(shm):
    digest, data = group()
    store = SharedGroupStore(shm, 1 << 20)
    await store.put(digest, data)
    view = await store.get(digest)
    assert view.readonly
    assert await store.delete(digest)
    assert digest not in store
    assert view == data
    await store.close()


@pytest.mark.parametrize("damage", ["byte", "cut", "hole", "empty", "pipe", "link"])
async def test_a_damaged_group_is_found_and_deleted(shm, tmp_path, damage):
    digest, data = group()
    store = SharedGroupStore(shm, 1 << 20)
    await store.put(digest, data)
    path = shm / f"{digest}.group"
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes({"byte": b"x" + bytes(data[1:]), "cut": bytes(data[:-9])}.get(damage, b""))
    if damage == "hole":
        os.truncate(path, len(data))
    assert await store.get(digest) is None
    if damage not in ("pipe", "link"):
        assert (digest in store, store.damaged) == (False, 1)
        assert await store.put(digest, data)
        assert await store.get(digest) == data
    await store.close()


def test_one_has_the_claim_and_the_others_see_the_bytes_come(shm):
    digest, data = group()
    with opened(shm) as one, opened(shm) as other:
        claim = one.claim(digest, len(data))
        assert isinstance(claim, GroupClaim)
        arriving = other.claim(digest, len(data))
        assert isinstance(arriving, NeighbourGroup)
        assert arriving.look()[0] == 0
        assert claim.write(data[:1000])
        assert arriving.look()[0] == 1000
        assert arriving.data(1000) == data[:1000]
        before = arriving.look()[1]
        os.utime(shm / claim.name, ns=(0, 0))
        assert arriving.look()[1] != before
        assert not arriving.is_left()
        assert claim.write(data[1000:])
        assert not other.has(digest)
        assert one.publish(claim)
        assert other.has(digest)
        assert arriving.data(len(data)) == data
        arriving.close()
        assert other.total_bytes == len(data)
    assert hidden(shm) == []


def test_a_claim_that_is_given_up_leaves_nothing(shm):
    digest, data = group()
    with opened(shm) as one, opened(shm) as other:
        claim = one.claim(digest, len(data))
        claim.write(data[:1000])
        arriving = other.claim(digest, len(data))
        one.drop(claim)
        one.drop(claim)
        assert arriving.is_left()
        assert arriving.data(1000) == data[:1000]  # never cut short
        arriving.close()
        assert (one.total_bytes, len(one)) == (0, 0)
        again = other.claim(digest, len(data))
        assert isinstance(again, GroupClaim)
        again.write(data[:10])
        assert not other.publish(again)  # incomplete
    assert list(shm.glob("*.group")) == hidden(shm) == []


def test_where_writers_stand_still_others_try_and_then_each_for_itself(shm):
    digest, data = group()
    folders = [SharedFolder(shm, 1 << 30) for _ in range(shared_folder.TURNS + 1)]
    last = folders[-1]
    for folder in folders[:-1]:
        assert isinstance(folder.claim(digest, len(data)), GroupClaim)
        # The next in line has waited in vain for all before it.
        for other in folders:
            arriving = other.claim(digest, len(data))
            if isinstance(arriving, NeighbourGroup):
                other.distrust(arriving)
                arriving.close()
            elif isinstance(arriving, GroupClaim):
                other.drop(arriving)
    assert last.claim(digest, len(data)) is None
    for folder in folders:
        folder.close()
    assert hidden(shm) == []


def _claims(pipe, path, digest, part):
    claim = SharedFolder(path, 1 << 30).claim(digest, LARGE)
    claim.write(memoryview(part))
    pipe.send("ready")
    signal.pause()


def test_what_a_killed_writer_left_is_taken_over(shm):
    digest, data = group()
    process, _ = started(_claims, shm, digest, bytes(data[:5000]))
    with opened(shm) as other:
        arriving = other.claim(digest, LARGE)
        assert arriving.data(5000) == data[:5000]
        assert not arriving.is_left()
        process.kill()
        process.join()
        assert arriving.is_left()
        claim = other.claim(digest, LARGE)
        assert isinstance(claim, GroupClaim)
        assert arriving.data(5000) == data[:5000]
        claim.write(data)
        assert other.publish(claim)
        arriving.close()
        assert (other.total_bytes, len(other)) == (LARGE, 1)
    assert (hidden(shm), bytes_of(shm)) == ([], LARGE)


def test_what_killed_writers_left_goes_with_the_next_process(shm):
    digests = [group()[0] for _ in range(3)]
    for digest in digests:
        process, _ = started(_claims, shm, digest, b"half")
        process.kill()
        process.join()
    assert len(hidden(shm)) <= 3
    with opened(shm) as folder:
        assert hidden(shm) == []
        assert (folder.total_bytes, len(folder)) == (0, 0)


def _holds_the_count(pipe, path):
    folder = SharedFolder(path, 1 << 30)
    with folder._locked(0.0):
        pipe.send("ready")
        signal.pause()


async def test_a_process_that_holds_up_the_count_holds_up_nobody(shm):
    (digest, data), (other, _) = group(), group()
    store = SharedGroupStore(shm, 1 << 20)
    await store.put(digest, data)
    process, _ = started(_holds_the_count, shm)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert await store.get(digest) == data
        with pytest.raises(BlockingIOError):
            store.claim_now(other, LARGE)
        assert await store.claim(other, LARGE, 0.1) is None
        assert not await store.put(other, data)
    finally:
        process.kill()
        process.join()
    assert await store.put(other, data)
    await store.close()


async def test_the_least_recently_used_make_room(shm):
    store = SharedGroupStore(shm, 350)
    groups = [group(100) for _ in range(4)]
    for age, (digest, data) in enumerate(groups[:3]):
        assert await store.put(digest, data)
        os.utime(shm / f"{digest}.group", (1000 + age, 1000 + age))
    assert await store.get(groups[0][0]) == groups[0][1]
    assert await store.put(*groups[3])
    assert [digest in store for digest, _ in groups] == [True, False, True, True]
    assert (store.total_bytes, store.evicted) == (300, 1)
    assert not await store.put(*group(351))
    assert store.total_bytes == 300
    await store.close()


@pytest.mark.parametrize("count", [b"", b"\xff" * 16, b"x"])
async def test_a_wrong_count_is_made_anew(shm, count):
    store = SharedGroupStore(shm, 350)
    await store.put(*group(300))
    (shm / "kvabr.count").write_bytes(count)
    assert await store.put(*group(300))
    assert bytes_of(shm) == store.total_bytes == 300
    await store.close()


BOUND = 6 * LARGE


def _churns(pipe, path, seed, rounds):
    """Write and read groups that other processes evict; end with an error if one is not what it was."""
    dice, folder = random.Random(seed), SharedFolder(path, BOUND)
    groups = [group(dice=random.Random(each)) for each in range(12)]
    pipe.send("ready")
    held = []
    for _ in range(rounds):
        digest, data = dice.choice(groups)
        found = folder.read(digest)
        if found is not None:
            held = [*held[-3:], (found[0], digest)]
        elif isinstance(claim := folder.claim(digest, len(data)), GroupClaim):
            claim.write(data)
            folder.publish(claim)
        elif claim is not None:
            claim.close()
        assert all(hashlib.sha256(view).hexdigest() == name for view, name in held)
    pipe.send((folder.evicted, len(held)))
    folder.close()


def test_the_bound_holds_over_all_processes_while_groups_are_read_and_evicted(shm):
    processes = [started(_churns, shm, seed, 200) for seed in range(4)]
    most = 0
    while any(process.is_alive() for process, _ in processes):
        sizes = {}
        for path in shm.glob("*.group"):
            with contextlib.suppress(OSError):
                sizes[path] = path.stat().st_size
        # What is listed one after the other need not have been there together.
        most = max(most, sum(size for path, size in sizes.items() if path.exists()))
        for process, _ in processes:
            process.join(0.01)
    assert [process.exitcode for process, _ in processes] == [0] * 4
    told = [pipe.recv() for _, pipe in processes]
    assert sum(evicted for evicted, _ in told) > 0
    assert all(held for _, held in told)
    assert 0 < most <= BOUND
    with opened(shm, BOUND) as folder:
        counted = folder.total_bytes
        assert counted == bytes_of(shm) <= BOUND
    assert hidden(shm) == []


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 2 MiB."""
    path = tmp_path / "tmpfs"
    path.mkdir()
    try:
        subprocess.run([*shlex.split("mount -t tmpfs -o size=2m,mode=700 none"), path], check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a tmpfs: sudo tools/test")
    yield path
    subprocess.run(["umount", "-l", path], check=True)  # noqa: S603, S607


async def test_at_most_half_of_the_memory_is_used(small):
    store = SharedGroupStore(small / "groups", 1 << 30)
    assert store.folder.max_bytes == 1 << 20
    groups = [group() for _ in range(6)]
    for digest, data in groups:
        assert await store.put(digest, data)
    assert bytes_of(small / "groups") <= 1 << 20
    assert store.evicted >= 3
    assert not await store.put(*group((1 << 20) + 1))
    await store.close()


async def test_memory_that_others_filled_is_left_to_them(small):
    store = SharedGroupStore(small / "groups", 1 << 30)
    kept = group()
    await store.put(*kept)
    free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
    (small / "of-others").write_bytes(bytes(free - 50_000))
    digest, data = group()
    assert not await store.put(digest, data)
    assert await store.claim(digest, LARGE, 300.0) is None
    assert (bytes_of(small / "groups"), store.total_bytes) == (0, 0)
    assert hidden(small / "groups") == []
    await store.close()


def test_a_write_that_fails_ends_the_claim(shm):
    digest, data = group()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(shm) as folder:
        claim = folder.claim(digest, LARGE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 2, before[1]))
        try:
            assert not claim.write(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not folder.publish(claim)
        assert not folder.has(digest)
        assert (folder.total_bytes, hidden(shm)) == (0, [])


def test_other_folders_are_refused(shm, tmp_path):
    with pytest.raises(AssetError, match=r"not in memory .*without shm://"):
        SharedFolder(tmp_path / "groups", 1 << 20)
    with pytest.raises(AssetError, match=r"no shared memory here.*--shm-size"):
        SharedFolder(tmp_path / "missing" / "groups", 1 << 20)
    shm.mkdir(mode=0o700)
    link, file, loose = shm / "link", shm / "file", shm / "loose"
    link.symlink_to(tmp_path)
    file.touch()
    loose.mkdir()
    loose.chmod(0o750)
    for path in (link, file):
        with pytest.raises(AssetError, match=r"is a link or no folder|not in memory"):
            SharedFolder(path, 1 << 20)
    with pytest.raises(AssetError, match=r"others may use it.*chmod 700"):
        SharedFolder(loose, 1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away: sudo tools/test")
def test_the_folder_of_another_user_is_refused(shm):
    shm.mkdir(mode=0o700)
    os.chown(shm, 12345, 12345)
    with pytest.raises(AssetError, match="belongs to another user"):
        SharedFolder(shm, 1 << 20)


def test_urls():
    assert shared_path("shm://") == Path(f"/dev/shm/kvabr-{os.geteuid()}")  # noqa: S108
    assert shared_path("shm:///mnt/ram%20disk/groups/") == Path("/mnt/ram disk/groups")
    for wrong in ("shm://host/path", "shm://?size=3", "shm:///a#b"):
        with pytest.raises(UsageError, match="shm:///PATH"):
            shared_path(wrong)


async def test_shared_memory_keeps_half_of_what_it_has_room_for_the_first_groups_last(shm, monkeypatch):
    """However much the settings allow, there is room for what is played now."""
    store = SharedGroupStore(shm, 1 << 40, keep_bytes=1 << 39)
    monkeypatch.setattr(store.folder, "_limits", lambda: (1000, 1000))
    digests = [f"{number * 7 % 10:064x}" for number in range(8)]
    for digest in digests:
        claim = store.folder.claim(digest, 100)
        assert claim.write(memoryview(bytes(100)))
        assert store.folder.publish(claim)
    store.keep(digests, time.monotonic() + 600.0)
    now = time.time_ns()
    assert {digest for used, digest, _ in store.folder.groups() if used > now} == set(digests[:5])
    assert (store.kept_bytes, store.released) == (500, 3)
    await store.close()


async def test_shared_memory_keeps_what_any_process_wants_kept(shm):
    stores = [SharedGroupStore(shm, 1000, keep_bytes=400) for _ in range(2)]
    here, there = (store.folder for store in stores)
    digests = [f"{number:064x}" for number in range(20)]

    def write(number):
        claim = here.claim(digests[number], 100)
        assert claim.write(memoryview(bytes(100)))
        assert here.publish(claim)

    for number in range(8):
        write(number)
    stores[1].keep(digests[2:4], time.monotonic() + 600.0)
    here.keep(digests[1:2], 100.0)
    there.read(digests[1])  # that it is used does not shorten that
    for number in range(8, 20):
        write(number)
    assert [digest for digest in digests[:8] if here.has(digest)] == digests[1:4]
    here.keep(digests[16:20], 300.0)
    assert (stores[0].kept_bytes, stores[0].released) == (400, 3)  # those that were to be kept for the shortest time
    for store in stores:
        await store.close()
