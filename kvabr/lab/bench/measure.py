"""Sends caches through schemes and asks the model what each of them cost. What was measured before is not again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.lab.bench.needle import Needle, recall
from kvabr.lab.bench.schemes import Coded, Scheme
from kvabr.lab.bench.store import Store
from kvabr.lab.bench.texts import Context, token_key
from kvabr.publish.encoder import compute_cache
from kvabr.publish.score import Reference

Progress = Callable[[str, int, int], None]
"""Told of every step: what is being done, steps done, steps in all."""

STAGES = {
    "prefill": "prefill (contexts)",
    "quality": "loss (contexts x schemes)",
    "size": "other group sizes",
    "recall": "retrieval (cases x schemes)",
}
"""What `Bench` does, for a progress bar."""

EXACT = "exact"
"""The scheme that changes nothing, as retrieval is measured without any coding."""

Row = dict[str, Any]


@dataclass
class Findings:
    """What came out, by scheme's name and then by context or case."""

    quality: dict[str, dict[str, Row]] = field(default_factory=dict)
    """``nbytes``, ``bits`` (an element), ``kl``, ``dnll``, ``top1`` of every context."""
    recall: dict[str, dict[str, Row]] = field(default_factory=dict)
    """``digits``, ``whole``, ``logprob`` of every case; `EXACT` among the schemes."""
    sizes: dict[int, dict[str, dict[str, Row]]] = field(default_factory=dict)
    """``nbytes``, ``bits`` for other lengths of groups, in tokens, first."""


class Bench:
    """One model, its work folder, and the contexts to measure on."""

    def __init__(
        self, loaded: LoadedModel, store: Store, progress: Progress = lambda _stage, _done, _all: None
    ) -> None:
        self.loaded, self.store, self._progress = loaded, store, progress

    def prefill(self, contexts: Sequence[Context]) -> None:
        """Compute the caches that are not in the work folder yet."""
        for index, context in enumerate(contexts):
            self.cache(context)
            self._progress("prefill", index + 1, len(contexts))

    def cache(self, context: Context) -> torch.Tensor:
        """The exact cache of a context, in the element type of the published cache."""
        key = token_key(context.tokens)
        return self.store.cache(key, len(context.tokens), lambda: compute_cache(self.loaded.engine, context.tokens))

    def quality(self, schemes: Sequence[Scheme], contexts: Sequence[Context]) -> dict[str, dict[str, Row]]:
        """Size and loss of every scheme on every context.

        The exact cache is the one that would be published: the model's, in the element type of its spec.
        """
        out: dict[str, dict[str, Row]] = {scheme.name: {} for scheme in schemes}
        steps = self._steps("quality", len(schemes) * len(contexts))
        for context in contexts:
            exact: tuple[torch.Tensor, Reference] | None = None
            where = f"{token_key(context.tokens)}|{token_key(context.continuation)}"
            for scheme in schemes:
                key = f"quality|{where}|{scheme.key}"
                row = self.store.known(key)
                if row is None:
                    if exact is None:
                        cache = self.cache(context)
                        exact = cache, Reference(self.loaded.engine, cache, context.continuation)
                    row = self.store.keep(key, _cost(scheme, *exact))
                out[scheme.name][context.name] = row
                next(steps)
        return out

    def sizes(self, schemes: Sequence[Scheme], contexts: Sequence[Context]) -> dict[str, dict[str, Row]]:
        """Size alone, of schemes with other lengths of groups."""
        out: dict[str, dict[str, Row]] = {scheme.name: {} for scheme in schemes}
        steps = self._steps("size", len(schemes) * len(contexts))
        for context in contexts:
            for scheme in schemes:
                key = f"size|{token_key(context.tokens)}|{scheme.key}"
                row = self.store.known(key)
                if row is None:
                    cache = self.cache(context)
                    row = self.store.keep(key, _size(scheme.code(cache, decode=False).nbytes, cache))
                out[scheme.name][context.name] = row
                next(steps)
        return out

    def recall(self, schemes: Sequence[Scheme], needles: Sequence[Needle]) -> dict[str, dict[str, Row]]:
        """Retrieval behind every scheme, and behind the exact cache."""
        wanted: dict[str, Scheme | None] = {EXACT: None} | {scheme.name: scheme for scheme in schemes}
        out: dict[str, dict[str, Row]] = {name: {} for name in wanted}
        steps = self._steps("recall", len(needles) * len(wanted))
        for needle in needles:
            cache: torch.Tensor | None = None
            where = f"{token_key(needle.tokens)}|{token_key(needle.question)}"
            for name, scheme in wanted.items():
                key = f"recall|{where}|{EXACT if scheme is None else scheme.key}"
                row = self.store.known(key)
                if row is None:
                    cache = self._planted(needle) if cache is None else cache
                    kv = cache if scheme is None else _decoded(scheme.code(cache))
                    row = self.store.keep(key, asdict(recall(self.loaded.engine, kv, needle)))
                out[name][needle.name] = row
                next(steps)
        return out

    def _steps(self, stage: str, total: int) -> Iterator[None]:
        """Every step taken of it is announced."""
        for done in range(1, total + 1):
            self._progress(stage, done, total)
            yield

    def _planted(self, needle: Needle) -> torch.Tensor:
        """Cache of a text with a code in it; what lies before the code is the text's own cache."""

        def compute() -> torch.Tensor:
            before = self.cache(needle.context)[:, :, :, : needle.at]
            rest = self.loaded.engine.prefill(needle.tokens[needle.at :], before if needle.at else None)
            return torch.cat((before, rest.to(before.dtype)), dim=3)

        return self.store.cache(token_key(needle.tokens), len(needle.tokens), compute)


def _decoded(coded: Coded) -> torch.Tensor:
    if coded.cache is None:
        raise AssertionError("a scheme that was asked for its cache gave none")
    return coded.cache


def _size(nbytes: int, cache: torch.Tensor) -> Row:
    return {"nbytes": nbytes, "bits": 8 * nbytes / cache.numel()}


def _cost(scheme: Scheme, cache: torch.Tensor, reference: Reference) -> Row:
    coded = scheme.code(cache)
    quality = reference.measure(_decoded(coded))
    return _size(coded.nbytes, cache) | {"kl": quality.kl, "dnll": quality.dnll, "top1": quality.top1}
