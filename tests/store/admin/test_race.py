"""Publishers, collectors, players, pins and SIGKILL at once, as `tools/race-stores` has them, for a few rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kind", ["bucket", "folder"])
def test_nothing_goes_wrong(tmp_path, kind):
    out = tmp_path / "out.json"
    command = [sys.executable, "tools/race-stores", "--rounds", "2", "--kind", kind, "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(out.read_text())[kind]
    assert counts["rounds"] == 2
    assert counts["published"] + counts.get("was there", 0) > 0
