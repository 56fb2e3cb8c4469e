"""Synthetic profiles and caches in the shape of models that are not installed.

A coder's speed depends only on shapes, rates, and the number of dead rows. So the spreads of coefficients fall like
those of SmolLM2's caches, and the transform is a random rotation.
"""

from __future__ import annotations

import numpy as np
import torch

from kvabr.codec.fit import FitConfig
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Quantiser
from kvabr.codec.native.references import TILE
from kvabr.codec.profile import ClassProfile, Depth
from kvabr.codec.quantiser import SymbolCounts, coder_model, count, nested
from kvabr.codec.transform import FARTHEST, FINE, NO_MATRIX, RUN, Structure, Transform, layered, rounded
from kvabr.types.kv import KVSpec, RopeSpec

LLAMA = KVSpec.uniform("Llama-3.1-8B", "synthetic", 32, 8, 128, "bfloat16", RopeSpec(500000.0, 128))
"""Spec of Llama-3.1-8B. Its real rotary embedding is scaled, which takes the same time to undo."""

_LEADING, _FALL = 9.0, 0.72
"""Spread of a stack's first coefficient, in units of the norm, and exponent by which the spreads of others fall."""
_TRAILING = 0.34
"""Spread of a block's first component outside the stack."""
_NEVER = 1e6
"""Threshold high enough that no token is stored separately."""
_COUNTED_TILES = 8


def profile(spec: KVSpec, seed: int = 0, config: FitConfig | None = None) -> ClassProfile:
    """Make a profile for caches of this shape, with default structure and steps; takes up to a minute."""
    config = config or FitConfig()
    structure = layered(spec, config.stack_layers, config.kept, config.block_heads)
    dice = torch.Generator().manual_seed(seed)
    block = rounded(torch.stack([_rotation(structure.width, dice) for _ in range(structure.blocks)]))
    stacks = tuple(
        rounded(_rotation(structure.width_of(stack), dice), run=RUN) if stack.kept else NO_MATRIX
        for stack in structure.stacks
    )
    layers, halves, heads, _, dim = spec.shape(1)
    shape = (layers, halves, heads, dim)
    mean = torch.randn(shape, generator=dice).half().numpy()
    norm, spread = np.ones((layers, halves), np.float32), np.ones(spec.layers, np.float32)
    transform = Transform(structure, mean, norm, block, stacks, spread, _NEVER)
    chain = nested(config.steps)
    drawn = coefficients(structure, _COUNTED_TILES * TILE, seed + 1).numpy()
    counted = {
        track: (Quantiser(config.steps[track], 0.0), SymbolCounts.nothing(structure.rows, refines=below is not None))
        for track, below in chain.items()
    }
    count(drawn, 1.0, counted)
    depths = {
        track: Depth(config.steps[track], 0.0, coder_model(counts, config.classes))
        for track, (_, counts) in counted.items()
    }
    return ClassProfile(spec, config.sinks, transform, depths)


def coefficients(structure: Structure, tokens: int, seed: int = 0) -> torch.Tensor:
    """Draw the coefficients of ``tokens`` tokens: [row, token] float32, Laplacian, in units of the norm."""
    spread = np.empty(structure.rows)
    for number, stack in enumerate(structure.stacks):
        size, blocks = structure.width_of(stack), len(structure.blocks_of(stack))
        spread[structure.stack_rows(number)] = _LEADING * (1 + np.arange(size)) ** -(_FALL / 2) / 2
        falling = _TRAILING * np.linspace(1.0, 0.3, structure.width - stack.kept)
        spread[structure.trailing_rows(number)] = np.tile(falling, blocks)
    dice = np.random.default_rng(seed)
    drawn = dice.laplace(size=(structure.rows, tokens)) * (spread / np.sqrt(2.0))[:, None]
    return torch.from_numpy(drawn.astype(np.float32))


def cache(made: ClassProfile, tokens: int, seed: int = 2) -> torch.Tensor:
    """Make a cache from drawn coefficients: [layer, K/V, head, token, dim] in the spec's dtype."""
    spec = made.spec
    out = torch.empty(spec.shape(tokens), dtype=spec.torch_dtype)
    # The finest step that the decoder's integers allow.
    step = 1 / 64
    drawn = coefficients(made.transform.structure, tokens, seed) / step
    coder.synthesise(made.transform, (drawn.clamp(-FARTHEST, FARTHEST) * FINE).short().numpy(), step, 0, out)
    return out


def _rotation(size: int, dice: torch.Generator) -> torch.Tensor:
    out: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=dice))[0]
    return out
