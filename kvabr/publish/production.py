"""The production of one asset: an engine hands over runs of tokens, and a thread encodes them step by step.

The asset of a `Production` appears when complete. For assets that players can follow while they grow, see
`kvabr.publish.live_publisher`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import torch

from kvabr.codec import gpu
from kvabr.codec.group import largest
from kvabr.publish.frames import FrameEncoder
from kvabr.publish.offer import TrackOffer
from kvabr.store.asset import Asset
from kvabr.store.asset_writer import AssetWriter
from kvabr.store.prompt import Prompt
from kvabr.types.errors import FormatError, KvabrError, NotFiniteError
from kvabr.types.kv import KVSpec
from kvabr.types.passage import PassageNotes
from kvabr.types.units import Unit, snapshot_ends, units_by_chunk, units_of

PublishVerdict = Literal["full", "known", "published", "failed"]


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Result of publishing one cache."""

    verdict: PublishVerdict
    bytes: int = 0
    why: str = ""
    tokens: int = 0
    """Number of tokens of the cache; after a failure, that of the shorter prompt that remains."""
    left_out: int = 0
    """Number of frames announced only after the last token, because encoding was too slow."""
    encoding_s: float = 0.0
    """Processor time of encoding until the last token, seconds."""
    idle_s: float = 0.0
    """The part of `encoding_s` that was spent at idle priority, seconds."""
    not_finite: bool = False
    """True if publishing failed because of NaN or infinity in the cache."""


class Production:
    """One asset in production. `append`, `end` and `fail` are thread-safe and return immediately."""

    def __init__(
        self,
        offer: TrackOffer,
        make_writer: Callable[[], AssetWriter],
        chunks: Sequence[str],
        tokens: int,
        position: int | None,
        done: Callable[[PublishOutcome], object],
        *,
        passage: PassageNotes | None = None,
        prompt: Prompt | None = None,
        begun: Callable[[], tuple[Asset, int] | None] | None = None,
    ) -> None:
        """Create a production without tokens.

        ``position`` and ``passage`` are as in `Publisher.reserve_named` and `reserve_passage`; ``prompt`` is stored
        with the asset. The first step calls ``make_writer`` and ``begun``; the latter returns an asset with the same
        prefix, and the number of groups to copy from it. ``done`` receives the outcome.
        """
        self.offer, self.chunks, self.tokens, self.done = offer, tuple(chunks), tokens, done
        self.lock = threading.Lock()
        self.outcome: PublishOutcome | None = None
        self.published: str | None = None
        self.waits_for: bool | None = None
        """Queue of the next step: True: patient thread; False: regular thread; None: not queued. Guarded by `lock`."""
        self.stepping = False
        self.patient_thread: int | None = None
        """Native id of the patient thread while it runs a step. Guarded by `lock`."""
        self._make_writer, self._position, self._passage = make_writer, position, passage
        self._prompt, self._begun = prompt, begun
        self._stack = contextlib.ExitStack()
        self._frames: FrameEncoder | None = None
        self._writer: AssetWriter | None = None
        self._pieces = _Pieces(offer.spec, tokens)
        self._ended, self._reason, self._full_speed = False, "", False
        self._next = 0
        self._source: tuple[Asset, int] | None = None
        self._not_finite = False

    @property
    def covers_beginnings(self) -> bool:
        """True if this asset serves every prefix of its prompt."""
        return self._passage is None and self._position == 0 and self.offer.spec.even_groups

    # ------------------------------------------------------- any thread

    def append(self, first: int, kv: Sequence[torch.Tensor], tokens: int | None = None) -> None:
        """Queue the cache of the next tokens. If it is malformed, publishing fails.

        See `LiveSlot.groups`; ``kv`` always has one tensor per layer class.
        """
        with self.lock:
            if self._ended:
                return
            try:
                self._pieces.append(first, kv, tokens)
            except FormatError as error:
                self._ended, self._reason = True, str(error)

    def end(self) -> None:
        """Mark the cache as complete."""
        with self.lock:
            if not self._ended and self._pieces.tokens < self.tokens:
                self._reason = f"the cache ended after {self._pieces.tokens} of {self.tokens} tokens"
            self._ended = True

    @property
    def ended(self) -> bool:
        """True if no tokens will follow."""
        return self._ended

    def fail(self, reason: str) -> None:
        """End the cache early with a reason; if called after `end` or another `fail`, abandon the remaining work."""
        with self.lock:
            self._full_speed = self._ended
            self._ended, self._reason = True, self._reason or reason or "given up"

    def has_work(self) -> bool:
        """Return True if there is work for `step`. The caller holds `lock`."""
        return self.outcome is None and (self._frames is None or self._ended or self._next < self._pieces.whole)

    def patient(self) -> bool:
        """Return True if the idle-priority thread should take the next step. The caller holds `lock`."""
        return False

    # ------------------------------------------------------- the encoding threads, one at a time

    def spent(self, cpu_s: float, wall_s: float, *, patient: bool) -> None:
        """Record the processor time and the elapsed time of a step."""

    def step(self) -> None:
        """Encode one group, and set the outcome at the end. Never raises."""
        try:
            self._step()
        except KvabrError as error:
            self._not_finite = isinstance(error, NotFiniteError)
            self._broken(str(error))
        except Exception as error:  # noqa: BLE001  # a full disk, no memory: the engine goes on
            self._broken(repr(error))

    def close(self, outcome: PublishOutcome) -> None:
        """Close the writer, and set the outcome."""
        with contextlib.suppress(Exception):
            self._stack.close()
        with self.lock:
            self._ended, self.outcome = True, replace(outcome, not_finite=self._not_finite)
            self._pieces.drop()

    def _step(self) -> None:
        if self._frames is None or self._writer is None:
            if self._reason and not self._pieces.whole:
                self._broken(self._reason)
                return
            magnitudes = self._magnitudes()
            self._writer = self._stack.enter_context(self._make_writer())
            frames = self.offer.encoder(
                self.chunks, self.tokens, self._writer, self._position, self._passage, magnitudes
            )
            frames.write_profile()
            self._begin(frames)
            with contextlib.suppress(KvabrError):  # removed or damaged
                self._source = None if self._begun is None else self._begun()
            self._frames = frames
            return
        if self._source is not None and not self._full_speed:
            self._take_over(self._frames, self._writer, *self._source)
            return
        with self.lock:
            whole, ended = 0 if self._full_speed else self._pieces.whole - self._next, self._ended
            taken = [self._pieces.take(self._next + at) for at in range(min(whole, self._at_once(self._frames)))]
        if taken:
            self._encode(self._frames, self._next, [unit for units in taken for unit in units])
            self._next += len(taken)
        elif ended:
            self._end(self._frames, self._writer, self._reason)
        else:
            self._catch_up(self._frames)

    def _take_over(self, frames: FrameEncoder, writer: AssetWriter, asset: Asset, shared: int) -> None:
        sound = False
        with contextlib.suppress(KvabrError):  # removed or damaged
            sound = frames.take_over(asset, self._next, writer)
        self._next += sound
        if not sound or self._next == shared:
            self._source = None

    def _magnitudes(self) -> list[float] | None:
        return self._pieces.magnitudes()

    def _begin(self, frames: FrameEncoder) -> None:
        pass

    def _at_once(self, frames: FrameEncoder) -> int:
        return frames.together if gpu.runs_on(self._pieces.device) else 1

    def _encode(self, frames: FrameEncoder, chunk: int, units: Sequence[tuple[int, torch.Tensor]]) -> None:
        del chunk
        for encoder in frames.encoders(units):
            for track in frames.tracks:
                encoder.encode(track)

    def _catch_up(self, frames: FrameEncoder) -> None:
        pass

    def _end(self, frames: FrameEncoder, writer: AssetWriter, reason: str) -> None:
        if reason:
            self._broken(reason)
            return
        self._commit(frames, writer)
        self.published = self.chunks[-1]
        self.close(PublishOutcome("published", total_bytes(frames), tokens=self.tokens))

    def _commit(self, frames: FrameEncoder, writer: AssetWriter) -> None:
        if self._prompt is not None:
            writer.prompt(self._prompt)
        writer.commit(self.offer.catalog(frames))

    def _broken(self, why: str) -> None:
        self.close(PublishOutcome("failed", why=why))


class _Pieces:
    def __init__(self, spec: KVSpec, tokens: int) -> None:
        self._spec, self._all = spec, tokens
        self._ends = [snapshot_ends(part, tokens) for part in spec.parts]
        self._held: list[deque[tuple[int, torch.Tensor]]] = [deque() for _ in spec.parts]
        self._done = [0] * len(spec.parts)
        units = units_by_chunk(units_of(spec, tokens), spec.groups(tokens))
        numbers = count()
        self._units = [[(next(numbers), unit) for unit in each] for each in units]
        self._runs: list[int] = []
        self.tokens = 0

    @property
    def device(self) -> torch.device:
        """Device of the first piece."""
        return next((held[0][1].device for held in self._held if held), torch.device("cpu"))

    @property
    def whole(self) -> int:
        """Number of complete groups of tokens."""
        return len(self._units) if self.tokens == self._all else self.tokens // self._spec.group_tokens

    def append(self, first: int, kv: Sequence[torch.Tensor], tokens: int | None) -> None:
        spec = self._spec
        if len(kv) != len(spec.parts):
            raise FormatError(
                f"{spec.model}: a cache must have {len(spec.parts)} tensors, one per layer class, got {len(kv)}"
            )
        if tokens is None:
            pairs = zip(kv, spec.parts, strict=True)
            tokens = next((int(one.shape[3]) for one, part in pairs if not _is_state(part) and one.dim() == 5), None)
        if tokens is None:
            raise FormatError(f"{spec.model}: give tokens=, because states do not show the number of tokens")
        last = first + tokens
        if first != self.tokens or not first <= last <= self._all:
            raise FormatError(
                f"{spec.model}: expected token {self.tokens} of {self._all} next, got tokens {first} to {last}"
            )
        for part, tensor, ends in zip(spec.parts, kv, self._ends, strict=True):
            rows = sum(first < end <= last for end in ends) * part.rows if _is_state(part) else tokens
            if tuple(tensor.shape) != part.shape(rows):
                raise FormatError(
                    f"{spec.model}: cannot encode {part.summary}: got the shape {tuple(tensor.shape)}, expected "
                    f"{part.shape(rows)}"
                )
        for index, tensor in enumerate(kv):
            if tensor.shape[3]:
                self._held[index].append((self._done[index], tensor))
                self._done[index] += int(tensor.shape[3])
        self.tokens = last
        self._runs.append(last)

    def magnitudes(self) -> list[float]:
        pairs = zip(self._spec.parts, self._held, strict=True)
        return [max((largest(kv, part, at) for at, kv in held), default=0.0) for part, held in pairs]

    def lag(self, chunk: int) -> int:
        """Return the number of runs received since a group was complete."""
        end = min((chunk + 1) * self._spec.group_tokens, self._all)
        return sum(last >= end for last in self._runs) - 1

    def units(self, chunk: int) -> list[tuple[int, Unit]]:
        return self._units[chunk]

    def take(self, chunk: int) -> list[tuple[int, torch.Tensor]]:
        return [(index, self._cut(unit)) for index, unit in self._units[chunk]]

    def _cut(self, unit: Unit) -> torch.Tensor:
        first = unit.group * unit.tokens if _is_state(self._spec.parts[unit.part]) else unit.first
        held, end = self._held[unit.part], first + unit.tokens
        while held[0][0] + held[0][1].shape[3] <= first:
            held.popleft()
        found = [piece[:, :, :, max(0, first - at) : end - at] for at, piece in held if at < end]
        return found[0] if len(found) == 1 else torch.cat(found, dim=3)

    def drop(self) -> None:
        for held in self._held:
            held.clear()


def total_bytes(frames: FrameEncoder) -> int:
    """Return the bytes of all frames."""
    return sum(map(sum, frames.bytes.values()))


def _is_state(part: KVSpec) -> bool:
    return part.only.kind == "state"
