"""Passages that requests publish: their caches, out of the engine's blocks and without rotation.

A request's prompt is the passage, or a text and the passage behind it. vLLM computes it once, so its base is ``alone``
or ``behind``; means over several contexts are made by `kvabr encode --passage`.
"""

from __future__ import annotations

import torch

from kvabr.engines.vllm.blocks import EngineBlocks
from kvabr.engines.vllm.config import ServedModel
from kvabr.engines.vllm.plays import PublishRequest
from kvabr.publish.fusion import FusionLosses
from kvabr.publish.passages import unrotated
from kvabr.publish.publisher import Publisher, PublishVerdict, Slot
from kvabr.types.passage import PassageNotes


def reserve_passage(
    publisher: Publisher, publication: PublishRequest, first: int, fusion: FusionLosses | None
) -> Slot | PublishVerdict:
    """Return a slot for the passage that begins at token ``first`` of a request, or why there is none.

    ``fusion`` is what joining passages costs the model. Of passages with another base than these it is left out.
    """
    base = "behind" if first else "alone"
    known = fusion is not None and (fusion.base, fusion.contexts) == (base, 0)
    notes = fusion.notes(publisher.offer.spec, base) if fusion is not None and known else PassageNotes(base)
    return publisher.reserve_passage(publication.tokens[first:], notes, publication.salt)


def read_passage(blocks: EngineBlocks, publication: PublishRequest, first: int, model: ServedModel) -> torch.Tensor:
    """Return the cache of the passage that begins at token ``first``, [layer, K/V, head, token, dim] float32.

    Its keys are before rotation.
    """
    spec, block = model.spec, model.block
    begin, end = first // block * block, len(publication.tokens)
    (part,) = spec.parts
    held = torch.empty(part.shape(-(-end // block) * block - begin), dtype=model.dtype)
    blocks.read(publication.blocks, (held,))
    return unrotated(held[:, :, :, first - begin : end - begin], spec, first)
