"""Other codecs, run as peer processes: LMCache's CacheGen, and zstd.

A peer runs in its own environment, made by tools/setup-peers, and answers requests in JSON lines; caches are exchanged
as safetensors files, so none of its dependencies are imported here.

CacheGen (Liu et al., SIGCOMM 2024) as in LMCache 0.5.6: the keys of each token and layer are divided by their largest
magnitude and rounded to a fixed number of levels; the same is done for values. The indices of each channel are coded
with probabilities that are counted in the group and stored with it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from kvabr.codec.base import GroupContext, codec
from kvabr.types.errors import AssetError
from kvabr.types.kv import KVSpec
from kvabr_lab.bench.measure import CacheStore
from kvabr_lab.bench.schemes import Coded, Scheme, groups

_INSTALL = "create it with tools/setup-peers"


class PeerError(AssetError):
    """A peer is not installed, or failed."""


class PeerProcess:
    """A peer process. It starts with the first request and ends with the context."""

    def __init__(self, folder: Path, name: str) -> None:
        """Locate the peer ``lmcache`` or ``zstd`` in a folder that tools/setup-peers made.

        Raises:
            PeerError: The peer is not installed there.
        """
        self.name = name
        self._command = [str(folder / name / "bin" / "python"), str(folder / name / "worker.py")]
        self._process: subprocess.Popen[str] | None = None
        for path in self._command:
            if not Path(path).is_file():
                raise PeerError(f"the peer {name} is not in {folder}; {_INSTALL}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            PeerError: The peer exited, or reports a failure.
        """
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  # a program that the user set up
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise PeerError(f"the peer {self.name} has no pipes")
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError as error:
            raise PeerError(self._ended()) from error
        if not line:
            raise PeerError(self._ended())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer {self.name} failed: {answer['error']}")
        return answer

    def _ended(self) -> str:
        return f"the peer {self.name} has exited; run it by hand to see why: {' '.join(self._command)}"


def find_peers(folder: Path, names: Sequence[str] = ("lmcache", "zstd")) -> tuple[dict[str, PeerProcess], list[str]]:
    """Return the installed peers by name, and a message for each missing one."""
    found, missing = {}, []
    for name in names:
        try:
            found[name] = PeerProcess(folder, name)
        except PeerError as error:
            missing.append(str(error))
    return found, missing


Runs = Sequence[tuple[int, int]]
"""Runs of layers, as (layer after the run, number of levels)."""

_ALL = 1 << 30

LEVELS: dict[str, tuple[Runs, Runs]] = {
    "CacheGen": (((10, 32), (_ALL, 16)), ((2, 32), (_ALL, 16))),
    "CacheGen-low": (((10, 16), (_ALL, 12)), ((2, 16), (_ALL, 12))),
    "CacheGen-32": (((_ALL, 32),), ((_ALL, 32),)),
}
"""Levels of keys and values: LMCache's only setting, and a coarser and a finer setting for its curve."""

_SHALLOW = 10
"""Models with fewer layers: LMCache gives all their layers the finest levels."""


class CacheGenQuantiser(Scheme):
    """CacheGen's quantiser without its coder. The decoded cache is the same, but the size is unknown."""

    def __init__(self, name: str = "CacheGen") -> None:
        self.name, self.family = name, "CacheGen"
        self.group_tokens = 1  # every token has its own scale
        self._levels = LEVELS[name]

    @property
    def key(self) -> str:
        """The levels."""
        return f"cachegen-quantiser-1|{self._levels}"

    def levels(self, layers: int) -> tuple[Runs, Runs]:
        """Return the levels of keys and values."""
        return self._levels if layers >= _SHALLOW else LEVELS["CacheGen-32"]

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Quantise every token with a separate scale."""
        if not decode:
            return Coded(0, None)
        layers = cache.shape[0]
        out = torch.empty_like(cache)
        for which, runs in enumerate(self.levels(layers)):
            top = _per_layer(runs, layers)[:, None, None, None] // 2 - 1
            values = cache[:, which]
            # All heads of a token share a scale, in the cache's precision.
            peak = values.abs().amax(dim=(1, 3), keepdim=True)
            index = (values * (top / peak) + top).round().to(torch.int8)
            out[:, which] = (index.float() - top) / top * peak
        return Coded(0, out)


class LMCacheCodec(CacheGenQuantiser):
    """LMCache's codec on a CPU."""

    def __init__(
        self, peer: PeerProcess, store: CacheStore, name: str = "CacheGen", *, group_tokens: int | None = None
    ) -> None:
        """Exchange caches with the peer in the work folder ``store``; ``name`` is one of `LEVELS`.

        ``group_tokens``: tokens per chunk; None: the model's group size.
        """
        super().__init__(name)
        self.group_tokens = group_tokens or store.spec.group_tokens
        self._peer, self._store = peer, store

    @property
    def key(self) -> str:
        """LMCache's version, levels and group size."""
        return f"lmcache-0.5.6|{self._levels}|{self.group_tokens}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Encode and decode in the peer process.

        Raises:
            PeerError: LMCache failed.
            AssetError: The decoded cache differs from that of `CacheGenQuantiser`.
        """
        given, back = self._store.scratch("to-peer.safetensors"), self._store.scratch("from-peer.safetensors")
        keys, values = self.levels(cache.shape[0])
        try:
            save_file({"kv": cache.contiguous()}, given)
            answer = self._peer.ask(
                {
                    "in": str(given),
                    "out": str(back) if decode else None,
                    "groups": list(groups(cache.shape[3], self.group_tokens)),
                    "options": {"keys": keys, "values": values},
                    "dtype": str(cache.dtype).removeprefix("torch."),
                }
            )
            made = load_file(back)["kv"] if decode else None
        finally:
            given.unlink(missing_ok=True)
            back.unlink(missing_ok=True)
        if made is not None:
            alone = super().code(cache).cache
            if alone is None or not torch.equal(made, alone):
                raise AssetError(f"{self.name}: the cache that LMCache decodes differs from that of its quantiser")
        return Coded(sum(answer["bytes"]), made)


def _per_layer(runs: Runs, layers: int) -> torch.Tensor:
    out, first = torch.zeros(layers), 0
    for end, count in runs:
        out[first : min(end, layers)] = count
        first = min(end, layers)
    return out


_LEVEL = 3


class Zstd(Scheme):
    """A track's payloads compressed by zstd. The decoded cache equals that of the track."""

    def __init__(self, track: str, width: int, spec: KVSpec, peer: PeerProcess, store: CacheStore) -> None:
        """Compress FP16 or Int8; group bytes of equal significance first, in numbers of ``width`` bytes."""
        self.name, self.family, self.group_tokens = f"{track}+zstd", "zstd", spec.group_tokens
        self._track, self._width, self._spec, self._peer, self._store = track, width, spec, peer, store

    @property
    def key(self) -> str:
        """Track and level."""
        return f"zstd-0.25.0|{_LEVEL}|{self._track}|{self._width}"

    def code(self, cache: torch.Tensor, *, decode: bool = True) -> Coded:
        """Compress every group separately.

        Raises:
            PeerError: zstd failed.
        """
        level = codec(self._track)
        out = torch.empty_like(cache) if decode else None
        payloads = {}
        for index, (first, end) in enumerate(groups(cache.shape[3], self.group_tokens)):
            context = GroupContext(self._spec, first, end - first)
            payload = level.encode(cache[:, :, :, first:end], context)
            payloads[str(index)] = np.frombuffer(payload, dtype=np.uint8)
            if out is not None:
                level.decode(memoryview(payload), context, out[:, :, :, first:end])
        given = self._store.scratch("to-zstd.safetensors")
        try:
            save_arrays(payloads, given)
            answer = self._peer.ask({"in": str(given), "options": {"level": _LEVEL, "width": self._width}})
        finally:
            given.unlink(missing_ok=True)
        return Coded(sum(answer["bytes"]), out)
