"""The built-in selectors, and the registry of all; `kvabr_lab.selectors` has alternatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import avg_pool1d

from kvabr.abr.plugins import Registered, load_plugin
from kvabr.blend.selection import Selection, Selector, by_passage, needed


class QuestionSelector(Selector):
    """Tokens that the question attends to (as ProphetKV, arXiv:2602.02579, and InfoFlow KV, arXiv:2603.05353)."""

    needs = frozenset({"attention"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the attention, summed over layers."""
        return needed(prompt.attention, "attention").sum(dim=0)


class QuestionValueSelector(Selector):
    """Tokens that the question attends to, weighted by the norm of their values: their effect on the answer."""

    needs = frozenset({"attention", "values"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return attention times norm, summed over layers."""
        return (needed(prompt.attention, "attention") * needed(prompt.values, "values")).sum(dim=0)


class QuestionPeaksSelector(Selector):
    """Runs of tokens around attention peaks (over heads and question tokens), weighted by the values' norms.

    Few heads look up facts, and in a sum over all heads they are drowned out. A fact is more than the token looked at:
    a number has several.

    Errors concentrate at the beginning of a passage, whose tokens had seen little of their own text. The squared error
    falls from 14 times its mean at the first token to 5 times at the fifth, 2 at the twentieth and a third after the
    128th (SmolLM2-135M, means over four contexts). So scores fall alike.
    """

    needs = frozenset({"peaks", "values"})
    reach = 8
    """Neighbours on either side that share a token's score."""
    fall = 0.5
    """Scores are divided by the position in the passage, from 1, to this power."""

    def looks_at(self, layers: int) -> range:
        """Return the first two thirds of the layers: the others add time, and do not change the choice."""
        return range(max(1, 2 * layers // 3))

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return peaks times norms, summed over layers, averaged over neighbours, by position in the passage."""
        own = (needed(prompt.peaks, "peaks") * needed(prompt.values, "values")).sum(dim=0)
        width = 2 * self.reach + 1
        rows = [
            avg_pool1d(own[None, first:end], width, 1, self.reach)[0]
            / torch.arange(1.0, 1.0 + end - first) ** self.fall
            for first, end in prompt.passages
        ]
        return by_passage(prompt, rows)


class OrderSelector(Selector):
    """The publisher's order: without a question, tokens can be recomputed while the rest is still loading."""

    needs = frozenset({"order"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return each token's byte; 0 for passages without an order."""
        rows = [
            torch.zeros(end - first) if order is None else torch.tensor(list(order), dtype=torch.float32)
            for (first, end), order in zip(prompt.passages, prompt.orders, strict=True)
        ]
        return by_passage(prompt, rows)


BUILTIN: dict[str, type[Selector]] = {
    "question": QuestionSelector,
    "question-value": QuestionValueSelector,
    "question-peaks": QuestionPeaksSelector,
    "order": OrderSelector,
}


def selectors() -> Registered[Selector]:
    """Return all selectors by name, including those of installed packages."""
    return Registered("kvabr.selectors", BUILTIN)


@cache
def load_selector(text: str) -> Callable[[], Selector]:
    """Return a factory of selectors; ``NAME`` or ``FILE.py:CLASS``, as `kvabr.abr.plugins.load_policy`.

    Raises:
        PolicyError: unknown selector, or its file cannot be loaded; the message names file and line.
    """
    return load_plugin(text, Selector, selectors(), "selector", "selectors")  # type: ignore[type-abstract]
