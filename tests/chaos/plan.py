"""The plan of a round, from its seed alone: links, faults and plays."""

import random
from dataclasses import dataclass
from typing import Any

from kvabr_lab.live.packet_schedule import Conditions
from tests.chaos.facts import Order
from tests.chaos.published import BEHIND, KINDS

PLAYS = 32
"""Plays of a round."""
LINKS = ("edge", "middle", "up")
"""Players to the second relay, second relay to the first, first relay to the origin."""
ROUND_S = 3.0
"""Plays and faults begin within this time."""
_CALM_SEEDS, _CYCLE = 40, 100
"""Of each hundred seeds the last forty kill nobody, so that memory can be compared over many rounds."""

KILLS = ("kill origin", "kill relay-1", "kill relay-2", "kill player")
FAULTS = (
    "blackout", "cliff", "losses", "rebinding", "freeze origin", "freeze relay-1", "freeze relay-2", *KILLS,
    "full disk relay-1", "full disk relay-2", "full disk player", "revoke at origin", "revoke at relay-1",
    "revoke at relay-2", "damage origin", "damage relay-1", "damage relay-2", "damage player", "replace", "remove",
    "liar edge", "liar middle", "liar up", "route to relay-1", "route to origin", "flood origin", "flood relay-1",
    "flood relay-2",
)  # fmt: skip
"""Kinds of faults; a seed without any is possible as well."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link as it is at the beginning of a round."""

    conditions: Conditions
    rate: float | None
    """Bytes per second; None: no bottleneck."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at_s: float
    for_s: float
    """When it is undone, after its beginning; what is left is undone at the end of the round."""
    link: str = "edge"
    seed: int = 0
    """Of what it does in detail."""


@dataclass(frozen=True, slots=True)
class Round:
    seed: int
    links: dict[str, Link]
    versions: tuple[int, ...]
    """Of each prompt, the version that is published at the beginning."""
    faults: tuple[Fault, ...]
    orders: tuple[tuple[Order, ...], ...]
    """Of each player."""


def plan(seed: int, *, prompts: int, versions: int, plays: int = PLAYS) -> Round:
    """Return the round of a seed."""
    dice = random.Random(f"round {seed}")
    links = {name: _link(dice, seed) for name in LINKS}
    placed = tuple(dice.randrange(versions) for _ in range(prompts))
    allowed = [kind for kind in FAULTS if kind not in KILLS or seed % _CYCLE < _CYCLE - _CALM_SEEDS]
    faults = tuple(
        sorted((_fault(dice, allowed) for _ in range(dice.choice((0, 1, 1, 2, 2, 3)))), key=lambda f: f.at_s)
    )
    orders = [_order(dice, number, prompts) for number in range(plays)]
    # The second player is the one that is killed.
    return Round(seed, links, placed, faults, (tuple(orders[: 2 * plays // 3]), tuple(orders[2 * plays // 3 :])))


def _link(dice: random.Random, seed: int) -> Link:
    loss = dice.choice((0.0, 0.0, 0.01, 0.03, 0.08))
    conditions = Conditions(
        rtt_s=dice.choice((0.0, 0.005, 0.02, 0.05, 0.12)),
        loss=loss,
        loss_up=loss * dice.random(),
        queue_bytes=dice.choice((None, None, 20_000, 400_000)),
        seed=seed,
        reorder=dice.choice((0.0, 0.0, 0.01, 0.1)),
        duplicate=dice.choice((0.0, 0.0, 0.01, 0.1)),
    )
    return Link(conditions, dice.choice((None, None, 5e6, 2e6, 1e6, 4e5)))


def _fault(dice: random.Random, allowed: list[str]) -> Fault:
    return Fault(
        dice.choice(allowed),
        at_s=dice.uniform(0.0, ROUND_S),
        for_s=dice.choice((0.1, 0.3, 1.0, 2.0)),
        link=dice.choice(LINKS),
        seed=dice.randrange(1 << 30),
    )


def _order(dice: random.Random, number: int, prompts: int) -> Order:
    prompt = dice.randrange(prompts)
    tokens, tracks = KINDS[prompt]
    how = dice.choice(("play", "play", "play", "asset", "prefix", "upgrades"))
    wanted = tokens if how == "asset" else dice.choice((*5 * (tokens,), *3 * (tokens + BEHIND,), tokens // 2, 7))
    changes: dict[str, Any] = {}
    if dice.random() < 0.3 and how != "prefix":
        changes["engine"] = dice.choice(("good", "good", "good", "slow", "failing"))
        changes["mode"] = dice.choice(("hole", "suffix"))
    if dice.random() < 0.2:
        single = [track for track in tracks if not track.startswith("AC-L")]
        changes["policy"] = dice.choice(("cheapfirst", "budget", f"fixed:{dice.choice(single)}"))
    if dice.random() < 0.08:
        changes["cancel_s"] = dice.uniform(0.0, 0.5)
    return Order(
        number,
        at_s=dice.uniform(0.0, ROUND_S),
        prompt=prompt,
        tokens=wanted,
        deadline_s=dice.choice((0.5, 0.7, 1.0, 1.5, 2.0)),
        quic=dice.choice(("aioquic", "qh3")),
        how=how,
        fresh=dice.random() < 0.15,
        own_tensor=dice.random() < 0.5 and how != "prefix",
        **changes,
    )
