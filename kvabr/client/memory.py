"""State that a client keeps between plays and processes: speeds of peers, decoders and engines, and codec profiles.

A file of measurements is valid only on one host; some also require the same versions of kvabr and torch. It is JSON
with a checksum, written atomically. Writers merge the entries of other processes. If two write at once, one may lose an
entry, and writes it again later. A corrupt, foreign or implausible file never fails a play; the next write replaces it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from cachetools import LRUCache

from kvabr import __version__
from kvabr.abr.estimators import Prior
from kvabr.client.decode_speeds import BATCH, complete, is_gpu, measure, sound_speed
from kvabr.client.engine_work import timings_of
from kvabr.client.lookup import fetch_view
from kvabr.client.prefill_timings import PrefillTimings, Timing, read_rows
from kvabr.codec.native.coder import active_path
from kvabr.codec.profile import Profile
from kvabr.codec.threads import decoder_threads
from kvabr.data.profiles import shipped_bytes
from kvabr.player.groups import DecodeRates
from kvabr.store.files import PRIVATE, PRIVATE_FOLDER, read_text, write_file, write_text
from kvabr.transfer.interface import Connection
from kvabr.transfer.work import decoders
from kvabr.types.catalog import MAX_PROFILE_BYTES, Catalog
from kvabr.types.engine import Engine
from kvabr.types.errors import AssetError, FormatError, KvabrError
from kvabr.types.kv import KVSpec
from kvabr.types.naming import PROFILE_TRACK, TrackNamespace
from kvabr.types.once import once

V = TypeVar("V")

SCHEMA = "kvabr.machine/1"
MAX_BYTES = 1 << 18
MAX_MODELS = 64
_MAX_NAME = 300


class MachineFile(Generic[V]):
    """Entries of a file of measurements, with newer ones in memory. Thread-safe."""

    owner, most = "machine", MAX_MODELS

    def __init__(self, path: Path | None, table: str, read: Callable[[Any], V | None]) -> None:
        """Read the file if it exists; never raises. Without a ``path``: memory only.

        ``table``: key of the entries in the file. ``read`` returns an entry from its JSON value, or None to drop it; if
        it raises `FormatError`, the whole file is dropped.
        """
        self.path, self.table, self._parse = path, table, read
        self._lock = threading.Lock()
        self._known = self._read()
        self._changed: set[str] = set()
        """Keys of entries that are newer than the file's."""

    def get(self, key: str) -> V | None:
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, value: V) -> None:
        """Set an entry, and write the file if there is one; never raises."""
        with self._lock:
            self._set(key, value)
        self.save()

    def refresh(self) -> None:
        """Merge in the changes of other processes; never raises."""
        merged = self._read()
        with self._lock:
            for key, known in self._known.items():
                if key not in merged or key in self._changed:
                    merged.pop(key, None)
                    merged[key] = known
            self._known = merged
            self._trim()

    def save(self) -> None:
        """Refresh, and write the file if there is one; never raises."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self.refresh()
            with self._lock:
                text = self.dumps(self._known)
                self._changed.clear()
            # Outside the lock: a starting play must not wait for a disk.
            write_text(self.path, text, mode=PRIVATE)
        except (OSError, KvabrError) as error:
            self.warn(f"{self.path} cannot be saved: {error}")

    def identity(self) -> Any:
        """Return the values that identify the machine or host of the file, for JSON."""
        return this_machine()

    def warn(self, what: str) -> None:
        """Report an unreadable or unwritable file."""

    def dumps(self, known: dict[str, V]) -> str:
        """Return the file's text with these entries."""
        head = {"schema": SCHEMA, self.owner: self.identity(), "sha256": digest(known)}
        return json.dumps(head | {self.table: known}, default=asdict) + "\n"

    def loads(self, text: str) -> dict[str, V]:
        """Return a file's entries; raise `FormatError` if it is damaged, or of another machine."""
        try:
            whole = json.loads(text)
            if whole["schema"] != SCHEMA or whole[self.owner] != self.identity():
                raise FormatError("of another machine or version")
            entries = whole[self.table]
            long = any(len(key) > _MAX_NAME for key in entries)
            if whole["sha256"] != digest(entries) or len(entries) > self.most or long:
                raise FormatError("damaged")
            found = {key: self._parse(value) for key, value in entries.items()}
            return {key: value for key, value in found.items() if value is not None}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"not a file of {self.table} ({error!r})") from error

    def _read(self) -> dict[str, V]:
        try:
            if self.path is None or not self.path.exists():
                return {}
            return self.loads(read_text(self.path, MAX_BYTES, unreadable=FormatError, unfit=FormatError))
        except (FormatError, OSError) as error:
            self.warn(f"{self.path}: {error}; the file is ignored, and will be replaced")
            return {}

    def _set(self, key: str, value: V) -> None:
        self._known.pop(key, None)
        self._known[key] = value
        self._changed.add(key)
        self._trim()

    def _trim(self) -> None:
        for key in list(self._known)[: -self.most]:
            del self._known[key]
            self._changed.discard(key)


@cache
def this_machine() -> dict[str, str | int]:
    """Return the facts about this machine that affect timings."""
    processor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")[: 1 << 14].splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": this_host(),
        "processor": processor,
        "kvabr": __version__,
        "torch": torch.__version__,
        "threads": decoder_threads(),
    }


def digest(entries: Any) -> str:
    """Return the checksum of entries, which are JSON values or dataclasses."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True, default=asdict).encode()).hexdigest()


@cache
def this_host() -> str:
    """Return a digest that identifies this host without revealing its name."""
    parts = [platform.node(), platform.machine()]
    with suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="ascii", errors="replace")[:64])
    return hashlib.sha256("\0".join(("kvabr.host", *parts)).encode()).hexdigest()[:16]


MAX_PEERS = 512
_SLOWEST, _FASTEST = 1.0, 1e12
"""Plausible rates, bytes per second."""
_MAX_TTFB_S = 30.0
_HALF_LIFE_S = 3600.0
_MAX_AGE_S = 7 * 86400.0
_LAST_PLAY_WEIGHT = 0.5
"""Weight of the last play against earlier ones."""
_RATE_SHARE, _MIN_WEIGHT = 0.8, 0.5
"""Fraction of the recorded rate to count on, and minimum `Prior.weight` (freshness) of a usable record."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """Measured speed of one peer."""

    rate: float
    """Geometric mean over plays in bytes per second; the last play counts half."""
    ttfb_s: float
    """Mean over plays of the minimum time to first byte, in seconds; the last play counts half."""
    at: float
    """End of the last play, in seconds since 1970."""

    def sound(self) -> bool:
        """Return True if the values are plausible."""
        numbers = (self.rate, self.ttfb_s, self.at)
        return (
            all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
            and _SLOWEST <= self.rate <= _FASTEST
            and 0 <= self.ttfb_s <= _MAX_TTFB_S
            and self.at >= 0
        )

    def with_play(self, last: PeerRecord) -> PeerRecord:
        """Return the record with one play added."""
        rate = math.exp((1 - _LAST_PLAY_WEIGHT) * math.log(self.rate) + _LAST_PLAY_WEIGHT * math.log(last.rate))
        ttfb_s = (1 - _LAST_PLAY_WEIGHT) * self.ttfb_s + _LAST_PLAY_WEIGHT * last.ttfb_s
        return PeerRecord(rate, ttfb_s, last.at)

    def prior(self, now: float) -> Prior | None:
        """Return the prior for a play that begins at ``now``, or None if the record is too old."""
        age_s = now - self.at
        if not -60 <= age_s <= _MAX_AGE_S:  # the clock may have been set back a little
            return None
        return Prior(self.rate, self.ttfb_s, 0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))


UNKNOWN = Prior(0.0, 0.0)
"""A link without measurements."""


class PeerHistory(MachineFile[PeerRecord]):
    """The file of peers' speeds, from which plays start. Thread-safe."""

    owner, most = "host", MAX_PEERS

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if there is one; never raises."""
        self._warned = False
        super().__init__(path, "peers", _record)

    def of(self, peer: str, now: float | None = None) -> Prior | None:
        """Return a peer's recent prior, or None."""
        known = self.get(peer)
        return None if known is None else known.prior(time.time() if now is None else now)

    def link(self, names: Iterable[str], announced: Prior) -> Prior:
        """Return a cautious estimate from the best of a peer's records, or the announced rate; else `UNKNOWN`."""
        known = self.before(names, announced) or UNKNOWN
        return UNKNOWN if known.weight < _MIN_WEIGHT else Prior(_RATE_SHARE * known.rate, known.ttfb_s)

    def before(self, names: Iterable[str], announced: Prior) -> Prior | None:
        """Return a play's prior: from earlier plays, or if none is recent, the announced rate."""
        known = [prior for name in names if (prior := self.of(name)) is not None]
        best = max(known, key=lambda prior: (prior.weight >= _MIN_WEIGHT, prior.rate), default=None)
        if (best is None or best.weight < _MIN_WEIGHT) and announced.rate:
            return replace(announced, weight=_MIN_WEIGHT)
        return best

    def record(self, peer: str, rate: float, ttfb_s: float, now: float | None = None) -> None:
        """Record a play's measurements in memory, unless implausible."""
        at = time.time() if now is None else now
        record = PeerRecord(rate, ttfb_s, at)
        if not record.sound() or not 0 < len(peer) <= _MAX_NAME:
            return
        with self._lock:
            before = self._known.get(peer)
            if before is not None and before.prior(at) is not None:
                record = before.with_play(record)
            self._set(peer, record)

    def identity(self) -> str:
        return this_host()

    def warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the speed of peers: {what}", RuntimeWarning, stacklevel=2)


history_at = once(PeerHistory)
"""Returns the process's `PeerHistory` for a file; `speeds_at` and `costs_at` work alike."""


def _record(plain: Any) -> PeerRecord:
    record = PeerRecord(**plain)
    if not record.sound():
        raise FormatError("a record is implausible")
    return record


SPEEDS_FILE = "decode-rates.json"
_MAX_TRACKS = 64
_GPU_GUESS = 32.0


def speeds_key(catalog: Catalog, device: torch.device | None = None) -> str:
    """Return the key of a catalog's decode times: digests of spec and profile, with the decoder's code path or GPU."""
    return f"{catalog.spec.digest().hex()}:{catalog.profile or ''}:{_decoder(device)}"


@cache
def _decoder(device: torch.device | None) -> str:
    with suppress(KvabrError):  # KVABR_CODER is wrong; the AC decoder reports it
        return f"gpu {torch.cuda.get_device_name(device)}" if is_gpu(device) else active_path()
    return "none"


class DecodeSpeeds:
    """The file of measured decode speeds, and rates that plays correct. Thread-safe.

    Speeds are measured once per model and device, in the background. Until then, plays use the times in the catalog.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = MachineFile(path, "decode_rates", _tracks)
        self._lock = threading.Lock()
        self._tried: set[str] = set()
        self._rates: LRUCache[tuple[object, ...], DecodeRates] = LRUCache(MAX_MODELS)

    def rates(self, catalog: Catalog, device: torch.device | None = None) -> DecodeRates:
        """Return decode rates, shared and corrected by all plays of a model."""
        key = speeds_key(catalog, device)
        times = tuple((track.name, track.decode_s) for track in catalog.tracks)
        known = self._file.get(key)
        with self._lock:
            found: DecodeRates | None = self._rates.get((key, times, known is None))
            if found is None:
                latencies = {name.removeprefix(BATCH): s for name, s in (known or {}).items() if name.startswith(BATCH)}
                measured = complete(catalog, known) if known is not None else None
                if measured is None and is_gpu(device):
                    measured = {one.name: one.decode_s / _GPU_GUESS for one in catalog.tracks if one.decode_s > 0}
                found = DecodeRates(catalog, measured, latencies)
                self._rates[key, times, known is None] = found
        return found

    def lacks(self, catalog: Catalog, device: torch.device | None = None) -> bool:
        """Return True if `measure` is useful: there is no entry, and the device is a GPU or there is a file."""
        key = speeds_key(catalog, device)
        wanted = self._file.path is not None or is_gpu(device)  # a catalog has no GPU times
        return wanted and key not in self._tried and self._file.get(key) is None

    def measure(self, catalog: Catalog, profile: Profile | None, device: torch.device | None = None) -> None:
        """Measure a model, and update the file; never raises."""
        key = speeds_key(catalog, device)
        with self._lock:
            if key in self._tried:
                return
            self._tried.add(key)
        per_token = measure(catalog, profile, device=device)
        if per_token:
            self._file.put(key, per_token)


speeds_at = once(DecodeSpeeds)


def _tracks(found: Any) -> dict[str, float] | None:
    tracks = dict(found)
    return tracks if 0 < len(tracks) <= _MAX_TRACKS and all(map(sound_speed, tracks.values())) else None


COSTS_FILE = "prefill-costs.json"


class EngineCosts:
    """The file of engines' prefill timings. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: MachineFile[list[Timing]] = MachineFile(path, "prefill_costs", read_rows)

    def of(self, engine: Engine) -> PrefillTimings:
        """Return the engine's prefill timings, from this process or else from the file."""
        timings = timings_of(engine)
        return self.restored(timings, engine_key(engine)) if timings.empty else timings

    def restored(self, timings: PrefillTimings, key: str) -> PrefillTimings:
        """Return ``timings``, filled from the file if empty."""
        if timings.empty and (rows := self._file.get(key)):
            timings.restore(rows)
        return timings

    def save(self, timings: PrefillTimings, key: str) -> None:
        """Save new timings if there is a file; never raises."""
        if self._file.path is not None and timings.news:
            self._file.put(key, timings.rows())

    def save_engine(self, engine: Engine) -> None:
        """Save an engine's timings, and fit its cost, which is slow."""
        timings = timings_of(engine)
        self.save(timings, engine_key(engine))
        timings.cost()


costs_at = once(EngineCosts)


def engine_key(engine: Engine) -> str:
    """Return an engine's key in the file: model, device and kind."""
    kind, device = type(engine), getattr(engine, "device", None)
    own = f"{getattr(engine, 'dtype', '')} {getattr(engine, 'weights', '')}"
    return cost_key(engine.spec.digest().hex(), f"{kind.__module__}.{kind.__qualname__} {own}", device)


def cost_key(model: str, engine: str, device: torch.device | None) -> str:
    """Return the key for a model on an engine and a device (None: the processor)."""
    where = f"{'cpu' if device is None else device.type} {torch.get_num_threads()}"
    if device is not None and device.type == "cuda":
        with suppress(RuntimeError):  # the device is gone
            where = torch.cuda.get_device_name(device)
    return f"{model}:{engine}:{where}"


PROFILES = "profiles"
_MAX_CACHED = 8
_profiles: LRUCache[str, Profile] = LRUCache(_MAX_CACHED)
_shipped = lru_cache(_MAX_CACHED)(shipped_bytes)
_LOCK, _READING = threading.Lock(), threading.Lock()
"""The first guards the profiles in memory; the second, reading a profile's file, which plays share. Neither is held
during network waits."""


class ProfileCache:
    """A client's codec profiles, from memory, a folder, kvabr's package data, or the origin.

    All clients of a process share the profiles in memory.
    """

    def __init__(self, folder: Path | None = None, on_failure: Callable[[str], object] = lambda _why: None) -> None:
        """``folder`` keeps profiles between processes; ``on_failure`` receives write errors, in any thread."""
        self._folder, self._on_failure = folder, on_failure

    def has(self, catalog: Catalog) -> bool:
        """Return True if `fetch` needs no network."""
        if catalog.profile is None:
            return True
        wanted = _name(catalog).prompt
        if _known(wanted) is not None or (self._folder is not None and _file(self._folder, wanted).is_file()):
            return True
        return _shipped(wanted, catalog.profile_bytes, catalog.spec) is not None

    async def fetch(self, origin: Connection, catalog: Catalog) -> Profile | None:
        """Return a catalog's profile, or None if its tracks need none; plays share the download.

        Raises `TransportError`, `ForeignError` if it is of another model, or `FormatError` if it is another profile.
        """
        if catalog.profile is None:
            return None
        name, size = _name(catalog), catalog.profile_bytes
        loop, wanted = asyncio.get_running_loop(), name.prompt
        profile = _known(wanted) or await loop.run_in_executor(decoders(), self._local, wanted, size, catalog.spec)
        if profile is None:
            data = await fetch_view(origin, name, PROFILE_TRACK, size)
            profile = await loop.run_in_executor(decoders(), self._received, wanted, data)
        if profile.spec != catalog.spec:  # group sizes may differ
            profile.check(catalog.spec)
        return profile

    def _local(self, sha256: str, size: int, spec: KVSpec) -> Profile | None:
        if self._folder is not None and (profile := self._stored(_file(self._folder, sha256), sha256)) is not None:
            return profile
        data = _shipped(sha256, size, spec)
        return None if data is None else _checked(data, sha256)

    @staticmethod
    def _stored(file: Path, sha256: str) -> Profile | None:
        try:
            with file.open("rb") as stream:
                return _checked(stream.read(MAX_PROFILE_BYTES + 1), sha256)
        except FormatError:
            with suppress(OSError):
                file.unlink()  # damaged: fetch it again
        except OSError:
            pass  # missing
        return None

    def _received(self, sha256: str, data: memoryview) -> Profile:
        profile = _checked(data, sha256)
        try:
            if self._folder is not None and not (file := _file(self._folder, sha256)).is_file():
                self._folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                write_file(file, bytes(data), mode=PRIVATE)
        except (OSError, AssetError) as error:
            self._on_failure(str(error))  # a failed write must not fail the play
        return profile


def keep(profile: Profile) -> None:
    """Add a local profile to those in memory."""
    with _LOCK:
        _profiles[profile.digest] = profile


def _known(sha256: str) -> Profile | None:
    with _LOCK:
        return _profiles.get(sha256)


def _name(catalog: Catalog) -> TrackNamespace:
    """Return the profile's namespace; raise `FormatError` unless its digest is safe as a file name."""
    if catalog.profile is None or not 0 < catalog.profile_bytes <= MAX_PROFILE_BYTES:
        raise FormatError(f"catalog: a profile must have 1 to {MAX_PROFILE_BYTES} bytes, got {catalog.profile_bytes}")
    return TrackNamespace(catalog.spec.model, catalog.profile)


def _checked(data: bytes | memoryview, sha256: str) -> Profile:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FormatError("the profile is not the one that the catalog names (its SHA-256 differs)")
    with _READING:
        if (profile := _known(sha256)) is None:
            profile = Profile.from_bytes(bytes(data))
            with _LOCK:
                _profiles[sha256] = profile
    return profile


def _file(folder: Path, sha256: str) -> Path:
    return folder / f"{sha256}.safetensors"


@dataclass(frozen=True, slots=True)
class Memory:
    """State that a client keeps between plays."""

    profiles: ProfileCache
    history: PeerHistory
    speeds: DecodeSpeeds
    costs: EngineCosts
