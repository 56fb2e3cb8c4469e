"""Which weights an engine has: a signal changes the names of its caches, a declared version is shared."""

import os

import pytest

from kvabr.engines.generation import Generation
from kvabr.engines.settings import EngineSettings
from kvabr.types.errors import UsageError


def test_loaded_weights_add_nothing_and_a_signal_something_of_ones_own():
    one, other = Generation(), Generation()
    assert one.name == other.name == ""
    assert one.salt(b"s") == b"s"
    one.changed()
    other.changed()
    names = {"", one.name, other.name}
    assert len(names) == 3
    before = one.name
    assert one.name == before
    one.changed()
    assert one.name not in names
    assert len({one.salt(b"s"), one.salt(b"t"), one.salt(b""), other.salt(b"s"), b"s"}) == 5


def test_engines_of_one_declared_version_share_their_names():
    told = ["7", "7"]
    one, other = (Generation(lambda place=place: told[place]) for place in range(2))
    assert one.name == other.name != ""
    first = one.name
    told[0] = "8"  # the engine says so itself, with or without a signal
    assert one.name != first
    one.changed()
    told[1] = "8"
    other.changed()
    assert one.name == other.name
    one.changed()  # the same version twice: what the weights are now is not known
    assert one.name != other.name
    told[0] = "9"
    assert one.name != first
    told[1] = "9"
    assert one.name == other.name


def test_a_version_file_is_read_again_when_it_has_changed(tmp_path):
    path = tmp_path / "version"
    settings = EngineSettings(version_file=path)
    with pytest.raises(UsageError, match="cannot be read"):
        settings.generation()
    path.write_text("7\n")
    one, other = settings.generation(), Generation(lambda: "7")
    assert one.name == other.name
    path.write_text("8\n")
    os.utime(path, ns=(1, 1))
    assert one.name == Generation(lambda: "8").name
    path.unlink()
    assert one.name == Generation(lambda: "8").name  # while it is being replaced
