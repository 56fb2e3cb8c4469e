"""What is said of engines: versions, ranges, and who adds one."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from kvabr.cli.main import main
from kvabr.engines.adapters import BUILTIN, adapters
from kvabr.engines.transformers import ADAPTER as TRANSFORMERS
from kvabr.types.errors import UsageError


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("5.17", True), ("5.17.0", True), ("5.24.0", True), ("5.24.3+cpu", True), ("5.25", False),
        ("5.25.0.dev0", False), ("5.16.9", False), ("6.0", False), ("nightly", False), ("", False),
    ],
)  # fmt: skip
def test_tested_ranges(version, known):
    assert TRANSFORMERS.is_tested(version) == known


def test_a_version_that_was_not_tested_is_told_once(caplog):
    other = replace(TRANSFORMERS, name="some-engine")
    with caplog.at_level(logging.WARNING, "kvabr.engines"):
        assert other.check("5.18")
        assert not [each for each in caplog.records if each.name == "kvabr.engines"]
        assert not other.check("9.1")
        assert not other.check("9.1")
    (record,) = [each for each in caplog.records if each.name == "kvabr.engines"]
    assert "tested with some-engine >=5.17,<5.25, this is 9.1" in record.getMessage()


def test_every_adapter_is_where_it_says():
    assert len(adapters()) == len(BUILTIN)
    for name, each in adapters().items():
        assert name == each.name
        assert find_spec(each.module) is not None
        assert each.is_tested(each.tested[0])
        assert not each.is_tested(each.tested[1])


def installed(monkeypatch, folder, value):
    """A real distribution on the path, with an entry point."""
    (folder / "someones_engine.py").write_text(f"from kvabr.engines.transformers import ADAPTER\nthing = {value}\n")
    info = folder / "someones_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvabr.engines]\nsomeones = someones_engine:thing\n")
    monkeypatch.syspath_prepend(str(folder))


def test_a_package_adds_one(monkeypatch, tmp_path):
    value = "__import__('dataclasses').replace(ADAPTER, name='someones', package='someones-engine')"
    installed(monkeypatch, tmp_path, value)
    assert adapters()["someones"].installed == "1.0"
    assert len(adapters()) == len(BUILTIN) + 1


@pytest.mark.parametrize(("value", "named"), [("42", "must be an Adapter, got 42"), ("1 / 0", "cannot be loaded")])
def test_an_entry_point_that_is_none(monkeypatch, tmp_path, value, named):
    folder = tmp_path / named.split()[-1]
    folder.mkdir()
    monkeypatch.delitem(__import__("sys").modules, "someones_engine", raising=False)
    installed(monkeypatch, folder, value)
    with pytest.raises(UsageError, match=named):
        adapters()


def test_the_command(capsys, tmp_path):
    assert main(["engines", "--json", str(tmp_path / "engines.json")]) == 0
    shown = capsys.readouterr().out
    listed = {line["name"]: line for line in json.loads((tmp_path / "engines.json").read_text())}
    assert set(listed) == set(adapters())
    for name, line in listed.items():
        assert name in shown
        known = adapters()[name]
        assert line["installed"] == known.installed
        assert line["known"] == (line["installed"] is not None and known.is_tested(line["installed"]))


def test_listing_adapters_loads_no_engine_and_no_settings():
    code = "import sys; from kvabr.engines.adapters import adapters; adapters(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    loaded = run.stdout.split()
    assert not {"torch", "pydantic", "transformers", "vllm", "lmcache", "sglang"} & {*loaded}
