"""A folder as a store: other users may write there, processes die, and disks are full."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvabr.store.files import STALE_S
from kvabr.store.local import LocalStore
from kvabr.store.store import listing
from kvabr.types.errors import NotFoundError, StoreError, TransportError


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "objects")


def write(store, name, data=b"0123"):
    return store.blocked(store.put_new(name, data))


def read(store, name):
    return bytes(store.blocked(store.get(name, limit=1 << 20)))


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_only_ordinary_files_are_objects(store, tmp_path, kind):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    write(store, "g/real")
    path = store.path("g/x")
    {
        "link": lambda: path.symlink_to(secret),
        "hard link": lambda: path.hardlink_to(secret),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(TransportError):
        read(store, "g/x")
    assert not write(store, "g/x") or kind == "folder"
    listed = store.blocked(listing(store, "g/"))
    assert set(listed) == {"g/real"} | ({"g/x"} if kind == "hard link" else set())


def test_an_object_is_read_in_the_moment_in_which_it_is_named(store):
    """A name is a hard link to the written file; a reader may open it before the partial name is removed."""
    write(store, "g/x")
    path = store.path("g/x")
    path.with_name(".x.0123456789abcdef.partial").hardlink_to(path)
    assert read(store, "g/x") == b"0123"
    path.with_name("other").hardlink_to(path)
    with pytest.raises(TransportError):
        read(store, "g/x")


def test_only_its_owner_reads_what_is_written(store, tmp_path):
    os.umask(0o022)
    write(store, "g/x")
    write(store, "private/x")
    assert {path.stat().st_mode & 0o777 for path in store.folder.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (store.folder, store.folder / "g")} == {0o700}
    shared = LocalStore(tmp_path / "shared")
    shared.folder.mkdir()
    shared.folder.chmod(0o2770)
    write(shared, "g/x")
    write(shared, "private/x")
    assert shared.path("g/x").stat().st_mode & 0o777 == 0o640
    assert shared.path("private/x").stat().st_mode & 0o777 == 0o600
    assert (shared.folder / "g").stat().st_mode & 0o070 == 0o050


def test_what_a_killed_writer_left_is_no_object_and_goes_later(store):
    script = (
        "import os, sys; from pathlib import Path; from kvabr.store import local\n"
        "local.os.link = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "store = local.LocalStore(Path(sys.argv[1]))\n"
        "store.blocked(store.put_new('g/x', b'half'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, store.folder], check=False, timeout=300)  # noqa: S603
    assert done.returncode == -9
    assert store.blocked(listing(store, "")) == {}
    (left,) = [path for path in store.folder.rglob("*") if path.is_file()]
    write(LocalStore(store.folder), "g/y")
    assert left.exists()  # its writer may live
    old_s = time.time() - STALE_S - 60.0
    os.utime(left, (old_s, old_s))
    write(LocalStore(store.folder), "g/z")
    assert not left.exists()
    assert set(store.blocked(listing(store, ""))) == {"g/y", "g/z"}


def test_a_file_system_without_hard_links_has_objects_too(store, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert write(store, "g/x")
    assert not write(store, "g/x", b"other")
    assert read(store, "g/x") == b"0123"


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(store, monkeypatch):
    write(store, "g/x")

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError) as failed:
        write(store, "g/y")
    assert "space" in str(failed.value)
    assert [path.name for path in (store.folder / "g").iterdir()] == ["x"]


def test_objects_reach_the_disk_and_catalogs_their_folder(store, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(Path(f"/proc/self/fd/{handle}").readlink()), sync(handle))
    )
    write(store, "g/x")
    write(store, "a/x")
    assert [path.name.partition(".")[0] for path in synced] == ["", "", "a"]
    synced.clear()
    lazy = LocalStore(store.folder, sync=False)
    write(lazy, "g/y")
    assert synced == []
    lazy.flush(["g/y"])
    assert [path.name for path in synced] == ["y"]


def test_folders_that_are_left_empty_go(store):
    write(store, "l/key/0")
    store.blocked(store.delete(["l/key/0"]))
    assert not (store.folder / "l" / "key").exists()
    with pytest.raises(NotFoundError):
        read(store, "l/key/0")
