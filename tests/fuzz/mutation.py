"""Random mutation: valid inputs, changed a little, without looking at what the parser does with them."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fuzz.target import SEPARATOR, Target, TooSlowError, in_time

_BYTES = (0x00, 0x01, 0x3F, 0x40, 0x7F, 0x80, 0xBF, 0xC0, 0xFE, 0xFF)
_LONG = 70_000


@dataclass(frozen=True, slots=True)
class Fed:
    inputs: int
    accepted: int


def mutate(data: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """Return the bytes with a few random changes, also with parts of others."""
    out = bytearray(data)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 6))):
        at = dice.randrange(len(out) + 1)
        end = min(len(out), at + dice.choice((1, 1, 2, 4, 8, 64)))
        match dice.randrange(9):
            case 0 if at < len(out):
                out[at] ^= 1 << dice.randrange(8)
            case 1 if at < len(out):
                out[at] = dice.choice(_BYTES)
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = out[at:end]
            case 4:
                out[at:at] = dice.randbytes(dice.choice((1, 2, 8, 9)))
            case 5:
                out[at:at] = b"\xff" * dice.choice((1, 8, 9))
            case 6:
                other = dice.choice(others)
                cut = dice.randrange(len(other) + 1)
                out[at:] = other[cut:]
            case 7 if dice.random() < 0.05:
                out[at:at] = bytes([dice.choice(_BYTES)]) * _LONG
            case 8 if SEPARATOR in out:
                _move(out, dice)
            case _:
                del out[at:]
    return bytes(out)


def _move(out: bytearray, dice: random.Random) -> None:
    """Leave out, repeat, or exchange whole parts."""
    parts = bytes(out).split(SEPARATOR)
    one, other = dice.randrange(len(parts)), dice.randrange(len(parts))
    match dice.randrange(3):
        case 0:
            del parts[one]
        case 1:
            parts.insert(one, parts[other])
        case _:
            parts[one], parts[other] = parts[other], parts[one]
    out[:] = SEPARATOR.join(parts)


def run(
    target: Target, *, seed: int, rounds: int | None = None, seconds: float | None = None, corpus: Sequence[bytes] = ()
) -> Fed:
    """Feed a target until the rounds or the seconds are over, with changes of its valid inputs and of a corpus.

    Raises:
        AssertionError: with the input that it did not take as it should, and the seed that leads there.
    """
    corpus = [*target.valid(), *corpus]
    until = None if seconds is None else time.monotonic() + seconds
    done = accepted = 0
    while (rounds is None or done < rounds) and (until is None or time.monotonic() < until):
        dice = random.Random(f"{seed}/{done}")
        data = mutate(dice.choice(corpus), corpus, dice)
        try:
            with in_time():
                accepted += target.take(data)
        except (Exception, TooSlowError) as error:
            shown = data.hex() if len(data) < 2000 else f"{data[:1000].hex()}... ({len(data)} bytes)"
            raise AssertionError(f"seed {seed}, round {done}: {error!r} for {shown}") from error
        done += 1
    return Fed(done, accepted)
