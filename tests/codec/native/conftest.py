"""Every path of this machine, and a case for each seed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvabr.codec.native import coder
from tests.codec.native import oracle

NATIVE = coder.available_paths()


@pytest.fixture(params=oracle.PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with oracle.taking(request.param):
        yield request.param


@pytest.fixture
def use() -> Iterator[Callable[[str], None]]:
    """Return a function that selects the path of later calls."""
    with ExitStack() as taken:

        def select(name: str) -> None:
            taken.close()
            taken.enter_context(oracle.taking(name))

        yield select
