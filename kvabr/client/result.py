"""What a play returns, and a played cache as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from kvabr.client.decode_speeds import on_one_core
from kvabr.client.upgrades import Upgrades
from kvabr.codec.block_slots import Place, TensorRoom
from kvabr.codec.paged import CodedGroup, expand
from kvabr.player.session_types import LiveRecord, PlayRecord
from kvabr.store.files import PRIVATE, replacing, sweep
from kvabr.transfer.work import decoders
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, FormatError, PlayError
from kvabr.types.joined import is_joined
from kvabr.types.kv import KVSpec
from kvabr.types.units import Span, Unit

FORMAT = "kvabr.cache/1"
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_RANGES = 8
"""Most ranges of numbers that a message lists."""


@dataclass(frozen=True, slots=True)
class Played:
    """A complete cache."""

    parts: tuple[torch.Tensor, ...]
    """The cache of the prompt's first `tokens` tokens: a tensor per layer class, [layer, K/V, head, token, dim], with
    the tokens of `spans`."""
    tokens: int
    """Tokens that it covers, at least one group; the engine computes the rest of the prompt as usual."""
    coverage: tuple[str, ...]
    """Per group, the track it came on, or ``recomputed``."""
    ttft_s: float
    """Seconds from the call until the cache was in place."""
    lookup_s: float
    """Seconds of these until catalog and profile were known."""
    met: bool
    """Whether the engine had, within the deadline, the time it needs for the rest of the prompt."""
    loss: float
    """Expected loss against the exact cache, nats per generated token."""
    record: PlayRecord
    """What happened to every group; its times count from the end of the lookup."""
    spec: KVSpec
    catalog: Catalog | None = None
    """What was played; None if the engine computed everything."""
    catalog_sha256: str | None = None
    """SHA-256 of the catalog as the origin has it, hex."""
    limited_by: str | None = None
    """The layer class for which less of the prompt could be played than is cached, see `kvabr.types.units.hit`."""
    fusion_loss: float | None = 0.0
    """What of `loss` comes of joining passages, less what computing tokens of them again saves; None: unknown, and not
    wholly in it, since that of one was not measured."""
    computed_again: tuple[int, ...] = ()
    """Tokens of passages that the engine computed again, over the cache as it was joined; increasing."""
    tail: int = 0
    """Tokens behind these that are cached, and left to the engine, which computes them on this cache together with what
    follows: `loss` is that behind them. What it computes so is not exact, unless the cache is. Of what is left of an
    incomplete play they begin with those that did not come."""
    upgrades: Upgrades | None = None
    """Upgrades that continue now that the cache is in use; None if `PlayOptions.after` did not ask for any."""

    @property
    def approximate(self) -> bool:
        """Whether it is joined from passages, whose caches were computed without what comes before them in the prompt.

        So is what was computed over them. Such a cache is not the prompt's own, on no track: do not publish it.
        """
        joined = self.catalog is not None and self.catalog.sources
        return self.catalog is not None and bool(joined) and is_joined(self.catalog, self.record.steps)

    @property
    def live(self) -> LiveRecord | None:
        """What the play learned of the producer of an asset that was still being prefilled; None if it was complete."""
        return self.record.live

    @property
    def kv(self) -> torch.Tensor:
        """The cache of a model with one layer class; a `FormatError` says that there are several, see `parts`."""
        _ = self.spec.only
        return self.parts[0]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tokens of each of the `parts`: of windows only those that can still be seen."""
        if self.catalog is not None:
            return self.catalog.spans
        whole = Span(0, self.tokens)
        parts = self.spec.parts
        return tuple(Span(self.tokens, part.rows) if part.only.kind == "state" else whole for part in parts)


class IncompleteError(PlayError):
    """A play of a whole cache ended with groups missing: at its deadline, unless its caller had more patience.

    The groups before the first missing one are a cache of the beginning of the prompt, as good as any; what lies behind
    it cannot be used.
    """

    def __init__(
        self, message: str, reason: str, missing: tuple[int, ...], record: PlayRecord, prefix: Played | None
    ) -> None:
        """Describe what is missing.

        Args:
            message: the error's text.
            reason: why the play ended.
            missing: groups that are not in place, ascending.
            record: what happened to every group.
            prefix: cache of the groups before the first missing one; None if there are none.
        """
        super().__init__(message)
        self.reason, self.missing, self.record, self.prefix = reason, missing, record, prefix


@dataclass(frozen=True, slots=True)
class NothingCached:
    """The origin has nothing of the prompt, and there is no engine to compute it."""

    spec: KVSpec | None
    """Model that was asked for; None if neither the caller nor the origin has a spec of it."""
    lookup_s: float
    """Seconds from the call until the origin had answered."""
    limited_by: str | None = None
    """If something that begins like the prompt is there, the layer class of which there is no snapshot to play."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """What is in the client's store of a prompt that is expected to come."""

    tokens: int
    """Tokens of its beginning that a play can have from there."""
    bytes: int
    """Of all groups that this took, whether they came now or were in the store before."""
    loss: float
    """Expected loss of these tokens, nats per generated token."""


@dataclass(frozen=True)
class PlayedPrefix:
    """What a prefix play brought before its first miss, possibly nothing. It is compressed until it is wanted."""

    spec: KVSpec
    groups: tuple[CodedGroup, ...]
    """The groups of `units`, verified and compressed, to be expanded where they belong (`expand_here`)."""
    dtype: torch.dtype | None
    """Element type of `parts`; None: that of the cache."""
    spans: tuple[Span, ...]
    """Per class, the tokens of its tensor. Of full attention and latents all; of a window or chunk those that can still
    be seen behind the prefix, and up to a group before them; of a state the rows of the snapshot at its end."""
    first: int
    """First token of the first group that was played."""
    tokens: int
    """Tokens in place; 0 if not even the first group is."""
    wanted: int
    """Tokens that were asked for, from `first` on."""
    units: tuple[Unit, ...]
    """The groups that were handed over, of whichever classes; counted from the first group that was played."""
    coverage: tuple[str, ...]
    """Track of each of them."""
    loss: float
    """Expected loss of these groups, nats per generated token."""
    bytes_fetched: int
    bytes_wasted: int
    """Those of `bytes_fetched` that nothing of `groups` is made of."""
    seconds: float
    """Seconds from the call to the end of the play."""
    cut: str | None
    """Why it is not all that was asked for, and the last fault if there was any; None if it is."""
    damaged: int = 0
    """Groups that came and could not be used, each time that they came."""
    failed: int = 0
    """Requests for groups that failed: not there, refused, or lost with a connection."""
    tail: int = 0
    """Tokens behind these that are cached, and left to the engine's call for the question; `loss` is that behind it."""
    live: LiveRecord | None = None
    """What the play learned of the producer of an asset that was still being prefilled; None if it was complete."""

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed groups."""
        return sum(group.nbytes for group in self.groups)

    @cached_property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The cache from token `first` on, expanded once: a tensor per layer class, with the tokens of `spans`.

        They are [layer, K/V, head, token, dim]. A `FormatError` says which group cannot be decoded.
        """
        outs, places = [], dict[int, Place]()
        for number, (part, span) in enumerate(zip(self.spec.parts, self.spans, strict=True)):
            own = [index for index, unit in enumerate(self.units) if unit.part == number]
            state = part.only.kind == "state"
            begin = span.first if state or not own else self.units[own[0]].first
            end = begin + span.tokens if state or not own else self.units[own[-1]].first + self.units[own[-1]].tokens
            out = torch.empty(part.shape(end - begin), dtype=self.dtype or part.torch_dtype)
            room = TensorRoom(out)
            for index in own:
                places[index] = room.place(self.units[index].first - begin, self.units[index].tokens)
            outs.append(out[:, :, :, span.first - begin :][:, :, :, : span.tokens])
        for error in expand_here(self.groups, [places[index] for index in range(len(self.groups))]):
            if error is not None:
                raise error
        return tuple(outs)

    @property
    def kv(self) -> torch.Tensor:
        """The cache of a model with one layer class; a `FormatError` says that there are several, see `parts`."""
        if len(self.spec.parts) > 1:
            raise FormatError(f"the cache has {len(self.spec.parts)} layer classes; take PlayedPrefix.parts")
        return self.parts[0]


def expand_here(groups: Sequence[CodedGroup], places: Sequence[Place]) -> list[Exception | None]:
    """Decode groups to their places, as `kvabr.codec.paged.expand`; blocks. Not for the threads that decode."""
    return expand(groups, places, _each)


def _each(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterable[_Result]:
    def alone(item: _Item) -> _Result:
        on_one_core()
        return work(item)

    return decoders().map(alone, items)


def listed(names: Iterable[str]) -> str:
    """Return names as text, the first few of many."""
    every = list(names)
    more = len(every) - _MOST_RANGES
    return ", ".join(every[:_MOST_RANGES]) + (f" and {more} more" if more > 0 else "")


def numbers(groups: Sequence[int]) -> str:
    """Return numbers of groups, ascending, as text: ``groups 3 to 7 and 9``."""
    ranges: list[tuple[int, int]] = []
    for group in groups:
        if ranges and group == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], group)
        else:
            ranges.append((group, group))
    said = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_MOST_RANGES]]
    if more := sum(last - first + 1 for first, last in ranges[_MOST_RANGES:]):
        said.append(f"{more} more")
    word = "group" if len(groups) == 1 else "groups"
    return f"{word} {', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else f"{word} {''.join(said) or 'none'}"


def save(played: Played, path: str | os.PathLike[str]) -> None:
    """Write a cache as safetensors, whole or not at all: the tensor ``kv``, [layer, K/V, head, token, dim].

    Of several layer classes there is a tensor each, ``kv.`` and the name of the class. The metadata has one string,
    ``kvabr``, which is JSON: ``format``, ``spec``, ``tokens`` (how many), ``tracks`` (one per group), ``namespace`` and
    ``catalog_sha256`` (null if everything was recomputed), ``loss``; and of several classes, or of windows, ``first``:
    the first token of each tensor, or the number of tokens before a state.

    Raises:
        AssetError: the file cannot be written; nothing is left behind.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  # most plays are never written
    from safetensors.torch import save_file  # noqa: PLC0415

    catalog = played.catalog
    namespace = None if catalog is None else {"model": catalog.namespace.model, "prompt": catalog.namespace.prompt}
    facts = {
        "format": FORMAT,
        "spec": played.spec.to_json(),
        "tokens": played.tokens,
        "tracks": list(played.coverage),
        "namespace": namespace,
        "catalog_sha256": played.catalog_sha256,
        "loss": played.loss,
    } | ({"approximate": True} if played.approximate else {})
    tensors = {"kv": played.parts[0].contiguous()}
    if len(played.parts) > 1:
        tensors = {f"kv.{name}": kv.contiguous() for name, kv in zip(played.spec.names, played.parts, strict=True)}
    if len(played.parts) > 1 or played.spec.only.kind not in ("full", "latent"):
        facts["first"] = [span.first for span in played.spans]
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise AssetError(f"{path}: is not an ordinary file; name another")
    try:
        sweep(path.parent, path.name)
        with replacing(path, mode=PRIVATE) as file:
            # By its name: safetensors writes to a path alone.
            save_file(tensors, file.name, metadata={"kvabr": json.dumps(facts, sort_keys=True)})
    except SafetensorError as error:
        raise AssetError(f"{path}: cannot be written ({error})") from error
