"""Lists, checks and copies the contents of a store, or of a folder of stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvabr.store.asset import Asset, as_asset_errors, is_damage, object_sizes
from kvabr.store.asset_store import AssetStore
from kvabr.store.asset_writer import put_model
from kvabr.store.names import CATALOGS, GROUPS
from kvabr.store.pages import page_kind
from kvabr.store.removing import (
    Progress,
    bad_pages,
    objects_of,
    put_pages,
    read_catalogs,
    remove_assets,
    silent,
)
from kvabr.store.store import StoredObject, listing
from kvabr.store.store_tree import StoreTree
from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, KvabrError, MissingAssetError, NotFoundError, UsageError, VersionError

REPAIR = "remove it with --repair, and publish it again"
REWRITE = "write it again with --repair"


@dataclass(frozen=True, slots=True)
class Holding:
    """An asset in a store."""

    name: str
    """Path of the store relative to the location, and prompt digest."""
    model: str
    tokens: int
    created_s: float
    """Time of publication by the store's clock, in seconds since 1970."""
    measured: bool
    """True if losses were measured."""
    objects: Mapping[str, int]
    """Sizes in bytes of the asset's objects, by path relative to the location; assets may share objects."""
    tracks: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Total size in bytes, including shared objects."""
        return sum(self.objects.values())


def total_bytes(holdings: Iterable[Holding]) -> int:
    """Return the total size of assets in bytes; shared objects count once."""
    shared: dict[str, int] = {}
    for holding in holdings:
        shared.update(holding.objects)
    return sum(shared.values())


@dataclass(frozen=True, slots=True)
class Inventory:
    """The content of a store."""

    holdings: tuple[Holding, ...]
    damaged: Mapping[str, str] = field(default_factory=dict)
    unreferenced_bytes: int = 0
    """Bytes of frames that no catalog names. They belong to a running publisher or a group cache, or are garbage."""


def inventory(tree: StoreTree, progress: Progress = silent) -> Inventory:
    """List all frames and read all catalogs."""
    found, damaged = tree.find()
    held, unreferenced = list[Holding](), 0
    for label, store in found.items():
        objects = store.store
        listed = objects.blocked(listing(objects, CATALOGS))
        prompts = [name.removeprefix(CATALOGS) for name in listed]
        prompts = [prompt for prompt in prompts if store.only in (None, prompt)]
        catalogs, bad = objects.blocked(read_catalogs(objects, prompts, progress))
        damaged |= {label + prompt: why for prompt, why in bad.items()}
        held += [_holding(label, catalog, listed[CATALOGS + prompt]) for prompt, catalog in catalogs.items()]
        named = {name for catalog in catalogs.values() for name in objects_of(catalog)}
        frames = objects.blocked(listing(objects, GROUPS))
        unreferenced += sum(one.size for name, one in frames.items() if name not in named)
    return Inventory(tuple(sorted(held, key=lambda one: one.name)), damaged, unreferenced)


def _holding(label: str, catalog: Catalog, found: StoredObject) -> Holding:
    objects = {label + name: size for name, size in (objects_of(catalog) | {found.name: found.size}).items()}
    tracks = {track.name: track.total_bytes for track in catalog.tracks}
    name, measured = label + catalog.namespace.prompt, not catalog.estimated
    return Holding(name, catalog.spec.model, catalog.tokens, found.modified_s, measured, objects, tracks)


def full_name(names: Collection[str], text: str) -> str:
    """Return the only asset name that starts with ``text``; raise `NotFoundError` if there is none or several."""
    found = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(found) != 1:
        what = "no asset" if not found else f"{len(found)} assets"
        raise NotFoundError(f"{text}: {what} of that name; `kvabr store ls` lists them")
    return found[0]


def names_in(tree: StoreTree) -> dict[str, AssetStore]:
    """Return the store of each asset, by the asset's name."""
    stores, _ = tree.find()
    return {label + prompt: store for label, store in stores.items() for prompt in store.list()}


def remove(tree: StoreTree, names: Collection[str], *, unreferenced: bool = False, progress: Progress = silent) -> int:
    """Remove assets by name; return the number of freed bytes. See `remove_assets`."""
    freed, stores = 0, tree.find()[0]
    for label, store in stores.items():
        own = [name.removeprefix(label) for name in names if name.startswith(label) and "/" not in name[len(label) :]]
        if own or unreferenced:
            work = remove_assets(store.store, own, unreferenced=unreferenced, progress=progress)
            freed += store.store.blocked(work)
    return freed


# ------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged or unreadable asset."""

    name: str
    what: str
    advice: str = REPAIR
    repaired: bool = False


def find_damage(tree: StoreTree, *, deep: bool = False, progress: Progress = silent) -> list[Damage]:
    """Check all assets; return the damaged ones. ``deep`` also reads all frames. Raise `AssetError` without access."""
    assets, sizes = names_in(tree), dict[AssetStore, dict[str, int]]()
    bad = [Damage(name, why, "it may be undamaged") for name, why in sorted(tree.find()[1].items())]
    for number, name in enumerate(sorted(assets), 1):
        store = assets[name]
        try:
            asset = store.open(name.rpartition("/")[2])
            if store not in sizes:
                sizes[store] = object_sizes(store.store)
            asset.check_objects(sizes[store])
            lost = asset.lost_lookups(sizes[store])
            if deep:
                asset.check_frames()
                with as_asset_errors():
                    pages = store.store.blocked(bad_pages(store.store, asset.catalog, sizes[store].keys()))
                lost += sorted(pages.keys() - set(lost))
            if lost:
                what = "damaged" if sizes[store].get(lost[0]) else "missing"
                more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
                bad.append(Damage(name, f"{store.store.where(lost[0])} is {what}{more}", REWRITE))
        except MissingAssetError:
            pass  # removed in the meantime
        except KvabrError as error:
            bad.append(Damage(name, str(error), _advice(error)))
        progress("checking", number, len(assets))
    return bad


def rewrite(tree: StoreTree, names: Collection[str]) -> None:
    """Write the missing and damaged objects by which players find assets; raise `AssetError` if this fails."""
    for name, store in names_in(tree).items():
        if name not in names:
            continue
        with suppress(MissingAssetError), as_asset_errors():
            catalog, objects = store.open(name.rpartition("/")[2]).catalog, store.store
            put_model(objects, catalog.spec)
            frames = object_sizes(objects, (GROUPS,)).keys()
            objects.blocked(put_pages(objects, objects.blocked(bad_pages(objects, catalog, frames))))


def _advice(error: KvabrError) -> str:
    if isinstance(error, VersionError):
        return "upgrade kvabr if a newer version publishes here; otherwise remove the asset"
    return REPAIR if is_damage(error) else "it may be undamaged"


# ------------------------------------------------------- copies


@dataclass(slots=True)
class Copied:
    """Result of copying."""

    assets: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Errors by name of assets that are damaged or could not be written."""
    bytes: int = 0


def copy_assets(
    source: StoreTree,
    target: AssetStore,
    *,
    names: Collection[str] = (),
    model: str | None = None,
    progress: Progress = silent,
) -> Copied:
    """Copy assets, and check each frame: those in ``names`` (full names; default: all), only of one ``model`` if given.

    Assets that are complete in the target are not replaced. Raise `UsageError` for a missing name.
    """
    done, there = Copied(), names_in(source)
    if missing := set(names) - there.keys():
        raise UsageError(f"{source.location}: has no asset {min(missing)}; `kvabr store ls` lists them")
    wanted = sorted(names or there)
    for number, name in enumerate(wanted):
        progress("copying", number, len(wanted))
        try:
            asset = there[name].open(name.rpartition("/")[2])
            if model not in (None, asset.catalog.spec.model):
                continue
            if (held := _held(target, asset.prompt_digest)) is None or held:
                done.bytes += _copy(asset, target, force=held is not None)
                done.assets.append(name)
            else:
                done.kept.append(name)
        except UsageError:
            raise
        except KvabrError as error:
            done.failed[name] = str(error)
    progress("copying", len(wanted), len(wanted))
    return done


def _held(store: AssetStore, prompt: str) -> bool | None:
    """Return True for a damaged copy in the target, False for an intact one, None without a copy."""
    if not store.has(prompt):
        return None
    try:
        store.open(prompt).check_parts()
    except KvabrError as error:
        return is_damage(error)
    return False


def _copy(asset: Asset, target: AssetStore, *, force: bool) -> int:
    catalog, size = asset.catalog, 0
    with target.writer(catalog.namespace.prompt, force=force) as writer:
        whole = catalog.passage is None and not catalog.position
        kind = page_kind(catalog.spec, catalog.tracks, catalog.profile, catalog.digest_kind) if whole else ""
        writer.begin(catalog.spec, catalog.chunks, kind)
        profile = asset.profile_bytes()
        if profile is not None:
            writer.profile(profile)
        published = catalog.published.values()
        for group in range(max(len(track.bytes) for track in published)):
            for track in published:
                if group < len(track.bytes):
                    frame = asset.frame(group, track.name)
                    writer.frame(group, track.name, frame, track.digests[group])
                    size += len(frame)
        with suppress(AssetError):  # only a publisher's folder has token ids
            writer.prompt(asset.prompt())
        writer.commit(catalog)
    return size
