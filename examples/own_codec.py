"""Add a compression level: Int8 compressed by zlib. Measure its size and error on a cache.

    python examples/own_codec.py

A package registers a codec with the entry point `kvabr.codecs`; then `kvabr encode --tracks Int8-zlib` accepts it.
"""

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch

from kvabr import KVSpec
from kvabr.codec.base import Codec, GroupContext, codec, register
from kvabr.types.errors import FormatError


class Int8Zlib(Codec):
    """The payload of Int8, compressed."""

    name: ClassVar[str] = "Int8-zlib"

    def encode(self, group: torch.Tensor, context: GroupContext, below: Sequence[bytes] = ()) -> bytes:
        """Compress one group, [layer, K/V, head, token, dim]."""
        return zlib.compress(codec("Int8").encode(group, context, below), 9)

    def decode(
        self, payload: memoryview, context: GroupContext, out: torch.Tensor, below: Sequence[memoryview] = ()
    ) -> None:
        """Decompress one group into ``out``. The payload is untrusted, so its size is bounded."""
        most = 2 * context.spec.fp16_bytes(context.tokens)
        try:
            plain = zlib.decompressobj().decompress(payload, most)
        except zlib.error as error:
            raise FormatError(f"{self.name}: {error}") from error
        codec("Int8").decode(memoryview(plain), context, out, below)


register(Int8Zlib())
spec = KVSpec.uniform("example", "0" * 32, layers=4, kv_heads=2, head_dim=64, dtype="float16")
context = GroupContext(spec, first_token=0, tokens=spec.group_tokens)
group = torch.randn(spec.shape(spec.group_tokens))
exact = spec.fp16_bytes(spec.group_tokens)
for name in ("FP16", "Int8", "Int8-zlib"):
    payload = codec(name).encode(group, context)
    back = torch.empty_like(group)
    codec(name).decode(memoryview(payload), context, back)
    error = (back - group).square().mean().sqrt()
    print(f"{name}: {len(payload) / exact:.3f} of FP16, error {error:.4f}")
