"""Measure the decode speeds of this machine, on synthetic frames; see `kvabr.client.memory.DecodeSpeeds`."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.block_slots import TensorPlace
from kvabr.codec.builtin import BUILTIN
from kvabr.codec.group import payload_of
from kvabr.codec.paged import CodedGroup, expand
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import below as track_below
from kvabr.codec.sample_frames import SampleFrames
from kvabr.codec.threads import CORES
from kvabr.player.groups import family
from kvabr.types.catalog import Catalog, Track
from kvabr.types.digests import digest_of, has_digest
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec

_MAX_S = 10.0
BATCH = "batch "
"""Key prefix of the fixed seconds per batch of a family of tracks."""
_BATCHED = 8
_ELEMENTS = 3 << 19
"""Maximum elements in a measurement on the processor: enough for codecs with a cost per 128 tokens."""
_RUNS = 3
_one_core = threading.local()
_one_core_lock = threading.Lock()


def on_one_core() -> None:
    """Limit torch to one CPU thread in the calling thread, since other threads decode other groups.

    The default for new threads does not change. With OpenMP's default, 2 decoders on 2 busy cores took ten times the
    processor time.
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
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:
    """Return the seconds per token, by track, that this thread takes to check and decode groups.

    Measures the smallest track of each family on synthetic frames (`SampleFrames`), except plug-in codecs and tracks
    that need a missing profile. ``device`` holds the cache (None: the CPU). A GPU decodes n groups at once in T(n) = a
    + b n seconds: b, per token, is returned by track, and a by family under `BATCH`. By default ``clock`` is this
    thread's processor time; on a GPU, wall-clock time.
    """
    on_one_core()
    gpu, spec, found = is_gpu(device), catalog.spec.largest, dict[str, float]()
    clock = clock or (time.perf_counter if gpu else time.thread_time)
    tokens = spec.rows if gpu else min(spec.rows, max(16, _ELEMENTS // spec.elements_per_token))
    sample = new_sample(spec, profile, tokens)
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if gpu else CORES.all_taken()  # type: ignore[no-untyped-call]
    # The GPU may be out of memory.
    with contextlib.suppress(RuntimeError), stream:
        shape, count = spec.shape(tokens), _BATCHED if gpu else 1
        places = [TensorPlace(torch.zeros(shape, dtype=spec.torch_dtype, device=device)) for _ in range(count)]
        for track in _smallest(catalog):
            with contextlib.suppress(KvabrError, RuntimeError, MemoryError):
                group, frame = sample_group(sample, track.name), sample.frame(track.name)
                check = partial(has_digest, digest_of(frame, catalog.digest_kind), frame)
                one_s = _timed(group, places[:1], clock, (lambda: None) if gpu else check)
                each_s = one_s
                if gpu:
                    each_s = max(_timed(group, places, clock) - one_s, one_s / 1024) / (_BATCHED - 1)
                if sound_speed(each_s / tokens):
                    found[track.name] = each_s / tokens
                    if one_s > each_s:
                        found[BATCH + family(track.name)] = one_s - each_s
    return found


def _smallest(catalog: Catalog) -> Iterable[Track]:
    """Return the smallest track of each family, without tracks that refine another."""
    tracks = [track for track in catalog.tracks if track.name in BUILTIN and track.refines is None]
    largest_first = sorted(tracks, key=lambda track: -track.total_bytes)
    return {family(track.name): track for track in largest_first}.values()


def _timed(
    group: CodedGroup,
    places: Sequence[TensorPlace],
    clock: Callable[[], float],
    check: Callable[[], object] = lambda: None,
) -> float:
    """Return the minimum seconds of a few runs that check a group, and decode it to all ``places`` at once."""
    times = []
    for _ in range(_RUNS):  # the first run may compile kernels
        start = clock()
        check()
        for wrong in expand([group] * len(places), places):
            if wrong is not None:
                raise wrong
        if places[0].device.type == "cuda":
            torch.cuda.current_stream(places[0].device).synchronize()
        times.append(clock() - start)
    return min(times)


def new_sample(spec: KVSpec, profile: Profile | None, tokens: int) -> SampleFrames:
    """Return a maker of synthetic frames for one layer class."""
    sinks = 0 if profile is None else profile.of(spec).sinks
    after_sinks = spec.group_tokens * (1 + sinks // spec.group_tokens)
    return SampleFrames(GroupContext(spec, after_sinks, tokens, profile))


def sample_group(sample: SampleFrames, track: str) -> CodedGroup:
    """Return a synthetic group on a track, with all layers that the track refines."""
    stack = [track]
    while (lower := track_below(stack[0])) is not None:
        stack.insert(0, lower)
    *below, payload = (payload_of(sample.frame(each)) for each in stack)
    return CodedGroup(payload, track, sample.context, below)


def complete(catalog: Catalog, per_token: dict[str, float]) -> dict[str, float]:
    """Return the seconds per full group of every track, extrapolated within its family if not measured."""
    tokens = catalog.spec.largest.rows
    found = {track.name: per_token[track.name] * tokens for track in catalog.tracks if track.name in per_token}
    factors = {family(name): seconds / (catalog.track(name).decode_s or math.inf) for name, seconds in found.items()}
    scaled = {track.name: track.decode_s * factors.get(family(track.name), 0.0) for track in catalog.tracks}
    return {name: seconds for name, seconds in scaled.items() if 0 < seconds < math.inf} | found  # untrusted catalogs


def is_gpu(device: torch.device | None) -> bool:
    """Return True for a CUDA device."""
    return device is not None and device.type == "cuda"


def sound_speed(seconds: object) -> bool:
    """Return whether seconds per token are plausible."""
    return type(seconds) is float and 0 < seconds <= _MAX_S  # rejects NaN
