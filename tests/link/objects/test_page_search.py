"""The search for a prompt's pages: which objects are requested, and in how many rounds."""

import asyncio
import gc
import hashlib

import pytest

from kvabr.link.objects.page_search import PageRequest, PageSearch
from kvabr.store.names import PAGE_GROUPS
from kvabr.store.pages import Page, PageTrack
from kvabr.transfer.interface import cancel_all
from kvabr.types.catalog import Level
from kvabr.types.errors import NotFoundError
from kvabr.types.kv import KVSpec

SIZE = PAGE_GROUPS
SPEC = KVSpec.uniform("test/model", "tokenizer", 1, 1, 2, "float16", None, group_tokens=1)


def digests(*names):
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


def prompt(groups, *, own_from=None):
    """Digests of a prompt; from group ``own_from`` on they differ from those of other prompts."""
    return digests(*(g if own_from is None or g < own_from else f"own {g}" for g in range(groups)))


def page(own, first):
    count = len(own)
    track = PageTrack("FP16", first, (1,) * count, tuple(own), (0.0,) * count)
    return Page(SPEC, (Level("FP16"),), tuple(own), first, count, (track,))


class Store:
    """Pages as publishers leave them; records requests."""

    def __init__(self, *assets, states=False):
        self.objects, self.asked = {}, []
        for chunks in assets:
            for first in range(0, len(chunks), SIZE):
                own = chunks[first : first + SIZE]
                made = page(own, first)
                if states and first + SIZE >= len(chunks):
                    self.objects.setdefault(("end", own[-1]), made)
                for each in own:
                    self.objects.setdefault(("page", each), made)

    def search(self, chunks, *, states=False):
        search, self.rounds = PageSearch(chunks, states=states), 0
        while asks := search.wanted():
            self.rounds += 1
            self.asked += asks
            search.take({ask: self.objects.get((ask.kind, chunks[ask.group])) for ask in asks})
        return [(page.first, page.chunks) for page in search.found]


def pages(chunks):
    return [(first, tuple(chunks[first : first + SIZE])) for first in range(0, len(chunks), SIZE)]


@pytest.mark.parametrize("groups", [1, 5, 15, 16, 17, 31, 32, 320, 327, 511])
def test_a_prompt_that_was_played_before_takes_one_round(groups):
    asset = prompt(groups)
    store = Store(asset)
    assert store.search(asset) == pages(asset)
    assert store.rounds == 1
    assert len(store.asked) == -(-groups // SIZE)


@pytest.mark.parametrize(("shared", "groups"), [(320, 330), (325, 330), (320, 336), (300, 320), (3, 320), (17, 40)])
def test_the_longest_prefix_takes_two_rounds_and_at_most_fifteen_pages_inside_one(shared, groups):
    asset = prompt(shared + 6)
    store = Store(asset)
    found = store.search(prompt(groups, own_from=shared))
    assert found == pages(asset)[: -(-shared // SIZE)]
    assert store.rounds <= 2
    assert len(store.asked) <= groups // SIZE + 1 + SIZE - 1


def test_a_page_in_the_middle_that_is_gone_ends_the_prefix():
    asset = prompt(64)
    store = Store(asset)
    del store.objects["page", asset[31]]
    assert store.search(asset) == pages(asset)[:2]  # the pages of its other groups say the same
    for group in range(16, 31):
        del store.objects["page", asset[group]]
    assert store.search(asset) == pages(asset)[:1]


def test_of_two_pages_that_share_groups_the_one_that_shares_more_is_taken():
    first, second = prompt(12, own_from=3), prompt(10)
    store = Store(first, second)
    assert store.search(prompt(14, own_from=9)) == pages(second)


@pytest.mark.parametrize("there", [0, 1, 5, 31, 40, 63, 64])
def test_a_long_prompt_is_searched_for_in_few_rounds(there):
    chunks = prompt(64 * SIZE)
    store = Store(chunks[: there * SIZE])
    assert store.search(chunks) == pages(chunks)[:there]
    assert store.rounds <= 3
    assert len(store.asked) <= 64 + SIZE


def test_a_page_under_the_name_of_another_is_not_believed():
    asset, other = prompt(32), digests(*(f"x{g}" for g in range(32)))
    store = Store(asset)
    wrong = Store(other).objects["page", other[15]]
    for place in (15, 31):
        store.objects["page", asset[place]] = wrong
    assert store.search(asset) == pages(asset)[:1]  # by the page of another group
    store.objects = {("page", asset[15]): wrong, ("page", asset[31]): wrong}
    assert store.search(asset) == []


def test_of_an_asset_with_states_the_page_that_ends_it_is_found():
    asset = prompt(21)
    store = Store(asset, states=True)
    assert store.search(asset, states=True) == pages(asset)
    assert store.rounds == 1
    longer = [*asset, *digests("more", "and more")]
    assert store.search(longer, states=True) == pages(asset)


def test_pages_of_another_kind_do_not_continue_a_prefix():
    asset = prompt(32)
    store = Store(asset)
    other = store.objects["page", asset[31]]
    object.__setattr__(other, "levels", (Level("Int8"),))
    other.__dict__.pop("kind", None)
    assert store.search(asset) == pages(asset)[:1]


def test_what_was_not_answered_counts_as_absent():
    search = PageSearch(prompt(16))
    assert search.wanted() == [PageRequest("page", 15)]
    search.take({})
    search.take({})
    assert search.found == []


@pytest.fixture
async def logged():
    """Messages of asyncio about tasks."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
    return found


async def test_tasks_that_fail_while_they_are_cancelled_leave_no_error(logged):
    async def fail():
        raise NotFoundError("no such object")

    tasks = [asyncio.create_task(fail()) for _ in range(2)]
    await asyncio.sleep(0)
    await cancel_all(tasks)
    del tasks
    gc.collect()
    await asyncio.sleep(0)
    assert not logged
