"""Every example runs, as its first lines say."""

import contextlib
import json
import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvabr.codec import base
from kvabr.store.locations import open_asset, open_store
from tests.assets import frame_file
from tests.client.conftest import root as root  # noqa: PLC0414 - the fixture
from tests.client.served import Served
from tests.processes import LIMIT_S
from tests.scripts import run_script
from tests.toymodel import prompt

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {path.stem for path in (ROOT / "examples").glob("*.py")}
TESTED = {"play", "own_policy", "own_codec", "relay", "telemetry", "two_engines"}
"""`two_engines` by `engines/transformers/test_smollm2.py`, where its model is loaded already."""


def run(name, *words, folder):
    """Run an example with limits of time that every machine meets, and return what it prints."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    text = text.replace("PeerOptions(", f"PeerOptions(timeout_s={LIMIT_S}, ")
    script = folder / f"{name}.py"
    script.write_text(re.sub(r"\bdeadline=[0-9.]+", f"deadline={LIMIT_S}", text))
    with contextlib.chdir(folder), mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        done = run_script(script, *words, beside=ROOT / "examples")  # one imports another
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    origin = Served(root / "short", tmp_path_factory.mktemp("served"))
    yield origin
    origin.close()


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(prompt(70).tokens))
    return path


def test_every_example_is_tested():
    assert EXAMPLES == TESTED


@pytest.mark.process
def test_play(served, prompt_file, tmp_path):
    assert "70 of 70 tokens" in run("play", served.url, prompt_file, served.fingerprint, folder=tmp_path)


@pytest.mark.parametrize("name", ["play", "relay", "telemetry", "two_engines"])
def test_an_example_without_arguments_says_how_it_is_called(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_script(ROOT / "examples" / f"{name}.py")
    assert done.returncode == 1
    assert f"python examples/{name}.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("lost", "says"), [(2, "(16|32) of 70 tokens"), (0, "nothing of this prompt came in time")])
def test_play_of_a_cache_that_lacks_a_group(root, prompt_file, tmp_path, lost, says):
    whole = open_asset(root / "short")
    catalog = whole.catalog
    with open_store(tmp_path / "asset").writer(live=True) as writer:  # a frame an object
        for track in catalog.published.values():
            for group, digest in enumerate(track.digests):
                writer.frame(group, track.name, whole.frame(group, track.name), digest)
        writer.profile(whole.profile_bytes() or b"")
        writer.commit(replace(catalog, tracks=tuple(replace(track, packs=()) for track in catalog.tracks)))
    with closing(Served(tmp_path / "asset", tmp_path)) as origin:
        for track in catalog.published:
            frame_file(tmp_path / "asset", lost, track).unlink()  # only now: an asset that is not whole is not served
        said = run("play", origin.url, prompt_file, origin.fingerprint, folder=tmp_path)
    assert f"group {lost} failed on every track" in said
    assert re.search(says, said)  # the second group may be on its way when the third is given up


def test_own_policy(tmp_path):
    lines = run("own_policy", folder=tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["EarliestFirst", "anytime"]


def test_own_codec(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_registered", dict(base._registered))
    assert "Int8-zlib: 0.4" in run("own_codec", folder=tmp_path)


@pytest.mark.process
def test_relay(root, tmp_path):
    out = run("relay", root / "short", folder=tmp_path)
    assert "first player: 70 tokens" in out
    assert "second player: 70 tokens" in out
