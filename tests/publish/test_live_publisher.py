"""Caches that are published while they are computed: what followers see, what is left, and what goes wrong."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvabr.publish import encoding_threads
from kvabr.publish.encoding_threads import EncodingBudget, encoding_thread, restore_priority, yield_priority
from kvabr.publish.live_publisher import LiveProduction, LivePublisher, LiveSlot
from kvabr.store.files import NameClaim
from kvabr.store.live import LiveFollower
from kvabr.store.local import LocalStore
from kvabr.store.locations import open_asset, open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import StoreError, UsageError
from kvabr.types.live import UNKNOWN, LiveEnd, PublishedFrames
from kvabr.types.naming import LAYERS, chain
from kvabr.types.units import snapshot_ends
from tests import kvdata
from tests.assets import live_folders
from tests.client.classes import HYBRID, SLIDING, WINDOWS, numbers
from tests.store.publishing import outcome_of, publisher
from tests.toymodel import SPEC

TOKENS = list(range(70))
"""Five groups, the last one short."""
PACE = PrefillCost.from_rate(100.0)
LIMIT_S = 300
SNAPSHOTS = replace(HYBRID, classes=(*HYBRID.classes[:2], replace(HYBRID.classes[2], interval=32)))
"""With a snapshot behind every second group."""


def followed(path):
    """Follow the production of a folder of `live_folders`."""
    return LiveFollower(LocalStore(path.parent.parent), path.name)


def cache(spec, tokens=TOKENS):
    if spec is SPEC:
        return (kvdata.related(spec, len(tokens)),)
    found = list(numbers(spec, tokens))
    for index, part in enumerate(spec.parts):
        if ends := snapshot_ends(part, len(tokens)):
            found[index] = torch.cat([numbers(spec, tokens[:end])[index] for end in ends], dim=3)
    return tuple(found)


def run_of(spec, kv, first, last):
    """The part of a cache that a prefill of tokens ``first`` to ``last`` - 1 computes."""
    found = []
    for part, tensor in zip(spec.parts, kv, strict=True):
        if part.only.kind == "state":
            rows = [row for row, end in enumerate(snapshot_ends(part, len(TOKENS))) if first < end <= last]
            begin = rows[0] * part.rows if rows else 0
            found.append(tensor[:, :, :, begin : begin + len(rows) * part.rows])
        else:
            found.append(tensor[:, :, :, first:last])
    return tuple(found)


class Steps:
    """A cache that grows by steps that the test takes, without a thread."""

    def __init__(self, root, spec=SPEC, *, edge=None, **options):
        self.spec, self.kv, self.outcomes = spec, cache(spec), []
        self.made = LivePublisher(publisher(root, spec, **options), edge=edge, clock=lambda: 5.0)
        slot = self.made.publisher.reserve(TOKENS)
        claim = NameClaim(root / slot.chunks[-1])
        assert claim.take()
        self.production = LiveProduction(self.made, slot, claim, [1.0] * 5, self.outcomes.append)

    def hand(self, first, last):
        self.production.append(first, run_of(self.spec, self.kv, first, last))

    def work(self):
        while self.production.has_work():
            self.production.step()
        return self.production.outcome


def published(root, spec=SPEC, **options):
    """The asset that an ordinary publisher makes of the same cache."""
    made = publisher(root, spec, **options)
    assert outcome_of(made, made.reserve(TOKENS), cache(spec)).verdict == "published"
    return open_asset(root / name_of(spec))


def unpacked(asset):
    """The catalog of an asset, however its frames are packed."""
    return replace(asset.catalog, tracks=tuple(replace(track, packs=()) for track in asset.catalog.tracks))


def name_of(spec, tokens=TOKENS):
    return chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)[-1]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_followers_see_each_group_once_it_is_encoded_and_then_an_ordinary_asset(tmp_path, share):
    made = LivePublisher(publisher(tmp_path), share=share, clock=lambda: 5.0)
    over, outcomes = threading.Event(), []
    slot = made.begin(TOKENS, pace=PACE, done=lambda outcome: (outcomes.append(outcome), over.set()))
    assert isinstance(slot, LiveSlot)
    assert (slot.tokens, slot.chunks[-1]) == (70, name_of(SPEC))
    (kv,) = cache(SPEC)
    for first in range(0, 70, 20):
        slot.groups(first, kv[:, :, :, first : first + 20])
    slot.end()
    assert over.wait(LIMIT_S)
    made.close()
    assert (outcomes[0].verdict, outcomes[0].tokens) == ("published", 70)
    asset = open_asset(tmp_path / slot.chunks[-1])
    asset.check_parts()
    assert outcomes[0].bytes == sum(track.total_bytes for track in asset.catalog.tracks)
    assert list(open_store(tmp_path).list()) == [slot.chunks[-1]]
    assert live_folders(tmp_path) == []


def test_the_news_name_what_is_there(tmp_path):
    steps = Steps(tmp_path)
    steps.production.step()
    (path,) = live_folders(tmp_path)
    with nullcontext(followed(path)) as follower:
        live = follower.live
        assert live.seconds == (1.0,) * 5
        assert live.catalog.chunks == steps.production.chunks
        assert {digest for track in live.catalog.tracks for digest in track.digests} == {UNKNOWN}
        steps.hand(0, 10)
        steps.work()
        assert follower.read() == []
        steps.hand(10, 33)
        steps.work()
        news = follower.read()
        assert [(message.group, sorted(message.frames)) for message in news] == [
            (0, ["Int4"]), (1, ["Int4"]), (0, ["FP16", "Int8"]), (1, ["FP16", "Int8"])
        ]  # fmt: skip
        assert [message.rest_s is None for message in news] == [False, False, True, True]
        for message in news:
            for track, (size, digest) in message.frames.items():
                follower.open_frame(size, digest).close()
                assert 0.5 < live.catalog.track(track).bytes[message.group] / size < 2
        steps.hand(33, 70)
        steps.production.end()
        assert steps.work().verdict == "published"
        news += follower.read()
    assert [type(message) for message in news] == [PublishedFrames] * 10 + [LiveEnd]
    assert [message.group for message in news[4:-1]] == [2, 3, 4, 2, 3, 4]
    assert news[-1].reason == ""
    asset = open_asset(tmp_path / name_of(SPEC))
    for message in news[:-1]:
        for name, (size, digest) in message.frames.items():
            track = asset.catalog.track(name)
            assert (track.bytes[message.group], track.digests[message.group]) == (size, digest)


@pytest.mark.parametrize("spec", [SPEC, SLIDING, WINDOWS, HYBRID, SNAPSHOTS], ids=lambda spec: spec.model)
@pytest.mark.parametrize("ends", [(70,), (16, 32, 48, 64, 70), (5, 33, 34, 70), (1, 2, 63, 70)])
def test_the_asset_is_the_same_however_its_cache_comes(tmp_path, spec, ends):
    options = {"tracks": ("FP16", "Int8")}
    steps, first = Steps(tmp_path / "live", spec, **options), 0
    for last in ends:
        steps.hand(first, last)
        steps.work()
        first = last
    steps.production.end()
    assert steps.work().verdict == "published", steps.production.outcome
    assert unpacked(open_asset(tmp_path / "live" / name_of(spec))) == unpacked(
        published(tmp_path / "once", spec, **options)
    )


def test_the_base_of_every_group_comes_before_the_layers_of_any(tmp_path):
    """What follows the last token counts, unless its group was in the last run."""
    side = kvdata.profile(SPEC)
    steps = Steps(tmp_path / "live", profile=side)
    steps.production.step()
    (path,) = live_folders(tmp_path / "live")
    with nullcontext(followed(path)) as follower:
        steps.hand(0, 16)
        steps.production.step()
        steps.hand(16, 32)
        steps.production.step()
        steps.production.step()
        told = [(message.group, len(message.frames)) for message in follower.read()]
        assert told == [(0, 1), (1, 1), (0, 3)]
        steps.hand(32, 64)
        steps.hand(64, 70)
        steps.production.end()
        assert steps.work().verdict == "published"
        *news, end = follower.read()
    assert [(message.group, len(message.frames)) for message in news] == [
        (2, 1), (3, 1), (4, 1), (1, 3), (2, 3), (3, 3), (4, 3)
    ]  # fmt: skip
    assert end.reason == ""
    assert steps.production.outcome.left_out == 1 + 1 + 3 + 3 + 3
    whole = unpacked(published(tmp_path / "once", profile=side))
    assert unpacked(open_asset(tmp_path / "live" / name_of(SPEC))) == whole


def test_what_waits_for_its_layers_is_bounded_and_the_rest_is_begun_anew(tmp_path):
    side = kvdata.profile(SPEC)
    steps = Steps(tmp_path / "live", profile=side)
    steps.hand(0, 70)
    while steps.production._next < 5:
        steps.production.step()
    assert [put_off.encoder is not None for put_off in steps.production._layers] == [True] * 4 + [False]
    steps.production.end()
    assert steps.work().verdict == "published"
    whole = unpacked(published(tmp_path / "once", profile=side))
    assert unpacked(open_asset(tmp_path / "live" / name_of(SPEC))) == whole


def test_a_producer_that_fails_between_a_base_and_its_layers_completes_them(tmp_path):
    side = kvdata.profile(SPEC)
    steps = Steps(tmp_path, profile=side)
    steps.hand(0, 40)
    while steps.production._next < 2:
        steps.production.step()
    (path,) = live_folders(tmp_path)
    steps.production.fail("preempted")
    with nullcontext(followed(path)) as follower:
        assert steps.work().tokens == 32
        assert [type(message) for message in follower.read()] == [PublishedFrames] * 2 + [LiveEnd]
    catalog = open_asset(tmp_path / name_of(SPEC, TOKENS[:32])).catalog
    assert {*LAYERS} < catalog.by_name.keys()


@pytest.mark.parametrize(
    ("reason", "told"), [("the engine was preempted", "preempted"), ("", "ended after 40 of 70 tokens")]
)
def test_a_producer_that_fails_leaves_a_shorter_prompt(tmp_path, reason, told):
    steps = Steps(tmp_path)
    steps.production.step()
    (path,) = live_folders(tmp_path)
    with nullcontext(followed(path)) as follower:
        steps.hand(0, 40)
        if reason:
            steps.production.fail(reason)
        else:
            steps.production.end()
        outcome = steps.work()
        end = follower.read()[-1]
    assert (outcome.verdict, outcome.tokens) == ("failed", 32)
    assert told in outcome.why
    assert end == LiveEnd(end.key, outcome.why)
    asset = open_asset(tmp_path / name_of(SPEC, TOKENS[:32]))
    asset.check_parts()
    assert asset.catalog.tokens == 32
    assert asset.catalog.namespace.prompt == name_of(SPEC, TOKENS[:32])
    assert outcome.bytes == sum(track.total_bytes for track in asset.catalog.tracks)
    assert len(open_store(tmp_path).list()) == 1
    frames = published(tmp_path / "whole").catalog
    assert [track.digests for track in asset.catalog.tracks] == [track.digests[:2] for track in frames.tracks]


@pytest.mark.parametrize(("spec", "left"), [(SPEC, 0), (HYBRID, 0), (SNAPSHOTS, 32)])
def test_what_cannot_be_played_is_not_left(tmp_path, spec, left):
    steps = Steps(tmp_path, spec, tracks=("FP16", "Int8"))
    steps.hand(0, 15 if spec is SPEC else 60)
    steps.production.fail("")
    outcome = steps.work()
    assert (outcome.verdict, outcome.tokens) == ("failed", left)
    assert len(open_store(tmp_path).list()) == (left > 0)


def test_a_shorter_prompt_that_is_there_is_left_alone(tmp_path):
    first = Steps(tmp_path)
    first.hand(0, 40)
    first.production.fail("one")
    first.work()
    before = open_asset(tmp_path / name_of(SPEC, TOKENS[:32])).version
    again = Steps(tmp_path)
    again.hand(0, 40)
    again.production.fail("two")
    assert again.work().tokens == 0
    assert open_asset(tmp_path / name_of(SPEC, TOKENS[:32])).version == before
    assert len(open_store(tmp_path).list()) == 1


def test_a_store_that_refuses_ends_it_with_a_reason(tmp_path, monkeypatch):
    steps, put_new, frames = Steps(tmp_path), LocalStore._put_new, []

    def refuse(self, name, data):
        if name.startswith("g/"):
            frames.append(name)
            if len(frames) == 3:
                raise StoreError("the disk is full")
        return put_new(self, name, data)

    monkeypatch.setattr(LocalStore, "_put_new", refuse)
    steps.production.step()
    (path,) = live_folders(tmp_path)
    with nullcontext(followed(path)) as follower:
        steps.hand(0, 60)
        outcome = steps.work()
        *news, end = follower.read()
    assert (outcome.verdict, outcome.tokens) == ("failed", 32)
    assert outcome.why == "the disk is full"
    assert end.reason == outcome.why[:500]
    assert [message.group for message in news] == [0, 1]
    steps.hand(60, 70)  # the engine goes on
    steps.production.end()
    assert not steps.production.has_work()
    open_asset(tmp_path / name_of(SPEC, TOKENS[:32])).check_parts()


@pytest.mark.parametrize(
    ("first", "piece", "told"),
    [
        (16, (slice(0, 16),), "expected token 0 of 70 next"),
        (0, (slice(0, 16), slice(0, 16)), "must have 1 tensors, one per layer class, got 2"),
        (0, (slice(0, 16), slice(0, 1)), "cannot encode"),
    ],
)
def test_what_does_not_fit_is_told_by_the_outcome(tmp_path, first, piece, told):
    steps = Steps(tmp_path)
    (kv,) = steps.kv
    given = (kv[:, :, :, piece[0]],) * len(piece) if told != "cannot encode" else (kv[:, :, piece[1], piece[0]],)
    steps.production.append(first, given)
    outcome = steps.work()
    assert outcome.verdict == "failed"
    assert told in outcome.why
    assert open_store(tmp_path).list() == {}


OTHER = """
import sys
from pathlib import Path
from tests.publish.test_live_publisher import PACE, TOKENS, LivePublisher, publisher
made = LivePublisher(publisher(Path(sys.argv[1])))
slot = made.begin(TOKENS, pace=PACE)
print(slot if isinstance(slot, str) else "begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_two_producers_of_one_prompt_in_two_processes(tmp_path):
    command = [sys.executable, "-c", OTHER, tmp_path]
    made = LivePublisher(publisher(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603
        assert process.stdout.readline() == b"begun\n"
        assert made.begin(TOKENS, pace=PACE) == "known"
        process.kill()
        process.wait()
    slot = made.begin(TOKENS, pace=PACE)
    assert isinstance(slot, LiveSlot)
    slot.groups(0, cache(SPEC))
    slot.end()
    made.close()
    open_asset(tmp_path / name_of(SPEC)).check_parts()


def test_closing_ends_what_still_grows(tmp_path):
    made, outcomes = LivePublisher(publisher(tmp_path)), []
    slot = made.begin(TOKENS, pace=PACE, done=outcomes.append)
    slot.groups(0, run_of(SPEC, cache(SPEC), 0, 40))
    made.close()
    assert (outcomes[0].verdict, outcomes[0].tokens) == ("failed", 32)
    assert "closed" in outcomes[0].why
    slot.groups(40, run_of(SPEC, cache(SPEC), 40, 70))
    slot.end()
    assert len(outcomes) == 1


def test_an_end_that_is_given_up_leaves_what_was_offered(tmp_path):
    steps = Steps(tmp_path, edge=("Int4",))
    steps.hand(0, 70)
    steps.production.end()
    while len(list((tmp_path / "g").glob("*"))) <= 5:  # those of Int4
        steps.production.step()
    steps.production.fail("interrupted")
    outcome = steps.work()
    assert (outcome.verdict, outcome.why, outcome.tokens) == ("failed", "interrupted", 70)
    catalog = open_asset(tmp_path / name_of(SPEC)).catalog
    assert [track.name for track in catalog.tracks] == ["Int4"]


@pytest.mark.parametrize("pace", [[1.0] * 4, [5.0, 4.0, 6.0, 7.0, 8.0], [-1.0, 0, 0, 0, 0], [0, 0, 0, 0, float("inf")]])
def test_a_pace_that_is_none(tmp_path, pace):
    made = LivePublisher(publisher(tmp_path, queue=1))
    with pytest.raises(UsageError, match="5 groups"):
        made.begin(TOKENS, pace=pace)
    slot = made.begin(TOKENS, pace=[0.0, 1.0, 1.0, 2.0, 3.0])
    assert isinstance(slot, LiveSlot)
    made.close()


def test_tracks_at_the_edge_that_cannot_be(tmp_path):
    side = kvdata.profile(SPEC)
    with pytest.raises(UsageError, match="refines AC-L0"):
        LivePublisher(publisher(tmp_path, profile=side), edge=["AC-L1"])
    with pytest.raises(UsageError, match="is not published"):
        LivePublisher(publisher(tmp_path), edge=["BF16"])


@pytest.mark.parametrize(("cpu_s", "wall_s", "taken_s"), [(0.03, 0.3, 0.03), (0.03, 0.04, 0.01), (0.03, 0.02, 0.0)])
def test_a_step_takes_its_processor_time_at_most_and_as_much_as_it_waited(cpu_s, wall_s, taken_s):
    budget = EncodingBudget(0.1)
    budget.spend(cpu_s, wall_s)
    assert budget.allows(20 * taken_s + 1e-9)
    assert not taken_s or not budget.allows(20 * taken_s - 1e-6)


def test_of_no_share_nothing_is_taken_but_the_first_step_shows():
    budget = EncodingBudget(0.0)
    assert budget.allows(0.0)
    budget.spend(0.01, 1.0)
    assert not budget.allows(1e9)


def test_the_threads_leave_the_cores_to_the_engine():
    before = torch.get_num_threads()
    for patient in (False, True):
        thread = encoding_thread(patient=patient)
        try:
            assert thread.submit(torch.get_num_threads).result() == 1
        finally:
            thread.shutdown()
    assert torch.get_num_threads() == before


def test_a_thread_that_is_calm_can_be_hurried():
    found, go_on = [], [threading.Event(), threading.Event()]

    def work():
        yield_priority()
        found.append((threading.get_native_id(), os.sched_getscheduler(0)))
        go_on[0].set()
        go_on[1].wait()

    thread = threading.Thread(target=work)
    thread.start()
    go_on[0].wait()
    ((number, policy),) = found
    restore_priority(number)
    after = os.sched_getscheduler(number)
    go_on[1].set()
    thread.join()
    restore_priority(number)  # it has ended
    assert policy == (os.SCHED_IDLE if encoding_threads._can_leave_idle_priority() else os.sched_getscheduler(0))
    assert after != os.SCHED_IDLE or os.sched_getscheduler(0) == os.SCHED_IDLE


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none(tmp_path, share):
    with pytest.raises(UsageError, match=r"0 to 1, got"):
        LivePublisher(publisher(tmp_path), share=share)
