"""A play whose groups come from several sources: each its own connection and its own estimate."""

from __future__ import annotations

import pytest

from kvabr.abr.estimators.tracking import Tracking
from kvabr.abr.ladder import Ladder
from kvabr.abr.view import Transfer
from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.client.play import Play
from kvabr.player.builder import new_session
from kvabr.player.requests import StallDetector
from kvabr.player.session_types import FetchGroup
from kvabr.types.events import RequestSent
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import TOKENS, close
from tests.client.virtual import virtual
from tests.toymodel import SPEC


def by_parity(group, track):
    """A static split, which is enough to show that groups come from both."""
    del track
    return group % 2


async def play(client, peers, deadline, source_of=by_parity, **options):
    """Play what the first of some peers finds from all of them, as a client does from one."""
    how = PlayOptions(**options)
    async with client._runner.play([client._peer(peer) for peer in peers], deadline, how, source_of) as turn:
        one = Play(turn, client._profiles, client._history, client._speeds, client._costs, None, None, TOKENS)
        found, _ = await client._peer(peers[0]).find(one.connection, TOKENS, SPEC)
        return one.over(await one.whole(await one.prepare(found)))


@pytest.fixture
def origins(root, tmp_path):
    made = [Served(root / "short", tmp_path / name) for name in ("one", "other") if not (tmp_path / name).mkdir()]
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("quic", ["aioquic", "qh3"])
async def test_a_play_from_two_origins(origins, short, quic):
    sent = []
    async with AsyncClient() as client:
        peers = [client.peer(each.url, fingerprint=each.fingerprint, quic=quic, timeout_s=LIMIT_S) for each in origins]
        log = lambda event: sent.append(event) if isinstance(event, RequestSent) else None  # noqa: E731
        played = await play(client, peers, LIMIT_S, policy="fixed:FP16", log=log)
        received = [(await client.connect(peer)).stats().bytes_received for peer in peers]
        told = [(await client.connect(peer)).peer for peer in peers]
    assert played.met
    assert played.coverage == ("FP16",) * 5
    assert close(played.kv, error=1e-5)
    sizes = short.track("FP16").bytes
    assert received[1] == sizes[1] + sizes[3]
    assert received[0] > sizes[0] + sizes[2] + sizes[4]  # the catalog came from there, too
    assert sorted(event.group for event in sent) == [0, 1, 2, 3, 4]
    assert all(client._history.of(peer) is not None for peer in told)  # each link was estimated by itself


@virtual
async def test_two_links_bring_what_one_of_them_would_not_in_time(origin, short):
    """The estimate of the whole is the sum of both: the play knows that better tracks come in time."""
    size = short.track("FP16").total_bytes
    alone = []
    for links in (1, 2):
        async with origin(rate=size / 3) as one, origin(rate=size / 3) as other, AsyncClient() as client:
            played = await play(client, [one, other][:links], 2.0, source_of=by_parity if links == 2 else first)
            assert played.met
            assert close(played.kv)
            alone.append(played.loss)
    assert alone[1] < alone[0]


def first(group, track):
    del group, track
    return 0


def test_a_source_that_falls_silent_has_stalled_whatever_another_brings():
    watch = StallDetector(0.2)
    asked = {number: Transfer(number, number, "FP16", 100, False, 0.0, source=number % 2) for number in range(4)}
    for transfer in asked.values():
        watch.asked(transfer)
    for step in range(1, 11):
        watch.heard(asked[0], 0.1 * step)
        watch.heard(asked[2], 0.1 * step)
    assert [transfer.request for transfer, _ in watch.stalled(asked, 0.01, 1.0)] == [1, 3]
    for transfer in asked.values():
        watch.heard(transfer, 1.0)
    assert watch.stalled(asked, 0.01, 1.1) == []


def test_each_source_is_sampled_by_itself(short):
    """A source that brings nothing does not lower the estimate of another, and rates add up."""
    session = new_session(Ladder(short), 2.0, "fixed:FP16", [Tracking(), Tracking()], source_of=by_parity)
    session.start(0.0)
    asked = [action for action in session.actions() if isinstance(action, FetchGroup)]
    assert {action.source for action in asked} == {0, 1}
    for action in asked:
        assert action.source == action.group % 2
    for step in range(1, 11):
        now = 0.1 * step
        for action in (one for one in asked if one.source == 0):
            session.progress(action.request, step * 20, now)
        session.timer(now)
    only = session.view.rate
    assert only > 0
    for step in range(1, 11):
        now = 1.0 + 0.05 * step
        for action in (one for one in asked if one.source == 1):
            session.progress(action.request, step * 20, now)
        session.timer(now)
    assert session.view.rate > 1.2 * only
