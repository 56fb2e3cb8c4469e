"""Memory and bandwidth that connections share: budgets per connection, per address, and in total.

A group stays in memory while it is sent. When a budget is exhausted, further groups wait in order of arrival. A
complete group that has been open for a while can then be closed, and is loaded again when its answer continues. So no
answer fails for lack of memory, and slow clients do not block others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from kvabr.server.addresses import site_of
from kvabr.server.limits import ServerLimits
from kvabr.types.errors import RequestError

MIN_IN_FLIGHT_BYTES = 256 << 10
"""Bytes that every connection may always have in flight."""
OPEN_S = 10.0
"""Seconds after which an open group may be closed to free memory."""
_CHECK_S = 1.0
_WAKE_BATCH = 16


class Holder(Protocol):
    """An answer that may hold a group in memory."""

    def on_more(self) -> None:
        """Try again, since memory may be free."""

    def may_park(self) -> bool:
        """Return True if its group may be closed now, and loaded again later."""

    def close(self) -> None:
        """Close its group for now, and call `ConnectionBudget.leave`."""


class Account:
    """Usage and limits of one connection, of one address, or of the server."""

    def __init__(self, memory: int, in_flight: int) -> None:
        self.max_memory, self.max_in_flight = memory, in_flight
        self.memory = self.in_flight = self.connections = 0
        self.open: dict[Holder, float] = {}
        """Answers with an open group, with the time of opening, earliest first."""
        self.waiting: dict[Holder, None] = {}

    def parkable(self, since_s: float) -> Holder | None:
        """Return an answer whose group was opened before ``since_s`` and may be closed, or None."""
        return next((one for one, opened_s in self.open.items() if opened_s < since_s and one.may_park()), None)


class Budgets:
    """The budgets of all connections of a server."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:

        self._limits, self.clock = limits, clock
        self.total = Account(limits.memory, limits.in_flight)
        self.addresses: dict[str, Account] = {}
        self._waiting: dict[Holder, Account] = {}
        self._freed: dict[Account, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, address: str) -> ConnectionBudget | None:
        """Return a new connection's budget, or None if its address has too many connections."""
        limits, site = self._limits, site_of(address)
        shared = self.addresses.get(site)
        if shared is not None and shared.connections >= limits.connections_per_address:
            return None
        if shared is None:
            shared = self.addresses[site] = Account(limits.memory_per_address, limits.in_flight_per_address)
        own = Account(limits.memory_per_connection, limits.in_flight_per_connection)
        for account in (own, shared, self.total):
            account.connections += 1
        return ConnectionBudget(self, site, (own, shared, self.total))

    def left(self, budget: ConnectionBudget) -> None:
        """Close the account of a connection that has ended."""
        budget.note(0)
        for account in budget.accounts:
            account.connections -= 1
        if not budget.accounts[1].connections:
            self.addresses.pop(budget.site, None)

    def wait(self, holder: Holder, account: Account) -> None:
        """Call ``holder.on_more`` when an account may have free memory."""
        if self._waiting.get(holder) is not account:
            self.stop_waiting(holder)
            self._waiting[holder] = account
            account.waiting[holder] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def stop_waiting(self, holder: Holder) -> None:
        """Stop waiting; idempotent."""
        if (account := self._waiting.pop(holder, None)) is not None:
            del account.waiting[holder]

    def freed(self, accounts: Iterable[Account]) -> None:
        """Wake some waiting answers in the next iteration of the event loop."""
        before = len(self._freed)
        self._freed.update((account, None) for account in accounts if account.waiting)
        if self._freed and not before:
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        accounts, self._freed = self._freed, {}
        for account in accounts:
            for holder in list(islice(account.waiting, _WAKE_BATCH)):
                holder.on_more()

    def _check(self) -> None:
        self._timer = None
        self.freed(set(self._waiting.values()))
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)


class ConnectionBudget:
    """One connection's view of the budgets."""

    def __init__(self, budgets: Budgets, site: str, accounts: tuple[Account, Account, Account]) -> None:
        """Prefer `Budgets.enter`. ``accounts``: of the connection, of its address, and of the server."""
        self.site, self.accounts = site, accounts
        self._budgets = budgets
        self.in_flight = 0
        """Bytes given to QUIC but not acknowledged."""
        self._held: dict[Holder, int] = {}

    def take(self, holder: Holder, memory: int) -> bool:
        """Record an answer's memory, closing other groups if necessary.

        If it does not fit, return False, and call ``holder.on_more`` later. A group larger than the budget of its
        connection or address fits if alone; raise `RequestError` if it is larger than that of the server.
        """
        if memory > (most := self.accounts[-1].max_memory):
            raise RequestError(f"a group of {memory} bytes does not fit into the server's memory limit of {most} bytes")
        since_s = self._budgets.clock() - OPEN_S
        for account in self.accounts:
            while account.open and account.memory + memory > account.max_memory:
                victim = account.parkable(since_s)
                if victim is None:
                    self._budgets.wait(holder, account)
                    return False
                victim.close()
        self._budgets.stop_waiting(holder)
        self.hold(holder, memory)
        return True

    def hold(self, holder: Holder, memory: int) -> None:
        """Record an answer's memory, unless already recorded."""
        if memory and holder not in self._held:
            self._held[holder] = memory
            for account in self.accounts:
                account.memory += memory
                account.open[holder] = self._budgets.clock()

    def leave(self, holder: Holder) -> None:
        """Release an answer's memory. Idempotent."""
        self._budgets.stop_waiting(holder)
        if (held := self._held.pop(holder, None)) is None:
            return
        for account in self.accounts:
            account.memory -= held
            del account.open[holder]
        self._budgets.freed(self.accounts)

    def note(self, in_flight: int) -> None:
        """Record the current bytes in flight."""
        for account in self.accounts:
            account.in_flight += in_flight - self.in_flight
        self.in_flight = in_flight

    def allowance(self) -> int:
        """Return how many more bytes QUIC may have now.

        When an address or the server is at its limit, each connection gets an equal share of it.
        """
        own, *shared = self.accounts
        most = own.max_in_flight
        for account in shared:
            if account.in_flight >= account.max_in_flight:
                share = max(MIN_IN_FLIGHT_BYTES, account.max_in_flight // account.connections)
                most = min(most, share)
        return most - self.in_flight
