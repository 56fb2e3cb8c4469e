"""How fast codecs are: every stage of a track's way to bytes and back, on one core, and whole decodes on all of them.

One core is measured in processor time of this process with one thread, so that other work on the machine does not
count; all cores in time on the wall. A rate is millions of elements of the cache a second, median of several rounds.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native import coder
from kvabr.codec.native.model import Quantiser, dequantise
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import quantise
from kvabr.types.kv import KVSpec

ROUNDS = 5
"""Rounds at least, of which the median counts."""


@dataclass(frozen=True)
class Timing:
    """One track of one cache, by one path of the coder."""

    track: str
    path: str
    bits: float
    """An element, without frames; a chain's all together."""
    rates: dict[str, float] = field(default_factory=dict)
    """Millions of elements a second on one core, by stage: ``analysis``, ``entropy encode`` (with quantising),
    ``encode`` (all of these), ``entropy decode``, ``synthesis``, ``decode`` (whole, into BF16)."""
    all_cores: float = 0.0
    """Whole decode into BF16 with a group on every core, by the wall."""
    scratch: float | None = None
    """Memory that decoding one group takes beside its output, in FP16 sizes of the group; None where the system does
    not tell."""


def chain(track: str) -> list[str]:
    """A track and all that it refines, base first."""
    names = [track]
    while (lower := codec(names[0]).refines) is not None:
        names.insert(0, lower)
    return names


@dataclass(frozen=True)
class Job:
    """One group, encoded on one track."""

    group: torch.Tensor
    """[layer, K/V, head, token, dim] from position 0 on."""
    spec: KVSpec
    profile: Profile | None
    track: str
    payloads: tuple[bytes, ...]
    """Of the track and all that it refines, base first."""

    @classmethod
    def make(cls, group: torch.Tensor, spec: KVSpec, profile: Profile | None, track: str) -> Job:
        """Encode it."""
        context = cls._context(group, spec, profile)
        payloads: list[bytes] = []
        for name in chain(track):
            payloads.append(codec(name).encode(group, context, payloads))
        return cls(group, spec, profile, track, tuple(payloads))

    @staticmethod
    def _context(group: torch.Tensor, spec: KVSpec, profile: Profile | None) -> GroupContext:
        return GroupContext(spec, 0, group.shape[3], profile, memo={})

    def encode(self) -> None:
        """The whole chain, as an origin that offers only this does it."""
        Job.make(self.group, self.spec, self.profile, self.track)

    def decode(self, out: torch.Tensor) -> None:
        """The whole chain, as a player does it."""
        context = self._context(self.group, self.spec, self.profile)
        views = [memoryview(payload) for payload in self.payloads]
        codec(self.track).decode(views[-1], context, out, views[:-1])


def time_track(job: Job, *, seconds: float = 0.5) -> Timing:
    """Time every stage of a track.

    Args:
        job: what is coded.
        seconds: processor time to spend on each stage, at least `ROUNDS` rounds.
    """
    million = job.group.numel() / 1e6
    out = torch.empty(job.group.shape, dtype=torch.bfloat16)
    rates: dict[str, float] = {}
    with one_thread():
        if codec(job.track).needs_profile and job.profile is not None:
            rates |= _stages(job, job.profile, million, seconds)
        rates["encode"] = million / processor_time(job.encode, seconds)
        rates["decode"] = million / processor_time(lambda: job.decode(out), seconds)
    bits = 8 * sum(map(len, job.payloads)) / job.group.numel()
    path = coder.active_path() if codec(job.track).needs_profile else "torch"
    return Timing(job.track, path, bits, rates, million / _on_all_cores(job), scratch_of(job))


def _stages(job: Job, profile: Profile, million: float, seconds: float) -> dict[str, float]:
    names = chain(job.track)
    depths = [profile.depth(name) for name in names]
    transform, step = profile.transform, depths[-1].step
    coefficients = transform.analyse(job.group, 0).rows
    rows, keep = coefficients.numpy(), np.ones(job.group.shape[3], dtype=np.bool_)
    quantisers = [Quantiser(each.step, each.dead) for each in depths]
    triples = list(zip(depths, quantisers, [None, *quantisers[:-1]], strict=True))
    coded = [coder.encode_rows(each.coder, rows, own, lower, keep) for each, own, lower in triples]
    finest = quantise(coefficients, step, depths[-1].dead).short().numpy()
    z = dequantise(depths[-1].coder, finest)
    out = torch.empty(job.group.shape, dtype=torch.bfloat16)
    tokens = job.group.shape[3]

    def encode() -> None:
        for each, own, lower in triples:
            coder.encode_rows(each.coder, rows, own, lower, keep)

    def decode() -> None:
        lower: np.ndarray | None = None
        for each, data in zip(depths, coded, strict=True):
            lower = coder.decode_indices(each.coder, data, tokens, lower)

    stages: dict[str, Callable[[], object]] = {
        "analysis": lambda: transform.analyse(job.group, 0),
        "entropy encode": encode,
        "entropy decode": decode,
        "synthesis": lambda: coder.synthesise(profile.synthesis, z, step, 0, out),
    }
    return {name: million / processor_time(work, seconds) for name, work in stages.items()}


def processor_time(work: Callable[[], object], seconds: float) -> float:
    """Median processor seconds of one call, after one that does not count."""
    work()
    times: list[float] = []
    spent = 0.0
    while len(times) < ROUNDS or spent < seconds:
        start = time.process_time()
        work()
        times.append(max(time.process_time() - start, 1e-9))
        spent += times[-1]
        if spent > 8 * seconds and len(times) >= 2:
            break  # the reference takes minutes where the others take milliseconds
    return statistics.median(times)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_all_cores(job: Job) -> float:
    """Median wall seconds a group, when every core decodes groups of its own."""
    workers = cores()
    outs = [torch.empty(job.group.shape, dtype=torch.bfloat16) for _ in range(workers)]
    with one_thread(), ThreadPoolExecutor(workers) as pool:
        times = []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            list(pool.map(job.decode, outs))
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / workers


def scratch_of(job: Job) -> float | None:
    """Memory that decoding a group takes beside its output, in FP16 sizes of the group; None but on Linux.

    The high-water mark of a forked process, so that what earlier decodes left behind in this one does not hide it.
    """
    if not Path("/proc/self/clear_refs").exists() or not hasattr(os, "fork"):
        return None
    # A first decode, of one token, makes the tables that a player makes once, and brings the code itself into memory.
    token = Job.make(job.group[:, :, :, :1].clone(), job.spec, job.profile, job.track)
    out = torch.empty(job.group.shape, dtype=torch.bfloat16).zero_()
    with one_thread():
        token.decode(out[:, :, :, :1])
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            status = 1
            try:
                os.close(reader)
                token.decode(out[:, :, :, :1])
                _give_back()
                os.write(writer, str(_peak_of(lambda: job.decode(out))).encode())
                status = 0
            finally:
                os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    _, ended = os.waitpid(child, 0)
    return int(said) / (2 * job.group.numel()) if said and not ended else None


def _peak_of(work: Callable[[], object]) -> int:
    """Bytes by which memory grew at most during a call. Pages of the parent that are only read do not count."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def _give_back() -> None:
    """Return freed memory to the system, so that its reuse shows as growth."""
    with suppress(OSError, AttributeError):  # only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    """A size from this process's status, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def coder_path(path: str) -> Iterator[None]:
    """Have the coder take a path."""
    before = os.environ.get(coder.VARIABLE)
    os.environ[coder.VARIABLE] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ[coder.VARIABLE]
        else:
            os.environ[coder.VARIABLE] = before


def paths(wanted: Sequence[str] | None) -> list[str]:
    """The paths that were named, or all that this machine has but the reference, which is for checking."""
    native = [path for path in coder.available_paths() if path != "reference"]
    return list(wanted or native or ["reference"])
