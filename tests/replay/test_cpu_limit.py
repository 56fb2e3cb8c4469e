import signal
import threading
import time

import pytest

from kvabr.replay.cpu_limit import TooLongError, at_most


def spin(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def test_what_takes_too_long_is_stopped_where_it_is():
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TooLongError, match=r"0\.05 s of CPU.*test_cpu_limit\.py, line \d+"), at_most(0.05):
        spin(30.0)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    spin(0.1)  # nothing rings any more


def test_what_ends_in_time_is_left_alone():
    with at_most(10.0):
        spin(0.01)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_elsewhere_than_in_the_main_thread_nothing_is_watched():
    found = []

    def work():
        with at_most(0.01):
            spin(0.05)
            found.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["done"]
