"""What the connections of a server share, and what each may take of it: per connection, per address, and in total.

A group that is fetched or loaded stays in memory while it is sent. When a budget is used up, further ones wait for
room, in the order in which they came, and a group that was not read for a while is parked: it is closed, and loaded
again when its answer goes on. So no answer fails for want of room, however often a client changes its mind.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvabr.server.limits import ServerLimits
from kvabr.server.metrics import Metrics
from kvabr.server.publication import Source

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LEAST_IN_FLIGHT_BYTES = 256 << 10
"""What every connection may have on the way, whatever the others have."""
IDLE_READ_S = 10.0
"""Seconds without reading after which a group may be parked."""
_LOOK_S = 1.0
_LEAST_REQUESTS = 8
_WOKEN = 16
"""Answers that are told at a time that there may be room."""
_IPV6_SITE = 64
"""Bits of an IPv6 address that tell one site from another; the rest a client chooses for itself."""


P = TypeVar("P")


class Host(Generic[P]):
    """What the connections of a server share; P is what stands for a connection."""

    def __init__(self, source: Source, limits: ServerLimits, log: FilteringBoundLogger, metrics: Metrics) -> None:
        self.source, self.limits, self.log, self.metrics = source, limits, log, metrics
        self.budgets = Budgets(limits)
        self.peers: set[P] = set()
        """Connections, from their first packet on."""
        self.requests = 0
        """Requests in flight on all connections, also those that wait for an answer; connections count theirs."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set whenever a connection has nothing in flight any more."""

    @property
    def equal_part(self) -> int:
        """How many requests every connection may have in flight when all together have as many as allowed."""
        return max(_LEAST_REQUESTS, self.limits.requests // max(1, len(self.peers)))

    @property
    def crowded(self) -> bool:
        """Whether there are more connections than allowed."""
        return len(self.peers) > self.limits.connections

    def left(self, peer: P) -> None:
        """Note that a connection is over."""
        self.peers.discard(peer)
        self.idle.set()


class Holder(Protocol):
    """An answer that has a group in memory."""

    def on_more(self) -> None:
        """Note that there may be room for its group."""

    def may_park(self) -> bool:
        """Return whether its group may be closed and loaded again."""

    def close(self) -> None:
        """Close its group for now, and call `Room.leave`."""


class Account:
    """What one connection, one address, or all of them use at the moment."""

    def __init__(self, memory: int, in_flight: int) -> None:
        """Use nothing; the arguments are the bounds."""
        self.max_memory, self.max_in_flight = memory, in_flight
        self.memory = self.in_flight = self.connections = 0
        self.open: OrderedDict[Holder, float] = OrderedDict()
        """Answers with an open group and when they read from it, the longest ago first."""
        self.waiting: dict[Holder, None] = {}
        """Answers that wait for room here, in order."""

    def lacks(self, memory: int) -> bool:
        """Return whether there is no room for so much more."""
        return bool(self.open) and self.memory + memory > self.max_memory

    def parkable(self, since_s: float) -> Holder | None:
        """Return an answer whose group may be closed, as it has not been read since then."""
        for holder, read_s in self.open.items():
            if read_s >= since_s:
                return None
            if holder.may_park():
                return holder
        return None


class Budgets:
    """All accounts of a server."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without connections."""
        self._limits, self.clock = limits, clock
        self.total = Account(limits.memory, limits.in_flight)
        self.addresses: dict[str, Account] = {}
        """By address or IPv6 site, those that have connections."""
        self._waiting: dict[Holder, Account] = {}
        """Answers whose groups wait for room, and where they lack it."""
        self._freed: dict[Account, None] = {}
        """Where there is more room since the last turn of the event loop."""
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return how many answers wait for room."""
        return len(self._waiting)

    def enter(self, address: str) -> Room | None:
        """Return the account of a new connection; None if there are too many of that address."""
        limits, site = self._limits, site_of(address)
        shared = self.addresses.get(site)
        most = limits.connections_per_address
        if shared is not None and most is not None and shared.connections >= most:
            return None
        if shared is None:
            shared = self.addresses[site] = Account(limits.memory_per_address, limits.in_flight_per_address)
        own = Account(limits.memory_per_connection, limits.in_flight_per_connection)
        for account in (own, shared, self.total):
            account.connections += 1
        return Room(self, site, (own, shared, self.total))

    def left(self, room: Room) -> None:
        """Close the account of a connection that is over."""
        room.note(0)
        for account in room.accounts:
            account.connections -= 1
        if not room.accounts[1].connections:
            self.addresses.pop(room.site, None)

    def wait(self, holder: Holder, account: Account) -> None:
        """Call ``holder.on_more`` when there may be room in an account."""
        if self._waiting.get(holder) is not account:
            self.waits_no_more(holder)
            self._waiting[holder] = account
            account.waiting[holder] = None
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def waits_no_more(self, holder: Holder) -> None:
        """Forget an answer that waits."""
        if (account := self._waiting.pop(holder, None)) is not None:
            del account.waiting[holder]

    def freed(self, accounts: Iterable[Account]) -> None:
        """Tell some of those that wait that there is more room, once this turn of the event loop is over."""
        before = len(self._freed)
        self._freed.update((account, None) for account in accounts if account.waiting)
        if self._freed and not before:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        accounts, self._freed = self._freed, {}
        for account in accounts:
            for holder in list(islice(account.waiting, _WOKEN)):
                holder.on_more()

    def _look(self) -> None:
        """While answers wait, look for groups that are read no more."""
        self._looking = None
        self.freed(set(self._waiting.values()))
        if self._waiting:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)


class Room:
    """One connection's part in the budgets."""

    def __init__(self, budgets: Budgets, site: str, accounts: tuple[Account, Account, Account]) -> None:
        """See `Budgets.enter`; ``accounts`` are those of the connection, of its address, and of all."""
        self.site, self.accounts = site, accounts
        self._budgets = budgets
        self.in_flight = 0
        """Bytes that QUIC was given and that the peer has not acknowledged."""
        self._held: dict[Holder, int] = {}

    def take(self, holder: Holder, memory: int, *, wait: bool = False) -> bool:
        """Note what an answer keeps in memory, and park others until it fits; what exceeds a budget may be alone.

        With ``wait`` nothing is noted if nobody else can be parked: the answer is told when to try again. But a
        connection that has none open never waits. Returns whether it was noted.
        """
        if not memory:
            return True
        now, wait = self._budgets.clock(), wait and bool(self.accounts[0].open)
        for account in self.accounts:
            while account.lacks(memory):
                victim = account.parkable(now - IDLE_READ_S)
                if victim is None:
                    if wait:
                        self._budgets.wait(holder, account)
                        return False
                    break
                victim.close()
        self._budgets.waits_no_more(holder)
        self._held[holder] = memory
        for account in self.accounts:
            account.memory += memory
            account.open[holder] = now
        return True

    def read(self, holder: Holder) -> None:
        """Note that an answer has read from its group."""
        if holder in self._held:
            now = self._budgets.clock()
            for account in self.accounts:
                account.open[holder] = now
                account.open.move_to_end(holder)

    def leave(self, holder: Holder) -> None:
        """Note that an answer has closed its group, or waits no more. May be called twice."""
        self._budgets.waits_no_more(holder)
        if (held := self._held.pop(holder, None)) is None:
            return
        for account in self.accounts:
            account.memory -= held
            del account.open[holder]
        self._budgets.freed(self.accounts)

    def note(self, in_flight: int) -> None:
        """Note what is `in_flight` now."""
        for account in self.accounts:
            account.in_flight += in_flight - self.in_flight
        self.in_flight = in_flight

    def allowance(self) -> int:
        """Return how many bytes QUIC may be given now.

        Where the bytes of all connections together reach their bound, each may have an equal part of it.
        """
        own, *shared = self.accounts
        most = own.max_in_flight
        for account in shared:
            if account.in_flight >= account.max_in_flight:
                part = max(LEAST_IN_FLIGHT_BYTES, account.max_in_flight // account.connections)
                most = min(most, part)
        return most - self.in_flight


def site_of(address: str) -> str:
    """Return what the connections of one client have in common: its IPv4 address, or its IPv6 network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 6:
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, _IPV6_SITE), strict=False))
    return str(found)
