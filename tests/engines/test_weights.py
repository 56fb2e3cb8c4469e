"""Which weights an engine has: a digest of all in its folder, read once, or a declared one; and what a signal adds."""

import json
import os
import shutil

import pytest

from kvabr.engines import weights
from kvabr.engines.generation import Generation
from kvabr.engines.settings import EngineSettings
from kvabr.engines.weights import DECLARED, RECORD, cached_folder, model_name, weights_digest
from kvabr.types.errors import ModelError, UsageError
from tests.needs import ORDINARY_USER, may_read_everything

PIECE = 1 << 16
"""Bytes of a piece in these tests."""


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(weights, "_PIECE_BYTES", PIECE)
    monkeypatch.setattr(weights, "_READ_BYTES", PIECE // 4 + 1)  # a piece is read in several steps


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "a" / "assistant")


def make(folder, content=b"w" * (3 * PIECE + 5)):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(content)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def settled(monkeypatch):
    """Files count as unchanged for long."""
    monkeypatch.setattr(weights, "_SETTLED_S", -60.0)


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that were read."""
    found = []
    read = weights._piece

    def noting(path, at, meter):
        found.append(path.name)
        return read(path, at, meter)

    monkeypatch.setattr(weights, "_piece", noting)
    return found


def test_equal_folders_have_equal_names_and_a_byte_anywhere_makes_another(folder, tmp_path):
    name = model_name(folder)
    assert name.startswith("assistant-")
    assert len(name) == len("assistant-") + 16
    assert model_name(make(tmp_path / "b" / "assistant")) == name
    for number, at in enumerate((0, PIECE - 1, PIECE, PIECE + PIECE // 2, 2 * PIECE + 3, 3 * PIECE + 4)):
        changed = bytearray(b"w" * (3 * PIECE + 5))
        changed[at] ^= 1
        assert model_name(make(tmp_path / f"c{number}" / "assistant", bytes(changed))) != name


LOADED = ("more.safetensors", "pytorch_model.bin", "model.gguf", "adapter_config.json", "hf_quant_config.json")


@pytest.mark.parametrize("file", [*LOADED, "m.index.json", "quantize_config.json", "modeling_x.py", "params.json"])
def test_every_file_that_an_engine_may_load_counts(folder, file):
    before = weights_digest(folder)
    (folder / file).write_bytes(b"{}")
    assert weights_digest(folder) != before


@pytest.mark.parametrize(
    "file", ["README.md", "tokenizer_config.json", "generation_config.json", ".hidden.safetensors"]
)
def test_others_do_not(folder, file):
    before = weights_digest(folder)
    (folder / file).write_bytes(b"x")
    assert weights_digest(folder) == before


def test_the_sizes_of_files_are_told_apart(folder):
    """The same bytes in other files are another model."""
    before = weights_digest(folder)
    one, other = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    one.write_bytes(b"w" * (2 * PIECE))
    other.write_bytes(b"w" * (PIECE + 5))
    assert weights_digest(folder) != before


def test_weights_are_read_once_and_what_has_changed_again(folder, settled, reads):
    first = weights_digest(folder)
    assert set(reads) == {"config.json", *(path.name for path in folder.glob("*.safetensors"))}
    assert (folder / RECORD).is_file()
    reads.clear()
    assert weights_digest(folder) == first
    assert reads == []
    path = folder / "model-00001-of-00002.safetensors"
    with path.open("r+b") as file:  # of the same size
        file.seek(2 * PIECE)
        file.write(b"x")
    os.utime(path, ns=(1, 1))  # whatever its own times say
    assert weights_digest(folder) != first
    assert set(reads) == {path.name}


def test_what_has_just_been_written_is_not_kept(folder):
    weights_digest(folder)
    assert not (folder / RECORD).exists()


@pytest.mark.skipif(may_read_everything(), reason=ORDINARY_USER)
def test_a_folder_that_cannot_be_written_has_its_record_elsewhere(folder, settled, reads):
    folder.chmod(0o500)
    first = weights_digest(folder)
    reads.clear()
    assert weights_digest(folder) == first
    assert reads == []
    folder.chmod(0o700)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": "kvabr.weights/2", "files": {}}', b"\xff" * 9])
def test_a_damaged_record_is_none(folder, settled, content, reads):
    first = weights_digest(folder)
    (folder / RECORD).write_bytes(content)
    reads.clear()
    assert weights_digest(folder) == first
    assert reads


def test_a_copied_record_does_not_vouch_for_other_files(folder, settled, tmp_path):
    first = weights_digest(folder)
    other = make(tmp_path / "b" / "assistant", b"v" * (3 * PIECE + 5))
    shutil.copy2(folder / RECORD, other / RECORD)
    for path in folder.iterdir():
        shutil.copystat(path, other / path.name)
    assert weights_digest(other) != first


def test_files_that_change_while_they_are_read_are_an_error(folder, monkeypatch):
    read = weights._piece

    def changing(path, at, meter):
        (folder / "config.json").write_text('{"model_type": "gemma"}')
        return read(path, at, meter)

    monkeypatch.setattr(weights, "_piece", changing)
    with pytest.raises(ModelError, match="has changed while it was read"):
        weights_digest(folder)


def test_files_that_cannot_be_read_are_an_error(folder, tmp_path):
    (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"gone\.safetensors: cannot be read"):
        weights_digest(folder)
    with pytest.raises(ModelError, match="none: cannot be read"):
        weights_digest(tmp_path / "none")


def test_a_declared_version_stands_for_the_weights(folder, reads):
    (folder / DECLARED).write_text('{"version": "2026-11"}')
    one = model_name(folder)
    (folder / DECLARED).write_text('{"version": "2026-12"}')
    two = model_name(folder)
    assert len({one, two}) == 2
    assert one.startswith("assistant~")
    assert reads == []


def test_a_declared_name_is_the_name(folder, reads):
    (folder / DECLARED).write_text('{"model": "assistant-1f0c2a3b"}')
    assert model_name(folder) == "assistant-1f0c2a3b"
    assert reads == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"name": "x"}', '{"version": 3}', '{"version": ""}', '{"a": "b", "version": "1"}']
)
def test_other_declarations_are_errors(folder, text):
    (folder / DECLARED).write_text(text)
    with pytest.raises(ModelError, match=DECLARED):
        model_name(folder)


def test_snapshots_of_repositories_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    repository = tmp_path / "hf" / "hub" / "models--org--tiny"
    for commit in ("c1", "c2"):
        make(repository / "snapshots" / commit, commit.encode())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c2")
    assert cached_folder("org/tiny") == repository / "snapshots" / "c2"
    assert cached_folder("org/tiny", "c1") == repository / "snapshots" / "c1"
    assert cached_folder("org/tiny", "c3") is None
    assert cached_folder("org/other") is None
    assert cached_folder(str(repository / "snapshots" / "c1")) == repository / "snapshots" / "c1"
    one, two = (model_name(cached_folder("org/tiny", revision)) for revision in ("c1", "c2"))
    assert one != two
    assert one.startswith("org/tiny-")
    assert json.dumps(one)


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
