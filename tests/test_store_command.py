"""`kvabr store`: what it prints and writes, and what it refuses."""

import json
import re
import secrets

import pytest

from kvabr.cli.main import main
from kvabr.store.locations import open_store
from tests.store.noise import LONG, MODEL, publish


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    made = str(tmp_path / "assets") if request.param == "folder" else f"memory://{secrets.token_hex(6)}"
    publish(made, LONG[:128])
    publish(made, LONG, measured=True)
    return made


def store(*words):
    return main(["store", *map(str, words)])


def test_ls(place, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert store("ls", place, "--json", out) == 0
    value = json.loads(out.read_text())
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "store ls")
    assert [asset["tokens"] for asset in sorted(value["assets"], key=lambda each: each["tokens"])] == [128, 200]
    assert all(0 < asset["own_bytes"] <= asset["bytes"] for asset in value["assets"])
    shown = capsys.readouterr().out
    assert value["assets"][0]["name"][:16] in shown
    assert re.search(r"^2 assets, [\d.]+ kB$", shown, re.MULTILINE)
    assert store("ls", place, "--model", "unknown") == 0
    assert "no assets" in capsys.readouterr().out
    assert value["unreferenced_bytes"] == 0
    assert {track for asset in value["assets"] for track in asset["tracks"]} == {"FP16", "Int4"}


def test_rm(place, tmp_path, capsys):
    name = min(open_store(place).list(), key=lambda each: open_store(place).open(each).catalog.tokens)
    publish(place, LONG[:20], model="test/other")
    out = tmp_path / "out.json"
    assert store("rm", place, name[:10], "--json", out) == 0
    assert "1 asset removed" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "store rm")
    assert value["removed"] == [name]
    assert value["bytes"] > 0
    assert len(open_store(place).list()) == 2
    assert store("rm", place, name) == 1
    assert "no asset of that name" in capsys.readouterr().err
    assert store("rm", place, "--model", MODEL) == 0
    (left,) = open_store(place).list()
    assert open_store(place).open(left).catalog.spec.model == "test/other"
    assert store("rm", place, "--model", MODEL) == 0
    assert "0 assets removed" in capsys.readouterr().out
    assert store("rm", place) == 2
    assert "--unreferenced" in capsys.readouterr().err


def test_verify_and_copy(place, tmp_path, capsys):
    target = tmp_path / "copy"
    assert store("copy", place, target) == 0
    assert "2 assets copied" in capsys.readouterr().out
    assert store("copy", place, target, "--json", tmp_path / "out.json") == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["kept"]) == 2
    assert store("verify", target, "--deep") == 0
    assert "no object is damaged" in capsys.readouterr().out
    name = publish(tmp_path / "same", LONG)[0]
    path = target / open_store(target).open(name).place(40, "FP16").name  # only the longer one has it
    path.write_bytes(bytes(path.stat().st_size))
    assert store("verify", target) == 0
    capsys.readouterr()
    assert store("verify", target, "--deep", "--json", tmp_path / "out.json") == 1
    said = capsys.readouterr()
    assert f"{name}: " in said.out
    assert "remove it with --repair" in said.out
    assert "1 damaged" in said.err
    assert json.loads((tmp_path / "out.json").read_text())["damages"][0]["repaired"] is False
    assert store("copy", target, tmp_path / "third") == 1
    assert "1 asset was not copied" in capsys.readouterr().err
    assert store("verify", target, "--deep", "--repair") == 0
    assert "1 removed, the rest is undamaged" in capsys.readouterr().out
    assert store("copy", place, target) == 0
    assert store("verify", target, "--deep") == 0
