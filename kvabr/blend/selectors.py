"""The built-in selectors, and the registry of all selectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import avg_pool1d

from kvabr.blend.selection import Selection, Selector, by_passage, needed
from kvabr.types.plugins import Registered, load_plugin


class QuestionSelector(Selector):
    """Selects tokens that the question attends to (ProphetKV, arXiv:2602.02579; InfoFlow KV, arXiv:2603.05353)."""

    needs = frozenset({"attention"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return the attention summed over layers."""
        return needed(prompt.attention, "attention").sum(dim=0)


class QuestionValueSelector(Selector):
    """Selects tokens that the question attends to, weighted by the norm of their values: their effect on the answer."""

    needs = frozenset({"attention", "values"})

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return attention times norm of the values, summed over layers."""
        return (needed(prompt.attention, "attention") * needed(prompt.values, "values")).sum(dim=0)


class QuestionPeaksSelector(Selector):
    """Selects runs of tokens around attention peaks (over heads and question tokens), weighted by values' norms.

    Only a few heads look up facts, and a sum over all heads hides them. A fact, such as a number, often has several
    tokens.

    Errors concentrate at the beginning of a passage, where tokens were computed with little preceding text. The squared
    error falls from 14 times its mean at the first token to 5 times at the fifth, 2 at the twentieth and a third after
    the 128th (SmolLM2-135M, means over four contexts). So scores fall likewise.
    """

    needs = frozenset({"peaks", "values"})
    reach = 8
    """Number of neighbours on either side that share a token's score."""
    fall = 0.5
    """Exponent: scores are divided by the position in the passage, counted from 1, to this power."""

    def looks_at(self, layers: int) -> range:
        """Return the first two thirds of the layers: reading more takes longer and does not change the choice."""
        return range(max(1, 2 * layers // 3))

    def scores(self, prompt: Selection) -> torch.Tensor:
        """Return peaks times norms, summed over layers, averaged over neighbours, and reduced with the position."""
        own = (needed(prompt.peaks, "peaks") * needed(prompt.values, "values")).sum(dim=0)
        width = 2 * self.reach + 1
        rows = [
            avg_pool1d(own[None, first:end], width, 1, self.reach)[0]
            / torch.arange(1.0, 1.0 + end - first) ** self.fall
            for first, end in prompt.passages
        ]
        return by_passage(prompt, rows)


class OrderSelector(Selector):
    """Selects tokens in the publisher's order. It needs no question, so it can start while groups are still loading."""

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
    """Return a factory of selectors for ``NAME`` or ``FILE.py:CLASS``, like `kvabr.abr.plugins.load_policy`.

    Raises:
        PolicyError: the selector is unknown, or its file cannot be loaded; the message names file and line.
    """
    return load_plugin(text, Selector, selectors(), "selector", "selectors")  # type: ignore[type-abstract]
