"""The interface of a codec, and the registry of codecs by name. Does not import torch.

Codecs are built in (`kvabr.codec.builtin`), installed (entry points ``kvabr.codecs``), or registered by a program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from kvabr.codec.builtin import BUILTIN, PayloadLayout
from kvabr.types.errors import FormatError, did_you_mean
from kvabr.types.kv import FP16_MAX, KVSpec
from kvabr.types.naming import check_track_name

if TYPE_CHECKING:
    import torch

    from kvabr.codec.profile import Profile


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Parameters of a group that codecs need."""

    spec: KVSpec
    first_token: int
    """Position of the group's first token in the prompt or passage, for rotation and sinks."""
    tokens: int
    """`KVSpec.group_tokens`, or fewer in the last group."""
    profile: Profile | None = None
    free: bool = False
    """True for position-free groups, as in passages (`kvabr.types.passage`): encoded keys are not rotated, and no token
    is a sink. The class must have a `LayerClass.rope`.
    """
    at: int | None = None
    """For decoding a position-free group: position of its first token, for rotating keys. None: keys stay unrotated."""
    finer: int = 0
    """For encoding: number of last tokens to store with higher precision, as the continuation attends most to them."""
    memo: dict[str, object] | None = field(default=None, compare=False, repr=False)
    """For encoding: cache of results that the tracks of one group share. Pass one dict per group."""


class Codec(ABC):
    """One compression level."""

    name: str
    refines: str | None = None
    """The track to decode first; None if this track is self-contained."""
    needs_profile: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    """True if `decode` rotates position-free keys; otherwise `kvabr.codec.group.decode_payload` does."""
    has_kernel: ClassVar[bool] = False
    """True if kernels in `kvabr.codec.gpu` expand its payloads. Subclasses do not inherit it."""
    takes_codes: ClassVar[bool] = False
    """True if `encode` and `decode` accept float8 codes; otherwise the codes are converted first
    (`kvabr.codec.quantised`).
    """

    def layout(self, spec: KVSpec, tokens: int) -> PayloadLayout | None:
        """Return the layout of a payload of ``tokens`` tokens, or None if the payload cannot be cut by tokens.

        Token-separable plug-ins override this; subclasses of built-in codecs inherit it.
        """
        for cls in type(self).__mro__:
            known = BUILTIN.get(vars(cls).get("name", ""))
            if known is not None:
                return None if known.layout is None else known.layout(spec, tokens)
        return None

    def outliers(self, payload: memoryview, context: GroupContext) -> int:  # noqa: ARG002
        """Return the number of tokens that the encoder stored separately."""
        return 0

    def largest(self, spec: KVSpec) -> float:  # noqa: ARG002
        """Return the largest magnitude that this codec keeps within its loss; `encode` clips larger numbers."""
        return FP16_MAX

    def prepare(self, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> None:  # noqa: B027  # few can
        """Prepare groups on a GPU for `encode`, and store the results in their memos; payloads do not change.

        Encode the tracks below first.
        """

    @abstractmethod
    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        """Return the payload of one group, without the container's frame.

        ``group`` is [layer, K/V, head, token, dim], any float dtype, any strides; ``below`` are the payloads of the
        tracks below, base first.
        """

    @abstractmethod
    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        """Decompress an untrusted result of `encode` into ``out``; other arguments are as for `encode`.

        ``out`` is [layer, K/V, head, token, dim], any float dtype, any strides; an error may leave it partly written.
        Raise `FormatError` if this codec did not write the payload for this context.
        """


_registered: dict[str, Codec] = {}


def register(added: Codec) -> None:
    """Register a codec under its name; replace any codec of that name."""
    check_track_name(added.name)
    _registered[added.name] = added


def codec(name: str) -> Codec:
    """Return a track's codec; raise `FormatError` with the known names if there is none, or its plug-in's error."""
    if (found := _registered.get(name)) is not None:
        return found
    if name in BUILTIN:
        return _builtin(name)
    if (found := _plugins().get(name)) is not None:
        return found
    raise FormatError(f"no codec for track {name!r}{did_you_mean(name, names())}; choose from {', '.join(names())}")


def names() -> tuple[str, ...]:
    """Return all codec names: the draft's levels in the draft's order, then layers (base first), then others."""
    return tuple(dict.fromkeys((*BUILTIN, *_registered, *_plugins())))


def payload_layout(track: str, spec: KVSpec, tokens: int) -> PayloadLayout | None:
    """Return a track's payload layout without loading torch for built-in codecs.

    Return None for unknown codecs, and if the payload cannot be cut by tokens.
    """
    if track in BUILTIN and track not in _registered:
        made = BUILTIN[track].layout
        return None if made is None else made(spec, tokens)
    try:
        return codec(track).layout(spec, tokens)
    except FormatError:
        return None


@cache
def _builtin(name: str) -> Codec:
    module, _, attribute = BUILTIN[name].path.partition(":")
    made: Codec = getattr(import_module(module), attribute)()
    return made


@cache
def _plugins() -> dict[str, Codec]:
    from importlib.metadata import entry_points  # noqa: PLC0415  # loads slowly, and origins rarely need it

    found = {}
    for entry in entry_points(group="kvabr.codecs"):
        try:
            made = entry.load()()
        except Exception as error:  # a plug-in may raise anything
            raise FormatError(f"codec plug-in {entry.name} ({entry.value}) cannot be loaded: {error!r}") from error
        if not isinstance(made, Codec) or made.name != entry.name:
            raise FormatError(f"codec plug-in {entry.name} ({entry.value}) is not a codec of that name")
        found[entry.name] = made
    return found
