"""KV caches for tests of the codecs: channels of unlike spread, a few outliers, keys turned by RoPE, loud sinks."""

from functools import cache as cache_result

import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.fit import fit
from kvabr.codec.group import decode_group, encode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.codec.rope import rotate
from kvabr.types.kv import KVSpec, RopeSpec
from kvabr.types.naming import LAYERS

CHUNK = "ab" * 32


def spec(layers=2, heads=2, dim=32, *, group_tokens=128, rope="half", dtype="float16"):
    made = None if rope is None else RopeSpec(10000.0, dim if rope == "half" else dim // 2, rope)
    return KVSpec.uniform("test/model", "tokenizer", layers, heads, dim, dtype, made, group_tokens)


def cache(shape: KVSpec, tokens: int, seed: int = 0) -> torch.Tensor:
    """float32 [layer, K/V, head, token, dim]; the channels' character depends on the spec alone."""
    fixed = torch.Generator().manual_seed(99)
    dice = torch.Generator().manual_seed(seed)
    size = (shape.layers, 2, shape.kv_heads, 1, shape.head_dim)
    spread = torch.rand(size, generator=fixed).mul(2).exp().mul(0.3)
    mean = torch.randn(size, generator=fixed)
    mean[:, 0, :, :, 3] += 12.0
    kv = torch.randn(shape.shape(tokens), generator=dice) * spread + mean
    kv[:, :, :, :1] *= 3.0
    kv[:, 0] = rotate(kv[:, 0], shape.rope, 0)
    return kv


def related(shape: KVSpec, tokens: int, seed: int = 0, first: int = 0) -> torch.Tensor:
    """As `cache`, but channels share causes across heads and layers, as those of a model share its residual stream.

    Its first token is at position ``first``.
    """
    fixed = torch.Generator().manual_seed(98)
    dice = torch.Generator().manual_seed(1000 + seed)
    causes = shape.head_dim
    mixing = torch.randn(causes, shape.elements_per_token, generator=fixed)
    strength = 3.0 * 0.9 ** torch.arange(causes)
    parts = torch.randn(tokens, causes, generator=dice) * strength @ mixing / causes**0.5
    kv = parts.view(tokens, shape.layers, 2, shape.kv_heads, shape.head_dim).permute(1, 2, 3, 0, 4).contiguous()
    kv += 0.05 * torch.randn(kv.shape, generator=dice)
    kv[:, 0] = rotate(kv[:, 0], shape.rope, first)
    return kv


@cache_result
def profile(shape: KVSpec) -> Profile:
    return fit(shape, lambda: (cache(shape, 400, seed) for seed in (101, 102, 103)))


def is_base_of(decoded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether a part of a `cache` was decoded from AC-L0 with its `profile`, rather than from a finer track."""
    error = (decoded.float() - exact.float()).square().mean() / exact.float().var()
    return 0.03 < float(error) < 0.3


def framed(kv: torch.Tensor, track: str, context: GroupContext) -> list[bytes]:
    """Return the frames of a track and of those that it refines, base first."""
    frames: list[bytes] = []
    for name in LAYERS[: LAYERS.index(track) + 1] if track in LAYERS else (track,):
        frames.append(encode_group(kv, name, context, CHUNK, 3, [bytes(payload_of(frame)) for frame in frames]))
    return frames


def unframed(frames: list[bytes], track: str, context: GroupContext, out=None, **options) -> torch.Tensor:
    """Return what `framed` frames decode to; into ``out``, if given."""
    out = torch.full(context.spec.shape(context.tokens), float("nan")) if out is None else out
    decode_group(frames[-1], track, context, CHUNK, 3, out, [payload_of(frame) for frame in frames[:-1]], **options)
    return out
