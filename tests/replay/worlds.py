"""Small links for tests: each a trace with a character."""

import random

from kvabr.replay.trace import Trace


def world(name: str, rates: list[float], step: float = 0.25) -> Trace:
    times = tuple(index * step for index in range(len(rates)))
    return Trace(f"test/{name}", "test", times, tuple(map(float, rates)), len(rates) * step)


def worlds() -> list[Trace]:
    dice = random.Random(5)
    walk, level = [], 1e6
    for _ in range(200):
        level = min(4e6, max(5e4, level * dice.lognormvariate(0.0, 0.3)))
        walk.append(level)
    return [
        world("steady", [1e6]),
        world("walk", walk),
        world("outage", [1e6] * 6 + [0.0] * 5 + [1e6] * 40),
        world("dead-start", [0.0] * 6 + [2e6] * 40),
        world("dies", [2e6] * 4 + [0.0] * 200 + [1.0]),
        world("falls", [3e6, 2e6, 1e6, 5e5, 2e5, 1e5, 5e4] * 5),
        world("bursts", [0.0, 5e6, 0.0, 0.0, 3e6] * 20, 0.04),
    ]
