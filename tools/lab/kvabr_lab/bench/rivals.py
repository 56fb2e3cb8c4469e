"""Other quantisers as schemes: KIVI's, TurboQuant's, and the formats in which engines store their caches.

Each quantiser codes the whole prompt, even if its paper keeps recent tokens exact. Sizes include every byte: codes,
scales, offsets and norms. As in the originals, there is no entropy coding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr_lab.bench.schemes import Coded, Scheme, groups


class Kivi(Scheme):
    """KIVI's quantiser (Liu et al., 2024): asymmetric integers, keys per channel, values per token, 32 per scale."""

    span = 32
    """Number of elements that share an offset and a scale, both in half precision."""

    def __init__(self, bits: Literal[2, 4], *, group_tokens: int) -> None:
        self.bits = bits
        self.name = f"KIVI-{bits}"
        self.family = "KIVI"
        self.group_tokens = group_tokens

    @property
    def key(self) -> str:
        """Bits and group size."""
        return f"kivi-1|{self.bits}|{self.group_tokens}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Quantise and dequantise."""
        out = torch.empty_like(cache) if decode else None
        nbytes = 0
        for first, end in groups(cache.shape[3], self.group_tokens):
            part = cache[:, :, :, first:end].float()
            # A scale of keys is for a run of tokens of one channel, a scale of values for a run of channels of one
            # token.
            keys, scales = self._round(part[:, 0].transpose(-1, -2))
            values, more = self._round(part[:, 1])
            nbytes += part.numel() * self.bits // 8 + 4 * (scales + more)
            if out is not None:
                out[:, 0, :, first:end] = keys.transpose(-1, -2)
                out[:, 1, :, first:end] = values
        return Coded(nbytes, out)

    def _round(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        length, scales = rows.shape[-1], 0
        parts = []
        for first, end in groups(length, self.span):
            part, count = affine(rows[..., first:end], self.bits)
            parts.append(part)
            scales += count
        return torch.cat(parts, dim=-1), scales


def affine(part: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Round [..., element] float32 to integers of ``bits`` bits between the smallest and largest element of a row.

    Each row has an offset and a scale in half precision. Return the decoded elements, and the number of rows.
    """
    low = part.amin(dim=-1, keepdim=True).half().float()
    step = ((part.amax(dim=-1, keepdim=True) - low) / (2**bits - 1)).clamp(min=2.0**-24).half().float()
    return ((part - low) / step).round().clamp(0, 2**bits - 1) * step + low, low.numel()


class TurboQuant(Scheme):
    """TurboQuant for mean squared error (Zandieh et al., 2025; arXiv 2504.19874).

    The key or value of a head and token is a vector. Its norm is stored in half precision. After a fixed random
    rotation, each coordinate is distributed like that of a random direction, and is rounded to the nearest centroid of
    the best scalar quantiser for this distribution. The variant for inner products uses one of the bits for the
    residual's signs; it is unbiased, but loses more here.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name, self.family = f"TurboQuant-{bits}", "TurboQuant"
        self.group_tokens = 1  # every vector has its own norm

    @property
    def key(self) -> str:
        """The bits."""
        return f"turboquant-1|{self.bits}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Rotate, round and rotate back."""
        dim = cache.shape[-1]
        nbytes = cache.numel() * self.bits // 8 + 2 * (cache.numel() // dim)
        if not decode:
            return Coded(nbytes, None)
        turn = _rotation(dim)
        centroids = torch.from_numpy(_centroids(dim, self.bits))
        edges = (centroids[1:] + centroids[:-1]) / 2
        out = torch.empty_like(cache)
        for layer, part in enumerate(cache):
            vectors = part.float()
            # Norms in real caches are far below the maximum of half precision.
            norms = vectors.norm(dim=-1, keepdim=True).half().float()
            turned = (vectors / norms.clamp(min=2.0**-24)) @ turn
            nearest = centroids[torch.bucketize(turned, edges)]
            out[layer] = (nearest @ turn.T * norms).to(out.dtype)
        return Coded(nbytes, out)


@lru_cache(maxsize=4)
def _rotation(dim: int) -> torch.Tensor:
    drawn = np.random.default_rng(0).standard_normal((dim, dim))
    basis, triangle = np.linalg.qr(drawn)
    return torch.from_numpy((basis * np.sign(np.diag(triangle))).astype(np.float32))


@lru_cache(maxsize=16)
def _centroids(dim: int, bits: int) -> NDArray[np.float32]:
    """Return the ascending centroids of the Lloyd-Max quantiser for a coordinate of a random unit vector."""
    x = np.linspace(-1, 1, 200_001)
    density = (1 - x * x) ** ((dim - 3) / 2)
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    # Begin with intervals of equal probability.
    edges = np.searchsorted(mass, mass[-1] * np.arange(1, 2**bits) / 2**bits)
    for _ in range(1000):
        ends = np.concatenate([[0], edges, [len(x) - 1]])
        found = np.diff(moment[ends]) / np.diff(mass[ends])
        new = np.searchsorted(x, (found[1:] + found[:-1]) / 2)
        if (new == edges).all():
            break
        edges = new
    out: NDArray[np.float32] = found.astype(np.float32)
    return out


class EngineFp8(Scheme):
    """FP8 as engines store it (vLLM's ``fp8_e4m3`` with scales of 1): every element is rounded to E4M3."""

    name, family, group_tokens = "FP8, engine", "engine formats", 1
    _LARGEST = 448.0

    @property
    def key(self) -> str:
        """The format."""
        return "engine-fp8-1"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Round to eight bits."""
        if not decode:
            return Coded(cache.numel(), None)
        rounded = cache.float().clamp(-self._LARGEST, self._LARGEST).to(torch.float8_e4m3fn)
        return Coded(cache.numel(), rounded.to(cache.dtype))


class NvFp4(Scheme):
    """NVFP4 as engines store it: E2M1 in blocks of 16 channels of one token, each with a scale in E4M3.

    A second scale in float32, one for the keys and one for the values of a layer, brings the blocks' scales into E4M3's
    range. Keys are coded along channels, like values, since engines append tokens one by one.
    """

    name, family, group_tokens = "NVFP4", "engine formats", 1
    _BLOCK = 16
    _LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    @property
    def key(self) -> str:
        """The format."""
        return "nvfp4-1"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Round every block."""
        layers, halves = cache.shape[:2]
        size = math.gcd(self._BLOCK, cache.shape[-1])
        blocks = cache.numel() // size
        nbytes = cache.numel() // 2 + blocks + 4 * layers * halves
        if not decode:
            return Coded(nbytes, None)
        out = torch.empty_like(cache)
        edges = (self._LEVELS[1:] + self._LEVELS[:-1]) / 2
        for layer in range(layers):
            for half in range(halves):
                part = cache[layer, half].float().reshape(*cache.shape[2:4], -1, size)
                whole = part.abs().amax().clamp(min=2.0**-100) / (448 * 6)
                scale = (part.abs().amax(dim=-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
                magnitude = part.abs() / scale.clamp(min=2.0**-126)
                rounded = self._LEVELS[torch.bucketize(magnitude, edges)]
                out[layer, half] = (rounded * scale * part.sign()).flatten(-2).to(out.dtype)
        return Coded(nbytes, out)
