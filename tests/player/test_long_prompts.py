"""The work per group does not grow with the prompt: 8,192 groups cost 128 times as much as 64.

Work is counted in lines of Python, so what runs in C is not in it: finding the next byte of a set, or a sum of numbers.
"""

from functools import cache

import pytest

from kvabr.abr import Ladder
from kvabr.abr.plugins import policies
from kvabr.player.builder import new_estimator, new_session
from kvabr.player.decode_rates import DecodeRates
from kvabr.player.session_types import GroupRecord, GroupRecords, PlayerConfig
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from tests.catalogs import catalog
from tests.counting import lines

DEADLINE_S = 4.0
LINKS = {
    "slow": {"share": 0.05},
    "middling": {"share": 0.4},
    "fast": {"share": 3.0},
    "slow decoders": {"share": 0.4, "decode": 1.5},
    "an engine fills holes": {"share": 0.03, "prefill": 0.7},
    "an engine computes tails": {"share": 0.03, "prefill": 0.7, "mode": "suffix"},
    "a slow engine": {"share": 0.3, "prefill": 2.5},
}
POLICIES = sorted("fixed:FP16" if name == "fixed" else name for name in policies() if "oracle" not in name)
_MORE = 1.6
"""Lines per group may grow by this factor: heaps deepen, and a play of few groups is over before it has to plan."""


@cache
def ladder(groups):
    return Ladder(catalog(groups, layered=True, decode=64 / groups))


def play(groups, policy, *, share, decode=0.05, prefill=None, mode="hole"):
    """Simulate a play of groups that are the smaller the more there are, in relation to what the link carries."""
    offer = ladder(groups).catalog
    rate = share * offer.fp16_bytes / DEADLINE_S
    cost = None if prefill is None else PrefillCost.from_rate(offer.tokens / (prefill * DEADLINE_S))
    session = new_session(
        ladder(groups), DEADLINE_S, policy, new_estimator(policy), cost=cost, mode=mode,
        config=PlayerConfig(decoders=2, stalled_after=0.2), decode_rates=DecodeRates(offer),
    )  # fmt: skip
    link = Capacity(Trace("flat", "test", (0.0,), (rate,), 100.0), 0.0, 0.04, window=1e4 * groups)
    more = {"cost": cost, "decode_scale": decode / 0.004, "decoders": 2}
    return Simulator(session, offer, link, rtt_s=0.04, **more).run()


def per_group(groups, policy, **link):
    play(groups, policy, **link)  # whatever is worked out once is now
    return lines(lambda: play(groups, policy, **link)) / groups


def beginning(groups):
    """Return the lines that run before a play makes its first requests, nothing being stored."""
    config = PlayerConfig(decoders=2, time_price=1e-3)

    def begin():
        how = {"config": config, "cached_groups": lambda *_: ()}
        new_session(ladder(groups), DEADLINE_S, "anytime", new_estimator("anytime"), **how).start()

    begin()
    return lines(begin)


def test_of_the_beginning():
    """Nothing is worked out group by group but records and sums: what a play may need, it makes when it needs it."""
    few, some, many = map(beginning, (64, 1024, 8192))
    assert (some - few) / (1024 - 64) < 20
    assert (many - few) / (8192 - 64) < 20


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_of_the_default_policy(link):
    few, many = (per_group(groups, "anytime", **link) for groups in (64, 1024))
    assert many <= _MORE * few


@pytest.mark.slow
@pytest.mark.parametrize("link", ["middling", "an engine fills holes"])
def test_of_a_million_tokens(link):
    few, many = (per_group(groups, "anytime", **LINKS[link]) for groups in (64, 8192))
    assert many <= _MORE * few


@pytest.mark.parametrize("link", ["middling", "an engine fills holes"])
@pytest.mark.parametrize("policy", POLICIES)
def test_of_every_policy(policy, link):
    few, many = (per_group(groups, policy, **LINKS[link]) for groups in (64, 512))
    assert many <= _MORE * few


def test_records_are_made_for_groups_that_come_into_place():
    records = GroupRecords(5)
    records[3].ready_s = 1.0
    assert (len(records), records.missing, records[-1].group) == (5, (0, 1, 2, 4), 4)
    assert [record.group for record in records[1:3]] == [1, 2]
    assert list(records) == records == [GroupRecord(0), GroupRecord(1), GroupRecord(2), records[3], GroupRecord(4)]
    with pytest.raises(IndexError):
        records[5]
