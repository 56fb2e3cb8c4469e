"""A few bad minutes of object stores, from seeds."""

import pytest

from tests.chaos import stores
from tests.client.conftest import root as root  # noqa: PLC0414 - the fixture

pytestmark = pytest.mark.process


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_stores_in_trouble_give_no_wrong_cache_and_are_played_again_afterwards(root, seed):
    tally = await stores.run(root, seed)
    assert not any(tally[kind] for kind in stores.BAD), tally
    assert tally["played"] >= 4
