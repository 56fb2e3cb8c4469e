"""What a process that has run out of something is told."""

from __future__ import annotations

import errno

import pytest

from kvabr.types.errors import (
    ExhaustedError,
    PlayError,
    TransportError,
    exhausted,
    may_pass,
    told_if_exhausted,
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory is left"),
        (MemoryError(), "no memory is left"),
        (RuntimeError("can't start new thread"), "no thread can be started"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), "no memory"),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("another"), None),
        (ValueError("another"), None),
        (PlayError("ours"), None),
    ],
)
def test_what_has_run_out_is_told(error, said):
    for raised in (error, wrapped(error)):
        told = exhausted(raised)
        assert (told is None) == (said is None)
        if said is not None:
            assert isinstance(told, PlayError | TransportError)
            assert may_pass(told)
            assert said in str(told)


def wrapped(error):
    """Return an error that another caused, which caused itself."""
    made = ImportError("a module cannot be loaded")
    made.__cause__ = error
    if not isinstance(error, PlayError):
        error.__cause__ = error
    return made


def test_what_can_be_had_again_is_let_go_before_it_is_told():
    freed = []
    with pytest.raises(ExhaustedError), told_if_exhausted(lambda: freed.append(1)):
        raise MemoryError
    assert freed == [1]
    with pytest.raises(KeyError), told_if_exhausted(lambda: freed.append(2)):
        raise KeyError
    assert freed == [1]
