"""Checks the assets of a store, of whatever kind: everything is there, and on demand every frame is undamaged."""

from __future__ import annotations

from itertools import count

from kvabr.store.admin.protocol import REPAIR, Damage, Progress, silent
from kvabr.store.asset import AssetStore, is_damage
from kvabr.store.objects.blocking import each
from kvabr.types.errors import KvabrError, MissingAssetError, VersionError

_AT_ONCE = 8


def find_damage(store: AssetStore, *, deep: bool = False, progress: Progress = silent) -> list[Damage]:
    """Return what is wrong with the assets of a store; ``deep`` also reads all frames.

    Raises `AssetError` if the store cannot be reached.
    """
    listing, done = store.list(), count(1)
    bad = [Damage(name, why, "it may be undamaged") for name, why in sorted(listing.unreadable.items())]
    names = sorted(listing.versions)

    def check(name: str) -> Damage | None:
        try:
            asset = store.open(name)
            asset.check_parts()
            if deep:
                asset.check_frames()
        except MissingAssetError:
            return None  # it was removed meanwhile
        except KvabrError as error:
            return Damage(name, str(error), _advice(error))
        finally:
            progress("checking", next(done), len(names))
        return None

    return bad + [damage for damage in each(_AT_ONCE, check, names) if damage is not None]


def _advice(error: KvabrError) -> str:
    if isinstance(error, VersionError):
        return "upgrade kvabr if a newer version publishes here; otherwise remove it"
    return REPAIR if is_damage(error) else "it may be undamaged"
