"""Caches of passages, computed alone, after a text, or as a mean over contexts, and the loss from joining passages.

The mean is closer to the cache after any text than a cache computed alone: it has no attention sinks at its first
tokens, and the influence of single contexts averages out. All caches here are position-free: [layer, K/V, head, token,
dim] float32 with keys before rotation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from kvabr.blend.selection import Selector, choose, look
from kvabr.codec.rope import rotate
from kvabr.publish.model import CalibrationEngine, TextModel, opened
from kvabr.publish.reference import Reference
from kvabr.types.engine import BlendEngine, Engine
from kvabr.types.errors import UsageError
from kvabr.types.kv import KVSpec

NEUTRAL = "The following passages may help to answer the question that comes after them.\n\n"
CONTEXTS = 4
"""Default number of contexts: the neutral text, and three pieces of other texts."""
CONTEXT_TOKENS = 96


class FusionEngine(BlendEngine, CalibrationEngine, Protocol):
    """An engine for measuring the loss of joined caches."""


def free_cache(engine: Engine, ids: Sequence[int], before: Sequence[int] = ()) -> torch.Tensor:
    """Return the cache of a passage computed after ``before``, or alone."""
    return unrotated(engine.prefill([*before, *ids])[:, :, :, len(before) :], engine.spec, len(before))


def mean_cache(
    engine: Engine,
    ids: Sequence[int],
    contexts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> torch.Tensor:
    """Return the mean of a passage's caches after several contexts of at least one token."""
    if not contexts or not all(contexts):
        raise UsageError("a mean needs at least one context, and each context needs at least one token")
    total: torch.Tensor | None = None
    for done, before in enumerate(contexts, 1):
        one = free_cache(engine, ids, before)
        total = one if total is None else total.add_(one)
        progress(done, len(contexts))
    if total is None:
        raise AssertionError("there is at least one context")
    return total / len(contexts)


def contexts_for(model: TextModel, texts: Mapping[str, str], count: int = CONTEXTS, seed: int = 0) -> list[list[int]]:
    """Return contexts for computing passages: a neutral text, then pieces of ``texts`` in turn.

    ``texts`` must not contain the passages; other seeds give held-out contexts.
    """
    dice = random.Random(seed)  # noqa: S311 - reproducible, not secret
    out = [list(opened(model, model.encode(NEUTRAL)))] if count else []
    names = list(texts)
    dice.shuffle(names)
    while len(out) < count:
        text = texts[names[len(out) % len(names)]]
        # Cut more characters than needed, and count tokens afterwards.
        at = dice.randrange(max(1, len(text) - 16 * CONTEXT_TOKENS))
        ids = model.encode(text[at : at + 16 * CONTEXT_TOKENS])[:CONTEXT_TOKENS]
        if not ids:
            raise UsageError("cannot cut a context from an empty text")
        out.append(list(opened(model, ids)))
    return out


def unrotated(kv: torch.Tensor, spec: KVSpec, first_token: int) -> torch.Tensor:
    """Undo the rotation of a cache that starts at position ``first_token``; return float32."""
    kv = kv.to(torch.float32, copy=True)
    kv[:, 0] = rotate(kv[:, 0], spec.rope, first_token, undo=True)
    return kv


def joined(parts: Sequence[torch.Tensor], spec: KVSpec, first_token: int = 0) -> torch.Tensor:
    """Join position-free caches, and rotate them to consecutive positions from ``first_token`` on."""
    kv = torch.cat(list(parts), dim=3)
    kv[:, 0] = rotate(kv[:, 0], spec.rope, first_token)
    return kv


def fisher(engine: CalibrationEngine, kv: torch.Tensor, continuation: Sequence[int], draws: int = 1) -> torch.Tensor:
    """Return the mean squared gradient of a continuation's outputs with respect to a cache."""
    total = torch.zeros(kv.shape)
    for seed in range(draws):
        total += engine.gradient_classes((kv,), continuation, seed)[0].cpu() ** 2
    return total / draws


def token_costs(engine: CalibrationEngine, kv: torch.Tensor, other: torch.Tensor, tail: Sequence[int]) -> torch.Tensor:
    """Return the cost of each token's error in ``other`` compared with the exact cache ``kv``, [token] float32.

    The cost is the squared error, weighted by the Fisher information of the following tokens ``tail``.
    """
    costs: torch.Tensor = (fisher(engine, kv, tail) * (kv.float() - other.float()) ** 2).sum(dim=(0, 1, 2, 4))
    return costs


def publisher_order(
    engine: CalibrationEngine,
    ids: Sequence[int],
    base: torch.Tensor,
    contexts: Sequence[Sequence[int]],
    tail: Sequence[int],
) -> bytes:
    """Return the rank of each token, 0 (first) to 255, for recomputing a passage if the question is unknown.

    Errors of the position-free cache ``base`` are measured after held-out ``contexts``, by their effect on the outputs
    of ``tail``.
    """
    cost = torch.zeros(len(ids))
    for before in contexts:
        exact = engine.prefill([*before, *ids])
        other = joined([base], engine.spec, len(before)).to(exact.dtype)
        fused = torch.cat((exact[:, :, :, : len(before)], other), dim=3)
        cost += token_costs(engine, exact, fused, tail)[len(before) :]
    ranks = torch.empty(len(ids), dtype=torch.long)
    ranks[torch.argsort(cost, stable=True)] = torch.arange(len(ids))
    return bytes((ranks * 255 // max(1, len(ids) - 1)).tolist())


def fusion_losses(
    engine: FusionEngine,
    ids: Sequence[int],
    base: torch.Tensor,
    contexts: Sequence[Sequence[int]],
    tail: Sequence[int],
    selector: Callable[[], Selector],
    shares: Sequence[float] = (0.0, 0.05, 0.15, 0.3),
    order: bytes | None = None,
    question: int = 16,
) -> tuple[tuple[float, float], ...]:
    """Measure the loss of a passage's position-free cache after held-out contexts, by share of recomputed tokens.

    The first ``question`` ids of ``tail``, which follow the passage, select the tokens, with the publisher's ``order``
    if the selector needs it. Return (share, loss) pairs: KL against the full prefill over the rest of the tail, nats
    per token, mean over contexts.
    """
    if len(tail) < question + 2:
        raise UsageError(f"the text after the passage must have at least {question + 2} tokens, got {len(tail)}")
    asked, rest = list(tail[:question]), list(tail[question - 1 :])
    losses = [0.0] * len(shares)
    for before in contexts:
        exact = engine.prefill([*before, *ids])
        reference = Reference(engine, _with_tail(engine, exact, asked), rest)
        kv = torch.cat((exact[:, :, :, : len(before)], joined([base], engine.spec, len(before)).to(exact.dtype)), dim=3)
        tokens, span = [*before, *ids], (len(before), len(before) + len(ids))
        made = selector()
        seen = look(engine, made, tokens, [span], asked, kv, orders=[order])
        scores = made.scores(seen)
        for index, share in enumerate(shares):
            at = choose(seen, scores, share)
            fused = kv.clone()
            if at:
                fused[:, :, :, list(at)] = engine.recompute(tokens, at, kv).to(fused.dtype)
            losses[index] += reference.measure(_with_tail(engine, fused, asked)).kl / len(contexts)
    return tuple(zip(shares, losses, strict=True))


def _with_tail(engine: Engine, kv: torch.Tensor, asked: Sequence[int]) -> torch.Tensor:
    """Append the cache of all tokens of a question except the last, which is scored."""
    if len(asked) < 2:
        return kv
    return torch.cat((kv, engine.prefill(asked[:-1], kv).to(kv.dtype)), dim=3)
