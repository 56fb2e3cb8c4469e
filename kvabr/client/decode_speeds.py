"""Decode speeds of this machine, measured once per model and device in the background, and kept in a file.

Unmeasured, plays start with the catalog's times, and correct them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cachetools import LRUCache

from kvabr.client.machine_file import MAX_MODELS, MachineFile
from kvabr.codec.base import GroupContext
from kvabr.codec.block_slots import TensorPlace
from kvabr.codec.builtin import BUILTIN
from kvabr.codec.group import decode_group, payload_of
from kvabr.codec.native.coder import active_path
from kvabr.codec.paged import CodedGroup, expand
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import below as track_below
from kvabr.codec.sample_frames import CHUNK, SampleFrames
from kvabr.codec.threads import CORES
from kvabr.player.decode_queue import DecodeRates, family
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import digest_of
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec
from kvabr.types.once import once

SPEEDS_FILE = "decode-rates.json"
_MAX_TRACKS = 64
_MAX_S = 10.0
BUDGET_S, _GPU_BUDGET_S = 0.05, 0.5
"""Seconds for all tracks of a model, on the processor and on a GPU; the rest is inferred by family."""
BATCH = "batch "
"""Key prefix of a family's seconds per batch."""
_GPU_GUESS = 32.0
_BATCHED = 8
_SMALL, _LARGE = 1 << 19, 3 << 19
"""Elements to decode: for codecs with proportional time, and with a cost per 128 tokens."""
_RUNS = 2
_one_core = threading.local()
_one_core_lock = threading.Lock()


def on_one_core() -> None:
    """Limit torch to this thread, since other threads decode their own groups.

    Sets this thread's count and keeps the default for new ones. With OpenMP's default, 2 decoders on 2 busy cores took
    ten times the processor time.
    """
    if getattr(_one_core, "done", False):
        return
    _one_core.done = True
    with _one_core_lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        again = threading.Thread(target=torch.set_num_threads, args=(before,), name="kvabr-torch")
        again.start()
        again.join()


def measure(
    catalog: Catalog,
    profile: Profile | None,
    *,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.thread_time,
    budget_s: float | None = None,
) -> dict[str, float]:
    """Return the seconds that this thread takes to check and decode a token, by track.

    A GPU decodes n groups at once in T(n) = a + b n, with b by track, and a by family under `BATCH`. The smallest track
    of each family is measured on synthetic frames (`SampleFrames`), then others within the budget. Plug-in codecs, and
    tracks without their profile, are skipped. ``device`` is the cache's (None: the processor). The processor's clock
    excludes the machine's other work; ``budget_s`` is by default `BUDGET_S`, or more on a GPU.
    """
    on_one_core()
    if device is not None and _is_gpu(device):
        found = dict[str, float]()
        with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            found = _measure_batches(catalog, profile, device, _GPU_BUDGET_S if budget_s is None else budget_s)
        return found  # empty if the GPU has no memory for it
    budget_s = BUDGET_S if budget_s is None else budget_s
    began, found = clock(), {}
    samples: dict[int, SampleFrames] = {}
    for track, share in _by_family(catalog):
        if clock() - began >= share * budget_s:
            break
        with CORES.all_taken(), contextlib.suppress(KvabrError, RuntimeError, MemoryError):
            seconds = _timed_decode(catalog, track.name, profile, samples, clock)
            if _sound(seconds):
                found[track.name] = seconds
    return found


def _by_family(catalog: Catalog) -> Iterator[tuple[Track, float]]:
    """Yield the smallest track of each family, fast ones first, then others, each with its budget share."""
    tracks = sorted((track for track in catalog.tracks if track.name in BUILTIN), key=lambda track: track.total_bytes)
    first: dict[str, Track] = {}
    for track in tracks:
        if track.refines is None:
            first.setdefault(family(track.name), track)
    for track in sorted(first.values(), key=lambda track: BUILTIN[track.name].layout is None):
        yield track, 1.0
    for track in tracks:
        if track not in first.values():
            yield track, 0.5


def _timed_decode(
    catalog: Catalog,
    track: str,
    profile: Profile | None,
    samples: dict[int, SampleFrames],
    clock: Callable[[], float],
) -> float:
    spec, separable = catalog.spec.largest, BUILTIN[track].layout is not None
    most = _SMALL if separable else _LARGE
    tokens = min(spec.rows, max(16, most // spec.elements_per_token))
    sample = samples.setdefault(tokens, new_sample(spec, profile, tokens))
    frame, below = sample.frame(track), sample_group(sample, track).below
    digest = digest_of(frame, catalog.digest_kind)
    out = torch.zeros(spec.shape(tokens), dtype=spec.torch_dtype)
    times = []
    for _ in range(_RUNS):
        start = clock()
        decode_group(frame, track, sample.context, CHUNK, 0, out, below, digest=digest)
        times.append(clock() - start)
    return min(times) / tokens


def new_sample(spec: KVSpec, profile: Profile | None, tokens: int) -> SampleFrames:
    """Return a maker of synthetic frames for one layer class."""
    sinks = 0 if profile is None else profile.of(spec).sinks
    behind_sinks = spec.group_tokens * (1 + sinks // spec.group_tokens)
    return SampleFrames(GroupContext(spec, behind_sinks, tokens, profile))


def sample_group(sample: SampleFrames, track: str) -> CodedGroup:
    """Return a synthetic group on a track, with all layers below."""
    stack = [track]
    while (lower := track_below(stack[0])) is not None:
        stack.insert(0, lower)
    *below, payload = (payload_of(sample.frame(each)) for each in stack)
    return CodedGroup(payload, track, sample.context, below)


def _measure_batches(
    catalog: Catalog, profile: Profile | None, device: torch.device, budget_s: float
) -> dict[str, float]:
    spec, found = catalog.spec.largest, dict[str, float]()
    sample = new_sample(spec, profile, spec.rows)
    places = [
        TensorPlace(torch.zeros(spec.shape(spec.rows), dtype=spec.torch_dtype, device=device)) for _ in range(_BATCHED)
    ]
    spent_s = 0.0
    for track, share in _by_family(catalog):
        if spent_s >= share * budget_s:
            break
        with contextlib.suppress(KvabrError, RuntimeError, MemoryError):
            group = sample_group(sample, track.name)
            one_s, took_s = _timed_batch(group, places[:1])
            many_s, also_s = _timed_batch(group, places)
            spent_s += took_s + also_s
            each_s = max(many_s - one_s, one_s / 1024) / (_BATCHED - 1)
            if _sound(seconds := each_s / spec.rows):
                found[track.name] = seconds
                latency_s = max(0.0, one_s - each_s)
                if latency_s:
                    name = BATCH + family(track.name)
                    found[name] = max(found.get(name, 0.0), latency_s)
    return found


def _timed_batch(group: CodedGroup, places: Sequence[TensorPlace]) -> tuple[float, float]:
    times = []
    for _ in range(1 + _RUNS):
        start = time.perf_counter()
        for wrong in expand([group] * len(places), places):
            if wrong is not None:
                raise wrong
        if places[0].device.type == "cuda":
            torch.cuda.current_stream(places[0].device).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:]), sum(times[1:])


def complete(catalog: Catalog, per_token: dict[str, float]) -> dict[str, float]:
    """Return seconds per full group of a catalog's tracks, given some seconds per token; scale others by family."""
    tokens = catalog.spec.largest.rows
    found = {track.name: per_token[track.name] * tokens for track in catalog.tracks if track.name in per_token}
    factors: dict[str, list[float]] = {}
    for name, seconds in found.items():
        said = catalog.track(name).decode_s
        if said > 0 and 0 < (factor := seconds / said) < math.inf:  # catalogs are not trusted
            factors.setdefault(family(name), []).append(factor)
    for track in catalog.tracks:
        known = factors.get(family(track.name))
        if track.name not in found and known and track.decode_s > 0:
            seconds = track.decode_s * math.exp(sum(map(math.log, known)) / len(known))
            if 0 < seconds < math.inf:
                found[track.name] = seconds
    return found


def speeds_key(catalog: Catalog, device: torch.device | None = None) -> str:
    """Return the key of a catalog's decode times on this machine: digests of spec and profile, and code path or GPU."""
    path = "none"
    with contextlib.suppress(KvabrError):  # KVABR_CODER is wrong; decoding AC reports it
        path = f"gpu {torch.cuda.get_device_name(device)}" if _is_gpu(device) else active_path()
    return f"{catalog.spec.digest().hex()}:{catalog.profile or ''}:{path}"


class DecodeSpeeds:
    """The file, and rates corrected by plays. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if there is one; never raises."""
        self._file = MachineFile(path, "decode_rates", _tracks)
        self._lock = threading.Lock()
        self._tried: set[str] = set()
        self._rates: LRUCache[tuple[object, ...], DecodeRates] = LRUCache(MAX_MODELS)

    def rates(self, catalog: Catalog, device: torch.device | None = None) -> DecodeRates:
        """Return decode rates; plays of one model share and correct them."""
        key = speeds_key(catalog, device)
        times = tuple((track.name, track.decode_s) for track in catalog.tracks)
        known = self._file.get(key)
        with self._lock:
            found: DecodeRates | None = self._rates.get((key, times, known is None))
            if found is None:
                latencies = {name.removeprefix(BATCH): s for name, s in (known or {}).items() if name.startswith(BATCH)}
                measured = complete(catalog, known) if known is not None else None
                if measured is None and _is_gpu(device):
                    measured = {one.name: one.decode_s / _GPU_GUESS for one in catalog.tracks if one.decode_s > 0}
                found = DecodeRates(catalog, measured, latencies)
                self._rates[key, times, known is None] = found
        return found

    def lacks(self, catalog: Catalog, device: torch.device | None = None) -> bool:
        """Return whether `measure` is useful: no entry, but a file or a GPU."""
        key = speeds_key(catalog, device)
        wanted = self._file.path is not None or _is_gpu(device)  # a catalog has no GPU times
        return wanted and key not in self._tried and self._file.get(key) is None

    def measure(self, catalog: Catalog, profile: Profile | None, device: torch.device | None = None) -> None:
        """Measure a model within about `BUDGET_S`, and update the file; never raises."""
        key = speeds_key(catalog, device)
        with self._lock:
            if key in self._tried:
                return
            self._tried.add(key)
        per_token = measure(catalog, profile, device=device)
        if per_token:
            self._file.keep(key, per_token)


@once
def speeds_at(path: Path | None) -> DecodeSpeeds:
    """Return this process's `DecodeSpeeds` for a file."""
    return DecodeSpeeds(path)


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _sound(seconds: object) -> bool:
    return type(seconds) is float and 0 < seconds <= _MAX_S  # NaN compares false


def _tracks(found: Any) -> dict[str, float] | None:
    tracks = dict(found)
    return tracks if 0 < len(tracks) <= _MAX_TRACKS and all(map(_sound, tracks.values())) else None
