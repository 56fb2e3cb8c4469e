"""KVTC as a scheme (Staniszewski and Łańcucki, ICLR 2026; arXiv 2511.01815), implemented from the paper.

The keys (before rotation) of all layers and heads of a token form one vector, and so do its values. After subtracting
the mean, an orthogonal transform that is learnt from calibration texts orders the components by variance. Runs of
components share a scale and an offset per token. A dynamic program chooses the runs and their bits (0 drops a
component) to minimise the squared error on other calibration texts at a given size. The integers are packed and
compressed with DEFLATE.

The paper keeps the first 4 tokens (attention sinks) and a prompt's last 128 in 16 bits. In short prompts these 128
dominate the size, so the recipe is measured with and without them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvabr.codec.rope import rotate
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.calibrate import CONTEXT_TOKENS, CONTEXTS, cut_contexts
from kvabr.publish.encoder import compute_cache
from kvabr.publish.model import opened
from kvabr.publish.texts import calibration_texts
from kvabr.types.kv import KVSpec
from kvabr_lab.bench.rivals import affine
from kvabr_lab.bench.schemes import Coded, Scheme, by_class, groups

SINKS = 4
"""Number of first tokens stored in 16 bits."""
RECENT = 128
"""Number of last tokens stored in 16 bits."""
_RUNS = (16, 64, 256, 1024)
_BITS = (2, 4, 8)
_SIDE = 32
"""Bits per token for a run's scale and offset."""
_UNIT = 16
"""Runs start at multiples of this many components, and take multiples of this many bits per token."""
_MAX_COMPONENTS = 4096
_MEASURED = 256
"""Number of tokens for measuring the errors of runs, outside the training data."""


@dataclass(frozen=True)
class KvtcBasis:
    """Calibration of one layer class."""

    means: tuple[torch.Tensor, torch.Tensor]
    """Means, [layer * head * dim] float32."""
    bases: tuple[torch.Tensor, torch.Tensor]
    """Orthonormal columns, [layer * head * dim, component] float32, by falling variance."""
    sample: tuple[torch.Tensor, torch.Tensor]
    """Components, [token, component] float32, of caches outside the training data."""


def learn_bases(spec: KVSpec, caches: Iterable[torch.Tensor]) -> KvtcBasis:
    """Learn the transforms of one layer class.

    ``caches`` are [layer, K/V, head, token, dim], each from a prompt's first token; the last cache is only used for
    measuring.
    """
    sums: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    seen = 0
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    for cache in caches:
        if last is not None:
            for half, vectors in enumerate(last):
                sums[half] += vectors.sum(dim=0)
                squares[half].addmm_(vectors.T, vectors)
            seen += len(last[0])
        keys, values = _vectors(cache, spec, 0)
        last = keys[SINKS:], values[SINKS:]
        if not sums:
            sums = [torch.zeros(part.shape[1]) for part in last]
            squares = [torch.zeros(part.shape[1], part.shape[1]) for part in last]
    if last is None or not seen:
        raise ValueError("KVTC's transforms need at least two caches")
    means, bases, sample = [], [], []
    for half, vectors in enumerate(last):
        mean = sums[half] / seen
        covariance = squares[half] / seen - mean[:, None] * mean
        _, found = torch.linalg.eigh(covariance)
        basis = found.flip(1)[:, :_MAX_COMPONENTS].contiguous()
        means.append(mean)
        bases.append(basis)
        sample.append((vectors[:: max(1, len(vectors) // _MEASURED)][:_MEASURED] - mean) @ basis)
    return KvtcBasis((means[0], means[1]), (bases[0], bases[1]), (sample[0], sample[1]))


def _kept(path: Path, learn: Callable[[], KvtcBasis]) -> KvtcBasis:
    names = ("means", "bases", "sample")
    try:
        found = load_file(path)
        return KvtcBasis(*((found[f"{name}0"], found[f"{name}1"]) for name in names))
    except (SafetensorError, OSError, KeyError):
        pass  # missing, or unfinished after an interrupted run
    made = learn()
    part = path.with_suffix(".part")
    save_file({f"{name}{half}": getattr(made, name)[half].contiguous() for name in names for half in (0, 1)}, part)
    part.replace(path)
    return made


def learned(
    loaded: LoadedModel, spec: KVSpec, folder: Path, progress: Callable[[int, int], None]
) -> tuple[KvtcBasis, ...]:
    """Return the bases of every layer class, read from the work folder or learnt from `kvabr calibrate`'s texts.

    ``progress`` receives the number of computed contexts and the total; all classes share them.
    """
    length = min(CONTEXT_TOKENS, loaded.engine.context) - len(loaded.opening)
    texts = {name: loaded.encode(text) for name, text in calibration_texts().items()}
    contexts = [opened(loaded, ids) for _, ids in cut_contexts(texts, CONTEXTS, length)]
    digest = hashlib.sha256(repr([spec.digest().hex(), contexts]).encode()).hexdigest()[:16]
    steps = count(1)

    def caches(number: int) -> Iterator[torch.Tensor]:
        for ids in contexts:
            yield by_class(compute_cache(loaded.engine, ids)[0], spec)[number]
            progress(next(steps), len(contexts) * len(spec.parts))

    return tuple(
        _kept(folder / f"kvtc-{digest}-{number}.safetensors", partial(_learn, part, partial(caches, number)))
        for number, part in enumerate(spec.parts)
    )


def _learn(part: KVSpec, caches: Callable[[], Iterable[torch.Tensor]]) -> KvtcBasis:
    return learn_bases(part, caches())


Run = tuple[int, int]
"""Number of components, and bits of each; 0 bits drop the run."""


def allot(sample: torch.Tensor, budget: int) -> tuple[Run, ...]:
    """Choose runs and their bits by dynamic programming, from the first component on; drop the other components.

    ``sample`` is [token, component], by falling variance; ``budget`` is in bits per token, including scales and
    offsets.
    """
    units = sample.shape[1] // _UNIT
    room = budget // _UNIT
    power = sample.square().sum(dim=0).double().numpy()
    # Minimum error of the components before a place, by units of bits spent on them.
    best = np.full((units + 1, room + 1), np.inf)
    best[0] = 0.0
    choice = np.zeros((units + 1, room + 1), dtype=np.int8)
    options = [(size, bits) for size, bits in product(_RUNS, _BITS) if size // _UNIT <= units]
    for end in range(1, units + 1):
        dropped = power[(end - 1) * _UNIT : end * _UNIT].sum()
        best[end], choice[end] = best[end - 1] + dropped, -1
        for number, (size, bits) in enumerate(options):
            first, cost = end - size // _UNIT, (size * bits + _SIDE) // _UNIT
            if first < 0 or cost > room:
                continue
            part = sample[:, first * _UNIT : end * _UNIT]
            error = float((affine(part, bits)[0] - part).square().sum())
            reached = best[first, : room + 1 - cost] + error
            better = reached < best[end, cost:]
            best[end, cost:][better] = reached[better]
            choice[end, cost:][better] = number
    runs: list[Run] = []
    end, spent = units, int(best[units].argmin())
    while end:
        number = int(choice[end, spent])
        size, bits = (_UNIT, 0) if number < 0 else options[number]
        runs.append((size, bits))
        end -= size // _UNIT
        spent -= 0 if number < 0 else (size * bits + _SIDE) // _UNIT
    runs.reverse()
    while runs and not runs[-1][1]:
        runs.pop()
    return tuple(runs)


class Kvtc(Scheme):
    """KVTC at one compression ratio."""

    def __init__(
        self, ratio: float, spec: KVSpec, bases: Sequence[KvtcBasis], *, recent: int, group_tokens: int
    ) -> None:
        """Choose the runs and their bits.

        ``ratio`` is 16 bits divided by the bits per element of the dynamic program, before DEFLATE; ``recent`` is the
        number of last tokens in 16 bits.
        """
        self.name = f"KVTC-{ratio:g}x" + (f", last {recent} exact" if recent else "")
        self.family = "KVTC, recent exact" if recent else "KVTC"
        self.group_tokens = group_tokens
        self._ratio, self._spec, self._bases, self._recent = ratio, spec, bases, recent
        self._runs = [
            [allot(part, int(16 * len(mean) / ratio)) for mean, part in zip(each.means, each.sample, strict=True)]
            for each in bases
        ]

    @property
    def key(self) -> str:
        """Ratio, runs and group size."""
        runs = hashlib.sha256(repr(self._runs).encode()).hexdigest()[:8]
        return f"kvtc-1|{self._ratio:g}|{runs}|{self._recent}|{self.group_tokens}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Transform, round and compress, group by group."""
        out = cache.clone() if decode else None
        nbytes = 0
        classes = zip(self._spec.parts, by_class(cache, self._spec), self._bases, self._runs, strict=True)
        for part, kv, basis, runs in classes:
            end = max(SINKS, kv.shape[3] - self._recent)
            nbytes += 2 * kv[:, :, :, :SINKS].numel() + 2 * kv[:, :, :, end:].numel()
            made = kv.clone()
            for first, last in groups(end - SINKS, self.group_tokens):
                where = slice(SINKS + first, SINKS + last)
                vectors = _vectors(kv[:, :, :, where], part, SINKS + first)
                decoded = []
                for half, each in enumerate(vectors):
                    size, back = _coded((each - basis.means[half]) @ basis.bases[half], runs[half])
                    nbytes += size
                    decoded.append(back @ basis.bases[half].T + basis.means[half])
                made[:, :, :, where] = _cache(decoded, part, SINKS + first).to(made.dtype)
            if out is not None:
                out[list(part.only.layers)] = made
        return Coded(nbytes, out)


def _coded(components: torch.Tensor, runs: Sequence[Run]) -> tuple[int, torch.Tensor]:
    """Return the compressed size of components [token, component], and the decoded components."""
    back = torch.zeros_like(components)
    packed: list[bytes] = []
    first = 0
    for size, bits in runs:
        part = components[:, first : first + size]
        if bits:
            low = part.amin(dim=1, keepdim=True).half().float()
            step = ((part.amax(dim=1, keepdim=True) - low) / (2**bits - 1)).clamp(min=2.0**-24).half().float()
            index = ((part - low) / step).round().clamp(0, 2**bits - 1)
            back[:, first : first + size] = index * step + low
            packed += [_packed(index.T, bits), low.half().numpy().tobytes(), step.half().numpy().tobytes()]
        first += size
    return len(zlib.compress(b"".join(packed), 6)), back


def _packed(index: torch.Tensor, bits: int) -> bytes:
    flat = index.flatten().to(torch.uint8).numpy()
    each = 8 // bits
    padded = np.concatenate([flat, np.zeros(-len(flat) % each, np.uint8)]).reshape(-1, each)
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(padded << (bits * np.arange(each, dtype=np.uint8)), axis=1)
    return joined.tobytes()


def _vectors(cache: torch.Tensor, spec: KVSpec, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys before rotation and values, [token, layer * head * dim] float32."""
    keys = rotate(cache[:, 0].float(), spec.only.rope, first, undo=True)
    return _flat(keys), _flat(cache[:, 1].float())


def _flat(part: torch.Tensor) -> torch.Tensor:
    return part.permute(2, 0, 1, 3).flatten(1)


def _cache(vectors: Sequence[torch.Tensor], spec: KVSpec, first: int) -> torch.Tensor:
    """Undo `_vectors`."""
    layers, _, heads, tokens, dim = spec.shape(len(vectors[0]))
    keys, values = (each.reshape(tokens, layers, heads, dim).permute(1, 2, 0, 3) for each in vectors)
    return torch.stack((rotate(keys.contiguous(), spec.only.rope, first), values), dim=1)
