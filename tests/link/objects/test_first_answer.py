"""One small object, asked for several times."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvabr.link.objects.index import first_answer
from kvabr.transfer.work import cancel_all
from kvabr.types.errors import NotFoundError


@pytest.fixture
async def logged():
    """What asyncio has to say of tasks."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
    return found


async def test_of_tries_that_fail_in_one_turn_no_error_is_left(logged):
    go, tries = asyncio.Event(), []

    async def ask(silence_s):
        tries.append(silence_s)
        if len(tries) == 2:
            go.set()
        await go.wait()
        raise NotFoundError("there is no such object")

    with pytest.raises(NotFoundError):
        await first_answer(ask)
    gc.collect()
    await asyncio.sleep(0)
    assert len(tries) == 2
    assert not logged


async def test_tasks_that_fail_while_they_are_cancelled_leave_no_error(logged):
    async def fail():
        raise NotFoundError("there is no such object")

    tasks = [asyncio.create_task(fail()) for _ in range(2)]
    await asyncio.sleep(0)
    await cancel_all(tasks)
    del tasks
    gc.collect()
    await asyncio.sleep(0)
    assert not logged
