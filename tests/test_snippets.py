"""The Python of the README and of the documentation, run as it is written, against a real origin.

A block after ``<!-- not run: REASON -->`` is only compiled.
"""

import math
import re
from pathlib import Path

import pytest

import kvabr
from kvabr.abr import Estimator, Policy
from kvabr.blend import Selection, Selector, choose
from kvabr.blend.selectors import load_selector
from kvabr.cli.main import main
from tests.client.conftest import root as root  # noqa: PLC0414 - the fixture
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import close
from tests.toymodel import ToyModel, prompt

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: [^>]+-->\s*)?^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(path, code, bool(skip), id=f"{path.relative_to(ROOT)}-{number}")
    for path in PAGES
    for number, (skip, code) in enumerate(BLOCK.findall(path.read_text()))
]
TOKENS = prompt(70).tokens
TOKEN = "a token of the documentation"  # noqa: S105 - of a server in this test


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    origin = Served(root / "short", tmp_path_factory.mktemp("served"), token=TOKEN)
    yield origin
    origin.close()


@pytest.mark.parametrize(("path", "code", "skip"), SNIPPETS)
def test_a_snippet_runs(path, code, skip, served, tmp_path, monkeypatch):
    if skip:
        compile(code, str(path), "exec")
        return
    how = f"fingerprint={served.fingerprint!r}, token={TOKEN!r}, timeout_s={LIMIT_S}"
    trusted = f"{served.url!r}, kvabr.PeerOptions({how})"
    code = code.replace('"moqt://origin.example/", kvabr.PeerOptions(token=token)', trusted)
    code = code.replace('"moqt://origin.example/"', trusted)
    code = code.replace("deadline=2.0", f"deadline={LIMIT_S}")  # which every machine meets
    monkeypatch.chdir(tmp_path)
    used = []
    peer = kvabr.PeerOptions(fingerprint=served.fingerprint, token=TOKEN, timeout_s=LIMIT_S)
    with kvabr.Client(served.url, peer) as client:
        names = {"kvabr": kvabr, "math": math, "client": client, "token": TOKEN, "tokens": TOKENS}
        names |= {"engine": ToyModel(), "use": used.append, "__name__": "snippet"}
        exec(compile(code, str(path), "exec"), names)  # noqa: S102
        played = names.get("played")
        if isinstance(played, kvabr.Played):
            assert close(played.kv, TOKENS[: played.tokens])
            if played.upgrades is not None:
                played.upgrades.cancel()
    assert all(close(kv) for kv in used)
    for name, value in names.items():
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == "snippet":
            replays("policy", code, name, tmp_path)
            break
        if isinstance(value, type) and issubclass(value, Estimator) and value.__module__ == "snippet":
            replays("estimator", code, name, tmp_path)
            break
        if isinstance(value, type) and issubclass(value, Selector) and value.__module__ == "snippet":
            chooses(code, name, tmp_path)
            break
    else:
        assert played is not None, (
            "a snippet that neither plays nor defines a plug-in tests nothing: mark it as not run"
        )


def chooses(code, name, folder):
    """Let a selector of a snippet choose, loaded as the command line does."""
    (folder / "mine.py").write_text(code)
    prompt = Selection(tokens=9, passages=((1, 4), (5, 9)), layers=2)
    scores = load_selector(f"{folder / 'mine.py'}:{name}")().scores(prompt)
    assert len(choose(prompt, scores, 2 / 7)) == 2


def replays(kind, code, name, folder):
    """Play a policy or an estimator of a snippet over a trace, as the text around it does."""
    (folder / "mine.py").write_text(code)
    words = ["replay", str(ROOT / "traces" / "lte.csv"), f"--{kind}", f"./mine.py:{name}", "--load", "0.4"]
    assert main([*words, "--jobs", "1"]) == 0
