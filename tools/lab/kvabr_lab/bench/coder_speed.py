"""Speed of the coder on synthetic groups with real shapes, by stage on one thread, for `kvabr bench codec`.

Numbers have a Laplace distribution. Its spread falls from the first component of each stack and block to the last, and
is scaled to a real group's rate. Speed depends only on the rates and on the share of dead rows. Times are processor
times, since other programs may be running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, DecodeJob, Index, dequantise, frequencies
from kvabr.codec.native.references import TILE
from kvabr.codec.transform import Matrices, Stack, Structure, Transform
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr_lab.bench.code_length import ideal_bits

CLASSES = 32


@dataclass(frozen=True)
class CacheShape:
    """A cache's shape, and its transform's."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    block_heads: int
    stack_layers: int
    kept: int


SMOLLM2 = CacheShape("SmolLM2-135M", 30, 3, 64, 3, 15, 64)
LLAMA = CacheShape("Llama-3.1-8B", 32, 8, 128, 2, 8, 32)


@dataclass(frozen=True)
class SyntheticGroup:
    """A synthetic group and its models."""

    shape: CacheShape
    transform: Transform
    depths: tuple[CoderModel, ...]
    indices: tuple[Index, ...]
    payloads: tuple[bytes, ...]
    ideal_bits: tuple[float, ...]

    @property
    def symbols(self) -> int:
        """Number of elements of the group."""
        return int(self.indices[0].size)


@dataclass(frozen=True)
class Speed:
    """Speed of one path of the coder, in millions of cache elements per second on one core, including dead rows."""

    path: str
    bits_per_element: float
    live_share: float
    """Fraction of elements in coded rows."""
    decode_indices: float
    decode_live: float
    """Speed of ``decode_indices``, counting only elements in coded rows."""
    synthesise: float
    decode: float
    encode_indices: float


def synthetic(
    shape: CacheShape, bits: float, depths: int = 1, *, tokens: int = TILE, seed: int = 0, dense: bool = False
) -> SyntheticGroup:
    """Draw a group at about ``bits`` per element of the base, 0.2 to 6.

    Each further depth has a third of the previous step. ``dense`` gives all components the same spread, so that no row
    is dead, to measure the coder's raw speed.
    """
    dice = np.random.default_rng(seed)
    transform = _transform(shape, dice)
    spread = np.ones(transform.structure.rows) if dense else _spread(transform.structure)
    draw = dice.laplace(size=(len(spread), tokens)) * spread[:, None]
    step = _step_for(draw, bits)
    finest = step / 3 ** (depths - 1)
    indices = [np.round(draw / finest).clip(-2047, 2047).astype(np.int16)]
    for _ in range(depths - 1):  # thirds, rounded to nearest
        indices.insert(0, np.round(indices[0] / 3).astype(np.int16))
    models: list[CoderModel] = []
    payloads: list[bytes] = []
    ideal: list[float] = []
    below: Index | None = None
    for index in indices:
        model = _tables(index, below, spread)
        models.append(model)
        payloads.append(coder.encode_indices(model, index, below))
        ideal.append(ideal_bits(model, index, below))
        below = index
    return SyntheticGroup(shape, transform, tuple(models), tuple(indices), tuple(payloads), tuple(ideal))


def measure(sample: SyntheticGroup, *, seconds: float = 0.5, dtype: torch.dtype = torch.bfloat16) -> Speed:
    """Time each stage on the active path (KVABR_CODER); take the best of all rounds within ``seconds``.

    For a chain, stages are those of its last depth, except `decode`, which is the whole chain in one call.
    """
    model, index = sample.depths[-1], sample.indices[-1]
    below = sample.indices[-2] if len(sample.indices) > 1 else None
    tokens, s = index.shape[1], sample.shape
    out = torch.empty(s.layers, 2, s.kv_heads, tokens, s.head_dim, dtype=dtype)
    z = dequantise(model, index)
    job = DecodeJob(sample.depths, sample.payloads, sample.transform, 0.1, 0, out)
    million = sample.symbols / 1e6
    coded = index if below is None else index.astype(np.int32) - 3 * below
    live = float((coded != 0).any(axis=1).mean())
    took = _best(lambda: coder.decode_indices(model, sample.payloads[-1], tokens, below), seconds)
    return Speed(
        path=coder.active_path(),
        bits_per_element=sum(len(each) for each in sample.payloads) * 8 / sample.symbols,
        live_share=live,
        decode_indices=million / took,
        decode_live=million * live / took,
        synthesise=million / _best(lambda: coder.synthesise(sample.transform, z, 0.1, 0, out), seconds),
        decode=million / _best(lambda: coder.decode(job), seconds),
        encode_indices=million / _best(lambda: coder.encode_indices(model, index, below), seconds),
    )


def _best(work: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.thread_time() + seconds
    while True:
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
        if time.thread_time() > end:
            return best


def _transform(shape: CacheShape, dice: np.random.Generator) -> Transform:
    rope = RopeSpec(10000.0, shape.head_dim)
    spec = KVSpec.uniform(shape.name, "synthetic", shape.layers, shape.kv_heads, shape.head_dim, "bfloat16", rope)
    firsts = range(0, shape.layers, shape.stack_layers)
    stacks = (Stack(kv, first, first + shape.stack_layers, shape.kept) for kv in (0, 1) for first in firsts)
    structure = Structure(spec, shape.block_heads, tuple(stacks))

    def mantissas(*of: int) -> NDArray[np.int8]:
        return dice.integers(-127, 128, of).astype(np.int8)

    sizes = map(structure.width_of, structure.stacks)
    matrices = tuple(Matrices(mantissas(size, size), np.full(size, 7, np.uint8)) for size in sizes)
    blocks, width = structure.blocks, structure.width
    block = Matrices(mantissas(blocks, width, width), np.full((blocks, width), 16, np.uint8))
    mean = np.zeros((shape.layers, 2, shape.kv_heads, shape.head_dim), np.float16)
    norm, spread = np.ones((shape.layers, 2), np.float32), np.ones(shape.layers, np.float32)
    return Transform(structure, mean, norm, block, matrices, spread, math.inf)


def _spread(structure: Structure) -> NDArray[np.float64]:
    """Return each row's spread, which follows a power law like the eigenvalues of real caches."""
    spread = np.empty(structure.rows)
    for number, stack in enumerate(structure.stacks):
        spread[structure.stack_rows(number)] = (1 + np.arange(structure.width_of(stack))) ** -0.5 * 8
        falling = (stack.kept + np.arange(structure.width - stack.kept) + 1.0) ** -0.5
        spread[structure.trailing_rows(number)] = np.tile(falling, len(stack.layers) * structure.per_layer)
    return spread


def _step_for(draw: NDArray[np.float64], bits: float) -> float:
    """Return the step at which rows of Laplacian indices take this many bits on average."""
    low, high = 1e-3, 1e3
    step = 1.0
    scale = np.abs(draw).mean(axis=1)
    for _ in range(40):
        step = math.sqrt(low * high)
        still = 1 - np.exp(-0.5 * step / scale)  # probability of zero, then the entropy of the rest
        move = 1 - still
        decay = np.exp(-step / scale)
        size = (-_xlog(decay) - _xlog(1 - decay)) / np.maximum(1 - decay, 1e-12)
        entropy = float((-_xlog(still) - _xlog(move) + move * (1 + size)).mean())
        low, high = (step, high) if entropy > bits else (low, step)
    return step


def _xlog(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return p * np.log2(np.maximum(p, 1e-300))


def _tables(index: Index, below: Index | None, spread: NDArray[np.float64]) -> CoderModel:
    rows = len(index)
    coded = index.astype(np.int32)
    context = np.zeros(index.shape, np.int64)
    if below is not None:
        coded = (coded - 3 * below) * np.where(below < 0, -1, 1)
        context = np.minimum(np.abs(below.astype(np.int64)), 2)
    rank = np.argsort(np.argsort(-spread, kind="stable"), kind="stable")
    which = (rank * CLASSES // rows).astype(np.uint8)
    tile_live = (coded != 0).any(axis=1)
    contexts, widest = (1 if below is None else 3), 0
    radius = np.zeros(CLASSES, np.uint8)
    for c in range(CLASSES):
        seen = np.abs(coded[which == c])
        radius[c] = min(126, int(seen.max(initial=0)))
        widest = max(widest, int(radius[c]))
    freqs = np.zeros((CLASSES, contexts, 2 * widest + 2), np.uint16)
    for c in range(CLASSES):
        n = 2 * int(radius[c]) + 2
        part, where = coded[(which == c) & tile_live], context[(which == c) & tile_live]
        counts = np.zeros((contexts, n))
        for k in range(contexts):
            values = part[where == k] + int(radius[c])
            values = np.where((values < 0) | (values > n - 2), n - 1, values)
            counts[k] = np.bincount(values, minlength=n)
        freqs[c, :, :n] = frequencies(counts)
    chance = np.empty(rows)
    for c in range(CLASSES):
        chance[which == c] = tile_live[which == c].mean() if (which == c).any() else 0.5
    flags = np.clip(np.round(chance * 4096), 1, 4095).astype(np.uint16)
    flag_freq = np.tile(flags, (1 if below is None else 2, 1))
    return CoderModel(which, radius, freqs, flag_freq, np.ones(CLASSES, np.uint8))
