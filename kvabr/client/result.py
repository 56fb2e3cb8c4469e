"""Results of plays, and a played cache as a file."""

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
from kvabr.codec.block_slots import CacheTensor, Place
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
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Played:
    """A complete cache."""

    parts: tuple[torch.Tensor, ...]
    """The cache of the first `tokens` tokens: a tensor per layer class, [layer, K/V, head, token, dim], with the tokens
    of `spans`."""
    tokens: int
    """Tokens in the cache, at least one group."""
    coverage: tuple[str, ...]
    """Per group, its track, or ``recomputed``."""
    ttft_s: float
    """Seconds from the call to the finished cache."""
    lookup_s: float
    """Part of `ttft_s` spent on looking up and fetching catalog and profile, in seconds."""
    met: bool
    """True if the deadline left the engine enough time to compute the rest of the prompt."""
    loss: float
    """Expected loss against the exact cache, nats per generated token."""
    record: PlayRecord
    """History of the play; its times count from the end of the lookup."""
    spec: KVSpec
    catalog: Catalog | None = None
    """None if the engine computed everything."""
    catalog_sha256: str | None = None
    """SHA-256 of the stored catalog, in hex; None if all was computed."""
    limited_by: str | None = None
    """Layer class that limited the playable prefix, see `kvabr.types.units.hit`."""
    fusion_loss: float | None = 0.0
    """Part of `loss` that comes from joining passages, after recomputation of tokens. None: unknown, because the loss
    of a passage was not measured; `loss` then leaves it out."""
    computed_again: tuple[int, ...] = ()
    """Positions of passage tokens that were recomputed over the joined cache, ascending."""
    tail: int = 0
    """Cached tokens after `tokens` that are left to the engine, which computes them on this cache with the rest of the
    prompt. `loss` includes their effect. In an incomplete play they start with the missing tokens."""
    upgrades: Upgrades | None = None
    """None unless requested by `PlayOptions.after`."""

    @property
    def approximate(self) -> bool:
        """True if the cache joins passages computed without the text before them in the prompt.

        Do not publish such a cache as the prompt's, on any track, even with recomputed tokens.
        """
        joined = self.catalog is not None and self.catalog.sources
        return self.catalog is not None and bool(joined) and is_joined(self.catalog, self.record.steps)

    @property
    def live(self) -> LiveRecord | None:
        """Facts about the producer, if the asset was still being prefilled."""
        return self.record.live

    @property
    def kv(self) -> torch.Tensor:
        """The cache of a model with one layer class; raise `FormatError` if there are several, see `parts`."""
        _ = self.spec.only
        return self.parts[0]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Tokens of each of the `parts`; for windows, those still visible."""
        if self.catalog is not None:
            return self.catalog.spans
        whole = Span(0, self.tokens)
        parts = self.spec.parts
        return tuple(Span(self.tokens, part.rows) if part.only.kind == "state" else whole for part in parts)


class IncompleteError(PlayError):
    """A play of a whole cache ended with groups missing.

    Only the groups before the first missing one are usable.
    """

    def __init__(
        self, message: str, reason: str, missing: tuple[int, ...], record: PlayRecord, prefix: Played | None
    ) -> None:
        """``missing``: missing groups, ascending; ``prefix``: cache of the groups before the first of them, or None."""
        super().__init__(message)
        self.reason, self.missing, self.record, self.prefix = reason, missing, record, prefix


@dataclass(frozen=True, slots=True)
class NothingCached:
    """The origin has no prefix of the prompt, and there is no engine."""

    spec: KVSpec | None
    """Spec of the prompt's model; None if unknown."""
    lookup_s: float
    """Seconds from the call to the origin's answer."""
    limited_by: str | None = None
    """Layer class without a snapshot that made a shorter common prefix unplayable, or None."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """The part of an expected prompt that a hint has put into the client's store."""

    tokens: int
    """Leading tokens that a play can take from the store."""
    bytes: int
    """Bytes of the groups of these tokens."""
    loss: float
    """Expected loss of these tokens in nats per generated token."""


@dataclass(frozen=True)
class PlayedPrefix:
    """The compressed groups that a prefix play received before the first missing one."""

    spec: KVSpec
    groups: tuple[CodedGroup, ...]
    """Verified, compressed groups, one per entry of `units`, for `expand_here`."""
    dtype: torch.dtype | None
    """Element type of `parts`; None: the cache's."""
    spans: tuple[Span, ...]
    """Per layer class, the tokens of its tensor in `parts`. Full attention and latents: all tokens; a window or chunk:
    the tokens still visible after the prefix, and up to a group before them; a state: the rows of the snapshot at the
    end."""
    first: int
    """Index of the first played token."""
    tokens: int
    """Tokens received; 0 if the first group is missing."""
    requested: int
    """Requested tokens, counted from `first`."""
    units: tuple[Unit, ...]
    """The groups of all layer classes, counted from the first played group."""
    coverage: tuple[str, ...]
    """Track of each entry of `groups`."""
    loss: float
    """Expected loss if the engine computes the missing groups, in nats per generated token."""
    bytes_fetched: int
    bytes_wasted: int
    """Fetched bytes that are not in `groups`."""
    seconds: float
    """Seconds from the call to the end of the play."""
    cut: str | None
    """Why the prefix is shorter than requested, and the last error; None if it is not."""
    damaged: int = 0
    """Number of damaged or undecodable groups received, with repetitions."""
    failed: int = 0
    """Failed requests: not found, refused, or lost with a connection."""
    tail: int = 0
    """Cached tokens after these, left to the engine, which computes them with the question; `loss` includes their
    effect."""
    live: LiveRecord | None = None
    """Facts about the producer, if the asset was still being prefilled."""

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed groups."""
        return sum(group.nbytes for group in self.groups)

    @cached_property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The cache from token `first` on, decoded once: a tensor per layer class, with the tokens of `spans`.

        Tensors are [layer, K/V, head, token, dim]. Raises `FormatError` if a group cannot be decoded.
        """
        outs, places = [], dict[int, Place]()
        for number, (part, span) in enumerate(zip(self.spec.parts, self.spans, strict=True)):
            own = [index for index, unit in enumerate(self.units) if unit.part == number]
            state = part.only.kind == "state"
            begin = span.first if state or not own else self.units[own[0]].first
            end = begin + span.tokens if state or not own else self.units[own[-1]].first + self.units[own[-1]].tokens
            out = torch.empty(part.shape(end - begin), dtype=self.dtype or part.torch_dtype)
            target = CacheTensor(out)
            for index in own:
                places[index] = target.place(self.units[index].first - begin, self.units[index].tokens)
            outs.append(out[:, :, :, span.first - begin :][:, :, :, : span.tokens])
        for error in expand_here(self.groups, [places[index] for index in range(len(self.groups))]):
            if error is not None:
                raise error
        return tuple(outs)

    @property
    def kv(self) -> torch.Tensor:
        """The cache of a model with one layer class; raise `FormatError` if there are several."""
        if len(self.spec.parts) > 1:
            raise FormatError(f"the cache has {len(self.spec.parts)} layer classes; use PlayedPrefix.parts")
        return self.parts[0]


def expand_here(groups: Sequence[CodedGroup], places: Sequence[Place]) -> list[Exception | None]:
    """Decode groups to their places, and return each one's error or None. Blocks; not for decoder threads."""
    return expand(groups, places, _each)


def _each(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterable[_Result]:
    def alone(item: _Item) -> _Result:
        on_one_core()
        return work(item)

    return decoders().map(alone, items)


def listed(names: Iterable[str]) -> str:
    """Return names as one text, cut after a few."""
    every = list(names)
    more = len(every) - _MAX_LISTED
    return ", ".join(every[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def save(played: Played, path: str | os.PathLike[str]) -> None:
    """Write a cache as safetensors, atomically: the tensor ``kv``, [layer, K/V, head, token, dim].

    With several layer classes, each has a tensor ``kv.CLASS``. The metadata has one JSON string, ``kvabr``, with
    ``format``, ``spec``, ``tokens`` (a number), ``tracks`` (per group), ``namespace`` and ``catalog_sha256`` (null if
    all was recomputed), and ``loss``. For several classes or windows it also has ``first``: each tensor's first token;
    for a state, the number of tokens before it.

    Raises:
        AssetError: the file cannot be written; no partial file remains.
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
        raise AssetError(f"{path}: not a regular file; give another path")
    try:
        sweep(path.parent, path.name)
        with replacing(path, mode=PRIVATE) as file:
            # safetensors accepts only paths
            save_file(tensors, file.name, metadata={"kvabr": json.dumps(facts, sort_keys=True)})
    except SafetensorError as error:
        raise AssetError(f"{path}: cannot be written ({error})") from error
