"""Cores are shared among the groups being decoded."""

from __future__ import annotations

import pytest

from kvabr.codec import threads
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
