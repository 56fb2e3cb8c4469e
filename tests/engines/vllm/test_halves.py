"""The two halves of the connector without vLLM: a real origin over QUIC, blocks in plain tensors."""

import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from kvabr.data import default_catalog
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.settings import INSIDE, TroubleLog
from kvabr.engines.vllm import plays
from kvabr.engines.vllm.config import VllmSettings
from kvabr.engines.vllm.plays import leave_client, take_client
from kvabr.publish.publisher import Publisher, with_heads
from kvabr.store.locations import open_asset, open_store
from kvabr.types.naming import chain
from tests.chaos.nodes import free_port
from tests.client.served import LIMIT_S, Served
from tests.engines.paging import paged_blocks
from tests.engines.served import assets_of, harmed
from tests.engines.vllm.halves import BLOCK, LONGEST, TOKENS, Bench, exact, near, request
from tests.toymodel import SPEC, ToyModel, toy_asset

pytestmark = pytest.mark.process


def test_a_hit_is_played_into_blocks(bench):
    numbers = [30, 2, 17, 5, 9, 11, 0, 4, 25]
    count, failed = bench.load(request(), blocks=numbers)
    assert count == 64  # whole blocks, and one token at least is left to compute
    assert not failed
    assert near(bench.blocks(numbers[:8]), exact(0, 64))
    counted = bench.worker.counts.take()
    assert counted["tokens_loaded"] == 64
    assert bench.scheduler.counts.take() == {"lookups_hit": 1}


@pytest.mark.parametrize("tail", [0, 40])
def test_ranks_fetch_their_own_heads_where_they_are_published_so(tmp_path, tail):
    kv = ToyModel().prefill(TOKENS)
    for heads in (range(1), range(1, 2)):
        made = Publisher(tmp_path / "assets", with_heads(SPEC, heads), prior=default_catalog(), tracks=["FP16"])
        made.reserve(TOKENS).fill(kv[:, :, heads.start : heads.stop], lambda _: None)
        made.close()
    served, policy = Served(tmp_path / "assets", tmp_path), "fixed:FP16"
    if tail:
        (tmp_path / "longest.py").write_text(LONGEST)
        policy = f"{tmp_path / 'longest.py'}:Longest"
    both = (range(1), range(1, 2))
    first, second = (Bench(served, heads=heads, policy=policy, tail=tail) for heads in both)
    first.scheduler._model = replace(first.model, ranks=2)
    tokens = 32 if tail else 64
    try:
        assert first.load(request()) == (tokens, set())
        assert near(first.blocks(list(range(tokens // BLOCK))), exact(0, tokens)[:, :, :1])
        # vLLM has one scheduler, which looks up for its own rank, and tells all ranks what it found.
        asked, numbers = request("both"), list(range(20))
        first.scheduler._promises._ranks = 2
        end_s = time.monotonic() + LIMIT_S
        placed = []
        while (count := first.scheduler.matched(asked, 0)[0]) is None:
            step = first.scheduler.step({}, None)
            for bench in (first, second):
                bench.worker.begin(step)
                bench.worker.collect()
                placed += bench.worker.placed()
            if len(placed) == 2:  # as vLLM adds up what all workers report
                for play in placed:
                    first.scheduler.placed(play)
            assert time.monotonic() < end_s
        first.scheduler.allocated(asked, [numbers], count)
        step = first.scheduler.step({}, None)
        for bench in (first, second):
            bench.worker.begin(step)
        assert second.steps() == (set(), {"both"}, set())
        assert near(second.blocks(list(range(tokens // BLOCK))), exact(0, tokens)[:, :, 1:2])
        assert second.worker.counts.take()["bytes_fetched"] < 1.1 * kv[:, :, :1, :tokens].numel() * 2
    finally:
        first.close()
        second.close()
        served.close()


def test_nothing_is_played_of(bench):
    other = [token + 1 for token in TOKENS]
    for asked, why in [
        (request(tokens=TOKENS[:16]), "lookups_short"),
        (request(tokens=other), "lookups_miss"),
        (request(cache_salt="mine"), "lookups_miss"),
        (request(tokens=None), "lookups_unfit"),
    ]:
        asked.request_id = why + str(id(asked))
        assert bench.matched(asked) == (0, False)
        assert bench.scheduler.counts.take() == {why: 1}
    assert bench.matched(request("no", kv_transfer_params={"play": False})) == (0, False)
    assert bench.matched(request("all is there"), 64) == (0, False)


def test_an_asset_of_another_dtype_is_played(tmp_path):
    """The publisher's dtype is part of an asset's name, and no obstacle."""
    served_spec = SPEC.changed(dtype="bfloat16")
    made = Publisher(tmp_path / "assets", served_spec, prior=default_catalog(), tracks=["FP16"])
    made.reserve(TOKENS).fill(ToyModel().prefill(TOKENS), lambda _: None)
    made.close()
    with closing(Served(tmp_path / "assets", tmp_path)) as served, closing(Bench(served)) as bench:
        bench.load(request())
        assert near(bench.blocks(list(range(8))), exact(0, 64))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"play": "no"}, "play must be true or false: 'no' counts as false"),
        ({"play": 0}, "play must be true or false: '0' counts as false"),
        ({"deadline": 2.0}, "unknown key: 'deadline'; did you mean 'deadline_s'?"),
        (
            {"zzz": None},
            "unknown key: 'zzz'; known keys: back, deadline_s, keep_s, live, max_loss, play, publish",
        ),
        ({"deadline_s": 0}, "deadline_s must be more than 0 and at most 300"),
        ({"deadline_s": float("nan")}, "deadline_s must be more than 0 and at most 300"),
        ({"deadline_s": 1e9}, "deadline_s must be more than 0 and at most 300"),
        ({"deadline_s": True}, "deadline_s must be more than 0 and at most 300"),
        ({"deadline_s": "1"}, "deadline_s must be more than 0 and at most 300"),
        ({"max_loss": -1.0}, "max_loss must be a number of 0 or more"),
        ({"max_loss": float("nan")}, "max_loss must be a number of 0 or more"),
        ({"max_loss": True}, "max_loss must be a number of 0 or more"),
        ({"max_loss": "0.001"}, "max_loss must be a number of 0 or more"),
    ],
)
def test_parameters_that_make_no_sense_are_told_once(bench, caplog, given, says):
    with caplog.at_level("WARNING"):
        played = [bench.matched(request(name, kv_transfer_params=given))[0] for name in ("a", "b")]
    assert played == ([0, 0] if given.keys() & {"play", "max_loss"} else [64, 64])
    (told,) = [each for each in caplog.messages if "kv_transfer_params" in each]
    assert says in told
    assert bench.scheduler.counts.take()["params_ignored"] == 2


def test_of_many_parameters_the_first_are_looked_at(bench):
    bench.matched(request(kv_transfer_params={f"key {number}": 1 for number in range(10_000)}))
    assert bench.scheduler.counts.take()["params_ignored"] < 100


def test_parameters_of_others_are_theirs(bench, caplog):
    given = {"do_remote_prefill": False, "remote_host": "there", "play": None, "kvabr": {"loss": 0.0}}
    with caplog.at_level("WARNING"):
        assert bench.matched(request(kv_transfer_params=given))[0] == 64
    assert "kv_transfer_params" not in caplog.text


@pytest.mark.parametrize(
    ("harm", "counts", "computed"), [("corrupt", "groups_damaged", 32), ("missing", "groups_failed", 64)]
)
def test_what_a_group_failed_of_is_counted_and_told(tmp_path, harm, counts, computed, caplog):
    asset = toy_asset(tmp_path / "assets" / "one", ("FP16",))
    served = Served(tmp_path / "assets", tmp_path)
    bench = Bench(served)
    try:
        with caplog.at_level("WARNING"), harmed(asset, 2, "FP16", harm):
            bench.load(request())
        assert bench.worker.counts.take()[counts] >= 1
        end_s = time.monotonic() + LIMIT_S  # the play is reported before it is logged
        while f"a play ended early: {computed} tokens are computed: " not in caplog.text:
            assert time.monotonic() < end_s
            time.sleep(0.005)
        assert "last fault: " in caplog.text
    finally:
        bench.close()
        served.close()


def test_the_deadlines_of_one_client_do_not_stop_the_lookups_of_others(bench):
    for number in range(6):
        asked = request(f"short {number}", kv_transfer_params={"deadline_s": 1e-6})
        assert bench.matched(asked) == (0, False)
    assert bench.load(request())[0] == 64
    counted = bench.scheduler.counts.take()
    assert counted["lookups_failed"] == 6
    assert "lookups_paused" not in counted
    assert bench.scheduler._rtt_s > 1e-6  # now that it is known, nobody is asked in vain
    assert bench.matched(request("hopeless", kv_transfer_params={"deadline_s": 1e-6})) == (0, False)
    assert bench.scheduler.counts.take() == {"lookups_hopeless": 1}


@pytest.mark.parametrize(
    ("rate", "within_s"),
    [(1e6, 7.5), (10.0, 3.0), (7.5, 2.5), (6.9, 2.5), (70 / 15, 5.0), (1.0, 7.5)],
    ids=["most of it", "while computing is in time", "at least a quarter", "just late", "late", "far too late"],
)
def test_a_lookup_waits_as_long_as_computing_would_be_in_time(served, rate, within_s):
    with closing(Bench(served, deadline_s=10.0, prefill_rate=rate)) as bench:
        bench.scheduler.arrived(request("waits"))
        assert bench.scheduler._lookups["waits"].within_s == pytest.approx(within_s, abs=1e-3)


@pytest.mark.parametrize("fault", ["closed port", "fingerprint"])
def test_an_origin_that_cannot_be_reached_is_named_before_any_request(served, fault, caplog, monkeypatch):
    monkeypatch.setattr(plays, "_trouble", TroubleLog(plays._log))  # not the one that has told the other fault
    url = f"moqt://127.0.0.1:{free_port()}/" if fault == "closed port" else served.url
    settings = VllmSettings(url=url, fingerprint="ab" * 32, player=INSIDE)
    take_client(settings)
    try:
        end_s = time.monotonic() + LIMIT_S
        while "the origin cannot be reached: " not in caplog.text:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        leave_client(settings)
    assert ("no answer within" if fault == "closed port" else "fingerprint") in caplog.text


def test_a_round_trip_that_took_long_once_is_measured_again(bench):
    bench.client.begin(lambda client: client.round_trip()).result(LIMIT_S)
    bench.scheduler._rtt_s = 2 * LIMIT_S
    assert bench.scheduler.matched(request("hopeless"), 0) == (0, False)
    assert bench.scheduler.counts.take() == {"lookups_hopeless": 1}
    end_s = time.monotonic() + LIMIT_S
    while bench.scheduler._rtt_s > LIMIT_S:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert bench.load(request("later"))[0] == 64


def test_an_origin_that_is_gone_costs_one_request_its_lookup(tmp_path):
    served = Served(tmp_path, tmp_path)
    bench = Bench(served, deadline_s=2.0)
    served.kill()
    try:
        assert bench.matched(request("a")) == (0, False)
        assert bench.scheduler.matched(request("b"), 0) == (0, False)  # at once
        counted = bench.scheduler.counts.take()
        assert counted == {"lookups_failed": 1, "lookups_paused": 1}
    finally:
        bench.close()
        served.close()


def test_after_a_reset_nothing_old_is_played_and_what_is_new_is_published(tmp_path):
    """vLLM calls ``reset_cache()`` when its weights may have changed."""
    made = Publisher(tmp_path / "assets", SPEC, prior=default_catalog(), tracks=["FP16"])
    made.reserve(TOKENS).fill(ToyModel().prefill(TOKENS), lambda _: None)
    made.close()
    with (
        closing(Served(tmp_path / "assets", tmp_path)) as served,
        closing(Bench(served, publish=tmp_path / "assets")) as bench,
        closing(Bench(served)) as other,
    ):
        old = request("old")
        assert bench.matched(old) == (64, True)  # played, and not used yet
        assert bench.scheduler.reset() is True
        assert bench.matched(old) == (0, False)  # looked up again, under its new name
        assert not bench.scheduler.finished(old, [list(range(9))])  # it may have begun before
        assert bench.scheduler.counts.take()["publish_skipped_old"] == 1
        new = request("new")
        assert bench.matched(new) == (0, False)
        bench.prefilled()
        assert bench.scheduler.finished(new, [list(range(9))])
        assert bench.steps()[0] == {"new"}
        bench.published()
        assert len(assets_of(tmp_path / "assets")) == 2
        assert other.matched(request("other")) == (64, True)  # of an engine with the old weights


def test_a_reset_while_caches_are_loaded_into_blocks_says_so(served):
    with closing(Bench(served)) as bench:
        asked = request()
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, [list(range(20))], count)
        assert bench.scheduler.reset() is False


def test_nothing_is_written_while_the_engine_sleeps(served):
    with closing(Bench(served)) as bench:
        asked = request("before")
        count, _ = bench.matched(asked)  # played, or promised, but in no block yet
        for _ in range(2):
            bench.worker.sleep()
        bench.scheduler.allocated(asked, [list(range(20))], count)
        bench.steps()
        assert all(bool(cache.isnan().all()) for cache in bench.caches)
        for _ in range(2):
            bench.worker.wake()
        assert bench.load(request("after"))[0] == 64


def test_a_copy_that_begins_while_the_engine_falls_asleep_is_waited_for(served, monkeypatch):
    bench, over = Bench(served), threading.Event()
    try:
        wait = bench.worker._copier.wait

        def late():
            monkeypatch.setattr(bench.worker._copier, "wait", wait)
            bench.worker._loader.submit(lambda: (time.sleep(0.2), over.set()))
            wait()

        monkeypatch.setattr(bench.worker._copier, "wait", late)
        bench.worker.sleep()
        assert over.is_set()
    finally:
        bench.close()


def test_an_aborted_load_ends_its_play(served):
    with closing(Bench(served)) as bench:
        asked = request()
        count, _ = bench.matched(asked)
        bench.scheduler.allocated(asked, [list(range(20))], count)
        bench.worker.begin(bench.scheduler.step({}, None))
        assert not bench.scheduler.finished(asked, [[]])
        received = set()
        end_s = time.monotonic() + LIMIT_S
        while not received:
            _, received = bench.worker.collect()
            assert time.monotonic() < end_s
        assert received == {"r"}
        assert bench.worker._plays == {}


def test_what_was_computed_is_published_and_played(served, assets):
    bench = Bench(served, assets)
    tokens = [(token * 7 + 3) % 97 for token in TOKENS]
    kv = ToyModel().prefill(tokens)
    numbers = list(range(3, 12))
    try:
        paged_blocks(bench.caches, numbers[:8], BlockLayout.TRANSPOSED).write(kv[:, :, :, :64])
        asked = request("p", tokens)
        assert bench.scheduler.finished(asked, [numbers])
        sent, _, _ = bench.steps()
        assert sent == {"p"}
        name = chain(tokens[:64], model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=16)[-1]
        bench.published()
        assert open_store(assets).has(name)
        assert bench.worker.counts.take()["published"] == 1
        assert bench.scheduler.finished(asked, [numbers])
        bench.steps()
        assert bench.worker.counts.take() == {"publish_dropped_known": 1}
    finally:
        bench.close()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prefill_that_is_not_finite_is_counted_and_not_published(served, tmp_path, live, value, caplog):
    bench = Bench(served, tmp_path / "out", publish_live=live)
    kv = ToyModel().prefill(TOKENS[:64])
    kv[1, 0, 0, 3, 2] = value
    try:
        paged_blocks(bench.caches, list(range(8)), BlockLayout.TRANSPOSED).write(kv)
        assert bench.scheduler.finished(request(), [list(range(9))])
        bench.steps()
        bench.published()
        counted = bench.worker.counts.take()
        assert counted["publish_dropped_not_finite"] == 1
        assert not {"published", "publish_dropped_failed"} & counted.keys()
        assert not assets_of(tmp_path / "out")
        assert caplog.text.count("keys of layer 1 are NaN or infinite") == 1
    finally:
        bench.close()


def test_of_a_session_that_goes_on_what_it_came_with_is_published(served, tmp_path):
    with closing(Bench(served, tmp_path / "out")) as bench:
        asked = request("session", tokens=TOKENS[:40][::-1])
        assert bench.matched(asked) == (0, False)
        bench.prefilled()
        asked.prompt_token_ids += TOKENS[:30]  # as vLLM adds what comes in a stream
        asked.num_prompt_tokens = asked.num_computed_tokens = 70
        assert bench.scheduler.finished(asked, [list(range(9))])
        bench.steps()
        bench.published()
        assert open_asset(tmp_path / "out").catalog.tokens == 32


@pytest.mark.parametrize("heads", [None, range(1, 2)])
def test_what_was_computed_behind_a_lossy_cache_is_not_published(served, tmp_path, heads):
    with closing(Bench(served, tmp_path / "out", heads=heads, policy="fixed:Int4")) as bench:
        bench.load(request())
        assert bench.scheduler.finished(request(), [list(range(20))])
        bench.steps()
        counted = bench.worker.counts.take()
        assert counted["publish_dropped_lossy"] == 1
        assert not assets_of(tmp_path / "out")


@pytest.mark.parametrize(("computed", "shared", "lossy"), [(0, 8, 1), (0, 7, 0), (32, 40, 1), (32, 39, 0)])
def test_nor_is_what_shares_a_block_of_a_lossy_group(served, tmp_path, computed, shared, lossy):
    """vLLM gives a prompt all blocks that it shares with another; a group has two of them."""
    with closing(Bench(served, tmp_path / "out", policy="fixed:Int4")) as bench:
        bench.load(request(), computed)
        other = [*TOKENS[:shared], *(token + 1 for token in TOKENS[shared:])]
        assert bench.scheduler.finished(request("other", other), [list(range(20))])
        bench.steps()
        assert bench.worker.counts.take().get("publish_dropped_lossy", 0) == lossy


def test_what_cannot_begin_is_computed(bench):
    asked = request()
    bench.worker._settings = bench.options.model_copy(update={"prefill_rate": "fast"})  # not a number
    count, _ = bench.matched(asked)
    assert count == 0
    assert bench.worker.counts.take()["plays_failed"] == 1
