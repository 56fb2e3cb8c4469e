"""Work in several processes."""

import os
import subprocess
import sys
import time

import pytest

from kvabr.replay.workers import in_processes, named_play
from kvabr.types.errors import PlayError, PolicyError, UsageError
from tests.lab.matrices import tuned
from tests.processes import LIMIT_S, gone


def test_the_play_is_named():
    with pytest.raises(PolicyError, match="broken; it was playing a trace from 0 s"):
        named_play("a trace from 0 s", lambda: (_ for _ in ()).throw(PolicyError("broken")))


INTERRUPTED = """
import os, signal, sys
os.register_at_fork(after_in_parent=lambda: os.killpg(0, signal.SIGINT))
from kvabr.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The command line, with a Ctrl-C right after each fork."""


@pytest.mark.process
@pytest.mark.parametrize("command", ["replay", "lab", "tune"])
def test_ctrl_c_while_workers_start_is_not_lost(command, tmp_path):
    for name in "ab":
        (tmp_path / "traces" / name).mkdir(parents=True)
        (tmp_path / "traces" / name / "t.csv").write_text("time_s,bits_per_second\n0,8000000\n60,0\n")
    words = {"replay": [], "lab": ["--out", "out"], "tune": ["--out", "out", tuned(tmp_path)]}[command]
    words += [str(tmp_path / "traces"), "--starts", "5000", "--jobs", "4"]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", INTERRUPTED, command, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert said.startswith("kvabr: interrupted")
    assert said.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_task_is_answered_once(processes):
    assert sorted(in_processes(hex, range(50), processes)) == list(enumerate(map(hex, range(50))))
    assert list(in_processes(hex, [], processes)) == []


def test_closing_ends_the_processes_in_the_middle_of_their_tasks():
    answers = in_processes(lambda task: os.getpid() if task < 1 else time.sleep(10 * LIMIT_S), range(20), 2)
    _, worker = next(answers)
    answers.close()
    assert gone(worker)


def test_the_first_error_is_raised_and_says_where_it_came_from():
    with pytest.raises(ZeroDivisionError) as caught:
        list(in_processes(lambda task: 1 // task, [1, 1, 0, 1], 2))
    assert "in <lambda>" in "".join(caught.value.__notes__)


def test_a_process_that_dies_is_an_error():
    with pytest.raises(PlayError, match=r"worker process died.*--jobs 1"):
        list(in_processes(os._exit, range(4), 2))
    with pytest.raises(UsageError):
        list(in_processes(hex, range(4), 0))
