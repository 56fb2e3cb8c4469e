"""The contract of a codec, and the codecs by name. Importing this module does not load torch.

A codec turns one group of a KV cache into a payload, and a payload into the caller's tensor. Codecs are built in
(`kvabr.codec.builtin`), provided by installed packages (entry points ``kvabr.codecs``), or registered by a program.
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
    """Properties of a group, in addition to its bytes."""

    spec: KVSpec
    first_token: int
    """Position of the group's first token in the prompt or passage. The rotary embedding and the sinks depend on it,
    unless the group is position-free.
    """
    tokens: int
    """Tokens in this group: `KVSpec.group_tokens`, or fewer in the last one."""
    profile: Profile | None = None
    """Side information of the model, for codecs that need it."""
    free: bool = False
    """Position-free, as in passages (`kvabr.types.passage`): encoded keys are not rotated, and no token is a sink. The
    class must have a `LayerClass.rope`.
    """
    at: int | None = None
    """Decoding of a position-free group: prompt position of its first token, for rotating keys; None: unrotated."""
    finer: int = 0
    """Encoding: number of last tokens to store finer, where the continuation attends most."""
    memo: dict[str, object] | None = field(default=None, compare=False, repr=False)
    """Encoding: intermediate results shared by the tracks of one group. Pass one dict per group."""


class Codec(ABC):
    """One compression level."""

    name: str
    """Name of the track."""
    refines: str | None = None
    """The track to decode first; None if self-contained."""
    needs_profile: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    """True if `decode` rotates the keys of position-free groups; otherwise they are rotated afterwards
    (`kvabr.codec.group.decode_payload`).
    """
    has_kernel: ClassVar[bool] = False
    """True if `kvabr.codec.gpu` expands its payloads. Not inherited: derived classes may decode others."""
    takes_codes: ClassVar[bool] = False
    """True if `encode` and `decode` take float8 tensors, an engine's own codes; otherwise they get the numbers
    (`kvabr.codec.quantised`).
    """

    def layout(self, spec: KVSpec, tokens: int) -> PayloadLayout | None:
        """Return the layout of a payload of ``tokens`` tokens; None if it cannot be cut by tokens.

        Token-separable plug-ins override this; classes derived from a built-in codec inherit its layout.
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
        """Return the largest magnitude that a payload of a layer class keeps within this codec's loss.

        A group beyond it is not offered on this track: `encode` would clip it.
        """
        return FP16_MAX

    def prepare(self, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> None:  # noqa: B027  # few can
        """Prepare groups on a GPU for `encode` together, storing results in their memos; the payloads stay the same.

        Tracks below have been encoded.
        """

    @abstractmethod
    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        """Compress one group and return the payload, without the container's frame.

        Args:
            group: [layer, K/V, head, token, dim], any float dtype, any strides.
            context: of the group.
            below: payloads of the tracks below, base first.
        """

    @abstractmethod
    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        """Decompress one group into ``out``.

        Args:
            payload: a result of `encode`; untrusted.
            context: as for `encode`.
            out: [layer, K/V, head, token, dim], any float dtype, any strides; written completely, or partly on error.
            below: payloads of the tracks below, base first.

        Raises:
            FormatError: this codec did not write the payload for this context.
        """


_registered: dict[str, Codec] = {}


def register(added: Codec) -> None:
    """Register a codec under its name, replacing any other of that name."""
    check_track_name(added.name)
    _registered[added.name] = added


def codec(name: str) -> Codec:
    """Return the codec of a track; raise `FormatError` with the known names, or a plug-in's error."""
    if (found := _registered.get(name)) is not None:
        return found
    if name in BUILTIN:
        return _builtin(name)
    if (found := _plugins().get(name)) is not None:
        return found
    raise FormatError(
        f"no codec for track {name!r}{did_you_mean(name, names())}; known codecs are {', '.join(names())}"
    )


def names() -> tuple[str, ...]:
    """Return the names of all codecs: the draft's levels in its order, the layers (base first), then all others."""
    return tuple(dict.fromkeys((*BUILTIN, *_registered, *_plugins())))


def payload_layout(track: str, spec: KVSpec, tokens: int) -> PayloadLayout | None:
    """Return the payload layout of a track without loading torch for built-in codecs.

    None if the payload cannot be cut by tokens, or for unknown codecs, which an origin may serve.
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
