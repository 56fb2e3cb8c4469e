"""`kvabr store`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from kvabr.cli.main import main
from kvabr.store.locations import open_store
from tests.assets import frame_file
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


def test_rm(place, tmp_path, capsys):
    name = min(open_store(place).list().versions, key=lambda each: open_store(place).open(each).catalog.tokens)
    publish(place, LONG[:20], model="test/other")
    out = tmp_path / "out.json"
    assert store("rm", place, name[:10], "--json", out) == 0
    assert "1 asset removed" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert (value["schema"], value["command"]) == ("kvabr.result/1", "store rm")
    assert value["removed"] == [name]
    assert value["bytes"] > 0
    assert len(open_store(place).list().versions) == 2
    assert store("rm", place, name) == 1
    assert "no asset of that name" in capsys.readouterr().err
    assert store("rm", place, "--model", MODEL) == 0
    (left,) = open_store(place).list().versions
    assert open_store(place).open(left).catalog.spec.model == "test/other"
    assert store("rm", place, "--model", MODEL) == 0
    assert "0 assets removed" in capsys.readouterr().out
    assert store("rm", place) == 2
    assert "--unnamed" in capsys.readouterr().err


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
    frame_file(target / name, 0, "FP16").write_bytes(bytes(200))
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
