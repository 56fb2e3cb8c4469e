"""Plays of a cache that is still being prefilled, over a simulated link and in virtual time."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.result import IncompleteError, NothingCached
from kvabr.publish.encoder import publish
from kvabr.server.publication import BytesPublication
from kvabr.store.locations import open_asset, open_store
from kvabr.transfer import news
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError
from kvabr.types.events import GroupsPublished, ProducerStopped, RequestSent, SoonerAlone
from kvabr.types.live import LiveEnd
from tests.client.classes import HYBRID, SLIDING, WINDOWS, published
from tests.client.classes import link as linked
from tests.client.live import GROUPS, TOKENS, Producer, origin, play, right, working
from tests.client.virtual import virtual
from tests.memory_transport import MemoryConnection, MemoryLink
from tests.toymodel import SPEC, ToyModel, prompt

SLOW = PrefillCost.from_rate(1.0)
"""An engine that is of no help."""
QUICK = {"prefill_cost": PrefillCost.from_rate(100.0), "gpu_price": float("inf")}
LAYERS = ("FP16", "Int8")
"""What may follow the base, which is Int4."""


@dataclass
class End:
    """What came of a play: its cache, or what there is of one; when it ended, what it told, and what it asked for."""

    result: Any = None
    error: str = ""
    missing: tuple = ()
    took_s: float = 0.0
    events: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def asked(self, wanted):
        return [group for track, group in self.sent if track == wanted]


async def played(producer, *steps, link=None, **how):
    """Play while a producer does what ``steps`` say: calls, and seconds to wait."""
    end, loop = End(), asyncio.get_running_loop()
    note = lambda ask: end.sent.append((ask.track, ask.group))  # noqa: E731
    async with origin(producer, faults=note, **(link or {})) as connection:
        begun_s = loop.time()
        task = asyncio.ensure_future(play(connection, log=end.events.append, **how))
        task.add_done_callback(lambda _: setattr(end, "took_s", loop.time() - begun_s))
        for step in steps:
            await (step if asyncio.iscoroutine(step) else asyncio.sleep(0 if callable(step) else step))
            if callable(step):
                step()
        try:
            end.result = await task
        except IncompleteError as error:
            end.result, end.error, end.missing = error.prefix, str(error), error.missing
    assert end.result is None or isinstance(end.result, NothingCached) or right(end.result, producer.asset)
    return end


@virtual
async def test_groups_come_as_they_are_published(producer):
    end = await played(producer, producer.run(1.0))
    found = end.result
    assert (found.tokens, found.met) == (160, True)
    # The last group is published after ten seconds, and its base needs no request; then the play ends soon.
    assert 10 < found.ttft_s < 10.5
    assert found.coverage[:-1] == ("FP16",) * 9
    assert [event.edge for event in end.of(GroupsPublished)] == list(range(1, 11))
    assert found.live.published == 10
    assert 9.9 < found.live.complete_s < 10.1
    assert found.live.stopped is found.live.sooner_alone_s is None


@pytest.mark.parametrize("before", [0, 1, 5, 9, 10])
@virtual
async def test_a_play_may_join_at_any_time(producer, before):
    producer.publish(before)
    found = (await played(producer, producer.run(1.0))).result
    assert (found.tokens, found.live.published) == (160, 10)
    assert found.ttft_s < GROUPS - before + 1


@virtual
async def test_a_complete_asset_is_preferred(producer, asset):
    producer.publish(3)

    def find(namespace, track):
        if track.startswith("prefix."):
            return BytesPublication(asset.catalog.dumps().encode())
        return producer.find(namespace, track)

    async with MemoryConnection(find, MemoryLink(1e6, 0.02)) as link, AsyncClient(link, model=SPEC) as client:
        found = await client.find(TOKENS, within_s=60)
    assert found.live is None


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """An asset of 330 groups, more than a lookup has names for."""
    spec = replace(SPEC, group_tokens=2)
    made, folder = prompt(660), tmp_path_factory.mktemp("endless") / "asset"
    with open_store(folder).writer() as writer:
        writer.commit(publish(ToyModel(spec), made, ("Int4",), None, writer, time_engine=False))
    return open_asset(folder)


@virtual
async def test_a_prompt_of_many_groups_is_played_whole(endless):
    producer = Producer(endless, pace_s=0.01)
    producer.publish(300)
    async with (
        origin(producer) as link,
        working(producer, 0.01),
        AsyncClient(link, model=endless.catalog.spec) as client,
    ):
        played = await client.play(prompt(660).tokens, deadline=60.0)
    assert played.tokens == 660
    assert right(played, endless)
    assert played.live.published == 330


@virtual
async def test_a_prompt_that_goes_on_elsewhere_plays_what_is_shared(producer):
    found = (await played(producer, producer.run(1.0), tokens=[*TOKENS[:80], 96, 95, 94])).result
    assert found.tokens == 80
    assert found.ttft_s < 6


@virtual
async def test_a_producer_that_stalls_ends_the_play_at_its_deadline(producer):
    end = await played(producer, producer.run(0.5, 6), deadline=8)
    assert "published 6 and has not stopped" in end.error
    assert 7.9 < end.took_s < 8.1
    assert end.missing == (6, 7, 8, 9)
    assert end.result.tokens == 96


@virtual
async def test_an_engine_computes_what_a_dead_producer_did_not_publish(producer):
    steps = 1, lambda: producer.publish(6), 1, lambda: producer.end("killed")
    found = (await played(producer, *steps, deadline=20, engine=ToyModel(SPEC), **QUICK)).result
    assert found.tokens == 160
    assert found.coverage[6:] == ("recomputed",) * 4
    assert (found.live.published, found.live.complete_s, found.live.stopped) == (6, None, "killed")
    assert found.ttft_s < 10


@virtual
async def test_an_engine_that_would_be_sooner_is_told(producer):
    end = await played(producer, producer.run(1.0), engine=ToyModel(SPEC), **QUICK)
    (told,) = end.of(SoonerAlone)
    assert told.alone_s == pytest.approx(1.6)
    assert told.ends_s == pytest.approx(10, abs=0.2)
    assert end.result.live.sooner_alone_s == pytest.approx(7.4, abs=0.3)


@virtual
async def test_a_live_catalog_that_makes_no_sense_is_refused(producer):
    good = producer.find

    def find(namespace, track):
        return BytesPublication(b"{}\n{}") if track.startswith("live.") else good(namespace, track)

    async with MemoryConnection(find, MemoryLink(1e6, 0.02)) as link, AsyncClient(link, model=SPEC) as client:
        with pytest.raises(FormatError):
            await client.find(TOKENS, within_s=60)


@virtual
async def test_a_decoder_may_come_before_its_producer(producer):
    producer.begun = False
    assert isinstance((await played(producer)).result, NothingCached)
    assert isinstance((await played(producer, wait_for_producer_s=2.0)).result, NothingCached)
    steps = 2, lambda: setattr(producer, "begun", True), producer.run(0.5)
    assert (await played(producer, *steps, wait_for_producer_s=5.0)).result.tokens == 160


@pytest.mark.parametrize("rtt_s", [0.02, 0.5])
@virtual
async def test_a_wait_beyond_the_deadline_ends_before_it(producer, rtt_s):
    """That nobody began is an answer, not a lookup that failed: also if a round trip is longer than what is left."""
    producer.begun = False
    end = await played(producer, link={"rtt_s": rtt_s}, deadline=2.0, wait_for_producer_s=10.0)
    assert isinstance(end.result, NothingCached)
    assert end.took_s <= 2.0


@pytest.mark.parametrize("spec", [SLIDING, HYBRID, WINDOWS], ids=lambda spec: spec.model)
@virtual
async def test_groups_of_several_layer_classes_come_as_they_are_published(spec, tmp_path):
    tokens = list(range(3, 150))
    complete = published(tmp_path, spec, tokens)
    producer = Producer(complete.assets[0])
    options = PlayOptions(policy="fixed:Int8")
    async with linked(complete) as link, AsyncClient(link, model=spec) as client:
        wanted = await client.play(tokens, deadline=30, options=options)
    async with origin(producer) as link, AsyncClient(link, model=spec) as client, working(producer, 1.0):
        played = await client.play(tokens, deadline=30, options=options)
        found = await client.find(tokens, within_s=60)
    assert found.live is not None
    assert played.coverage == wanted.coverage
    assert played.spans == wanted.spans
    assert all(map(torch.equal, played.parts, wanted.parts))
    assert played.live.published == len(played.coverage)


@virtual
async def test_the_base_is_on_its_way_before_its_news(producer):
    """The round trip is long, and each group is here half of one after it was published."""
    end = await played(producer, producer.run(2.0), link={"rtt_s": 0.5}, policy="fixed:Int4")
    assert end.result.met
    assert end.result.ttft_s < 20.3
    assert end.asked("Int4") == list(range(GROUPS))  # once each


@virtual
async def test_what_has_become_complete_meanwhile_is_told_by_its_catalog(producer):
    producer.publish(2)

    def complete():
        producer.publish(8, tell=False)
        producer.forgotten = True
        producer.news.finish("forgotten")

    end = await played(producer, 1, complete, deadline=20)
    assert end.result.tokens == 160
    assert end.took_s < 5


@pytest.mark.parametrize("reason", ["the engine ran out of memory", "\U0001f4a5" * 500], ids=["usual", "longest"])
@virtual
async def test_a_producer_that_dies_ends_the_play_with_its_reason(producer, reason):
    end = await played(producer, 1, lambda: producer.publish(3), 1, lambda: producer.end(reason), deadline=20)
    assert f"and then stopped: {reason[:20]}" in end.error
    assert end.took_s < 3
    assert [(event.edge, event.reason) for event in end.of(ProducerStopped)] == [(3, reason)]


@virtual
async def test_the_end_of_another_production_is_not_that_of_this_one(producer):
    producer.publish(3)
    producer.news.append(LiveEnd("f" * 16, "the first one died").dumps())
    end = await played(producer, deadline=20)
    assert "belongs to another prefill" in end.error
    assert "the first one died" not in end.error


@virtual
async def test_what_the_producer_left_out_is_not_asked_for(producer):
    def leave_out():
        producer.publish(4)
        producer.publish(left_out=LAYERS)
        producer.publish(left_out=("Int4",))
        producer.publish(4)

    end = await played(producer, 1, leave_out)
    assert end.result.coverage[4] == "Int4"
    assert not {("FP16", 4), ("Int8", 4)} & set(end.sent)


@virtual
async def test_a_frame_that_is_not_what_the_news_said_is_not_used(producer):
    def flipped(frame):
        return bytes(frame[:-1]) + bytes([frame[-1] ^ 1])

    def lie():
        producer.publish(2)
        producer.publish(spoil=lambda name, frame: flipped(frame) if name == "Int4" else frame)
        producer.publish(spoil=lambda name, frame: bytes(frame) + b"x" if name == "Int4" else frame)
        producer.publish(6)

    end = await played(producer, 1, lie, deadline=20)
    assert end.result.tokens == 160
    assert "Int4" not in end.result.coverage[2:4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.replace(b'"group":2', b'"group":3'), "received group 3, expected 2"),
        (lambda data: data.replace(b"0123456789abcdef", b"0123456789abcdee"), "another prefill"),
        (lambda _: b"nonsense", "edge message"),
        (lambda _: b"", ""),  # nothing comes: it is asked for again
        (lambda _: b"[" * 1000, "edge message"),
        (lambda data: data.replace(b'"Int4":[', b'"Int4":[1000000'), "more than a cache can need"),
    ],
)
@virtual
async def test_news_that_make_no_sense_end_the_play_with_what_is_in_place(producer, change, says):
    append = producer.news.append
    spoil = lambda: setattr(producer.news, "append", lambda data: append(change(data)))  # noqa: E731
    end = await played(producer, 1, lambda: producer.publish(2), 0.5, spoil, producer.publish, deadline=5)
    assert says in end.error
    assert end.result.tokens == 32
    assert end.took_s < 5.2


@virtual
async def test_plays_share_what_they_wait_for(producer, asset):
    sent = []
    note = lambda ask: sent.append(ask.track)  # noqa: E731
    async with origin(producer, faults=note) as link, AsyncClient(link, model=SPEC) as client, working(producer, 1.0):
        both = await asyncio.gather(*(client.play(TOKENS, deadline=30) for _ in range(2)))
    assert all(right(found, asset) for found in both)
    assert sent.count("Int4") == GROUPS
    assert sent.count("kvabr.edge") <= GROUPS + 1 + news._MAX_REQUESTED


@virtual
async def test_a_wait_for_the_producer_is_no_slow_link(producer):
    end = await played(producer, producer.run(25.0), deadline=300)
    assert (end.result.met, end.result.record.abandoned) == (True, 0)
    asked = [(event.group, event.track) for event in end.of(RequestSent)]
    assert len(asked) == len(set(asked))
    assert end.result.coverage[0] == "FP16"


@virtual
async def test_news_that_came_before_the_play_are_caught_up(producer):
    producer.publish(5, left_out=LAYERS, rest_s=0.5)
    for chunk in range(4):
        producer.add(chunk, ("FP16",), 0.5)
    producer.publish(4)
    for chunk in range(5):
        producer.add(chunk, ("Int8",) if chunk < 4 else LAYERS)
    end = await played(producer, 2.0, producer.publish, producer.end)
    assert {*end.result.coverage[:-1]} <= {*LAYERS}
