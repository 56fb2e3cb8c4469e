"""Measured prefill costs of engines by name, and their notation as numbers."""

from __future__ import annotations

import difflib
from types import MappingProxyType

from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError, UsageError

_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_H200_8B = (19, 21, 31, 62, 123, 268, 595, 1400, 3742)
_H200_8B_BEHIND = (
    (2048, 128, 23), (8192, 128, 25), (32768, 128, 67), (2048, 512, 23), (8192, 512, 34), (32768, 512, 77),
    (2048, 2048, 75), (8192, 2048, 102), (32768, 2048, 204),
)  # fmt: skip
_H200_70B = (60, 128, 240, 504, 1008, 2160, 4624, 10336, 25472)
_H200_70B_BEHIND = (
    (2048, 128, 72), (8192, 128, 112), (32768, 128, 240), (2048, 2048, 568), (8192, 2048, 696), (32768, 2048, 1192),
)  # fmt: skip
MEASURED = MappingProxyType(
    {
        "h200-8b": (*((0, new, ms) for new, ms in zip(_LENGTHS, _H200_8B, strict=True)), *_H200_8B_BEHIND),
        "h200-70b": (*((0, new, ms) for new, ms in zip(_LENGTHS, _H200_70B, strict=True)), *_H200_70B_BEHIND),
    }
)
"""Tokens before, new tokens, and milliseconds of prefills with transformers in BF16, for the shapes of Llama-3.1-8B and
of a 70B model (10 of 80 layers timed) on an H200.
"""
ENGINES = MappingProxyType(
    {
        "h200-8b": PrefillCost(4.15e-3, 2.76e-5, 4.76e-10, 1.70e-6, 0.0209),
        "h200-70b": PrefillCost(0.0306, 2.27e-4, 2.95e-9, 5.07e-6),
        "cpu-smollm2": PrefillCost(0.0423, 2.31e-3, 9.60e-7),
    }
)
"""Costs fitted to `MEASURED`, and that of SmolLM2-135M in float32 on two cores of a server."""
_FORM = "TOK/S, or FIXED:LINEAR[:BEFORE[:QUADRATIC[:FLOOR]]] in seconds"


def parse_cost(text: str, option: str) -> PrefillCost:
    """Return a prefill cost from a rate or from constants in seconds, see `PrefillCost`.

    ``8000`` means tokens per second. ``0.004:28e-6:1.7e-6:4.8e-10:0.02`` means seconds per call, per new token, per
    earlier token, per pair of tokens, and minimum per call. Raise `UsageError` for other text.
    """
    try:
        numbers = [float(part) for part in text.split(":")]
        if len(numbers) == 1:
            return PrefillCost.from_rate(numbers[0])
        if len(numbers) <= 5:
            constant, linear, before, quadratic, floor = (*numbers, 0.0, 0.0, 0.0)[:5]
            return PrefillCost(constant, linear, quadratic, before, floor)
    except ValueError:
        pass
    except KvabrError as error:
        raise UsageError(f"{option} {text}: {error}") from error
    raise UsageError(f"{option} {text}: give {_FORM}")


def engine_cost(name: str, option: str) -> PrefillCost:
    """Return the cost of an engine in `ENGINES`; raise `UsageError` with the most similar name if it is unknown."""
    if name not in ENGINES:
        close = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(ENGINES)}"
        raise UsageError(f"{option} {name}: unknown engine; {hint}")
    return ENGINES[name]
