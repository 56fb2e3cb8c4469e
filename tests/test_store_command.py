"""`kvabr store`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from kvabr.cli.main import main
from kvabr.store.asset_folder import frame_path
from kvabr.store.locations import open_store
from tests.store.admin.assets import LONG, MODEL, new_place, publish


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    made = new_place(request.param, tmp_path)
    publish(made, LONG[:128])
    publish(made, LONG, measured=True)
    return made


def store(*words):
    return main(["store", *map(str, words)])


def test_ls_and_du(place, tmp_path, capsys):
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
    assert store("du", place, "--json", out) == 0
    (usage,) = json.loads(out.read_text())["tenants"]
    assert usage["models"][MODEL]["assets"] == 2
    assert {each["track"] for each in usage["tracks"]} == {"FP16", "Int4"}
    assert usage["bytes"] <= sum(asset["bytes"] for asset in value["assets"])


def test_du_of_all_tenants(tmp_path, capsys):
    place, out = f"file://{tmp_path}/objects?layout=objects", tmp_path / "out.json"
    for tenant, tokens in (("one", 20), ("two", 40)):
        publish(f"{place}&tenant={tenant}", LONG[:tokens])
    assert store("du", place, "--all-tenants", "--json", out) == 0
    tenants = json.loads(out.read_text())["tenants"]
    assert [(each["tenant"], each["assets"]) for each in tenants] == [("one", 1), ("two", 1)]
    assert tenants[0]["bytes"] < tenants[1]["bytes"]
    assert "tenant two" in capsys.readouterr().out
    assert store("du", _other(tmp_path), "--all-tenants") == 0


def test_pins_and_gc(place, tmp_path, capsys):
    name = min(open_store(place).list().versions, key=lambda each: open_store(place).open(each).catalog.tokens)
    out = tmp_path / "out.json"
    assert store("pin", place, name[:10], "--for", "3d") == 0
    assert "pinned until 20" in capsys.readouterr().out
    options = ("--ttl", "0", "--grace", "0", "--measured", "--json", out)
    assert store("gc", place, *options, "--dry-run") == 0
    assert "1 asset would be removed, 1 stays" in capsys.readouterr().out
    assert store("gc", place, *options) == 0
    shown = capsys.readouterr().out
    assert "1 asset removed, 1 stays" in shown
    assert ": removed, unused" in shown
    value = json.loads(out.read_text())
    assert [each["reason"] for each in value["evicted"]] == ["unused"]
    assert value["kept"] == 1
    assert store("ls", place) == 0
    assert "for 3d" in capsys.readouterr().out
    assert store("unpin", place, name) == 0
    assert store("unpin", place, name) == 1
    assert "is not pinned" in capsys.readouterr().err


def test_measured_assets_stay(place, capsys):
    assert store("gc", place, "--ttl", "0", "--grace", "0") == 0
    assert "1 asset removed, 1 stays" in capsys.readouterr().out


def test_expire(place, tmp_path, capsys):
    words = ("expire", place, "--model", MODEL, "--before", "2199-01-01")
    assert store(*words, "--dry-run") == 0
    assert "2 assets would be removed, 0 stay" in capsys.readouterr().out
    assert store(*words, "--json", tmp_path / "out.json") == 0
    shown = capsys.readouterr().out
    assert "everything from before 2199-01-01 00:00:00 UTC has expired" in shown
    assert "2 assets removed, 0 stay" in shown
    assert not open_store(place).list().versions
    assert store("copy", _other(tmp_path), place) == 0
    assert "not copied, its model has expired" in capsys.readouterr().out


def _other(tmp_path):
    publish(tmp_path / "other", LONG[:20])
    return tmp_path / "other"


def test_verify_and_copy(place, tmp_path, capsys):
    target = tmp_path / "copy"
    assert store("copy", place, target) == 0
    assert "2 assets copied" in capsys.readouterr().out
    assert store("copy", place, target, "--json", tmp_path / "out.json") == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["kept"]) == 2
    assert store("verify", target, "--deep") == 0
    assert "nothing is damaged" in capsys.readouterr().out
    name = min(open_store(target).list().versions)
    frame_path(target / name, 0, "FP16").write_bytes(bytes(200))
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gc", "--ttl", "soon"), "is not a time"),
        (("gc", "--max-bytes", "lots"), "is not a number of bytes"),
        (("gc", "--model-ttl", "1d"), "write MODEL=TIME"),
        (("pin", "0", "--until", "never"), "is not a date"),
        (("pin", "", "--for", "0"), "must end in the future"),
        (("copy", "xyz://nowhere"), "stores are folders or"),
        (("ls", "--json", "/nowhere/out.json"), "there is no folder"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, capsys, words, message):
    publish(tmp_path / "assets", LONG[:20])
    assert store(words[0], tmp_path / "assets", *words[1:]) == 2
    assert message in capsys.readouterr().err


def test_a_store_that_is_not_there(tmp_path, capsys):
    assert store("ls", tmp_path / "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err
    assert store("pin", _other(tmp_path), "f", "--for", "1d") == 1
    assert "no asset of that name" in capsys.readouterr().err
