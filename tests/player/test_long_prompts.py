"""The work per group does not grow with the prompt: 4,096 groups cost 64 times as much as 64.

Work is counted in lines of Python, so what runs in C is not in it: finding the next byte of a set, or a sum of numbers.
"""

from dataclasses import replace
from functools import cache

import pytest

from kvabr.abr import Decision, Ladder, Policy
from kvabr.abr.plugins import policies
from kvabr.client.live_feed import LiveFeed
from kvabr.player.groups import DecodeRates
from kvabr.player.play_policy import new_estimator
from kvabr.player.session import Session
from kvabr.player.session_types import FetchGroup, PlayerConfig, UpgradeGoal
from kvabr.replay.link import Capacity
from kvabr.replay.simulator import Simulator
from kvabr.replay.trace import Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.live import UNKNOWN, GrowingCatalog, LiveCatalog, PublishedFrames
from tests.catalogs import catalog
from tests.counting import about_lines, lines
from tests.memory_transport import MemoryConnection
from tests.player.sessions import bring, of

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
_FEW, _SHARE = 64, 8
"""Of plays of more groups one turn in eight is counted, in blocks over the whole play."""


@cache
def ladder(groups):
    return Ladder(catalog(groups, layered=True, decode=64 / groups))


def play(groups, policy, turn=None, *, share, decode=0.05, prefill=None, mode="hole"):
    """Simulate a play of groups that are the smaller the more there are, in relation to what the link carries."""
    offer = ladder(groups).catalog
    rate = share * offer.fp16_bytes / DEADLINE_S
    cost = None if prefill is None else PrefillCost.from_rate(offer.tokens / (prefill * DEADLINE_S))
    session = Session(
        ladder(groups), DEADLINE_S, policy, new_estimator(policy), cost=cost, mode=mode,
        config=PlayerConfig(decoders=2, stalled_after=0.2), decode_rates=DecodeRates(offer),
    )  # fmt: skip
    link = Capacity(Trace("flat", "test", (0.0,), (rate,), 100.0), 0.0, 0.04, window=1e4 * groups)
    more = {"cost": cost, "decode_scale": decode / 0.004, "decoders": 2}
    if turn is not None:
        actions = session.actions
        session.actions = lambda: (turn(), actions())[1]
    return Simulator(session, offer, link, rtt_s=0.04, **more).run()


@cache
def per_group(groups, policy, link):
    link = LINKS[link]
    if groups <= _FEW:
        play(groups, policy, **link)  # whatever is worked out once is now
        return lines(lambda: play(groups, policy, **link)) / groups
    return about_lines(lambda turn: play(groups, policy, turn, **link), _SHARE) / groups


def beginning(groups):
    """Return the lines that run before a play makes its first requests, nothing being stored."""
    config = PlayerConfig(decoders=2, time_price=1e-3)

    def begin():
        how = {"config": config, "cached_groups": lambda *_: ()}
        Session(ladder(groups), DEADLINE_S, "anytime", new_estimator("anytime"), **how).start()

    begin()
    return lines(begin)


def test_of_the_beginning():
    """Nothing is worked out group by group but records and sums: what a play may need, it makes when it needs it."""
    few, some, many = map(beginning, (64, 1024, 8192))
    assert (some - few) / (1024 - 64) < 20
    assert (many - few) / (8192 - 64) < 20


@pytest.mark.parametrize("link", LINKS)
def test_of_the_default_policy(link):
    few, many = (per_group(groups, "anytime", link) for groups in (64, 1024))
    assert many <= _MORE * few


@pytest.mark.slow
def test_of_half_a_million_tokens():
    few, many = (per_group(groups, "anytime", "middling") for groups in (64, 4096))
    assert many <= _MORE * few


@pytest.mark.parametrize("link", ["middling", "an engine fills holes"])
@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"anytime"}))
def test_of_every_other_policy(policy, link):
    few, many = (per_group(groups, policy, link) for groups in (64, 512))
    assert many <= _MORE * few


KEY = "0123456789abcdef"


def live_catalog(groups):
    offer = ladder(groups).catalog
    tracks = tuple(replace(track, digests=(UNKNOWN,) * groups) for track in offer.tracks)
    return LiveCatalog(replace(offer, tracks=tracks), tuple(group / groups for group in range(groups)), KEY)


def tell(feed, listener, groups, names):
    """Tell of tracks of groups, of which more are to follow."""
    sizes = {name: ladder(feed.growing.catalog.groups).catalog.by_name[name].bytes for name in names}
    for group in groups:
        frames = {name: (sizes[name][group], "0" * 64) for name in names}
        feed._take([PublishedFrames(KEY, group, 0.0, frames, 5.0)], listener.published)


class LivePlay:
    """A play of a cache whose layers are all published after the base of its last group; what it asks for comes."""

    def __init__(self, groups):
        live = live_catalog(groups)
        self.groups, self.now = groups, 0.0
        growing = GrowingCatalog(live, live.catalog)
        self._feed = LiveFeed(MemoryConnection(lambda *_: None), growing, "base")
        self._feed.holds = False
        self.session = Session(
            Ladder(growing.catalog), 60.0, "anytime", new_estimator("anytime"), expected_s=growing.expected_s,
            config=PlayerConfig(time_price=1e-9),
        )  # fmt: skip
        self.session.start()
        for group in range(groups):
            tell(self._feed, self, [group], ["base"])
            for fetch in of(self.session.actions(), FetchGroup):
                bring(self.session, fetch, self.now)

    def published(self, edge, changes):
        self.now += 1e-6
        self.session.published(edge, self.now, changes)

    def add_layers(self):
        """Tell of the layers of all groups but the last, whose layers the play waits for; nothing of them comes."""
        tell(self._feed, self, range(self.groups - 1), ["layer-1", "layer-2"])
        assert not self.session.over


def of_news(groups):
    play = LivePlay(groups)
    return lines(play.add_layers) / groups


async def test_of_news_while_many_groups_wait_for_layers():
    few, many = map(of_news, (64, 256))
    assert many <= 2.0 * few  # a policy keeps what it has worked out only from 64 groups on


class Waits(Policy):
    def decide(self, view):
        return Decision.wait("for better days")


def idling(groups):
    """Return the lines of each event of upgrades after which nothing can be improved but the last group."""
    best = ladder(groups).catalog.tracks[0].name
    goal = UpgradeGoal((*(best,) * (groups - 1), "base"), 60.0, 1e9)
    session = Session(ladder(groups), DEADLINE_S, Waits(), new_estimator("anytime"), goal=goal)
    session.start()
    counted = lines(lambda: [session.timer(1e-4 * number) for number in range(groups)]) / groups
    assert not session.over
    return counted


def test_of_idle_upgrades():
    few, some, many = map(idling, (64, 1024, 8192))
    assert some <= _MORE * few
    assert many <= _MORE * few
