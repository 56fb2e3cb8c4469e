import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from kvabr.client import cpu_limit
from kvabr.client.cpu_limit import limited
from kvabr.types.errors import PolicyError
from tests.processes import LIMIT_S

pytestmark = pytest.mark.slow

NEVER_S = 2 * LIMIT_S
"""CPU seconds that no test lasts."""


def spin(cpu_s=NEVER_S):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def stubborn():
    while True:
        with contextlib.suppress(Exception):
            spin()


def in_thread(work):
    """Return what ``work`` returns or raises in a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - returned
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LIMIT_S)
    return found[0]


@pytest.mark.parametrize("call", [spin, stubborn])
def test_what_does_not_end_is_stopped_where_it_is(call):
    with pytest.raises(PolicyError, match=r"test_cpu_limit\.py, line \d+\).* after 0\.05 s of CPU time"):
        limited(0.05, call)
    spin(0.3)  # nothing is raised any more


@pytest.mark.parametrize("call", [spin, stubborn])
def test_also_in_another_thread(call):
    def work():
        with pytest.raises(PolicyError):
            limited(0.05, call)
        spin(0.3)
        return "went on"

    assert in_thread(work) == "went on"


def test_each_thread_has_its_own_time():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(limited(NEVER_S, spin, 0.2))),
        threading.Thread(target=lambda: found.append(in_thread(lambda: limited(0.05, spin)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(type(one).__name__ for one in found) == ["NoneType", "PolicyError"]


def test_what_ends_is_left_alone_and_sleep_does_not_count():
    assert limited(0.2, lambda: time.sleep(0.6) or "slept") == "slept"
    for _ in range(1000):
        assert limited(0.5, divmod, 7, 2) == (3, 1)


def test_errors_pass():
    with pytest.raises(ZeroDivisionError):
        limited(1.0, divmod, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        limited(1.0, lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_call_may_be_limited_within_another():
    def outer():
        with pytest.raises(PolicyError, match=r"0\.05 s"):
            limited(0.05, spin)
        spin()

    with pytest.raises(PolicyError, match=r"0\.6 s"):
        limited(0.6, outer)


def test_a_forked_process_looks_after_its_own_calls():
    limited(1.0, spin, 0.01)  # the thread of this process is up
    child = os.fork()
    if not child:
        try:
            limited(0.05, spin)
        except PolicyError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_thread_ends_when_nothing_is_called(monkeypatch):
    monkeypatch.setattr(cpu_limit, "_IDLE_LOOKS", 1)
    monkeypatch.setattr(cpu_limit, "_watch", cpu_limit._Watch())
    limited(1.0, int)
    thread = cpu_limit._watch._thread
    if thread is not None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    limited(1.0, int)  # and another begins
    assert cpu_limit._watch._thread is not thread


PROFILED = """
import sys
from kvabr.client import cpu_limit
from kvabr.types.errors import PolicyError

def forever():
    while True:
        pass

try:
    cpu_limit.limited(0.2, forever)
except PolicyError:
    calls = []
    sys.setprofile(lambda *event: calls.append(event))
    (lambda: None)()
    sys.setprofile(None)
    print(len(calls) > 0)
"""


@pytest.mark.process
def test_nothing_is_left_pending_that_would_hang_a_profiler():
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=300, check=True)  # noqa: S603
    assert done.stdout == "True\n"
