"""The end of a prompt that is cached under keys is left to the engine's call for the question, if that is worth it."""

from dataclasses import replace

import pytest
import torch

from kvabr.client.blocking import LoopThread
from kvabr.data import default_catalog
from kvabr.engines.chunk_store import ChunkStore, KeyedSettings, spec_of
from kvabr.engines.keyed_tails import as_one
from tests.engines.served import Origin

PAGE, PAGES = 128, 8
SPEC = spec_of("test/model", "engine", 2, 2, 16, torch.float16)
KEYS = [f"page {number}" for number in range(PAGES)]
FAST, SLOW = 20_000.0, 10.0
"""Tokens per second of an engine."""


@pytest.fixture(scope="module")
def loop():
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture(scope="module")
def origin(tmp_path_factory, loop):
    made = Origin(tmp_path_factory.mktemp("origin"))
    store = opened(loop, publish=made.root, tracks=["Int4"])
    kv = torch.randn(2, 2, 2, PAGE, 16).half()
    for number, key in enumerate(KEYS):
        assert store.put(key, kv, PAGE * number).result(300.0)
    loop.call(store.close())
    made.look(PAGES)
    yield made
    made.close()


def opened(loop, *, least=0, **settings):
    async def make():
        size = {"max_tokens": PAGE, "min_tokens": PAGE}
        kind = type("Settings", (KeyedSettings,), {"tail": settings.pop("tail", KeyedSettings.tail)})
        return ChunkStore(SPEC, kind(**settings), "a test", **size, least=least)

    return loop.call(make())


@pytest.fixture
def reader(loop, origin):
    made = []

    def build(**settings):
        reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 60.0}
        made.append(opened(loop, **reach, **settings))

        def leading(keys, **how):
            return loop.call(made[-1].leading(keys, **how))

        return leading

    yield build
    for store in made:
        loop.call(store.close())


def test_the_last_pages_are_left_to_the_engine_and_the_answer_holds(reader):
    leading = reader(prefill_rate=FAST)
    kept = leading(KEYS)
    assert PAGES - 4 <= kept < PAGES
    assert leading(KEYS[:kept]) == kept  # the engine asks again for what it was promised, or for less
    assert leading(KEYS[: kept - 1]) == kept - 1


def test_plays_count_with_what_follows_and_share_the_price_of_time(loop, origin):
    """A page far from the end of its prompt loses less than one near to it, on the same track."""
    reach = {"url": origin.url, "fingerprint": origin.fingerprint, "deadline_s": 60.0}
    store = opened(loop, **reach)
    try:
        alone = loop.call(store.play(KEYS[0]))
        assert loop.call(store.leading(KEYS)) == PAGES
        place = store._tails.place(store._text(KEYS[5]))
        assert (place.following, place.concurrent) == (2 * PAGE + PAGE // 2, PAGES)
        far, near = loop.call(store.play(KEYS[0])), loop.call(store.play(KEYS[7]))
        assert 0 < far.loss < near.loss
        assert near.loss != alone.loss
        assert loop.call(store.leading(KEYS[:3])) == 3  # asked again: nothing has changed
        assert store._tails.place(store._text(KEYS[5])) == place
    finally:
        loop.call(store.close())


@pytest.mark.parametrize("how", [{}, {"prefill_rate": FAST, "tail": 0}, {"prefill_rate": SLOW}])
def test_all_is_fetched_if_no_tail_is_worth_it(reader, how):
    assert reader(**how)(KEYS) == PAGES


def test_a_prompt_that_may_go_on_has_no_end_yet(reader):
    leading = reader(prefill_rate=FAST)
    assert leading(KEYS, goes_on=True) == PAGES
    assert leading([*KEYS, "more"], goes_on=True) < PAGES


@pytest.mark.parametrize(("step", "most"), [(100, 0), (300, 1), (900, 6)])
def test_the_tails_of_eight_requests_share_a_step(reader, step, most):
    """The question of each has half a page."""
    leading = reader(prefill_rate=FAST, step_tokens=step)
    left = sum(PAGES - leading(KEYS) for _ in range(8))
    assert left <= most
    assert bool(left) == bool(most)


def test_a_tail_longer_than_the_prompt_leaves_a_page_and_what_the_engine_fetches_at_all(reader):
    assert reader(prefill_rate=1e6, tail=1 << 20, step_tokens=1 << 20)(KEYS[:1]) == 1
    assert reader(prefill_rate=1e6, tail=1 << 20, step_tokens=1 << 20)(KEYS[:3]) >= 1
    assert reader(prefill_rate=1e6, least=2 * PAGE)(KEYS[:3]) >= 2
    assert reader(prefill_rate=1e6, least=3 * PAGE)(KEYS[:3]) == 3


def test_catalogs_that_do_not_follow_each_other_are_not_joined():
    whole = default_catalog()
    long, short = replace(whole, asked=(1.0,) * whole.groups).prefix(2), whole.prefix(1)
    joined = as_one([long, long, short])
    assert joined is not None
    assert joined.asked == ()
    assert (joined.tokens, joined.groups) == (5 * 128, 3)
    track = joined.track("Int4")
    assert track.total_bytes == 2 * long.track("Int4").total_bytes + short.track("Int4").total_bytes
    assert track.total_loss == pytest.approx(short.track("Int4").total_loss)
    assert as_one([short, long]) is None
    plain = replace(short, tracks=tuple(track for track in short.tracks if track.refines is None))
    assert {track.name for track in as_one([plain, short]).tracks} == {track.name for track in plain.tracks}
    base = replace(short, tracks=(short.track("AC-L0"),))
    assert as_one([base, replace(short, tracks=(short.track("Int4"),))]) is None
