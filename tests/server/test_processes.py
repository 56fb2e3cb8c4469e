"""Processes that share an address: how they end."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest

from kvabr.cli.serve_processes import run_processes
from tests.processes import gone

pytestmark = pytest.mark.process


def _serve(folder, number):
    """End at the first signal; the second process goes on until the first has gone, and says how many it got."""
    got = []
    signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / str(number)).write_text(str(os.getpid()))
    (folder / "new" / str(number)).rename(folder / str(number))
    while not got:
        time.sleep(0.01)
    if number == 0:
        return 0
    first = int((folder / "0").read_text())
    while not gone(first):
        time.sleep(0.01)
    time.sleep(0.5)  # for what the other's end might send
    return len(got) - 1


def test_one_that_has_ended_does_not_cut_short_what_another_finishes(tmp_path):
    def end():
        while not all((tmp_path / str(number)).exists() for number in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert run_processes(2, partial(_serve, tmp_path)) == 0
