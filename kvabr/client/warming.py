"""Compile GPU kernels, and check them against the processor, before a play needs them; this takes seconds.

`kvabr doctor` warms the shipped profiles, a starting engine its model, and a play a new profile. The latter two run in
the background, while the processor decodes. Triton caches compiled kernels on disk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from kvabr.client.decode_speeds import new_sample, sample_group
from kvabr.client.memory import DecodeSpeeds, keep
from kvabr.codec import gpu
from kvabr.codec.block_slots import BlockLayers, BlockSlots, Place, TensorPlace
from kvabr.codec.builtin import BUILTIN
from kvabr.codec.gpu.level_job import LEVELS
from kvabr.codec.gpu.together import CROWDED
from kvabr.codec.paged import CodedGroup, expand
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import below as track_below
from kvabr.data.profiles import shipped_profile
from kvabr.store.buffers import GROUPS
from kvabr.types.catalog import Catalog, Track
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace

_log = logging.getLogger("kvabr.client")
_ROWS_OF_A_STREAM = 2048
_PINNED_BYTES = 1 << 30
"""Maximum pinned memory kept for reuse, in bytes; pinning a gigabyte takes some tenths of a second."""


def warm(
    profile: Profile, device: torch.device, dtype: torch.dtype | None = None, like: Sequence[BlockLayers] = ()
) -> None:
    """Decode synthetic groups of a model's AC tracks on a GPU, singly and in batches.

    ``dtype`` is the cache's (None: the model's). ``like``: layers of a paged cache, as the layout to decode to; they
    are not written. Empty: decode to a tensor. Raises any error of decoding; unusable kernels only cause a warning.
    """
    if not gpu.runs_on(device):
        return
    for part in profile.spec.parts:
        if part.only.kind == "state":
            continue
        groups = list(_groups(profile, part))
        fitting = [layers for layers in like if _fits(layers, part)]
        makers: list[Callable[[], Place]] = [partial(_blocks_like, layers, part.rows) for layers in fitting]
        makers = makers or [partial(_tensor, part, dtype or part.torch_dtype, device)]
        many = -(-CROWDED * _ROWS_OF_A_STREAM // profile.of(part).transform.structure.rows)
        for new_place in makers:
            # Blocks for one group, which a layout may make large; all copies write the same data.
            place = new_place()
            for batch in (*([group] for group in groups), groups[:1] * many):
                for wrong in expand(batch, [place] * len(batch)):
                    if wrong is not None:
                        raise wrong


def receive_pinned(device: torch.device | None) -> None:
    """Receive later groups in pinned memory, for asynchronous copies to a GPU."""
    if device is not None and device.type == "cuda" and gpu.runs_on(device):
        GROUPS.pin_with(gpu.pin, _PINNED_BYTES)


_layouts: dict[torch.device, tuple[torch.dtype, tuple[BlockLayers, ...]]] = {}
"""The engine's element type and paged layers, by device."""
_begun: dict[Hashable, threading.Thread] = {}
_lock = threading.Lock()


def warm_engine(
    spec: KVSpec,
    device: torch.device,
    dtype: torch.dtype,
    like: Sequence[BlockLayers] = (),
    speeds: DecodeSpeeds | None = None,
) -> threading.Thread | None:
    """Run `warm_in_background` for a starting engine, with the profile shipped for its model, if any.

    Also records the layout, for profiles that the first play warms.
    """
    if not gpu.runs_on(device):
        return None
    receive_pinned(device)
    _layouts[device] = dtype, tuple(like)
    shipped = shipped_profile(spec)
    if shipped is None:
        return None
    keep(profile := Profile.from_bytes(shipped.bound(spec)))  # stores the comparison's result, too
    return warm_in_background(profile, device, speeds=speeds)


def warm_in_background(
    profile: Profile, device: torch.device, dtype: torch.dtype | None = None, speeds: DecodeSpeeds | None = None
) -> threading.Thread | None:
    """Run `warm` in a thread, once per profile, device and layout; return the thread, or None without kernels.

    ``dtype``: the element type of a tensor to decode to; None: use the type and layout of the device's engine. The
    thread then measures the decode speed, if unknown.
    """
    if not gpu.runs_on(device):
        return None
    own, like = _layouts.get(device, (None, ())) if dtype is None else (dtype, ())
    key = profile.digest, device, own, tuple(layers[0][0].stride() for layers in like)

    def work() -> None:
        try:
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream), gpu.trying(device):
                begun.set()
                warm(profile, device, own, like)
                if speeds is not None and speeds.lacks(catalog := sample_catalog(profile), device):
                    speeds.measure(catalog, profile, device)
        except Exception as error:  # noqa: BLE001  # plays report it
            _log.warning("kvabr: the GPU kernels could not be tested in advance (%s)", error)
        finally:
            begun.set()

    with _lock:
        if key in _begun:
            return _begun[key]
        begun = threading.Event()
        _begun[key] = thread = threading.Thread(target=work, name="kvabr-warm", daemon=True)
    thread.start()
    begun.wait()  # so that groups of the caller find the comparison in progress
    return thread


def sample_catalog(profile: Profile) -> Catalog:
    """Return a catalog of a synthetic group, to measure decode speed on AC tracks."""
    spec, part = profile.spec, profile.spec.largest
    tracks = [
        Track(group.track, (group.payload.nbytes,), (0.0,), ("0" * 64,), refines=track_below(group.track))
        for group in _groups(profile, part)
    ]
    namespace = TrackNamespace(spec.model, "0" * 64)
    return Catalog(namespace, spec, part.rows, ("0" * 64,), tuple(tracks), profile=profile.digest)


def _groups(profile: Profile, part: KVSpec) -> Iterator[CodedGroup]:
    sample = new_sample(part, profile, part.rows)
    for track in (*(track for track in profile.of(part).depths if track in BUILTIN), *LEVELS):
        yield sample_group(sample, track)


def _tensor(part: KVSpec, dtype: torch.dtype, device: torch.device) -> Place:
    return TensorPlace(torch.empty(part.shape(part.rows), dtype=dtype, device=device))


def _fits(layers: BlockLayers, part: KVSpec) -> bool:
    _, heads, _, dim = layers[0][0].shape
    return part.shape(1) == (len(layers), len(layers[0]), heads, 1, dim)


def _blocks_like(layers: BlockLayers, tokens: int) -> Place:
    first = layers[0][0]
    _, heads, size, dim = first.shape
    count = -(-tokens // size)
    shape = (count, heads, size, dim)
    made = BlockLayers(
        [
            [torch.empty_strided(shape, view.stride(), dtype=view.dtype, device=view.device) for view in layer]
            for layer in layers
        ]
    )
    return BlockSlots(made, np.arange(tokens))
