"""Which blocks of lossy plays vLLM's prefix cache may keep. Needs no vLLM, no network and no clock."""

import math
from contextlib import closing

import pytest

from kvabr.engines.vllm.block_losses import BlockLosses
from kvabr.engines.vllm.stats import ConnectorCounts
from tests.engines.vllm.halves import TOKENS, Bench, lora, request

BLOCK, LIMIT = 8, 0.001


def hashed(asked):
    """A request with vLLM's hashes of its blocks."""
    tokens = asked.prompt_token_ids
    asked.block_hashes = [hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    return asked


class Engine:
    """One table of blocks: a request's are numbered from a hundred of its own."""

    def __init__(self):
        self.counts, self.evicted, self.tables = ConnectorCounts(), set(), {}
        self.kept = BlockLosses(LIMIT, (BLOCK,), self.evicted.update, self.counts)

    def load(self, name, loss, *, blocks, first=0, last=64, deadline_s=2.0, tokens=TOKENS, **more):
        self.tables[name] = [list(blocks)]
        asked = hashed(request(name, tokens, **more))
        self.kept.begin(asked, deadline_s, first, last - first, self.tables[name])
        self.kept.lost(name, loss, loss)
        return asked

    def shares(self, name, computed, deadline_s=2.0, tokens=TOKENS, most=math.inf, **more):
        return self.kept.may_share(request(name, tokens, **more), computed, deadline_s, most)

    def loss_before(self, name, computed, tokens=TOKENS):
        return self.kept.loss_before(hashed(request(name, tokens)), computed)

    def over(self, name):
        return self.kept.over(name, self.tables[name])


@pytest.fixture
def engine():
    return Engine()


def test_a_play_within_the_limit_stays(engine):
    engine.load("a", LIMIT, blocks=range(100, 109))
    assert engine.shares("b", 64, math.inf)
    assert engine.over("a") == {"tokens_loaded": 64, "loss": LIMIT, "shared_loss": 0.0}
    assert engine.evicted == set()
    assert engine.counts.take() == {"request_loss": [LIMIT]}


def test_what_turns_of_a_conversation_leave_adds_up(engine):
    """Each turn alone is within the limit, but the third exceeds it together with the first two."""
    for turn, (first, kept) in enumerate([(0, True), (16, True), (32, False)]):
        name, last = f"turn {turn}", first + 16
        engine.load(name, 0.4 * LIMIT, blocks=range(100, 104 + turn), first=first, last=last)
        served = engine.over(name)
        assert served["loss"] == pytest.approx((turn + 1) * 0.4 * LIMIT)
        assert bool(engine.evicted) != kept
    engine.evicted.clear()
    engine.load("other", 0.4 * LIMIT, blocks=range(100, 109), first=16, tokens=tuple(reversed(TOKENS)))
    assert engine.over("other")["loss"] == pytest.approx(0.4 * LIMIT)
    assert not engine.evicted


def test_a_play_beyond_it_leaves_nothing_behind_its_request(engine):
    engine.load("a", 0.1, blocks=range(100, 109), first=16)
    engine.tables["a"][0].append(109)  # what it generated
    assert engine.over("a") == {"tokens_loaded": 48, "loss": 0.1, "shared_loss": 0.0}
    assert engine.evicted == set(range(102, 110))  # the first two were there before
    assert engine.counts.take() == {"plays_not_kept": 1, "request_loss": [0.1]}


def test_blocks_that_a_preemption_took_away_are_not_kept_either(engine):
    engine.load("a", 0.1, blocks=range(100, 109))
    engine.kept.step({"a": 6}, engine.tables.get)
    engine.tables["a"][0].append(109)
    engine.kept.step({"a": 2}, engine.tables.get)
    engine.tables["a"] = [[200, 201, 202]]
    engine.over("a")
    assert engine.evicted == {*range(100, 110), 200, 201, 202}


def test_who_would_be_played_as_well_shares_and_is_told(engine):
    engine.load("a", 0.1, blocks=range(100, 109))
    assert engine.shares("b", 64)
    engine.tables["b"] = [[*range(100, 108), 300]]
    assert engine.shares("c", 64, 1.0)  # vLLM may still have them when the first has ended
    engine.over("a")
    engine.kept.step({"b": 5}, engine.tables.get)
    engine.evicted.clear()
    assert engine.over("b") == {"tokens_loaded": 0, "loss": 0.1, "shared_loss": 0.1}
    assert engine.evicted == {*range(100, 108), 300}  # what it computed behind them is not exact
    assert engine.counts.take()["requests_shared_lossy"] == 1


@pytest.mark.parametrize("wanted", [{"deadline_s": 2.5}, {"deadline_s": math.inf}, {"most": 0.09}])
def test_who_wants_better_does_not_get_them(engine, wanted):
    engine.load("a", 0.1, blocks=range(100, 109))
    assert not engine.shares("b", 64, **wanted)
    assert engine.evicted == set(range(100, 109))
    assert engine.shares("b", 64, **wanted)  # somebody has computed the same tokens since
    engine.tables["b"] = [[]]
    assert engine.over("b") is None
    assert engine.counts.take() == {"plays_not_kept": 1, "requests_spared": 1}


def test_the_loss_of_tokens_that_a_request_may_use_is_known_while_they_are_kept_and_shared(engine):
    engine.load("a", LIMIT, blocks=range(100, 109), first=16)
    for _ in range(2):
        assert [engine.loss_before("b", computed) for computed in (0, 16, 24, 64)] == [0.0, 0.0, LIMIT, LIMIT]
        if "a" in engine.kept._served:
            engine.over("a")  # its blocks stay
    assert engine.loss_before("b", 64, tuple(reversed(TOKENS))) == 0.0
    engine.load("c", 0.1, blocks=range(200, 209))
    assert engine.shares("d", 64, most=0.1)
    assert engine.loss_before("d", 64) == pytest.approx(0.1 + LIMIT)


def test_what_is_computed_behind_blocks_that_were_taken_out_is_not_shared_either(engine):
    engine.load("a", 0.1, blocks=range(100, 108))
    assert not engine.shares("b", 64, math.inf)
    engine.tables["a"][0] += [108, 109]
    engine.kept.step({"a": 10}, engine.tables.get)
    assert engine.evicted == set(range(100, 110))


def test_a_request_that_comes_back_with_more_than_its_prompt_shares_by_what_it_has_said(engine):
    engine.load("a", 0.1, blocks=range(100, 109), first=40)
    said = [*TOKENS[:42], 7, 7, 7, 7, 7, 7]
    assert engine.shares("b", 48, tokens=TOKENS[:42], all_token_ids=said)
    engine.tables["b"] = [[]]
    assert engine.over("b") is None
    assert engine.shares("b", 48, tokens=TOKENS[:42], all_token_ids=TOKENS[:50])
    assert engine.shares("c", 64)
    assert engine.over("b")["shared_loss"] == 0.1


def test_others_have_nothing_of_them(engine):
    engine.load("a", 0.1, blocks=range(100, 109), first=16, cache_salt="mine")
    other = [*TOKENS[:20], 7, *TOKENS[21:]]
    adapted = {"lora_request": lora("/adapter"), "cache_salt": "mine"}
    for computed, more in [
        (64, {}),
        (16, {"cache_salt": "mine"}),
        (64, {"tokens": other, "cache_salt": "mine"}),
        (64, adapted),
    ]:
        assert engine.shares("b", computed, math.inf, **more)
    assert engine.evicted == set()


def test_a_request_that_is_preempted_has_shared_what_it_had(engine):
    engine.load("a", 0.1, blocks=range(100, 109))
    assert engine.shares("b", 64)
    engine.tables["b"] = [[*range(100, 108), 300]]
    engine.kept.step({"b": 6}, engine.tables.get)
    engine.over("a")
    assert engine.shares("b", 0)
    assert engine.over("b") == {"tokens_loaded": 0, "loss": 0.1, "shared_loss": 0.1}


def test_vllm_has_nothing_left_of_what_a_request_shared_while_it_waited(served):
    with closing(Bench(served, policy="fixed:Int4")) as bench:
        first, second = request("a"), request("b")
        bench.load(first)
        bench.scheduler.matched(second, 64)
        bench.scheduler.served(first, [list(range(9))])
        bench.scheduler.finished(first, [list(range(9))])
        assert bench.load(second, blocks=range(20, 40)) == (64, set())
        assert bench.scheduler.served(second, [list(range(20, 29))])["shared_loss"] == 0.0
        assert "requests_shared_lossy" not in bench.scheduler.counts.take()
