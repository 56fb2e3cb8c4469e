"""Two things at a time: results in order, errors where they belong, torch's threads as they were."""

import threading

import pytest
import torch

from kvabr.codec.parallel_map import parallel_map


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order(threads):
    first = threading.Event()

    def work(number):
        if threads > 1 and number == 0:
            assert first.wait(10)  # until the next one is done
        first.set()
        return number, torch.get_num_threads()

    assert list(parallel_map(work, range(5))) == [(number, 1) for number in range(5)]
    assert torch.get_num_threads() == threads


def test_an_error_is_raised_in_its_place(threads):
    found = parallel_map(lambda number: 1 / (number - 1), range(5))
    assert next(found) == -1
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert torch.get_num_threads() == threads
