"""The loss from joining passages: every base, selector, share and track on the same prompts, compared with prefill.

All recipes for a prompt run together to share caches. Times are processor times of selection, recomputation and the
question, as fractions of a full prefill of the same prompt in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from kvabr.blend.selection import Selection, Selector, choose, look, needed
from kvabr.blend.selectors import load_selector
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.blend import TransformersBlendEngine
from kvabr.publish.passages import free_cache, joined, publisher_order, token_costs
from kvabr.publish.reference import Reference
from kvabr_lab.bench.blend_prompts import FusedPrompt
from kvabr_lab.bench.contexts import token_key
from kvabr_lab.bench.schemes import TrackScheme, sources

EXACT_TRACK = "FP16"
"""Track for uncoded caches."""
SHARES = (0.05, 0.15, 0.3)
SELECTORS = ("question-peaks", "question", "question-value", "order", "hkvd", "legolink", "random", "oracle")
TRACKS = ("AC-L0", "AC-L1", "AC-L2")
LMCACHE = "lmcache"
"""LMCache's rule: keys alone, squared distance in layer 1, one selection of tokens, 15 %."""
_MAIN = 0.15

Row = dict[str, Any]
T = TypeVar("T")


class KeyDeviationSelector(Selector):
    """LMCache's CacheBlend: tokens with the largest changes of layer 1 keys after recomputing layer 0 completely."""

    needs = frozenset({"deviation"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the deviation of keys."""
        return needed(prompt.deviation, "deviation")[0]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to build a prompt's cache from the caches of its passages."""

    base: str
    """How the passages were computed: ``alone``, ``neutral`` (after a neutral text) or ``mean`` (over contexts)."""
    selector: str = ""
    """Name for `load_selector`; empty: no recomputation."""
    share: float = 0.0
    track: str = EXACT_TRACK
    chosen_on: str = EXACT_TRACK

    @property
    def name(self) -> str:
        """Name in tables."""
        parts = [self.base]
        if self.track != EXACT_TRACK:
            parts.append(self.track)
        if self.selector:
            parts.append(f"{self.selector} {self.share:g}")
        if self.chosen_on != self.track:
            parts.append(f"chosen on {self.chosen_on}")
        return ", ".join(parts)


def recipes(selectors: Sequence[str], shares: Sequence[float], tracks: Sequence[str]) -> list[Recipe]:
    """Return the recipes to compare: every base, selector, share and track, and other systems on their usual caches."""
    first = selectors[0]
    out = [Recipe(base) for base in ("alone", "neutral", "mean")]
    out += [Recipe("mean", selector, share) for selector in selectors for share in shares]
    out += [Recipe("alone", selector, _MAIN) for selector in ("hkvd", LMCACHE, "legolink", first)]
    for track in tracks:
        out += [Recipe("mean", track=track, chosen_on=track)]
        out += [Recipe("mean", first, _MAIN, track, tracks[0])]
    out += [Recipe("mean", first, _MAIN, EXACT_TRACK, tracks[0])] if tracks else []
    return list(dict.fromkeys(out))


@dataclass(frozen=True)
class FusionLab:
    """A model, and the contexts of its passages."""

    engine: TransformersBlendEngine
    contexts: Sequence[Sequence[int]]
    """Contexts to average over; the first is the neutral text."""
    held_out: Sequence[Sequence[int]]
    """Contexts for measuring the publisher's order."""
    following: Sequence[int]
    """Token ids that follow a passage in that measurement."""
    profile: Profile | None = None

    def key(self, prompt: FusedPrompt, recipe: Recipe) -> str:
        """Return a key that covers all inputs of a result."""
        made = [sources(room) for room in ("blend", "codec", "publish", "engines", "lab")]
        behind = token_key(
            [token for part in (*self.contexts, *self.held_out, self.following) for token in (*part, -1)]
        )
        digest = "" if self.profile is None or recipe.track == recipe.chosen_on == EXACT_TRACK else self.profile.digest
        return f"blend|{self.engine.dtype}|{prompt.key}|{recipe}|{digest}|{behind}|{made}"


@dataclass
class FusedCase:
    """A prompt that is being measured; data that recipes share is computed once."""

    lab: FusionLab
    prompt: FusedPrompt
    _looks: dict[tuple[object, ...], tuple[Selection, float]] = field(default_factory=dict)
    _bases: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _kv: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    @property
    def _tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.prompt.question]

    @cached_property
    def _full(self) -> tuple[torch.Tensor, float]:
        return _timed(lambda: self.lab.engine.prefill(self._tokens))

    @cached_property
    def _reference(self) -> Reference:
        return Reference(self.lab.engine, self._full[0][:, :, :, :-1], self._scored)

    @property
    def _scored(self) -> list[int]:
        """Token ids to score. The first is the question's last token, which is therefore not cached."""
        return [self.prompt.question[-1], *self.prompt.tail]

    def measure(self, recipe: Recipe) -> Row:
        """Return a recipe's ``kl``, ``top1``, results of `_answer`, ``work`` and ``time``."""
        full, full_s = self._full
        if recipe.selector:
            fused, spent_s, work = self._recomputed(recipe)
        else:
            kv, tokens = self._joined(recipe.base, recipe.track), len(self.prompt.tokens)
            tail, spent_s = _timed(lambda: self.lab.engine.recompute(self._tokens, range(tokens, full.shape[3]), kv))
            fused, work = torch.cat((kv, tail), dim=3), 0.0
        quality = self._reference.measure(fused[:, :, :, :-1])
        return {
            "kl": quality.kl,
            "top1": quality.top1,
            **self._answer(fused),
            "work": work,
            "time": spent_s / full_s,
            "full_s": full_s,
        }

    def exact(self) -> Row:
        """Return the row of the full prefill."""
        answer = self._answer(self._full[0])
        return {"kl": 0.0, "top1": 1.0, **answer, "work": 1.0, "time": 1.0, "full_s": self._full[1]}

    def _answer(self, kv: torch.Tensor) -> Row:
        """Return how certain the answer to a code question is, in nats.

        ``found``: True if greedy decoding returns the code. ``gap``: minimum advantage in log-likelihood of the code's
        tokens over the best alternatives. ``margin``: advantage of the code over the most likely other code in the
        prompt.
        """
        if self.prompt.kind != "codes":
            return {}
        right, *wrong = ([self._scored[0], *code] for code in (self.prompt.tail, *self.prompt.others))
        rows, own = self._likelihoods(kv, right)
        best = rows.scatter(1, torch.tensor(right[1:])[:, None], -math.inf).amax(dim=1)
        gap = float((own - best).min())
        margin = float(own.sum()) - max(float(self._likelihoods(kv, code)[1].sum()) for code in wrong)
        return {"found": gap > 0, "gap": gap, "margin": margin}

    def _likelihoods(self, kv: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities after all ``tokens`` but the last, and those of the tokens that follow."""
        rows = self.lab.engine.score(kv[:, :, :, :-1], tokens)[:-1]
        return rows, rows.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]

    def _recomputed(self, recipe: Recipe) -> tuple[torch.Tensor, float, float]:
        engine, tokens = self.lab.engine, self._tokens
        cached, every = len(self.prompt.tokens), len(tokens)
        kv = self._joined(recipe.base, recipe.track)
        selector = KeyDeviationSelector() if recipe.selector == LMCACHE else load_selector(recipe.selector)()
        seen, look_s = self._look(recipe, selector)
        at = choose(seen, selector.scores(seen), recipe.share)
        new, spent_s = _timed(lambda: engine.recompute(tokens, [*at, *range(cached, every)], kv))
        fused = torch.cat((kv, new[:, :, :, len(at) :]), dim=3)
        fused[:, :, :, list(at)] = new[:, :, :, : len(at)]
        layers = engine.spec.layers
        work = len(at) / every
        if selector.needs & {"attention", "peaks"}:
            work += len(self.prompt.question) / every * selector.looks_at(layers).stop / layers
        if "deviation" in selector.needs:
            work += cached / every / layers
        return fused, look_s + spent_s, work

    def _look(self, recipe: Recipe, selector: Selector) -> tuple[Selection, float]:
        layers = selector.looks_at(self.lab.engine.spec.layers)
        key = (recipe.base, recipe.chosen_on, selector.needs, layers)
        if key not in self._looks:
            kv = self._joined(recipe.base, recipe.chosen_on)
            orders = self._orders(recipe.base) if "order" in selector.needs else ()
            exact = self._costs(kv) if "exact" in selector.needs else None
            prompt = self.prompt
            self._looks[key] = _timed(
                lambda: look(
                    self.lab.engine, selector, prompt.tokens, prompt.spans, prompt.question, kv,
                    orders=orders, exact=exact,
                )
            )  # fmt: skip
        return self._looks[key]

    def _orders(self, base: str) -> list[bytes]:
        return [
            publisher_order(self.lab.engine, ids, kv, self.lab.held_out, self.lab.following)
            for ids, kv in zip(self.prompt.passages, self._caches(base), strict=True)
        ]

    def _costs(self, kv: torch.Tensor) -> torch.Tensor:
        exact = self._full[0][:, :, :, : kv.shape[3]]
        return token_costs(self.lab.engine, exact, kv, [*self.prompt.question, *self.prompt.tail])

    def _caches(self, base: str) -> list[torch.Tensor]:
        """Return the passages' position-free caches; the cache after the neutral context is reused for the mean."""
        if base not in self._bases:
            engine, passages, contexts = self.lab.engine, self.prompt.passages, self.lab.contexts
            if base == "alone":
                self._bases[base] = [free_cache(engine, ids) for ids in passages]
            elif base == "neutral":
                self._bases[base] = [free_cache(engine, ids, contexts[0]) for ids in passages]
            else:
                rest = [[free_cache(engine, ids, before) for before in contexts[1:]] for ids in passages]
                pairs = zip(self._caches("neutral"), rest, strict=True)
                self._bases[base] = [torch.stack([one, *others]).mean(dim=0) for one, others in pairs]
        return self._bases[base]

    def _joined(self, base: str, track: str) -> torch.Tensor:
        if (base, track) not in self._kv:
            spec, first = self.lab.engine.spec, len(self.prompt.beginning)
            caches: Iterable[torch.Tensor] = self._caches(base)
            if track != EXACT_TRACK:
                scheme = TrackScheme(track, spec, self.lab.profile, free=True)
                caches = [_decoded(scheme, kv) for kv in caches]
            beginning = self._full[0][:, :, :, :first]
            kv = joined(list(caches), spec, first).to(beginning.dtype)
            self._kv[base, track] = torch.cat((beginning, kv), dim=3)
        return self._kv[base, track]


def _decoded(scheme: TrackScheme, kv: torch.Tensor) -> torch.Tensor:
    coded = scheme.code(kv).cache
    if coded is None:
        raise AssertionError("a scheme that was asked for its cache gave none")
    return coded


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    return call(), time.process_time() - began


def measure(
    lab: FusionLab,
    prompts: Sequence[FusedPrompt],
    plan: Sequence[Recipe],
    known: Callable[[str], Row | None],
    keep: Callable[[str, Row], Row],
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
) -> dict[str, dict[str, Row]]:
    """Measure every recipe on every prompt, except results that ``known`` returns by key; ``keep`` stores them.

    Returns:
        Rows by the recipe's name, then by the prompt's; the full prefill is the recipe ``full``.
    """
    out: dict[str, dict[str, Row]] = {name: {} for name in (FULL, *(recipe.name for recipe in plan))}
    done, total = 0, len(prompts) * (len(plan) + 1)
    for prompt in prompts:
        case = FusedCase(lab, prompt)
        for recipe in (None, *plan):
            name = FULL if recipe is None else recipe.name
            key = lab.key(prompt, recipe or Recipe(FULL))
            row = known(key)
            if row is None:
                row = keep(key, case.exact() if recipe is None else case.measure(recipe))
            out[name][prompt.name] = row
            done += 1
            progress("measure", done, total)
    return out


FULL = "full"
STAGES: Mapping[str, str] = {"measure": "prompts x recipes"}
