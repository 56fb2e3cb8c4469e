"""Copies assets from store to store, of whatever kinds. What is there already stays, so a copy can be done again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from kvabr.store.admin.protocol import Progress, silent
from kvabr.store.asset import Asset, AssetStore, is_damage
from kvabr.types.errors import AssetError, KvabrError, UsageError


@dataclass(slots=True)
class Copied:
    """What was copied."""

    assets: list[str] = field(default_factory=list)
    """Names in the source."""
    kept: list[str] = field(default_factory=list)
    """Those that were there already."""
    failed: dict[str, str] = field(default_factory=dict)
    """Those that are damaged, or could not be written, and why."""
    bytes: int = 0
    """Bytes of the frames that were copied."""


def copy_assets(
    source: AssetStore,
    target: AssetStore,
    *,
    names: Collection[str] = (),
    model: str | None = None,
    progress: Progress = silent,
) -> Copied:
    """Copy assets, each frame checked against its catalog. What is there already stays unless it lacks a part.

    Args:
        source: Where they are.
        target: Where they go, by the digest of their prompt.
        names: In the source, whole; none: all of them.
        model: Only assets of this model.
        progress: Hears how far it is.

    Raises `UsageError` if the source has no asset of one of these names.
    """
    done, versions = Copied(), source.list().versions
    if missing := set(names) - versions.keys():
        raise UsageError(f"{source.location}: has no asset {min(missing)}; `kvabr store ls` lists them")
    wanted = sorted(names or versions)
    for number, name in enumerate(wanted):
        progress("copying", number, len(wanted))
        try:
            asset = source.open(name)
            catalog = asset.catalog
            if model not in (None, catalog.spec.model):
                continue
            if (there := _held(target, catalog.namespace.prompt)) == "whole":
                done.kept.append(name)
            else:
                done.bytes += _copy(asset, target, force=there == "damaged")
                done.assets.append(name)
        except UsageError:
            raise
        except KvabrError as error:
            done.failed[name] = str(error)
    progress("copying", len(wanted), len(wanted))
    return done


def _held(store: AssetStore, name: str) -> Literal["whole", "damaged", "nothing"]:
    """Return what a store has of an asset; its frames are not read."""
    if store.version(name) is None:
        return "nothing"
    try:
        store.open(name).check_parts()
    except KvabrError as error:
        return "damaged" if is_damage(error) else "whole"
    return "whole"


def _copy(asset: Asset, target: AssetStore, *, force: bool) -> int:
    """Copy one asset; return the bytes of its frames."""
    catalog, size = asset.catalog, 0
    with target.writer(catalog.namespace.prompt, force=force) as writer:
        profile = asset.profile_bytes()
        if profile is not None:
            writer.profile(profile)
        for track in catalog.published.values():
            for group in range(len(track.bytes)):
                frame = asset.frame(group, track.name)
                writer.frame(group, track.name, frame)
                size += len(frame)
        try:
            prompt = asset.prompt()
        except AssetError:
            pass  # only a publisher's own folder has it
        else:
            writer.prompt(prompt)
        writer.commit(catalog)
    return size
