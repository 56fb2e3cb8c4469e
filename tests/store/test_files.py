import os
import threading
import time
from pathlib import Path

import pytest

from kvabr.store.files import (
    PRIVATE,
    STALE_S,
    NameClaim,
    read_text,
    replacing,
    sweep,
    write_file,
    write_text,
)
from kvabr.types.errors import AssetError, TraceError, UsageError


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    write_text(path, "one")
    write_text(path, "two \ud800")
    assert path.read_text() == "two \\ud800"
    with pytest.raises(AssetError, match="cannot be written"):
        write_text(tmp_path / "no" / "out.json", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_into_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "hello")
    reader.join(timeout=300)
    assert heard == ["hello"]
    assert pipe.is_fifo()


def test_a_pipe_without_a_path_is_written_into():
    """As /dev/stdout is, and what a shell makes of ``>(...)``."""
    ours, theirs = os.pipe()
    write_text(Path("/dev/fd") / str(theirs), "hello")
    os.close(theirs)
    with os.fdopen(ours) as reader:
        assert reader.read() == "hello"


def test_bytes_too_and_never_over_a_folder(tmp_path):
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"t\0")
    assert (tmp_path / "a").read_bytes() == b"t\0"
    (tmp_path / "folder").mkdir()
    with pytest.raises(AssetError, match="cannot be written"):
        write_file(tmp_path / "folder", b"")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "folder"]


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UsageError, match="not a text file in UTF-8"):
        read_text(tmp_path / "latin")
    with pytest.raises(TraceError, match="not a text file in UTF-8"):
        read_text(tmp_path / "latin", unfit=TraceError)
    (tmp_path / "long").write_text("x" * 11)
    with pytest.raises(UsageError, match="more than the 10 bytes"):
        read_text(tmp_path / "long", limit=10)
    assert read_text(tmp_path / "long", limit=11) == "x" * 11
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(AssetError, match="cannot be read"):
            read_text(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_text(tmp_path / "nothing", unreadable=TraceError)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfwords")
    assert read_text(tmp_path / "marked") == "words"


def test_the_umask_is_never_touched(tmp_path, monkeypatch):
    """It is the whole process's: a file that another thread makes meanwhile would be open to all."""
    monkeypatch.setattr(os, "umask", lambda _mask: pytest.fail("umask was set"))
    write_text(tmp_path / "mine", "")
    with replacing(tmp_path / "private", mode=0o600) as file:
        file.write(b"x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_a_block_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "old").write_text("old")

    def write():
        with replacing(tmp_path / "old") as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("old", "old")]


def test_what_is_private_is_private_whatever_the_umask(tmp_path):
    mask = os.umask(0)
    try:
        write_text(tmp_path / "mine", "", mode=PRIVATE)
        write_file(tmp_path / "other", b"")
    finally:
        os.umask(mask)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o666


def test_half_written_files_of_one_name_are_swept_when_they_are_old(tmp_path):
    old, young, other = (tmp_path / f".{name}.partial" for name in ("out.aa", "out.bb", "other.aa"))
    for path in (old, young, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (time.time() - 2 * STALE_S,) * 2)
    (tmp_path / "out").write_text("")
    sweep(tmp_path, "out")
    assert sorted(tmp_path.iterdir()) == sorted([young, other, tmp_path / "out"])
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, tmp_path / "out"])
    sweep(tmp_path / "nothing")


def test_a_name_is_claimed_by_one_at_a_time(tmp_path):
    one, other = NameClaim(tmp_path / "asset"), NameClaim(tmp_path / "asset")
    assert one.take()
    assert not other.take()
    assert NameClaim(tmp_path / "another").take()
    one.release()
    one.release()
    assert other.take()
    assert not one.take()
    other.release()
    assert not list(tmp_path.glob(".asset*"))


def test_where_no_file_can_be_made_nothing_is_claimed_and_nobody_refused(tmp_path):
    assert NameClaim(tmp_path / "missing" / "asset").take()
