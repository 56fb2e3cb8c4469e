"""The play options shared by programs, the command line and replays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.abr.policies import DEFAULT
from kvabr.abr.tail import MAX_TAIL
from kvabr.player.session_types import GPU_PRICE, TIME_PRICE
from kvabr.types.cost import MISS_PENALTY
from kvabr.types.fields import Shown, check_fields

DEFAULT_SELECTOR = "question-peaks"
"""Name in `kvabr.blend.selectors`, which needs torch."""


@dataclass(frozen=True, slots=True)
class PlayChoices:
    """Options of a play."""

    policy: Annotated[str, Shown("-p --policy NAME|FILE.py:CLASS")] = DEFAULT
    """ABR policy: a name that `kvabr policies` lists, or ``FILE.py:CLASS``."""
    estimator: Annotated[str | None, Shown("--estimator NAME")] = None
    """Bandwidth estimator, see `kvabr estimators` (default: the policy's own)."""
    gpu_price: Annotated[float, Ge(0), Shown("--gpu-price NATS")] = GPU_PRICE
    """Price of a second of the engine's time, nats per generated token: 0 for an idle engine, inf to compute only
    groups that would be late."""
    time_price: Annotated[float, Ge(0), Lt(math.inf), Shown("--time-price NATS")] = TIME_PRICE
    """Price of a second before the first token, nats per generated token; 0: only the deadline counts. A play ends
    when waiting longer would not pay off."""
    live: bool = True
    """Also play caches during their prefill: groups arrive as they are published. A complete cache of as many tokens
    is preferred."""
    wait_for_producer_s: Annotated[float, Ge(0), Lt(math.inf), Shown("--wait-for-producer S")] = 0.0
    """If no part of a prompt is cached, seconds to wait for a producer to start. They count against the deadline; an
    engine does not wait beyond its latest start."""
    max_loss: Annotated[float | None, Ge(0), Shown("--max-loss NATS")] = None
    """Maximum expected loss, nats per generated token (default: unlimited, or 0.5 for a prompt in parts). To stay below
    it, a play computes more, cuts the prefix or misses the deadline. inf also joins passages without a measured fusion
    loss.
    """
    selector: str = DEFAULT_SELECTOR
    """Chooses the tokens of passages that are computed again: a name that `kvabr selectors` lists, or
    ``FILE.py:CLASS``."""
    question_tokens: Annotated[int, Ge(0), Le(MAX_TAIL), Shown("--question N")] = 0
    """Tokens that the engine will compute after the prompt, such as a question's: losses apply after them, and the
    same call may compute the last tokens of the cache."""
    tail: Annotated[int | None, Ge(0), Le(MAX_TAIL), Shown("--tail N")] = None
    """Maximum tokens at the end of the cache that the engine computes with the question instead of fetching them, if
    that pays off (default: 512 with an engine, else none). They have most of a coded cache's loss.
    """
    patience: Annotated[float, Ge(1), Lt(math.inf), Shown("--patience X")] = 1.0
    """Time limit of a play with missing groups, as a multiple of the deadline. An engine may complete it later, within
    twice the time of a whole prefill.
    """
    after: Annotated[float | None, Gt(0)] = None
    """Seconds that upgrades continue after the cache was handed over, see `Upgrades`; `math.inf`: until all groups are
    on their best track; None: no upgrades."""

    @property
    def joined_loss_limit(self) -> float:
        """Maximum expected loss of a prompt in parts; by default the price of a missed deadline."""
        return MISS_PENALTY if self.max_loss is None else self.max_loss

    def __post_init__(self) -> None:
        check_fields(self)
        # Reject unknown names before any network request.
        load_policy(self.policy)
        if self.estimator is not None:
            load_estimator(self.estimator)
