"""Ends a play that its policy does not let end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvabr.types.errors import PolicyError

MOST_CPU_S = 20.0
"""CPU seconds that one play may take: a thousand times what it needs."""


class TooLongError(BaseException):
    """Raised in the middle of whatever the play is at; its text says where that is.

    No `Exception`: a loop that goes on after every error must end, too.
    """


@contextmanager
def at_most(cpu_s: float | None = None) -> Iterator[None]:
    """Raise `TooLongError` in what is done within, once it has taken so many seconds of CPU time (None: `MOST_CPU_S`).

    Time asleep and the time of other processes do not count. It needs the signals of Unix and the main thread; without
    them nothing is watched.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    limit_s = MOST_CPU_S if cpu_s is None else cpu_s

    def stop(_number: int, frame: FrameType | None) -> None:
        place = "" if frame is None else f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
        raise TooLongError(f"one play has taken {limit_s:g} s of CPU time and is not at its end{place}")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Every second again: whoever swallows the first one is asked again.
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def watched(policy: str, play: str) -> Iterator[None]:
    """One play of a policy: it comes to an end, and if it fails the error says which play it was.

    Args:
        policy: its name.
        play: what it plays, in words.

    Raises:
        PolicyError: the policy failed, or took more than `MOST_CPU_S` of CPU time.
    """
    try:
        with at_most():
            yield
    except (PolicyError, TooLongError) as error:
        # An endless policy's own line is in the text of what ended it: the player saw only the alarm.
        ended = error if isinstance(error, TooLongError) else error.__cause__
        said = f"policy {policy}: {ended}" if isinstance(ended, TooLongError) else str(error)
        raise PolicyError(f"{said}; it was playing {play}") from error
