"""How many examples a property test tries."""

import os

import hypothesis

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
"""``same``: every run tries the same examples. ``fast``: the first quarter of them. ``search``: new ones."""


def of_profile(count: int) -> int:
    """Return how many of a number of examples are tried."""
    return -(-count // 4) if PROFILE == "fast" else count


def examples(count: int) -> hypothesis.settings:
    """Return the decorator of a test that tries this many examples, not the usual 100."""
    return hypothesis.settings(max_examples=of_profile(count))
