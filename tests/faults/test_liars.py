"""Publishers that lie: what comes is refused with its reason, asked for again, and never becomes part of a cache."""

import asyncio
import hashlib
import json
import shutil
from dataclasses import replace

import pytest

from kvabr.codec.container import pack, unpack
from kvabr.types.errors import PlayError, TransportError
from tests.assets import frame_file
from tests.client.playing import play
from tests.faults.common import (
    GROUPS,
    LIBRARIES,
    LIMIT_S,
    SLOW,
    SPEC,
    TOKENS,
    Log,
    connect,
    engine,
    for_both,
    relaying,
    right,
    serving,
)
from tests.faults.lies import LIES
from tests.faults.rude import GOAL, lying, rude_server

pytestmark = pytest.mark.process

FULL = 10586
"""Bytes of a group of Int4."""

REASONS = {
    "short": f"must have {FULL} bytes, got {FULL - 100}",
    "long": "longer than the",
    "empty": "the group is empty",
    "one bit": "checksum is wrong",
    "noise": "this is not a kvabr group",
    "another group": "belongs to another cache",
    "one huge object": "longer than the",
    "objects without end": "longer than the",
    "another group's objects": "of group 3 were received",
    "broken off": "MALFORMED_TRACK",
    "refused": "INTERNAL_ERROR: disk on fire",
    "refused with an unknown code": "0x7777: because",
    "stalled": "it has stalled",
    "no answer": "it has stalled",
    "garbage as objects": "broke the protocol",
    "garbage as messages": "broke the protocol",
    "two streams": "second stream of objects",
    "a stream for nobody's request": "never made",
}
"""What a play says of a lie."""


@pytest.mark.parametrize("draft", ["moqt-22", "moqt-20"])
async def test_a_lie_told_once_is_refused_and_the_group_asked_for_again(root, tls, fingerprint, draft):
    async def one(name, lie):
        log = Log()
        async with lying(root, tls, fingerprint, lie) as served:
            async with served.connect(drafts=(draft,)) as connection:
                # A transfer that stands still is given up after an eighth of the deadline.
                deadline = 64.0 if "it has stalled" in REASONS[name] else LIMIT_S
                played = await play(connection, TOKENS, deadline=deadline, policy="fixed:Int4", spec=SPEC, log=log)
            assert served.server.told == 1, name
            await served.empty()
        assert right(played), name
        assert played.met, name
        return name, log

    for name, log in await asyncio.gather(*(one(name, lie) for name, lie in LIES.items())):
        # With a deadline as long, the connection is replaced before the player counts a group as stalled.
        words = {REASONS[name], REASONS[name].replace("it has stalled", "it answers a new connection")}
        assert any(word in reason for word in words for reason in log.reasons()), (name, log.reasons())


async def test_a_lie_told_always(root, tls, fingerprint):
    """Without an engine it ends in an error that names it; with one, in a cache without a hole."""

    async def one(name):
        starting = lying(root, tls, fingerprint, LIES[name], once=False)
        async with starting as served, served.connect() as connection, served.connect() as other:
            error, played = await asyncio.gather(
                play(connection, TOKENS, deadline=16.0, patience=1.0, spec=SPEC),
                play(other, TOKENS, deadline=64.0, engine=engine(), prefill_cost=SLOW),
                return_exceptions=True,
            )
        assert isinstance(error, PlayError), error
        # On a slow machine a silent connection may be replaced before the player counts a group as stalled.
        told = {REASONS[name], REASONS[name].replace("it has stalled", "it answers a new connection")}
        assert any(words in str(error) for words in told), (name, error)
        assert right(played), name
        assert played.met, name
        assert played.coverage[GOAL] == "recomputed", name

    await asyncio.gather(*map(one, ("one bit", "long", "stalled", "garbage as objects")))


FOREIGN = {
    "model or cache shape": {"spec_digest": bytes(16)},
    "prompt": {"chunk": "ab" * 32},
    "group": {"group": 3},
    "track": {"track": "Int8"},
    "first token": {"first_token": 48},
}


async def test_a_catalog_that_vouches_for_frames_of_something_else(root, tls, fingerprint, tmp_path):
    """Sizes and digests agree: only what the frames say of themselves gives them away."""

    async def one(what, changes):
        asset = shutil.copytree(root / "one", tmp_path / what / "one")
        path = frame_file(asset, GOAL, "Int4")
        header, payload = unpack(path.read_bytes())
        frame = pack(payload, replace(header, **changes))
        path.write_bytes(frame)
        (catalog,) = (asset / "a").iterdir()
        value = json.loads(catalog.read_text())
        (track,) = [track for track in value["tracks"] if track["name"] == "Int4"]
        track["digests"][GOAL], track["bytes"][GOAL] = hashlib.sha256(frame).hexdigest(), len(frame)
        catalog.write_text(json.dumps(value))
        path.rename(path.with_name(track["digests"][GOAL]))
        log = Log()
        async with serving(tmp_path / what, tls, fingerprint) as served, served.connect() as connection:
            played = await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC, log=log)
        assert right(played)
        assert played.coverage[GOAL] != "Int4"
        return what, log

    for what, log in await asyncio.gather(*(one(what, changes) for what, changes in FOREIGN.items())):
        assert all(f"its {what} must be" in reason for reason in log.reasons()), log.reasons()
        assert "it belongs to another cache" in log.reasons()[0]


async def failing(work, kind=TransportError):
    with pytest.raises(kind) as caught:
        async with asyncio.timeout(LIMIT_S / 2):  # long before the limit that the work itself has, where it has one
            await work
    return str(caught.value)


async def dialled(address, fingerprint, quic="aioquic", timeout_s=LIMIT_S, **options):
    async with connect(address, fingerprint, quic, timeout_s=timeout_s, **options):
        pass


async def test_a_server_that_never_says_setup(tls, fingerprint):
    async with rude_server(tls, greet=lambda *_: None) as address:

        async def one(library):
            for timeout_s in (0.5, 4, 32, 128):  # a loaded machine may not even have shaken hands by the first
                said = await failing(dialled(address, fingerprint, library, timeout_s=timeout_s))
                if f"no SETUP within {timeout_s} s" in said:
                    return
                assert f"no answer within {timeout_s} s" in said
            raise AssertionError(said)

        await for_both(one)


async def test_a_server_that_closes_at_once(tls, fingerprint):
    async with rude_server(tls, greet=lambda end, _: end.shut(0x1, "out of order")) as address:
        for said in await for_both(lambda library: failing(dialled(address, fingerprint, library))):
            assert "INTERNAL_ERROR: out of order" in said


async def test_a_server_whose_setup_is_garbage(tls, fingerprint):
    def greet(end, draft):
        end.transport.write(3, b"\xff\xfe\xfd" * 20)

    async with rude_server(tls, greet=greet) as address:
        for said in await for_both(lambda library: failing(dialled(address, fingerprint, library))):
            assert "broke the protocol" in said


async def test_a_server_that_answers_nothing(tls, fingerprint):
    async def one(library):
        async with rude_server(tls) as address, connect(address, fingerprint, library) as connection:
            return await asyncio.gather(
                failing(play(connection, TOKENS, deadline=0.8, spec=SPEC), PlayError),
                play(connection, TOKENS, deadline=16.0, engine=engine(), prefill_cost=SLOW),
            )

    for said, played in await for_both(one):
        assert "no answer within" in said
        assert played.coverage == ("recomputed",) * GROUPS
        assert played.met
        assert right(played)


async def test_a_server_that_speaks_only_an_unknown_draft(tls, fingerprint):
    async with rude_server(tls, alpn=("moqt-99",)) as address:
        for quic in (*LIBRARIES, "auto"):
            said = await failing(dialled(address, fingerprint, quic))
            assert "no common protocol" in said


@pytest.mark.parametrize(
    "name", ["short", "long", "one bit", "noise", "another group", "broken off", "garbage as objects"]
)
async def test_a_relay_does_not_keep_a_lie(root, tls, fingerprint, name):
    """It is told to one player; the next one gets what is true, and the origin is not asked for it again."""
    logs = [Log(), Log()]
    async with lying(root, tls, fingerprint, LIES[name]) as origin, relaying(origin, tls) as relay:
        for log in logs:
            async with relay.connect("qh3") as connection:
                played = await play(connection, TOKENS, deadline=LIMIT_S, policy="fixed:Int4", spec=SPEC, log=log)
            assert right(played)
        assert origin.server.told == 1
    assert not logs[1].reasons()
