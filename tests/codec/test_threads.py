"""Cores are shared among the groups being decoded, and what is done two at a time leaves torch its threads."""

import threading

import pytest
import torch

from kvabr.codec import threads
from kvabr.codec.parallel_map import parallel_map
from kvabr.codec.threads import SharedCores


def test_the_last_group_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "decoder_threads", lambda: 8)
    cores = SharedCores()
    with cores.share() as first:
        with cores.share() as second, cores.share() as third:
            pass
        with cores.share() as fourth:
            pass
    with pytest.raises(KeyError), cores.share():
        raise KeyError
    with cores.share() as last:
        pass
    assert (first, second, third, fourth, last) == (8, 4, 2, 4, 8)


def test_what_is_timed_has_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "decoder_threads", lambda: 1024)
    cores = SharedCores()
    with cores.all_taken(), cores.share() as timed:
        pass
    with cores.share() as after:
        pass
    assert (timed, after) == (1, 1024)


@pytest.fixture(params=[1, 2])
def torchs(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order(torchs):
    first = threading.Event()

    def work(number):
        if torchs > 1 and number == 0:
            assert first.wait(300)  # until the next one is done
        first.set()
        return number, torch.get_num_threads()

    assert list(parallel_map(work, range(5))) == [(number, 1) for number in range(5)]
    assert torch.get_num_threads() == torchs


def test_an_error_is_raised_in_its_place(torchs):
    found = parallel_map(lambda number: 1 / (number - 1), range(5))
    assert next(found) == -1
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert torch.get_num_threads() == torchs
