"""Decoding straight into the blocks of an engine's paged cache.

On a CUDA device with Triton, AC's kernels write each number to its place in the blocks: no contiguous copy is made, and
groups that are decoded together share launches. All other levels, and other devices, decode to a contiguous tensor on
the blocks' device first; the blocks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvabr.codec import gpu
from kvabr.codec.ac import Ac, Parts
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.block_slots import BlockSlots
from kvabr.codec.group import decode_payload
from kvabr.codec.native.coder_model import DTYPES, DecodeJob
from kvabr.types.errors import FormatError


class PagedGroup(NamedTuple):
    """The payload of a frame that has been checked, and where its group belongs."""

    payload: memoryview
    """Untrusted, as are those below."""
    track: str
    context: GroupContext
    blocks: BlockSlots
    below: Sequence[memoryview] = ()
    """Payloads of the tracks below, base first."""


def decode_to_blocks(groups: Sequence[PagedGroup]) -> None:
    """Decode groups to blocks, which are written completely, or partly on error; return when all are verified.

    Raises:
        FormatError: as `kvabr.codec.group.decode_payload`, or blocks are of another shape than their group.
    """
    direct: list[tuple[DecodeJob, list[Parts], PagedGroup]] = []
    for group in groups:
        shape, own = group.context.spec.shape(group.context.tokens), group.blocks.first
        if not group.blocks.fits(shape):
            raise FormatError(
                f"{shape} cannot be decoded to blocks {tuple(own.shape)} of {len(group.blocks.slots)} tokens"
            )
        made, job = codec(group.track), None
        if isinstance(made, Ac) and own.dtype in DTYPES and gpu.runs_on(own.device):
            job = made.job(
                group.payload, group.context, torch.empty(shape, dtype=own.dtype, device="meta"), group.below
            )
        if job is not None:
            direct.append((*job, group))
            continue
        out = torch.empty(shape, dtype=own.dtype, device=own.device)
        decode_payload(group.payload, group.track, group.context, 0, out, group.below)
        group.blocks.write(out)
    gpu.decode_to_blocks([job for job, _, _ in direct], [group.blocks for _, _, group in direct])
    for _, parts, group in direct:
        for part in parts:
            if len(part.tokens):
                own = group.blocks.first
                group.blocks.write(part.stored(group.context, own.dtype, own.device), part.tokens)
