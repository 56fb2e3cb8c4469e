import os
import threading

import pytest

from kvabr.errors import AssetError
from kvabr.files import write_text


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
    reader.join(timeout=10)
    assert heard == ["hello"]
    assert pipe.is_fifo()
