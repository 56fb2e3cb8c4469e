"""A store of assets that is no folder: objects by key in memory, as a bucket has them. All that a new store takes.

It has no inodes, maps no files, and answers as slowly as a test asks it to.
"""

from __future__ import annotations

import hashlib
import itertools
import threading

from kvabr.store.asset import CATALOG, PROFILE, PROMPT, Asset, AssetListing, AssetVersion, LoadedFrame
from kvabr.store.locations import SCHEMES
from kvabr.types.errors import AssetError, UsageError

BUCKETS: dict[str, Bucket] = {}


class Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, int] = {}
        self.clock = itertools.count(1)
        self.gets = 0
        self.threads: set[str] = set()
        """Names of the threads that read."""

    def put(self, key, data):
        self.objects[key], self.written[key] = bytes(data), next(self.clock)

    def get(self, key, begin=0, end=None):
        self.gets += 1
        self.threads.add(threading.current_thread().name)
        try:
            return self.objects[key][begin:end]
        except KeyError:
            raise AssetError(f"{key}: missing from the asset") from None


class ObjectAsset(Asset):
    local = False

    def __init__(self, store, name, version):
        self._bucket, self._key = store.bucket, store.key(name)
        super().__init__(f"{store.location}/{name}", name, version, self._bucket.get(f"{self._key}/{CATALOG}"))

    def is_current(self):
        return version_of(self._bucket, self._key) == self.version

    def check_parts(self):
        parts = {self._frame_key(g, t.name): size for t in self.catalog.tracks for g, size in enumerate(t.bytes)}
        for key, size in parts.items():
            if len(self._bucket.objects.get(key, b"")) != size:
                raise AssetError(f"{key}: missing from the asset, or of another size")
        if self.catalog.profile is not None:
            self.profile_bytes()

    def open_frame(self, group, track):
        data = memoryview(self._bucket.get(self._frame_key(group, track)))
        if len(data) != self.catalog.published_track(track).bytes[group]:
            raise AssetError(f"{self._frame_key(group, track)}: has {len(data)} bytes")
        return LoadedFrame(data)

    def _read_part(self, part, max_bytes):
        return self._bucket.get(f"{self._key}/{part}", 0, max_bytes + 1)

    def _frame_part(self, group, track):
        return f"{track}/{group}"

    def _frame_key(self, group, track):
        return f"{self._key}/{self._frame_part(group, track)}"


class ObjectAssetWriter:
    """Puts frames under the catalog's digest at the end, and the catalog last."""

    def __init__(self, bucket, key):
        self._bucket, self._key, self._parts = bucket, key, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._parts.clear()

    def frame(self, group, track, frame):
        self._parts[f"{track}/{group}"] = frame

    def read_frame(self, group, track):
        return self._parts[f"{track}/{group}"]

    def profile(self, data):
        self._parts[PROFILE] = data

    def prompt(self, prompt):
        self._parts[PROMPT] = prompt.dumps().encode()

    def commit(self, catalog):
        for name, data in self._parts.items():
            self._bucket.put(f"{self._key}/{name}", data)
        self._bucket.put(f"{self._key}/{CATALOG}", catalog.dumps().encode())


class ObjectAssetStore:
    look_every_s = 0.0

    def __init__(self, url):
        self.location = url.rstrip("/")
        name, _, self._prefix = self.location.partition("://")[2].partition("/")
        self.bucket = BUCKETS.setdefault(name, Bucket())

    def key(self, name):
        return "/".join(part for part in (self._prefix, name) if part not in ("", "."))

    def prepare(self):
        pass

    def list(self):
        found = {}
        for key in list(self.bucket.objects):
            folder, _, last = key.rpartition("/")
            if last == CATALOG and f"/{folder}/".startswith(f"/{self._prefix}/" if self._prefix else "/"):
                name = folder[len(self._prefix) :].strip("/") or "."
                found[name] = version_of(self.bucket, folder)
        return AssetListing(found, complete=True)

    def version(self, name):
        return version_of(self.bucket, self.key(name))

    def open(self, name="."):
        version = self.version(name)
        if version is None:
            raise AssetError(f"{self.location}/{name}: no such asset")
        return ObjectAsset(self, name, version)

    def writer(self, name=".", *, force=False):
        if self.version(name) is not None and not force:
            raise UsageError(f"{self.location}/{name}: this asset exists; add --force to replace it")
        return ObjectAssetWriter(self.bucket, self.key(name))

    def close(self):
        pass


def version_of(bucket, key):
    catalog = f"{key}/{CATALOG}"
    data = bucket.objects.get(catalog)
    return None if data is None else AssetVersion(hashlib.sha256(data).hexdigest(), bucket.written[catalog])


SCHEMES["mem"] = ObjectAssetStore
