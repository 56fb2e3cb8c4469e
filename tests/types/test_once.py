"""What is built once is built by one thread, also where several want it first at the same moment."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvabr.types.once import once


def test_threads_that_want_it_first_get_the_same():
    built, go = [], threading.Barrier(8)

    @once
    def thing(name):
        built.append(name)
        time.sleep(0.01)  # others come meanwhile
        return object()

    def want(name):
        go.wait()
        return thing(name)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(want, ["a", "b"] * 4))
    assert sorted(built) == ["a", "b"]
    assert len(set(map(id, found))) == 2
    assert thing("a") is found[0]


def test_an_error_is_raised_and_tried_again():
    tried = []

    @once
    def thing():
        tried.append(1)
        if len(tried) == 1:
            raise KeyError("not yet")
        return len(tried)

    with pytest.raises(KeyError):
        thing()
    assert thing() == thing() == 2
