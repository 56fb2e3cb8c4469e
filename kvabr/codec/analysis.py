"""The encoder's side of the transform: from a group to rows of coefficients.

A group has bit-identical coefficients on every processor and with any number of threads, so that publishers' digests
are equal. Matrix products are exact (`kvabr.codec.inverse`). All other operations are per element, a maximum, or a sum
in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec import gpu
from kvabr.codec.coefficients import Coefficients
from kvabr.codec.inverse import Inverse, inverted
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DTYPES, check_cache
from kvabr.codec.rope import backwards, rope_first, rope_shape
from kvabr.codec.threads import encoder_threads
from kvabr.codec.transform import FARTHEST, ONE, Matrices, Structure, Transform

_kvanalysis: Any
try:
    from kvabr.codec.native import _kvanalysis  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kvanalysis = None

_MAX_ELEMENT = 8191
"""Largest element, divided by norm and step, for which all sums fit 32 bits (2**31 over `ONE` and `FINE`)."""
_TOKENS_PER_QUIET = 64
"""Divisor: at most one in this many tokens, plus one, is stored separately for being quiet; likewise for columns of a
state.
"""


@dataclass(frozen=True, eq=False)
class Analysis:
    """The encoder's direction of a transform."""

    transform: Transform

    @property
    def structure(self) -> Structure:
        """The transform's blocks and stacks."""
        return self.transform.structure

    def prepare(self) -> None:
        """Invert the matrices now, which takes seconds."""
        _ = self._native

    @cached_property
    def _inverses(self) -> tuple[tuple[Inverse, ...], tuple[Inverse, ...]]:
        return self._inverted()

    def _inverted(self) -> tuple[tuple[Inverse, ...], tuple[Inverse, ...]]:
        block = self.transform.block
        blocks = () if block is None else tuple(inverted(Matrices(*each)) for each in zip(*block, strict=True))
        return blocks, tuple(map(inverted, self.transform.stack))

    @cached_property
    def _scale(self) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return np.float32(1) / self.transform.norm

    @cached_property
    def _limits(self) -> NDArray[np.float32]:
        """[3, 1]: limits, in steps, of elements over the norm, of components of stacks, and of decodable rows.

        The first two leave a margin for rounding errors of up to a step. A rounded index may exceed its row by half a
        step.
        """
        components = max((_gain(each) for each in self.transform.stack if each.gain.size), default=1.0)
        elements = components * (1.0 if self.transform.block is None else _gain(self.transform.block))
        limits = [max(1.0, _MAX_ELEMENT - elements)], [max(1.0, FARTHEST - components)], [FARTHEST + 0.4]
        return np.array(limits, dtype=np.float32)

    def analyse(self, group: torch.Tensor, first_token: int | None) -> Coefficients:
        """Transform a group [layer, K/V, head, token, dim] of finite floats, any dtype and strides.

        ``first_token`` is the position of the first token, to undo the rotation of keys; None if they are not rotated.
        """
        check_cache(self.transform, group)
        if gpu.runs_on(group.device):
            return self.analyse_run([group], first_token)[0]
        return self._analyse_natively(group.detach().cpu(), first_token)

    def centred(self, bare: torch.Tensor) -> torch.Tensor:
        """Return the group less its mean, arranged in blocks, [block, channel, token] float32.

        ``bare`` is [layer, K/V, head, token, dim] float32, keys without rotary embedding; overwritten.
        """
        bare -= torch.from_numpy(self.transform.mean.astype(np.float32))[:, :, :, None]
        return bare.transpose(3, 4).reshape(self.structure.blocks, self.structure.width, bare.shape[3])

    def key_power(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of keys from their mean, [layer, token] float32, from the result of `centred`."""
        return self._power(channels, 0)

    def value_power(self, channels: torch.Tensor) -> torch.Tensor:
        """Return `key_power` for values."""
        return self._power(channels, 1)

    def _power(self, channels: torch.Tensor, kind: int) -> torch.Tensor:
        structure = self.structure
        elements = channels.reshape(structure.coded.layers, structure.halves, -1, channels.shape[2])[:, kind]
        power = torch.zeros(elements.shape[::2])
        for element in elements.unbind(1):  # in order: the result of a library's sum depends on the processor
            power += element * element
        return power

    def outlying(self, channels: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens to store separately, [token] bool, given the result of `centred`."""
        values = None if self.transform.quiet is None else self.value_power(channels)
        return self._outlying(self.key_power(channels), values)

    def _outlying(self, keys: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """Return a mask of all loud tokens and the quietest tokens, given powers of keys and values, [layer, token]."""
        loudness = (np.sqrt(keys.numpy()) / self.transform.spread[:, None]).max(axis=0)
        state = self.structure.spec.only.kind == "state"
        out = _beyond(loudness, self.transform.threshold) if state else loudness > np.float32(self.transform.threshold)
        quiet = self.transform.quiet
        if quiet is not None and values is not None:
            out |= _beyond(-quietness(values.numpy(), quiet.usual), -quiet.threshold)
        return torch.from_numpy(out)

    def _found(self, rows: torch.Tensor, largest: NDArray[np.float32], outlying: torch.Tensor) -> Coefficients:
        reach = (largest / self._limits).max(axis=0)
        return Coefficients(rows, torch.from_numpy(reach), torch.from_numpy(largest[2]), outlying)

    @cached_property
    def _native(self) -> tuple[Any, ...]:
        transform, structure, spec, made = self.transform, self.structure, self.structure.coded, []
        blocks, stacks = self._inverted()
        for stack, inverse in zip(structure.stacks, stacks, strict=True):
            which = slice(stack.first, stack.last), stack.kind
            own = [blocks[each] for each in structure.blocks_of(stack)] if blocks else []
            first = rope_first(None if stack.kind else spec.rope)
            handle = coder.built(_kvanalysis).analysis(
                (stack.kind, stack.first, len(stack.layers)),
                (spec.kv_heads, structure.dim, structure.block_heads, first),
                stack.kept,
                *rope_shape(None if stack.kind else spec.rope),
                np.ascontiguousarray(transform.mean[which], dtype=np.float32),
                np.ascontiguousarray(self._scale[which]),
                tuple(np.stack(each) for each in zip(*map(_arrays, own), strict=True)) if own else (b"", b"", b""),
                _arrays(inverse),
            )
            made.append(handle)
        return tuple(made)

    def analyse_run(self, groups: Sequence[torch.Tensor], first_token: int | None) -> list[Coefficients]:
        """Return the results of `analyse` for consecutive groups; rows stay on the groups' device."""
        for group in groups:
            check_cache(self.transform, group)
        whole = groups[0] if len(groups) == 1 else torch.cat(list(groups), dim=3)
        found = gpu.analyse(self.transform, self._inverses, self._scale, whole, first_token)
        largest, power = (part.cpu().contiguous() for part in (found.largest, found.power))
        made, first = [], 0
        for group in groups:
            own = slice(first, first := first + group.shape[3])
            quiet = None if self.transform.quiet is None else power[-1, :, own]
            loud = self._outlying(power[0, :, own], quiet)
            made.append(self._found(found.rows[:, own], largest[:, own].numpy(), loud))
        return made

    def _analyse_natively(self, group: torch.Tensor, first_token: int | None) -> Coefficients:
        """Transform stacks in parallel without the GIL, on as many threads as torch or `encoding_on` allow."""
        structure, tokens, path = self.structure, group.shape[3], coder.active_path()
        if group.dtype not in DTYPES:
            group = group.float()
        source = group.data_ptr(), DTYPES[group.dtype], group.stride(), tokens
        rows = np.empty((structure.rows, tokens), np.float32)
        power = np.zeros((structure.halves, structure.coded.layers, tokens), np.float32)

        def work(number: int) -> NDArray[np.float32]:
            stack, first, last = structure.stacks[number], *structure.first_rows[number : number + 2]
            turns = backwards(None if stack.kind else structure.coded.rope, first_token, tokens)
            largest, own = np.zeros((3, tokens), np.float32), power[stack.kind, stack.first : stack.last]
            _kvanalysis.analyse(path, self._native[number], source, *turns, rows[first:last], largest, own)
            return largest

        numbers = range(len(self._native))
        threads = min(encoder_threads() or torch.get_num_threads(), len(numbers))
        if threads > 1:
            with ThreadPoolExecutor(threads, thread_name_prefix="kvabr-analyse") as pool:
                largest = np.maximum.reduce(list(pool.map(work, numbers)))
        else:
            largest = np.maximum.reduce(list(map(work, numbers)))
        quiet = None if self.transform.quiet is None else torch.from_numpy(power[-1])
        return self._found(torch.from_numpy(rows), largest, self._outlying(torch.from_numpy(power[0]), quiet))


def _arrays(inverse: Inverse) -> tuple[NDArray[Any], ...]:
    return inverse.entries, inverse.rows, inverse.columns


def quietness(power: NDArray[np.float32], usual: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each token's distance from the mean value, relative to the usual distance, averaged over layers.

    ``power`` has squared distances, [layer, token]; ``usual`` is [layer].
    """
    total = np.zeros(power.shape[1], np.float32)
    for distance in np.sqrt(power) / usual[:, None]:  # in order
        total += distance
    return total / np.float32(len(power))


def _beyond(score: NDArray[np.float32], threshold: float) -> NDArray[np.bool_]:
    most = 1 + len(score) // _TOKENS_PER_QUIET
    if len(score) > most:
        threshold = max(threshold, float(np.sort(score)[-most - 1]))
    return score > np.float32(threshold)


def _gain(matrix: Matrices) -> float:
    return float(np.abs(matrix.expanded.astype(np.int64)).sum(axis=-1).max()) / ONE
