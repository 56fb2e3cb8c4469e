"""What a target is: bytes go in, and whatever they say, nothing but the parser's own error may come out.

The bytes alone decide what happens, also how they are cut into pieces and in which order a session hears them: so an
input is all that it takes to see a failure again, and a fuzzer that watches the code learns what each byte does.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SLOW_S = 20.0
"""Seconds of the processor's time that no input of these sizes may take; the slowest take a few hundredths."""
SEPARATOR = b"\xf7SEP"
"""Between the parts of an input that has several. A part that grows or shrinks leaves the others as they are."""


@dataclass(frozen=True)
class Target:
    """One parser, or a family of parsers."""

    take: Callable[[bytes], bool]
    """Feeds an input, and returns whether it was accepted. Raises for what should not have happened: an error that is
    not the documented one, a value that does not come back, more kept than is allowed."""
    valid: Callable[[], Sequence[bytes]]
    """Returns inputs that are accepted."""
    most_bytes: int = 4096
    """Length at which guided runs stop: enough for all that the parser can tell apart."""
    native: bool = False
    """Whether it runs compiled code of kvabr, which a guided run then builds with sanitizers."""


def family(*members: Target) -> Target:
    """Return one target for several: the first byte of an input chooses. Append new members, as corpora count on it."""

    def take(data: bytes) -> bool:
        return bool(data) and members[data[0] % len(members)].take(data[1:])

    return Target(
        take,
        lambda: [bytes([index]) + data for index, member in enumerate(members) for data in member.valid()],
        most_bytes=1 + max(member.most_bytes for member in members),
        native=any(member.native for member in members),
    )


def refused(parse: Callable[[], T], *errors: type[Exception]) -> T | None:
    """Return what is parsed, or None if it is refused by one of these errors."""
    try:
        return parse()
    except errors:
        return None


def chunks(data: bytes, cut: int) -> list[bytes]:
    """Return the same bytes in pieces, of sizes that depend on ``cut``; 0: one piece."""
    if not cut:
        return [data]
    dice = random.Random(cut)
    out, at, most = [], 0, dice.choice((1, 3, 40, 2000, 1 << 20))
    while at < len(data) and len(out) < 5000:
        size = dice.randint(1, most)
        out.append(data[at : at + size])
        at += size
    return [*out, data[at:]] if at < len(data) else out


class TooSlowError(BaseException):
    """An input takes too long. No parser catches it."""


@contextmanager
def in_time(seconds: float = SLOW_S) -> Iterator[None]:
    """Raise `TooSlowError` if the block takes more of the processor's time, which a loaded machine does not change.

    Python code is interrupted; calls into compiled code are measured when they return.
    """

    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    began = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if (took := time.process_time() - began) > seconds:
        raise TooSlowError(f"{took:.1f} s")
