"""What the tutorial on policies claims, measured by its own commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from kvabr.cli.main import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorials" / "write-a-policy.md"


@pytest.mark.slow
def test_a_policy_that_knows_its_link_beats_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    (code,) = re.findall(r'```python title="leased.py"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    Path("leased.py").write_text(code)
    for line in re.findall(r"^kvabr (?:traces synth|replay leased\.csv) .*", text, re.MULTILINE):
        words = shlex.split(line)[1:]
        assert main([*words, "--json", "x.json"] if words[0] == "replay" else words) == 0
    summary = json.loads(Path("x.json").read_text())["summary"]
    mine, default = summary["./leased.py:Leased"], summary["anytime"]
    assert mine["hit_ratio"] == default["hit_ratio"] == 1.0
    assert mine["regret_mean"] < 0.8 * default["regret_mean"]
    assert mine["ttft_p50_s"] < default["ttft_p50_s"]
