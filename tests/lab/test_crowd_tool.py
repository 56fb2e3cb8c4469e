"""A short form of `tools/bench-crowd`: every cache is right, and store and origin are asked once for each part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nginx import NGINX

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench-crowd"
PLAYERS = 12


def crowd(tmp_path, *words):
    """Run the tool; it fails by itself if a play did, or a cache was wrong, or too much memory was used."""
    out = tmp_path / "crowd.json"
    command = [sys.executable, TOOL, "--players", str(PLAYERS), "--assets", "2", "--processes", "1", *words]
    patient = ["--deadline", "400", "--json", out]
    done = subprocess.run([*command, *patient], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["right"] == found["complete"] == PLAYERS
    return found["fetched"]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx")
def test_a_crowd_behind_nginx_asks_the_store_once_for_each_slice(tmp_path):
    fetched = crowd(tmp_path, "--through", "nginx")
    assert fetched["spans asked for"] == fetched["slices of spans asked for"] == 4
    assert fetched["times each slice was fetched"] == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_crowd_behind_two_relays_asks_the_origin_once_for_each_group(tmp_path):
    # A relay asks again for what stalls for seconds, as it may on a busy machine. Without relays it would be 10 times.
    fetched = crowd(tmp_path, "--through", "relays", "--policy", "fixed:FP16", "--most", "1.5")
    assert fetched["groups"] > 0
    assert fetched["sent by the relay"] >= PLAYERS * 24
