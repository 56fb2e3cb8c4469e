"""Gathers what a selector asks for, with any engine that can recompute tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvabr.blend.selection import Selection, Selector
from kvabr.types.engine import BlendEngine


def look(
    engine: BlendEngine,
    selector: Selector,
    tokens: Sequence[int],
    passages: Sequence[tuple[int, int]],
    question: Sequence[int],
    kv: torch.Tensor,
    *,
    orders: Sequence[bytes | None] = (),
    exact: torch.Tensor | None = None,
) -> Selection:
    """Return a prompt as a selector sees it.

    Args:
        engine: computes what the selector needs.
        selector: says what that is.
        tokens: ids of the prompt, as many as the cache has.
        passages: first and end position of each.
        question: ids that follow the prompt.
        kv: the joined cache, [layer, K/V, head, token, dim], any float dtype; read, never written.
        orders: the publishers' orders, one a passage; empty for none.
        exact: see `Selection.exact`.
    """
    layers = selector.looks_at(engine.spec.layers)
    attention = peaks = values = deviation = None
    if "attention" in selector.needs:
        attention = engine.attention(question, kv, layers=layers)
    if "peaks" in selector.needs:
        peaks = engine.attention(question, kv, layers=layers, reduce="max")
    if "values" in selector.needs:
        values = kv[layers.start : layers.stop : layers.step, 1].float().pow(2).sum(dim=(1, 3)).sqrt()
    if "deviation" in selector.needs:
        # Layer 0 computes its keys and values from the tokens alone, so those of layer 1 are the first to differ.
        first = engine.recompute(tokens, range(len(tokens)), kv, layers=2)[1]
        deviation = (first.float() - kv[1].float()).pow(2).sum(dim=(1, 3))
    return Selection(
        tokens=len(tokens),
        passages=tuple(passages),
        layers=engine.spec.layers,
        attention=attention,
        peaks=peaks,
        values=values,
        orders=tuple(orders) or (None,) * len(passages),
        deviation=deviation,
        exact=exact,
    )
