"""The laboratory's processes, links and files, and the effect of each kind of fault."""

import asyncio
import hashlib
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvabr.client.async_client import AsyncClient
from kvabr.replay.trace import Trace
from kvabr.server import certificates
from kvabr.server.certificates import ServerTls
from kvabr.store.group_cache import StoreTier
from kvabr.store.names import GROUPS
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Shaper
from tests.chaos.liar import Liar
from tests.chaos.nodes import Node, free_port, replace_text, write_grants
from tests.chaos.plan import LINKS, Fault, Link, Round
from tests.chaos.player import Player, Seat
from tests.chaos.published import Library, Prompt, place, remove
from tests.floods import FLOODS, Flooder

PLAYER_TOKEN, RELAY_TOKEN = "player-token-of-the-laboratory", "relay-token-of-the-laboratory"
DISKS = ("relay-1", "relay-2", "player")
_STRANGER = "token-of-nobody-in-particular"
_DISK_BYTES = 6 << 20
"""Of each small disk."""
_OPEN = 1e9
"""Bytes per second of a link without a bottleneck, if it needs a trace."""
_TRACE_S = 600.0
Undo = Callable[[], object]


class World:
    """Everything that runs. A context manager."""

    def __init__(self, folder: Path, library: Library, *, players: int, hang_s: float) -> None:
        """Prepare folders; processes start when the context is entered."""
        self.folder, self.published = folder, library
        self._players_wanted, self._hang_s = players, hang_s
        self.root = folder / "assets"
        self._grants, self._relay_tokens = folder / "grants.json", {}
        self._stack = ExitStack()
        self.players: list[Player] = []
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, Shaper] = {}
        self._placed: dict[int, int] = {}
        """Version of each prompt that is published now."""

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _enter(self) -> None:
        folder = self.folder
        self.root.mkdir()
        for prompt in self.published.prompts:
            self._put(prompt, 0)
        tls = ServerTls(folder / "cert.pem", folder / "key.pem")
        certificate, key = certificates.make()
        tls.certfile.write_bytes(certificate)
        tls.keyfile.write_bytes(key)
        self.fingerprint = certificates.check(tls).fingerprint
        write_grants(self._grants, PLAYER_TOKEN, RELAY_TOKEN)
        for name in DISKS:
            self.disk(name).mkdir()
        common = ("--cert", str(tls.certfile), "--key", str(tls.keyfile), "--drain", "1")
        self._node("origin", "serve", str(self.root), "--grants", str(self._grants), *common)
        self.links["up"] = self._stack.enter_context(Shaper(self.nodes["origin"].address))
        self._relay("relay-1", "up", RELAY_TOKEN, *common)
        self.links["middle"] = self._stack.enter_context(Shaper(self.nodes["relay-1"].address))
        self._relay("relay-2", "middle", PLAYER_TOKEN, *common)
        self.links["edge"] = self._stack.enter_context(Shaper(self.nodes["relay-2"].address))
        self.liar = self._stack.enter_context(Liar(self.root, tls))
        self._stack.callback(self._end_players)
        self.players = [self._player(number) for number in range(self._players_wanted)]
        for node in self.nodes.values():
            node.wait_until_up()

    def _node(self, name: str, *words: str) -> None:
        node = self.nodes[name] = Node(name, words, free_port(), self.folder / f"{name}.log")
        self._stack.callback(node.kill)
        node.start()

    def _relay(self, name: str, link: str, token: str, *common: str) -> None:
        tokens = self._relay_tokens[name] = self.folder / f"{name}.token"
        tokens.write_text(PLAYER_TOKEN)
        upstream = self.folder / f"{name}.upstream"
        upstream.write_text(token)
        host, port = self.links[link].address
        self._node(
            name, "relay", "--upstream", f"moqt://{host}:{port}/", "--upstream-fingerprint", self.fingerprint,
            "--upstream-token-file", str(upstream), "--player-token-file", str(tokens), "--memory", "64MiB",
            "--disk", str(self.disk(name) / "groups"), "--disk-gib", "0.004", *common,
        )  # fmt: skip

    def _player(self, number: int) -> Player:
        host, port = self.links["edge"].address
        folder = self.disk("player") / str(number)
        seat = Seat(
            f"moqt://{host}:{port}/", PLAYER_TOKEN, self.fingerprint, folder, self.published.prompts,
            self._hang_s, self.folder / f"player-{number}.log",
        )  # fmt: skip
        return Player(seat)

    def _end_players(self) -> None:
        for player in self.players:
            player.close()

    # ---------------------------------------------------------------- rounds

    def begin(self, plan: Round) -> None:
        """Set up a round: the links, and the versions that are published."""
        for prompt, version in zip(self.published.prompts, plan.versions, strict=True):
            if self._placed[prompt.number] != version:
                self._put(prompt, version)
        for name in LINKS:
            mine = [fault for fault in plan.faults if fault.link == name]
            self._shape(name, plan.links[name], mine)
        self._plan, self._begun_s = plan, time.monotonic()

    def heal(self) -> None:
        """Open the links, and start stopped processes; other faults have been undone by now."""
        for shaper in self.links.values():
            shaper.open(Conditions())
        for node in self.nodes.values():
            node.start()
        self.revive()

    def revive(self) -> None:
        """Start players anew that are gone."""
        for number, player in enumerate(self.players):
            if player.gone:
                player.close()
                self.players[number] = self._player(number)

    def _put(self, prompt: Prompt, version: int) -> None:
        place(prompt, version, self.root)
        self._placed[prompt.number] = version

    def _shape(self, name: str, link: Link, faults: list[Fault]) -> None:
        rate = link.rate or _OPEN
        steps = [(fault.at_s, fault.at_s + fault.for_s, 0.0 if fault.kind == "blackout" else rate / 20)
                 for fault in faults if fault.kind in ("blackout", "cliff")]  # fmt: skip
        shaper = self.links[name]
        if link.rate is None and not steps:
            shaper.open(link.conditions)
            return
        times = sorted({0.0, *(at for step in steps for at in step[:2])})
        rates = [min([rate, *(low for begin, end, low in steps if begin <= at < end)]) for at in times]
        trace = Trace(f"chaos/{name}", "chaos", tuple(times), tuple(rates), _TRACE_S)
        shaper.begin(trace, 0.0, link.conditions)

    # ---------------------------------------------------------------- faults

    def inflict(self, fault: Fault) -> Undo | None:
        """Begin a fault; return a function that undoes it, if necessary."""
        kind, _, rest = fault.kind.partition(" ")
        if kind in ("blackout", "cliff"):
            return None  # the link's trace has it
        acts: dict[str, Callable[[str, Fault], Undo | None]] = {
            "losses": self._losses, "rebinding": self._rebind, "freeze": self._freeze, "kill": self._kill,
            "full": self._fill, "revoke": self._revoke, "damage": self._damage, "replace": self._replace,
            "remove": self._remove, "liar": self._lie, "route": self._route, "flood": self._flood,
        }  # fmt: skip
        return acts[kind](rest.rpartition(" ")[2], fault)

    def _losses(self, _: str, fault: Fault) -> Undo:
        link, shaper = self._plan.links[fault.link], self.links[fault.link]

        def lose(loss: float) -> None:
            conditions = replace(link.conditions, loss=loss, loss_up=loss)
            if shaper._trace is None or link.rate is None:
                shaper.open(conditions)
            else:
                shaper.begin(shaper._trace, time.monotonic() - self._begun_s, conditions)

        lose(0.35)
        return lambda: lose(link.conditions.loss)

    def _rebind(self, _: str, fault: Fault) -> None:
        self.links[fault.link].rebind()

    def _flood(self, name: str, fault: Fault) -> Undo:
        kind = random.Random(fault.seed).choice(sorted(FLOODS))
        return Flooder(self.nodes[name].address, kind).stop

    def _freeze(self, name: str, _: Fault) -> Undo:
        self.nodes[name].freeze(on=True)
        return lambda: self.nodes[name].freeze(on=False)

    def _kill(self, name: str, _: Fault) -> Undo | None:
        if name == "player":
            self.players[-1].kill()
            return None  # `heal` starts it anew, which takes a while
        self.nodes[name].kill()
        return self.nodes[name].start

    def _revoke(self, name: str, fault: Fault) -> Undo:
        if name == "origin":
            dice = random.Random(fault.seed)
            write_grants(self._grants, *dice.choice(((PLAYER_TOKEN,), (RELAY_TOKEN,), (_STRANGER,))))
            return lambda: write_grants(self._grants, PLAYER_TOKEN, RELAY_TOKEN)
        path = self._relay_tokens[name]
        replace_text(path, _STRANGER)
        return lambda: replace_text(path, PLAYER_TOKEN)

    def _replace(self, _: str, fault: Fault) -> None:
        dice = random.Random(fault.seed)
        prompt = dice.choice(self.published.prompts)
        self._put(prompt, dice.randrange(len(prompt.versions)))

    def _remove(self, _: str, fault: Fault) -> Undo:
        dice = random.Random(fault.seed)
        prompt = dice.choice(self.published.prompts)
        remove(prompt, self.root)
        return lambda: self._put(prompt, dice.randrange(len(prompt.versions)))

    def _lie(self, link: str, fault: Fault) -> Undo:
        self.liar.lie(fault.seed)
        return self._lead(link, self.liar.greeting)

    def _route(self, name: str, _: Fault) -> Undo:
        return self._lead("edge", self.nodes[name].address)

    def _lead(self, link: str, address: tuple[str, int]) -> Undo:
        ends = {"edge": "relay-2", "middle": "relay-1", "up": "origin"}
        self.links[link].rebind(address)
        return lambda: self.links[link].rebind(self.nodes[ends[link]].address)

    def _damage(self, name: str, fault: Fault) -> Undo | None:
        dice = random.Random(fault.seed)
        if name == "origin":
            prompt = dice.choice(self.published.prompts)
            folder = self.root / prompt.name
        else:
            folder = self.disk(name)
        files = sorted(folder.rglob(f"{GROUPS}*"))
        for path in dice.sample(files, min(len(files), dice.choice((1, 5, 1000)))):
            with suppress(OSError):  # its owner has just deleted it
                _spoil(path, dice)
        return (lambda: self._put(prompt, self._placed[prompt.number])) if name == "origin" else None

    # ----------------------------------------------------------------- disks

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where servers and players keep files."""
        return self.root, *(self.disk(name) for name in DISKS)

    def reopen(self) -> None:
        """Open all folders once more and write into them, as the next process would."""
        for prompt in self.published.prompts:
            self._put(prompt, 0)
        for groups in (path for name in DISKS for path in self.disk(name).rglob("groups")):
            asyncio.run(_write_group(groups))
        for cache in self.disk("player").rglob("cache"):
            asyncio.run(_open_client(cache))

    def disk(self, name: str) -> Path:
        return self.folder / f"disk-{name}"

    def _fill(self, name: str, _: Fault) -> Undo:
        """Forbid writes to files, so that they fail like on a full disk."""
        pids = [player.pid for player in self.players] if name == "player" else [self.nodes[name].pid]

        def limit(most: int) -> None:
            for pid in pids:
                if pid is not None:
                    with suppress(ProcessLookupError):
                        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))

        limit(0)
        return lambda: limit(resource.RLIM_INFINITY)


async def _write_group(folder: Path) -> None:
    tier = StoreTier(folder, _DISK_BYTES)
    await tier.put(hashlib.sha256(b"the last one").hexdigest(), memoryview(b"the last one"))
    await tier.close()


async def _open_client(cache: Path) -> None:
    async with AsyncClient(cache=cache):
        pass


def _spoil(path: Path, dice: random.Random) -> None:
    """Damage a file: as disks do, in place, or as people do."""
    data = path.read_bytes()
    way = dice.choice(("bit", "bits", "shorter", "longer", "empty", "gone", "zeros", "cut"))
    if way == "gone" or not data:
        path.unlink()
        return
    if way == "cut":
        os.truncate(path, len(data) // 2)
        return
    if way in ("bit", "bits", "zeros"):
        with path.open("r+b") as file:
            for _ in range({"bit": 1, "bits": 50, "zeros": 1}[way]):
                at = dice.randrange(len(data))
                file.seek(at)
                file.write(bytes(100) if way == "zeros" else bytes([data[at] ^ 1 << dice.randrange(8)]))
        return
    new = path.with_name(f"{path.name}.spoilt")
    new.write_bytes({"shorter": data[: len(data) // 2], "longer": data + b"more", "empty": b""}[way])
    shutil.copymode(path, new)
    new.replace(path)
