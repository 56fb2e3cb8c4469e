"""Codecs by name: the draft's levels, the layers, and those of installed packages (entry points ``kvabr.codecs``)."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from kvabr.codec.ac import Ac5x, AcL0, AcL1, AcL2, AcL3
from kvabr.codec.affine import Int4, Int8
from kvabr.codec.base import Codec
from kvabr.codec.cast import Bf16, Fp16
from kvabr.codec.fp4 import Fp4
from kvabr.codec.fp8 import Fp8
from kvabr.types.errors import FormatError
from kvabr.types.naming import check_track_name

_BUILTIN: tuple[type[Codec], ...] = (Fp16, Bf16, Fp8, Int8, Fp4, Int4, Ac5x, AcL0, AcL1, AcL2, AcL3)
_registered: dict[str, Codec] = {cls.name: cls() for cls in _BUILTIN}


def register(added: Codec) -> None:
    """Make a codec known by its name, in place of one that had it.

    Raises:
        FormatError: its name cannot name a track.
    """
    check_track_name(added.name)
    _registered[added.name] = added


def codec(name: str) -> Codec:
    """The codec of a track.

    Raises:
        FormatError: there is none; the message lists those that there are. Or a plug-in cannot be loaded.
    """
    found = _registered.get(name) or _plugins().get(name)
    if found is None:
        raise FormatError(f"no codec for track {name!r}; there are {', '.join(names())}")
    return found


def names() -> tuple[str, ...]:
    """Names of all codecs, the draft's levels first and in its order, then the layers, base first."""
    return tuple(dict.fromkeys((*_registered, *_plugins())))


@cache
def _plugins() -> dict[str, Codec]:
    found = {}
    for entry in entry_points(group="kvabr.codecs"):
        try:
            made = entry.load()()
        except Exception as error:  # a plug-in may raise anything
            raise FormatError(f"the codec plug-in {entry.name} ({entry.value}) cannot be loaded: {error!r}") from error
        if not isinstance(made, Codec) or made.name != entry.name:
            raise FormatError(f"the codec plug-in {entry.name} ({entry.value}) is no codec of that name")
        found[entry.name] = made
    return found
