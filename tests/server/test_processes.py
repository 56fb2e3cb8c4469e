"""Processes that share an address: how they end, and are replaced."""

import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.process import BaseProcess

import pytest

from kvabr.cli import serve_processes
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


def _sleeps(_):
    """Return what nobody expects, after a while."""
    time.sleep(10.0)
    return 5


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_signal_while_they_start_ends_all_without_a_traceback(number, status, capfd, monkeypatch):
    """It comes when the first one is about to run, and is no member yet."""
    started = BaseProcess.start

    def start(process):
        started(process)
        if not hits:
            hits.append(process)
            os.kill(os.getpid(), number)

    hits = []
    monkeypatch.setattr(BaseProcess, "start", start)
    assert run_processes(2, _sleeps) == status
    assert hits
    assert not capfd.readouterr().err


def _killed(folder, number):
    """Say that it runs; then the second one dies, as often as it is started, and the first goes on until it is told."""
    runs = folder / f"{number}-{os.getpid()}"
    runs.touch()
    if number == 1:
        while not (folder / "go").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.01)


def test_one_that_is_killed_is_started_again_and_said_but_not_for_ever(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(serve_processes, "_WITHIN_S", 1e9)  # however slow this machine is
    (tmp_path / "go").touch()
    assert run_processes(2, partial(_killed, tmp_path)) == 1
    said = capfd.readouterr().err.splitlines()
    killed = "kvabr: process 2 of 2 was killed (signal 9)"
    assert said == [f"{killed}; it is started again"] * 5 + [f"{killed}; so were 5 others within a minute, so all end"]
    assert len(list(tmp_path.glob("1-*"))) == 6
    assert len(list(tmp_path.glob("0-*"))) == 1


def test_one_that_is_killed_after_all_were_told_to_end_is_not_started_again(tmp_path, capfd):
    def end():
        while len(list(tmp_path.glob("?-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # the second one has no handler yet: it dies of this
        (tmp_path / "go").touch()

    threading.Thread(target=end, daemon=True).start()
    assert run_processes(2, partial(_killed, tmp_path)) == 1
    assert not capfd.readouterr().err
    assert len(list(tmp_path.glob("1-*"))) == 1
