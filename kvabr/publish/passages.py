"""Caches of passages: computed alone, behind a text, or as a mean over contexts, and what joining them costs.

A passage is played behind texts that its publisher does not know. The mean over several contexts, of keys before
rotation and of values, is nearer to the cache behind any other one than a cache computed alone: the sinks at its first
tokens are gone, and what depends on one context is averaged out. It costs the publisher a prefill a context, and nobody
anything at play time.

All caches here are position-free: [layer, K/V, head, token, dim] float32 with keys before rotation.
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
"""Text of the first context, which resembles the beginning of a prompt that is made of passages."""
CONTEXTS = 4
"""Contexts of a mean by default: the neutral text, and three pieces of other texts."""
CONTEXT_TOKENS = 96
"""Tokens of each of these pieces."""


class FusionEngine(BlendEngine, CalibrationEngine, Protocol):
    """An engine that can recompute, score, and say what errors cost: enough to measure what joined caches lose."""


def free_cache(engine: Engine, ids: Sequence[int], before: Sequence[int] = ()) -> torch.Tensor:
    """Return the cache of a passage behind some tokens; none: computed alone."""
    return unrotated(engine.prefill([*before, *ids])[:, :, :, len(before) :], engine.spec, len(before))


def mean_cache(
    engine: Engine,
    ids: Sequence[int],
    contexts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> torch.Tensor:
    """Return the mean of a passage's caches behind several contexts, each of at least one token."""
    if not contexts or not all(contexts):
        raise UsageError("a mean takes at least one context, and none may be empty")
    total: torch.Tensor | None = None
    for done, before in enumerate(contexts, 1):
        one = free_cache(engine, ids, before)
        total = one if total is None else total.add_(one)
        progress(done, len(contexts))
    if total is None:
        raise AssertionError("there is at least one context")
    return total / len(contexts)


def contexts_for(model: TextModel, texts: Mapping[str, str], count: int = CONTEXTS, seed: int = 0) -> list[list[int]]:
    """Return contexts to compute passages behind: a neutral text, then pieces of texts in turn.

    Args:
        model: its tokenizer, and what its prompts begin with.
        texts: texts by name; not those of the passages.
        count: number of contexts.
        seed: of the places where pieces are cut. Other seeds give held-out contexts.
    """
    dice = random.Random(seed)  # noqa: S311 - reproducible, not secret
    out = [list(opened(model, model.encode(NEUTRAL)))] if count else []
    names = list(texts)
    dice.shuffle(names)
    while len(out) < count:
        text = texts[names[len(out) % len(names)]]
        # Tokens are counted after the cut, from more characters than they take.
        at = dice.randrange(max(1, len(text) - 16 * CONTEXT_TOKENS))
        ids = model.encode(text[at : at + 16 * CONTEXT_TOKENS])[:CONTEXT_TOKENS]
        if not ids:
            raise UsageError("a text to cut contexts from is empty")
        out.append(list(opened(model, ids)))
    return out


def unrotated(kv: torch.Tensor, spec: KVSpec, first_token: int) -> torch.Tensor:
    """Return a cache that was computed from position ``first_token`` on, without its rotation, float32."""
    kv = kv.to(torch.float32, copy=True)
    kv[:, 0] = rotate(kv[:, 0], spec.rope, first_token, undo=True)
    return kv


def joined(parts: Sequence[torch.Tensor], spec: KVSpec, first_token: int = 0) -> torch.Tensor:
    """Return position-free caches one behind the other, rotated to positions from ``first_token`` on."""
    kv = torch.cat(list(parts), dim=3)
    kv[:, 0] = rotate(kv[:, 0], spec.rope, first_token)
    return kv


def fisher(engine: CalibrationEngine, kv: torch.Tensor, continuation: Sequence[int], draws: int = 1) -> torch.Tensor:
    """Return the mean squared gradient of a continuation's outputs by a cache, of its shape (`CalibrationEngine`)."""
    total = torch.zeros(kv.shape)
    for seed in range(draws):
        total += engine.gradient_classes((kv,), continuation, seed)[0].cpu() ** 2
    return total / draws


def token_costs(engine: CalibrationEngine, kv: torch.Tensor, other: torch.Tensor, tail: Sequence[int]) -> torch.Tensor:
    """Return what the error of each token of ``other`` costs by the exact cache ``kv``, [token] float32.

    The error squared, weighted by the Fisher information of the tokens that follow, ``tail``.
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
    """Return the order in which to recompute a passage's tokens where no question is known, a byte a token.

    Args:
        engine: the model.
        ids: the passage.
        base: its position-free cache.
        contexts: held-out contexts, behind which its error is measured.
        tail: ids that follow the passage, for whose outputs an error counts.

    Returns:
        The rank of each token from 0 to 255, first to recompute; evenly spread over the tokens.
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
    """Measure what a passage's cache loses behind held-out contexts, for several shares of recomputed tokens.

    Args:
        engine: the model.
        ids: the passage.
        base: its position-free cache.
        contexts: held-out contexts, not those of the base.
        tail: ids that follow the passage. The first ``question`` of them choose what is recomputed.
        selector: makes the selector that chooses.
        shares: the shares, increasing.
        order: the publisher's order, if the selector needs it.
        question: number of the tail's tokens that stand for the question.

    Returns:
        (share, loss) for each share: the KL against the full prefill over the rest of the tail, nats per token, mean
        over contexts.
    """
    if len(tail) < question + 2:
        raise UsageError(f"what follows the passage has {len(tail)} tokens; {question + 2} are needed")
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
    """Return a cache with all tokens of a question but the last, which is scored."""
    if len(asked) < 2:
        return kv
    return torch.cat((kv, engine.prefill(asked[:-1], kv).to(kv.dtype)), dim=3)
