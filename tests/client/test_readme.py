"""The Python of the README, run as it is written against a real origin, in one program after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvabr
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import close
from tests.toymodel import ToyModel, prompt

README = Path(__file__).resolve().parents[2] / "README.md"
TOKENS = prompt(70).tokens
TOKEN = "a token of the readme"  # noqa: S105 - of a server in this test


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    origin = Served(root / "short", tmp_path_factory.mktemp("served"), token=TOKEN)
    yield origin
    origin.close()


def snippets(word):
    """Return the README's blocks of Python that contain a word."""
    return [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if word in block]


def test_the_simplest_program_plays(served):
    (code,) = snippets("kvabr.Client(")
    code = code.replace('"moqt://origin.example/"', f"{served.url!r}, fingerprint={served.fingerprint!r}")
    got = []
    exec(code, {"token": TOKEN, "engine": ToyModel(), "tokens": TOKENS, "use": got.append})  # noqa: S102
    assert close(got[0])


def test_the_other_programs_play(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with kvabr.Client(served.url, fingerprint=served.fingerprint, token=TOKEN, timeout_s=LIMIT_S) as client:
        for code in (*snippets("StepGate"), *snippets("OpenTelemetry")):
            names = {"kvabr": kvabr, "client": client, "tokens": TOKENS}
            exec(code, names)  # noqa: S102
            assert close(names["played"].kv)
            if names["played"].upgrades is not None:
                names["played"].upgrades.cancel()
    assert (tmp_path / "plays.jsonl").read_text()
