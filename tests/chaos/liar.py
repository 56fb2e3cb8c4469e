"""The liar: an origin with everybody's certificate that serves wrong groups and wrong catalogs, in a process."""

import asyncio
import json
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvabr.server.certificates import ServerTls
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.publication import BytesPublication, Publication
from kvabr.server.server import Server, Watcher
from kvabr.types.naming import CATALOG_TRACK, PREFIX_TRACK
from kvabr_lab.live.child import Child
from tests.assets import whole
from tests.chaos.published import LOSS
from tests.faults.common import QUIET, OtherLibrary
from tests.faults.lies import LIES
from tests.faults.rude import Answer, LyingPeer, LyingServer
from tests.hostile import DOCUMENTS

_JUNK_BYTES = 100_000


def mood(seed: int) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Draw how often the liar lies, and its subjects: groups (`tests.faults.lies.LIES`) and catalogs (`CATALOGS`)."""
    dice = random.Random(f"mood {seed}")
    groups = tuple(dice.sample(sorted(LIES), dice.choice((0, 1, 1, 2))))
    catalogs = tuple(dice.sample(sorted(CATALOGS), dice.choice((0, 0, 1, 2))))
    return dice.choice((0.1, 0.3, 1.0)), groups, catalogs


class Liar(Child):
    def __init__(self, root: Path, tls: ServerTls) -> None:
        super().__init__("liar", _main, root, tls)

    def lie(self, seed: int) -> None:
        self.send(seed)


def _main(pipe: Connection, root: Path, tls: ServerTls) -> None:
    asyncio.run(_serve(pipe, root, tls))


async def _serve(pipe: Connection, root: Path, tls: ServerTls) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    state = _State()

    def listen() -> None:
        with suppress(RuntimeError):
            try:
                while True:
                    loop.call_soon_threadsafe(state.feel, pipe.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(over.set)

    library, metrics = OtherLibrary(root, None, state.catalog), Metrics()
    server = _Server(library, "127.0.0.1", 0, tls, ServerLimits(), QUIET, metrics, state=state)
    threading.Thread(target=listen, daemon=True).start()
    async with Watcher(library, QUIET, metrics), server:
        pipe.send(server.address)
        await over.wait()


class _State:
    share, groups, catalogs, dice = 0.0, (), (), random.Random(0)

    def feel(self, seed: int) -> None:
        self.share, self.groups, self.catalogs = mood(seed)
        self.dice = random.Random(f"lies {seed}")

    def _lies(self, kinds: tuple[str, ...]) -> str | None:
        return self.dice.choice(kinds) if kinds and self.dice.random() < self.share else None

    def group(self) -> Callable[[Answer], None] | None:
        """The lie about a group, if any."""
        kind = self._lies(self.groups)
        return None if kind is None else LIES[kind]

    def catalog(self, track: str, found: Publication | None) -> Publication | None:
        if found is None or not (track == CATALOG_TRACK or track.startswith(PREFIX_TRACK)):
            return found
        kind = self._lies(self.catalogs)
        return found if kind is None else BytesPublication(CATALOGS[kind](whole(found.open(0))))


class _Peer(LyingPeer):
    def _fetch(self, number, message, grant, found):
        lie = self._server.state.group() if message.track.decode() in LOSS else None
        if lie is None:
            super(LyingPeer, self)._fetch(number, message, grant, found)
        else:
            lie(Answer(self, number, found, message.start.group))


class _Server(LyingServer):
    def __init__(self, *arguments, state: _State) -> None:
        Server.__init__(self, *arguments)
        self.state = state

    def make_peer(self):
        return _Peer(self)


def _with(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Return a function that changes a catalog's JSON."""

    def changed(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return changed


def _each(**changes: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes fields of every track."""

    def change(value: dict[str, Any]) -> None:
        for track in value["tracks"]:
            for name, made in changes.items():
                track[name] = made(track[name])

    return change


CATALOGS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "larger groups": _with(_each(bytes=lambda sizes: [size + 1 for size in sizes])),
    "smaller groups": _with(_each(bytes=lambda sizes: [size - 1 for size in sizes])),
    "huge groups": _with(_each(bytes=lambda sizes: [1 << 20 for _ in sizes])),
    "other digests": _with(_each(digests=lambda digests: digests[::-1])),
    "losses upside down": _with(_each(loss=lambda losses: [1e-6 / (loss + 1e-9) for loss in losses])),
    "slow decoders": _with(_each(decode_s=lambda _: 1e6)),
    "fewer tracks": _with(lambda value: value["tracks"].__delitem__(slice(1, None))),
    "names changed": _with(lambda value: value["tracks"].reverse()),
    "another prompt": _with(lambda value: value["chunks"].reverse()),
    "more tokens": _with(lambda value: value.update(tokens=value["tokens"] + 1)),
    **{f"junk: {name}": lambda _, made=made: made(_JUNK_BYTES) for name, made in DOCUMENTS.items()},
}
"""What a liar makes of a catalog."""
