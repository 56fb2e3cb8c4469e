"""What store administration needs of a store of assets, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvabr.store.admin.collect import Collected
from kvabr.store.admin.rules import Holding, Rules
from kvabr.store.admin.survey import Progress
from kvabr.types.errors import NotFoundError


def silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore how far something is."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a store holds for one tenant."""

    now_s: float
    """The store's time, seconds since 1970."""
    holdings: tuple[Holding, ...]
    """Its assets, by name."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Assets that cannot be read, and why."""
    unnamed_bytes: int = 0
    """Bytes that belong to no asset: a publisher's at work, or garbage."""
    cached_bytes: int = 0
    """Bytes of single groups that relays and clients cached."""


REPAIR = "remove it with --repair, and publish it again"


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with an asset."""

    name: str
    what: str
    advice: str = REPAIR
    repaired: bool = False


class StoreAdmin(Protocol):
    """The administration of one store, for one tenant."""

    @property
    def location(self) -> str:
        """Path or URL."""

    @property
    def tenant(self) -> str:
        """Whose assets these are; an empty string where there are no tenants."""

    async def inventory(self, progress: Progress = silent) -> Inventory:
        """Find out what there is."""

    async def names(self) -> list[str]:
        """Return the names of all assets."""

    async def time_s(self) -> float:
        """Return the store's time, seconds since 1970; this machine's for those who may only read."""

    async def pin(self, name: str, seconds: float) -> float:
        """Keep an asset for a time from now on; return when that ends, by the store's clock.

        Raises `NotFoundError` if there is no such asset.
        """

    async def unpin(self, name: str) -> bool:
        """End the pins of an asset; return whether there was one."""

    async def expire(self, model: str, before_s: float | None = None) -> float:
        """Expire everything of a model from before a time of the store's clock, by default now; return that time.

        It is not published again. `collect` removes it.
        """

    async def expired(self) -> Mapping[str, float]:
        """Return the time before which everything is expired, by model."""

    async def collect(
        self,
        rules: Rules,
        *,
        dry_run: bool = False,
        cache_ttl_s: float | None = None,
        take_over: bool = False,
        progress: Progress = silent,
    ) -> Collected:
        """Remove what the rules do not keep, and what nothing names.

        Raises `UsageError` if another collector is at work, unless ``take_over``.
        """

    async def verify(self, *, deep: bool = False, repair: bool = False, progress: Progress = silent) -> list[Damage]:
        """Check that everything is there and fits.

        ``deep`` also reads all frames, ``repair`` removes damaged assets.
        """


def full_name(names: Sequence[str], text: str) -> str:
    """Return the name of an asset that ``text`` names or begins; `NotFoundError` if none does, or several do."""
    found = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(found) != 1:
        what = "no asset" if not found else f"{len(found)} assets"
        raise NotFoundError(f"{text}: {what} of that name; `kvabr store ls` lists them")
    return found[0]
