"""The rotary position embedding of keys, applied and undone (RoFormer; Su et al., 2021).

Without it the same channel of neighbouring tokens has much the same statistics; with it every token turns them by
another angle. So the AC codec works on keys as they were before it.
"""

from __future__ import annotations

import torch

from kvabr.kv import RopeSpec


def rotate(keys: torch.Tensor, rope: RopeSpec | None, first_token: int, *, undo: bool = False) -> torch.Tensor:
    """Turn keys by their positions.

    Args:
        keys: [..., token, dim], float32; not changed.
        rope: how; None returns ``keys`` as they are.
        first_token: position of the first token.
        undo: turn back instead.

    Returns:
        [..., token, dim], float32.
    """
    if rope is None:
        return keys
    half = rope.rotary_dim // 2
    # Angles in double precision: at position 100,000 float32 would be off by a hundredth of a radian.
    inverse = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    positions = torch.arange(first_token, first_token + keys.shape[-2], dtype=torch.float64)
    angles = positions[:, None] * inverse
    cos, sin = angles.cos().float(), angles.sin().float()
    if undo:
        sin = -sin
    out = keys.clone()
    turned = out[..., : rope.rotary_dim]
    if rope.layout == "half":
        first, second = keys[..., :half], keys[..., half : 2 * half]
        turned[..., :half] = first * cos - second * sin
        turned[..., half:] = second * cos + first * sin
    else:
        first, second = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
        turned[..., 0::2] = first * cos - second * sin
        turned[..., 1::2] = second * cos + first * sin
    return out
