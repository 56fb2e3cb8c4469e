"""CPU-time limit for runaway policies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvabr.types.errors import PolicyError

MOST_CPU_S = 20.0
"""Most CPU seconds of one play: about a thousand times what it needs."""


class TooLongError(BaseException):
    """Raised at the line that a play is executing; the message names it.

    It is not an `Exception`, so that a policy's loop that swallows every exception ends too.
    """


@contextmanager
def at_most(cpu_s: float | None = None) -> Iterator[None]:
    """Raise `TooLongError` in the body once it has taken ``cpu_s`` seconds of CPU time (None: `MOST_CPU_S`).

    Sleep and other processes do not count. Needs Unix signals and the main thread; elsewhere there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    limit_s = MOST_CPU_S if cpu_s is None else cpu_s

    def stop(_number: int, frame: FrameType | None) -> None:
        place = "" if frame is None else f" ({frame.f_code.co_filename}, line {frame.f_lineno})"
        raise TooLongError(f"one play has taken {limit_s:g} s of CPU time and is not at its end{place}")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Repeat every second, in case the first exception is swallowed.
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def watched(policy: str, play: str) -> Iterator[None]:
    """Limit the CPU time of one play, and name the play in errors.

    Args:
        policy: name of the policy.
        play: description of the play.

    Raises:
        PolicyError: the policy failed, or took more than `MOST_CPU_S` of CPU time.
    """
    try:
        with at_most():
            yield
    except (PolicyError, TooLongError) as error:
        # The line of an endless loop is in the message of the alarm, not in that of the player.
        ended = error if isinstance(error, TooLongError) else error.__cause__
        said = f"policy {policy}: {ended}" if isinstance(ended, TooLongError) else str(error)
        raise PolicyError(f"{said}; it was playing {play}") from error
