"""Fixtures of the tests of faults; and after each test: no task is left, and no event loop met an unhandled error."""

import asyncio

import pytest

from kvabr.server import certificates
from kvabr.store.locations import open_asset
from tests.faults import common


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    common.write_asset(folder / "one")
    return folder


@pytest.fixture(scope="session")
def catalog(root):
    return kvabr_catalog(root)


def kvabr_catalog(root):

    return open_asset(root / "one").catalog


@pytest.fixture(scope="session")
def tls():
    return certificates.development()


@pytest.fixture(scope="session")
def fingerprint(tls):
    return certificates.check(tls).fingerprint


@pytest.fixture
def origin(root, tls, fingerprint):
    """Start a server: ``async with origin(library=..., find=..., ...) as served``."""

    def start(**options):
        return common.serving(root, tls, fingerprint, **options)

    return start


@pytest.fixture(autouse=True)
async def nothing_is_left():
    loop = asyncio.get_running_loop()
    errors = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, left
    assert not errors, errors
