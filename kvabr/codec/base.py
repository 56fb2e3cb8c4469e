"""The contract of a codec, and the codecs by name. Importing this module does not load torch.

A codec turns one group of a KV cache into a payload, and a payload back into the caller's tensor. Codecs are built in
(`kvabr.codec.builtin`), come with installed packages (entry points ``kvabr.codecs``), or are registered by a program.
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
    """What a codec may know about a group besides its bytes."""

    spec: KVSpec
    first_token: int
    """Position of the group's first token in the prompt, or in its passage. The rotary embedding and the sinks depend
    on it, unless the group is position-free."""
    tokens: int
    """Tokens in this group: `KVSpec.group_tokens`, or fewer in the last one."""
    profile: Profile | None = None
    """Side information of the model, for codecs that need it."""
    free: bool = False
    """Whether the group is position-free, as those of passages (`kvabr.types.passage`): what is encoded has keys before
    rotation, and no token is a sink of the prompt. The class must have a `LayerClass.rope`."""
    at: int | None = None
    """Of a position-free group that is decoded, the position in the prompt of its first token, by which its keys are
    rotated; None leaves them as they were encoded."""
    finer: int = 0
    """Of a group that is encoded, how many of its last tokens are stored finer because the prompt ends there: what
    follows looks at them most. No reader needs to know."""
    memo: dict[str, object] | None = field(default=None, compare=False, repr=False)
    """Intermediate results that the tracks of one group share while they are encoded. Pass each group that is encoded
    on several tracks a dict of its own, and do not change the group in between."""


class Codec(ABC):
    """One compression level."""

    name: str
    """Name of the track."""
    refines: str | None = None
    """The track that must be decoded below this one; None if it stands alone."""
    needs_profile: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    """Whether `decode` rotates the keys of position-free groups itself; those of all others are rotated afterwards
    (`kvabr.codec.group.decode_payload`)."""
    has_kernel: ClassVar[bool] = False
    """Whether `kvabr.codec.gpu` expands its payloads. Each class says it for itself: derived ones may decode others."""
    takes_codes: ClassVar[bool] = False
    """Whether `encode` and `decode` take tensors in float8, an engine's own codes; all others are given the numbers
    that codes stand for (`kvabr.codec.quantised`)."""

    def layout(self, spec: KVSpec, tokens: int) -> PayloadLayout | None:
        """Return where each token lies in a payload of ``tokens`` tokens; None if it cannot be cut by tokens.

        A plug-in that is token-separable overrides this; classes derived from a built-in codec inherit its layout.
        """
        for cls in type(self).__mro__:
            known = BUILTIN.get(vars(cls).get("name", ""))
            if known is not None:
                return None if known.layout is None else known.layout(spec, tokens)
        return None

    def outliers(self, payload: memoryview, context: GroupContext) -> int:  # noqa: ARG002
        """Return the number of tokens that the encoder found too unusual to code like the others."""
        return 0

    def largest(self, spec: KVSpec) -> float:  # noqa: ARG002
        """Return the largest magnitude of numbers of a layer class that a payload keeps within this codec's loss.

        A group with larger ones is not offered on this track: `encode` would clip them.
        """
        return FP16_MAX

    def prepare(self, groups: Sequence[tuple[torch.Tensor, GroupContext]]) -> None:  # noqa: B027  # few can
        """Compute at once what `encode` will need of groups that lie on a GPU, and leave it in their memos.

        Tracks that this one refines have been encoded. `encode` returns the same without.
        """

    @abstractmethod
    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        """Compress one group and return the payload, without the container's frame.

        Args:
            group: [layer, K/V, head, token, dim], any float dtype, any strides.
            context: which group it is.
            below: payloads of the tracks that this one refines, base first; empty if it stands alone.
        """

    @abstractmethod
    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        """Decompress one group into ``out``.

        Args:
            payload: what `encode` returned; untrusted.
            context: as for `encode`.
            out: [layer, K/V, head, token, dim], any float dtype, any strides. It is written completely, or partly on
                error (the assembler never has a codec write over a group that is in place).
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
    """Return the codec of a track; a `FormatError` lists the known names, or says why a plug-in cannot be loaded."""
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

    None if the payload cannot be cut by tokens, or no such codec is here: an origin also serves tracks of other codecs.
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
