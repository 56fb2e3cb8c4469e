"""What store administration needs of a store of assets, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvabr.types.catalog import Catalog
from kvabr.types.errors import NotFoundError

Progress = Callable[[str, int, int], object]
"""Called with the name of a stage, how much of it is done, and how much there is."""


def silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore how far something is."""


@dataclass(frozen=True, slots=True)
class Holding:
    """An asset that a store holds."""

    name: str
    """In its store: the path of a folder, the prompt's digest in a bucket."""
    model: str
    tokens: int
    created_s: float
    """When it was published, by the store's clock, seconds since 1970."""
    bytes: int
    """All its bytes, with those that it shares with other assets."""
    own_bytes: int
    """Bytes that are freed whenever it goes, whatever other assets are there."""
    measured: bool = False
    """Whether its losses were measured, as `kvabr encode` does, which is expensive."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the objects that it may share with other assets, by their names."""
    tracks: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each track."""


def holding(
    catalog: Catalog, name: str, created_s: float, *, own_bytes: int, parts: Mapping[str, int] | None = None
) -> Holding:
    """Return the asset of a catalog; arguments as the fields of `Holding`."""
    parts = parts or {}
    return Holding(
        name=name,
        model=catalog.spec.model,
        tokens=catalog.tokens,
        created_s=created_s,
        bytes=own_bytes + sum(parts.values()),
        own_bytes=own_bytes,
        measured=not catalog.estimated,
        parts=parts,
        tracks={track.name: track.total_bytes for track in catalog.tracks},
    )


def total_bytes(holdings: Iterable[Holding]) -> int:
    """Return the bytes of assets together; what they share counts once."""
    shared: dict[str, int] = {}
    own = 0
    for holding in holdings:
        own += holding.own_bytes
        shared.update(holding.parts)
    return own + sum(shared.values())


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a store holds for one tenant."""

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

    async def remove(self, names: Collection[str], *, unnamed: bool = False, progress: Progress = silent) -> int:
        """Remove assets, and what only they have; return the bytes that this frees.

        Args:
            names: The assets; one that is gone already is no error.
            unnamed: Also remove what no asset names, and what publishers that were killed left, once it is an hour old.
            progress: Called as work goes on.

        Raises `UsageError` if the store is a single asset, `AssetError` or `TransportError` if the store refuses.
        """


def full_name(names: Sequence[str], text: str) -> str:
    """Return the name of an asset that ``text`` names or begins; `NotFoundError` if none does, or several do."""
    found = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(found) != 1:
        what = "no asset" if not found else f"{len(found)} assets"
        raise NotFoundError(f"{text}: {what} of that name; `kvabr store ls` lists them")
    return found[0]
