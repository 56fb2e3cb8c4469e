"""Shared by the tests of faults: a small real asset, real servers on loopback, and shaped links to them."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvabr.link.moqt.connect import connect as dial
from kvabr.publish.encoder import publish
from kvabr.server.certificates import ServerTls
from kvabr.server.grants import Grants
from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.publication import Publication
from kvabr.server.published_assets import PublishedAssets
from kvabr.server.server import Server
from kvabr.store.locations import open_store
from kvabr.types.cost import PrefillCost
from kvabr.types.events import PlayEvent
from kvabr.types.naming import CATALOG_TRACK, PREFIX_TRACK, chain
from kvabr.types.peer import PeerOptions
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Shaper
from tests import kvdata
from tests.lab.live.links import trace
from tests.toymodel import ToyModel, prompt, steady

LIBRARIES = ("aioquic", "qh3")
SPEC = kvdata.spec(layers=2, heads=4, dim=64, group_tokens=16)
PROMPT = prompt(96)
TOKENS = PROMPT.tokens
GROUPS = 6
DIGESTS = chain(TOKENS, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=SPEC.group_tokens)
SLOW = PrefillCost(0.2, 0.1)
"""Of an engine that claims ten seconds and needs a tenth of one: it begins early, so it is done in time anywhere."""
LIMIT_S = 300.0
"""Real seconds that something may take on the slowest machine; also a deadline that no machine misses."""
QUIET = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])


def engine() -> ToyModel:
    return ToyModel(SPEC)


def write_asset(path: Path) -> None:
    """6 groups of 16 tokens; 33 KB each at FP16."""
    with open_store(path).writer(live=True) as writer:
        catalog = steady(publish(engine(), PROMPT, ("FP16", "Int8", "Int4"), None, writer))
        writer.prompt(PROMPT)
        writer.commit(catalog)


def right(played, tokens: int = len(TOKENS)) -> bool:
    """Whether a play brought all of the cache, without a hole."""
    exact = engine().prefill(TOKENS[:tokens])
    error = (played.kv.float() - exact).square().mean() / exact.square().mean()
    return played.tokens == tokens and len(played.coverage) == tokens // 16 and all(played.coverage) and error < 0.02


def level(track: str) -> bool:
    """Whether a track is one of the cache itself."""
    return track != CATALOG_TRACK and not track.startswith(PREFIX_TRACK)


Find = Callable[[str, Publication | None], Publication | None]


class OtherLibrary(PublishedAssets):
    """Finds what a library has, and lets ``change`` have its way with it."""

    def __init__(self, root: Path, grants: Grants | None, change: Find) -> None:
        super().__init__(root, grants, QUIET)
        self._change = change

    def find(self, grant, namespace, track, **how):
        return self._change(track, super().find(grant, namespace, track, **how))


@dataclass
class Origin:
    server: Server
    tls: ServerTls
    fingerprint: str

    @property
    def metrics(self) -> Metrics:
        return self.server.metrics

    @property
    def address(self) -> tuple[str, int]:
        return self.server.address

    def connect(self, quic="aioquic", at=None, **options):
        """Connect to it, or to a link that leads there."""
        return connect(at or self.address, self.fingerprint, quic, **options)

    async def empty(self) -> None:
        """Wait until nothing is left of any connection."""
        server = self.server
        async with asyncio.timeout(LIMIT_S):
            # No event tells that a library has forgotten a connection.
            while server.peers or server._server._protocols:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert server.requests == 0
        assert server.metrics.value("kvabr_connections") == 0
        assert server.metrics.value("kvabr_requests_in_flight") == 0


def connect(address, fingerprint, quic="aioquic", *, timeout_s=LIMIT_S, token=None, **options):
    host, port = address
    how = PeerOptions(fingerprint=fingerprint, quic=quic, timeout_s=timeout_s, token=token)
    return dial(f"moqt://{host}:{port}/", how, **options)


@dataclass
class Log:
    lines: list[PlayEvent] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, line: PlayEvent) -> None:
        self.lines.append(line)
        self.more.set()

    async def seen(self, *names: str) -> None:
        """Wait for an event of one of these names, past or future."""
        async with asyncio.timeout(LIMIT_S):
            while not any(line.name in names for line in self.lines):
                self.more.clear()
                await self.more.wait()

    def reasons(self, name: str = "failed") -> list[str]:
        return [line.reason for line in self.lines if line.name == name]


@asynccontextmanager
async def serving(root, tls, fingerprint, *, library="aioquic", find: Find | None = None, grants=None, **limits):
    """An origin of the assets below a folder, on QUIC."""
    assets = PublishedAssets(root, grants) if find is None else OtherLibrary(root, grants, find)
    server = Server(assets, "127.0.0.1", 0, tls, ServerLimits(**limits), QUIET, Metrics(), quic=library)
    async with server:
        yield Origin(server, tls, fingerprint)


def shape(link: Shaper, rates, *, step=1.0, **conditions) -> None:
    """From now on the link has these rates, in bytes per second, each for ``step`` seconds, over and over."""
    link.begin(trace(rates, step), 0.0, Conditions(**conditions))


@contextmanager
def shaped(address, rates=(), **conditions) -> Iterator[Shaper]:
    """A link to ``address``; without ``rates`` it has delay and losses, but no bottleneck."""
    with Shaper(address, Conditions(**conditions)) as link:
        if rates:
            shape(link, rates, **conditions)
        yield link


@asynccontextmanager
async def relaying(origin: Origin, tls: ServerTls):
    """A relay in this process, before an origin."""
    from kvabr.server.relay import Relay

    metrics = Metrics()
    async with (
        origin.connect() as upstream,
        Relay(upstream, QUIET, metrics, memory_bytes=64 << 20) as relay,
        Server(relay, "127.0.0.1", 0, tls, ServerLimits(), QUIET, metrics) as server,
    ):
        yield Origin(server, tls, origin.fingerprint)


class Process:
    """A running `kvabr serve` or `kvabr relay`."""

    def __init__(self, process, url: str) -> None:
        self.process, self.url = process, url
        self.address = ("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(command: str, *words) -> AsyncIterator[Process]:
    """A kvabr command that prints its URL once it is up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvabr", command, *map(str, words), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            yield_url = (await process.stdout.readline()).decode().strip()
        assert yield_url.startswith("moqt://"), yield_url
        yield Process(process, yield_url)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def serve_process(root, tls, *, port=0, quic="aioquic"):
    words = ("--cert", tls.certfile, "--key", tls.keyfile, "--bind", f"127.0.0.1:{port}", "--quic", quic)
    words += ("--drain", LIMIT_S)
    return running("serve", root, *words, "--log-json")


def relay_process(origin, tls, *, port=0):
    host, upstream = origin.address
    words = ("--upstream", f"moqt://{host}:{upstream}/", "--upstream-fingerprint", origin.fingerprint)
    words += ("--cert", tls.certfile, "--key", tls.keyfile, "--bind", f"127.0.0.1:{port}")
    return running("relay", *words, "--log-json")


async def for_both(one):
    """Do something with either QUIC library, at the same time."""
    return await asyncio.gather(*map(one, LIBRARIES))


logging.getLogger("quic").setLevel(logging.ERROR)
