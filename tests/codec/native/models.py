"""Random coders and transforms of every shape that is allowed, and groups for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import MAX_NEAR, CoderModel, DecodeJob, Index, NearTables, frequencies
from kvabr.codec.native.references import References, join_references, tiles
from kvabr.codec.transform import Matrices, Stack, Structure, Transform
from kvabr.types.kv import KVSpec, RopeSpec

TOKENS = (1, 2, 5, 7, 8, 9, 16, 31, 63, 64, 65, 100, 127, 128, 129, 191, 256, 300)
_RADII = (0, 1, 1, 1, 2, 3, 5, 8, 15, 16, 40, 126)


def coder_model(dice: np.random.Generator, rows: int, *, refines: bool) -> CoderModel:
    """Tables of odd sizes, some symbols never used, some classes empty."""
    classes, contexts = int(dice.integers(1, 7)), 3 if refines else 1
    radius = dice.choice(_RADII, classes).astype(np.uint8)
    freqs = np.zeros((classes, contexts, 2 * int(radius.max()) + 2), np.uint16)
    _fill(dice, freqs, radius)
    count = int(dice.integers(1, MAX_NEAR + 1))
    near = NearTables(
        dice.integers(0, count, (contexts, 16)).astype(np.uint8), np.zeros((classes, count, freqs.shape[2]), np.uint16)
    )
    _fill(dice, near.freqs, radius)
    return CoderModel(
        row_class=dice.integers(0, classes, rows).astype(np.uint8),
        radius=radius,
        freqs=freqs,
        flag_freq=dice.integers(1, 4096, (2 if refines else 1, rows)).astype(np.uint16),
        delta=dice.integers(0, 8, classes).astype(np.uint8),
        near=near if dice.random() < 0.8 else None,
    )


def _fill(dice: np.random.Generator, freqs: np.ndarray, radius: np.ndarray) -> None:
    for which, table in enumerate(freqs):
        shape = len(table), 2 * int(radius[which]) + 2
        counts = dice.random(shape) ** 4 * (dice.random(shape) < 0.8)
        table[:, : shape[1]] = frequencies(counts)


def some_references(dice: np.random.Generator, tokens: int) -> References:
    """References of a group, with one tile that has none."""
    parts = {}
    for tile in tiles(tokens)[::2]:
        size = tile.stop - tile.start
        second = np.zeros(size, bool)
        second[dice.permutation(size)[64:]] = True
        parts[tile.start] = second, dice.choice(np.flatnonzero(~second), size)
    return join_references(parts, tokens)


def random_transform(dice: np.random.Generator, *, small: bool = False) -> Transform:
    """Grouped or not, odd head dims, partial rotation of both kinds, scaled or not, or none; transforms or not."""
    layers, block_heads, blocks = (int(dice.integers(1, n)) for n in ((3, 3, 2) if small else (5, 4, 4)))
    dim = int(dice.choice((1, 2, 3, 7, 16) if small else (1, 2, 3, 7, 16, 33, 40, 64)))
    heads, width = block_heads * blocks, block_heads * dim
    rope = None
    if dim > 1 and dice.random() < 0.75:
        rotary = 2 * int(dice.integers(1, dim // 2 + 1))
        rope = RopeSpec(10_000.0, rotary, "half" if dice.random() < 0.5 else "interleaved")
        if dice.random() < 0.5:
            frequencies = tuple((10.0 ** dice.uniform(-8, 0.5, rotary // 2)).tolist())
            rope = replace(rope, frequencies=frequencies, factor=float(dice.choice((0.5, 1.0, 1.1386294361, 3.0))))
    stacks, matrices = [], []
    for kv in (0, 1):
        cuts = np.flatnonzero(np.r_[True, dice.random(layers - 1) < 0.5, True]).tolist()
        for first, last in dice.permutation(list(pairwise(cuts))).tolist():
            stacks.append(Stack(kv, first, last, 2 * int(dice.integers(0, width // 2 + 1))))
            size = (last - first) * blocks * stacks[-1].kept
            matrices.append(Matrices(_mantissas(dice, size, size), _stack_gains(dice, size)))
    every = layers * 2 * blocks
    block = Matrices(_mantissas(dice, every, width, width), _gains(dice, every, width))
    return Transform(
        Structure(KVSpec.uniform("m", "t", layers, heads, dim, "float32", rope), block_heads, tuple(stacks)),
        dice.normal(size=(layers, 2, heads, dim)).astype(np.float16),
        (dice.random((layers, 2)) + 0.1).astype(np.float32),
        block if dice.random() < 0.75 else None,
        tuple(matrices),
        np.ones(layers, np.float32),
        np.inf,
    )


def _mantissas(dice: np.random.Generator, *shape: int) -> np.ndarray:
    return dice.integers(-128, 128, shape).astype(np.int8)


def _gains(dice: np.random.Generator, *shape: int) -> np.ndarray:
    return dice.integers(0, 256, shape).astype(np.uint8)


def _stack_gains(dice: np.random.Generator, size: int) -> np.ndarray:
    """Return gains that are equal, equal in runs, or different: equal neighbours may be multiplied as bytes."""
    kind = dice.integers(0, 3)
    if kind == 2:
        return _gains(dice, size)
    runs = np.repeat(dice.choice((9, 9, 9, 200, 0), size // 4 + 1), 4)[:size].astype(np.uint8)
    return runs if kind else np.full(size, dice.integers(0, 256), np.uint8)


def base_indices(dice: np.random.Generator, rows: int, tokens: int) -> Index:
    """Some rows dead, some loud, some indices far out."""
    index = dice.laplace(0, 2, (rows, 1)) * dice.laplace(0, 1, (rows, tokens))
    index[dice.random(rows) < 0.4] = 0
    index[dice.random(index.shape) < 0.002] = dice.integers(-32767, 32768)
    return np.round(index).clip(-32767, 32767).astype(np.int16)


def finer_indices(dice: np.random.Generator, below: Index) -> Index:
    """Return refinements of the indices below; indices below that are out of reach are reduced first, in place."""
    below[:] = below.clip(-10_000, 10_000)
    change = dice.integers(-1, 2, below.shape)
    change[dice.random(len(below)) < 0.4] = 0
    change[dice.random(below.shape) < 0.01] = dice.integers(-200, 200)
    return (3 * below.astype(np.int32) + change).astype(np.int16)


@dataclass(frozen=True)
class Case:
    """A chain of depths, and a transform for it."""

    transform: Transform
    models: tuple[CoderModel, ...]
    indices: tuple[Index, ...]
    references: References | None = None

    @property
    def rows(self) -> int:
        return self.transform.structure.rows

    def shape(self, tokens: int | None = None) -> tuple[int, ...]:
        """Shape of a cache; by default with one token for each index."""
        return self.transform.structure.spec.shape(tokens or self.indices[0].shape[1])

    def encode(self, encode: Callable[..., bytes] = coder.encode_indices) -> list[bytes]:
        """Return the payload of every depth; ``encode`` is a function like `coder.encode_indices`."""
        below = (None, *self.indices[:-1])
        return [encode(*each, self.references) for each in zip(self.models, self.indices, below, strict=True)]

    def job(self, payloads: Sequence[bytes], step: float, first: int | None, out: torch.Tensor) -> DecodeJob:
        """Decode these payloads into a tensor."""
        return DecodeJob(self.models, payloads, self.transform, step, first, out, references=self.references)


def case(seed: int, *, small: bool = False, depths: int | None = None) -> Case:
    dice = np.random.default_rng(seed)
    transform = random_transform(dice, small=small)
    tokens = int(dice.choice(TOKENS[:13] if small else TOKENS))
    count = depths or int(dice.choice((1, 1, 2, 3)))
    indices = [base_indices(dice, transform.structure.rows, tokens)]
    for _ in range(count - 1):
        indices.append(finer_indices(dice, indices[-1]))
    # Indices that a higher depth has reduced must again be reachable from below.
    for depth in range(count - 1, 0, -1):
        far = np.abs(indices[depth].astype(np.int32) - 3 * indices[depth - 1].astype(np.int32)) > 2000
        indices[depth - 1][far] = np.round(indices[depth][far] / 3).astype(np.int16)
    models = tuple(coder_model(dice, transform.structure.rows, refines=depth > 0) for depth in range(count))
    return Case(transform, models, tuple(indices), some_references(dice, tokens) if dice.random() < 0.5 else None)


def spread_out(shape: tuple[int, ...], dtype: torch.dtype, kind: int) -> torch.Tensor:
    """Return a tensor of this shape with various strides, filled with numbers that must be overwritten."""
    layers, two, heads, tokens, dim = shape
    match kind % 5:
        case 0:
            out = torch.empty(shape, dtype=dtype)
        case 1:  # token before head
            out = torch.empty(layers, two, tokens, heads, dim, dtype=dtype).transpose(2, 3)
        case 2:  # the last axis is not the innermost
            out = torch.empty(layers, two, heads, dim, tokens, dtype=dtype).transpose(3, 4)
        case 3:  # a page of a larger cache, at an odd address
            out = torch.empty(heads, layers, tokens + 5, two, dim + 3, dtype=dtype)[:, :, 2:-3, :, 1:-2]
            out = out.permute(1, 3, 0, 2, 4)
        case _:  # every other
            out = torch.empty(2 * layers, two, heads, 3 * tokens, 2 * dim, dtype=dtype)[::2, :, :, ::3, ::2]
    return out.fill_(7)
