"""Time codecs stage by stage, on one core and on all; time LMCache on the same groups."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kvabr.codec.ac import split_payload
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Index, Quantiser, dequantise
from kvabr.codec.native.references import References
from kvabr.codec.profile import ClassProfile, Profile
from kvabr.codec.quantiser import quantise
from kvabr.codec.unusual import is_unusual
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.publish.texts import cut_prompt, measuring_texts
from kvabr.types.kv import KVSpec
from kvabr_lab.bench import coder_speed as raw
from kvabr_lab.bench import synthetic
from kvabr_lab.bench.code_length import ideal_bits
from kvabr_lab.bench.other_codecs import CacheGenQuantiser, PeerProcess
from kvabr_lab.bench.schemes import track_chain

ROUNDS = 5


@dataclass(frozen=True)
class Timing:
    """Speed of a track on one path of the coder."""

    track: str
    path: str
    bits: float
    """Bits per element of the whole chain of layers, without frames."""
    rates: dict[str, float] = field(default_factory=dict)
    """Millions of elements per second on one core, by stage: ``analysis``, ``entropy encode`` (with quantising),
    ``encode`` (all stages), ``entropy decode``, ``synthesis``, ``decode`` (all stages, into BF16)."""
    all_cores: float = 0.0
    """Millions of elements per second of wall time if every core decodes separate groups into BF16."""
    scratch: float | None = None
    """Memory for decoding, without the output, divided by the group's size in FP16; None if unknown."""


@dataclass(frozen=True)
class Job:
    """One group, encoded on one track."""

    group: torch.Tensor
    """[layer, K/V, head, token, dim], from position 0."""
    spec: KVSpec
    profile: Profile | None
    track: str
    payloads: tuple[bytes, ...]
    """Payloads of the chain of tracks, base first."""

    @classmethod
    def make(cls, group: torch.Tensor, spec: KVSpec, profile: Profile | None, track: str) -> Job:
        """Encode a group."""
        context = cls._context(group, spec, profile)
        payloads: list[bytes] = []
        for name in track_chain(track):
            payloads.append(codec(name).encode(group, context, payloads))
        return cls(group, spec, profile, track, tuple(payloads))

    @staticmethod
    def _context(group: torch.Tensor, spec: KVSpec, profile: Profile | None) -> GroupContext:
        return GroupContext(spec, 0, group.shape[3], profile, memo={})

    def encode(self) -> None:
        """Encode the whole chain, like an origin with only this track."""
        Job.make(self.group, self.spec, self.profile, self.track)

    def decode(self, out: torch.Tensor) -> None:
        """Decode the whole chain, like a player."""
        context = self._context(self.group, self.spec, self.profile)
        views = [memoryview(payload) for payload in self.payloads]
        codec(self.track).decode(views[-1], context, out, views[:-1])


def time_track(job: Job, *, seconds: float = 0.5) -> Timing:
    """Time every stage of a track for ``seconds`` of processor time per stage, at least `ROUNDS` rounds."""
    million = job.group.numel() / 1e6
    out = torch.empty(job.group.shape, dtype=torch.bfloat16)
    rates: dict[str, float] = {}
    with one_thread():
        if codec(job.track).needs_profile and job.profile is not None:
            rates |= _stages(job, job.profile.of(job.spec), million, seconds)
        rates["encode"] = million / processor_time(job.encode, seconds)
        rates["decode"] = million / processor_time(lambda: job.decode(out), seconds)
    bits = 8 * sum(map(len, job.payloads)) / job.group.numel()
    path = coder.active_path() if codec(job.track).needs_profile else "-"
    return Timing(job.track, path, bits, rates, million / _on_all_cores(job), scratch_of(job))


def _stages(job: Job, profile: ClassProfile, million: float, seconds: float) -> dict[str, float]:
    names = track_chain(job.track)
    depths = [profile.depth(name) for name in names]
    transform, step = profile.transform, depths[-1].step
    coefficients = profile.analysis.analyse(job.group, 0).rows
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
        "analysis": lambda: profile.analysis.analyse(job.group, 0),
        "entropy encode": encode,
        "entropy decode": decode,
        "synthesis": lambda: coder.synthesise(transform, z, step, 0, out),
    }
    return {name: million / processor_time(work, seconds) for name, work in stages.items()}


def processor_time(work: Callable[[], object], seconds: float) -> float:
    """Return the median processor seconds of a call, after a warm-up call."""
    work()
    times: list[float] = []
    spent = 0.0
    while len(times) < ROUNDS or spent < seconds:
        start = time.process_time()
        work()
        times.append(max(time.process_time() - start, 1e-9))
        spent += times[-1]
        if spent > 8 * seconds and len(times) >= 2:
            break  # it takes far longer than the others
    return statistics.median(times)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cores() -> int:
    """Return the number of usable processors."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_all_cores(job: Job) -> float:
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
    """Return the memory for decoding a group without its output, in FP16 sizes of the group; None except on Linux.

    A forked process measures it, since memory kept from earlier decodes would hide it.
    """
    if not Path("/proc/self/clear_refs").exists() or not hasattr(os, "fork"):
        return None
    # Decode one token first: this builds the tables that a player builds once, and loads the code.
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
    """Return the largest growth of memory during a call in bytes, without pages of the parent that are only read."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def _give_back() -> None:
    # Without this, reuse of freed memory would not show as growth.
    with suppress(OSError, AttributeError):  # only glibc has this
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def paths(wanted: Sequence[str] | None) -> list[str]:
    """Return the named paths of the coder, or all paths of this machine."""
    return list(wanted or coder.available_paths())


SCHEMA = "kvabr.bench.codec/1"
RAW_BITS = 3.0
"""Bits per symbol, not counting skipped symbols, for timing the entropy coder alone."""

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """A group of a model's cache, and the model's profile."""

    name: str
    spec: KVSpec
    group: torch.Tensor
    profile: Profile | None


def real(loaded: LoadedModel, profile: Profile | None) -> Subject:
    """Return a group computed from a text that no profile was calibrated on."""
    prompt = cut_prompt(loaded, next(iter(measuring_texts().values())), loaded.engine.spec.group_tokens, 2)
    group = loaded.engine.prefill(prompt.tokens).to(loaded.engine.spec.torch_dtype)
    return Subject(loaded.engine.spec.model, loaded.engine.spec, group, profile)


def llama(work: Path) -> Subject:
    """Return a synthetic group in the shape of Llama-3.1-8B; its profile takes minutes, and is kept in ``work``."""
    path = work / "synthetic-llama.profile.safetensors"
    made: ClassProfile | None = None
    if path.is_file():
        try:
            made = Profile.from_bytes(path.read_bytes()).of(synthetic.LLAMA)
        except (OSError, ValueError):
            made = None  # damaged
    if made is None:
        made = synthetic.profile(synthetic.LLAMA)
        work.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.to_bytes())
    name = f"{synthetic.LLAMA.model} (synthetic)"
    return Subject(name, synthetic.LLAMA, synthetic.cache(made, synthetic.LLAMA.group_tokens), made)


def measure(
    subject: Subject,
    tracks: Sequence[str],
    wanted: Sequence[str] | None,
    *,
    seconds: float = 0.5,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Time ``tracks`` on paths ``wanted`` of the coder (None: all), with ``seconds`` of processor time per stage."""
    for track in tracks:
        native = codec(track).needs_profile
        if native and subject.profile is None:
            continue
        for path in paths(wanted) if native else paths(wanted)[:1]:
            with coder.taking(path):
                job = Job.make(subject.group, subject.spec, subject.profile, track)
                yield {"subject": subject.name, **asdict(time_track(job, seconds=seconds))}
            progress()


def against_lmcache(subject: Subject, peer: PeerProcess, rounds: int = 3) -> Row:
    """Time LMCache's codec on the same group, after a round that compiles its kernels.

    Returns:
        Millions of elements per second: ``encode`` and ``decode`` on one core, ``decode_all`` per wall time on all
        cores; ``bits`` per element.

    Raises:
        PeerError: LMCache failed.
    """
    million = subject.group.numel() / 1e6
    keys, values = CacheGenQuantiser().levels(subject.spec.layers)
    with TemporaryDirectory(prefix="kvabr-bench-") as folder:
        given = Path(folder) / "group.safetensors"
        save_file({"kv": subject.group.contiguous()}, given)
        request = {
            "in": str(given),
            "out": None,
            "decode": True,
            "groups": [(0, subject.group.shape[3])] * (rounds + 1),
            "options": {"keys": keys, "values": values},
            "dtype": str(subject.group.dtype).removeprefix("torch."),
        }
        one, every = (peer.ask(request | {"processors": count}) for count in (1, cores()))
    return {
        "subject": subject.name,
        "bits": 8 * one["bytes"][0] / subject.group.numel(),
        "encode": million / statistics.median(processors for _, processors in one["encode_s"][1:]),
        "decode": million / statistics.median(processors for _, processors in one["decode_s"][1:]),
        "decode_all": million / statistics.median(wall for wall, _ in every["decode_s"][1:]),
    }


def coder_alone(wanted: Sequence[str] | None, seconds: float = 0.5) -> list[Row]:
    """Time the entropy coder alone on each path, coding every symbol."""
    sample = raw.synthetic(raw.SMOLLM2, RAW_BITS, dense=True)
    rows = []
    for path in paths(wanted):
        with coder.taking(path):
            speed = raw.measure(sample, seconds=seconds)
        ideal = 8 * len(sample.payloads[0]) / sample.ideal_bits[0]
        rows.append(
            {
                "path": path,
                "bits": speed.bits_per_element,
                "decode": speed.decode_indices,
                "encode": speed.encode_indices,
                "over_ideal": ideal,
            }
        )
    return rows


def over_ideal(subject: Subject, tracks: Sequence[str]) -> dict[str, float]:
    """Return the size of each track's own layer, without references, divided by the ideal for the profile's tables."""
    out: dict[str, float] = {}
    for track in tracks:
        if subject.profile is None or not codec(track).needs_profile:
            continue
        profile = subject.profile.of(subject.spec)
        job = Job.make(subject.group, subject.spec, profile, track)
        context = GroupContext(subject.spec, 0, subject.group.shape[3], profile)
        below: Index | None = None
        references: References | None = None
        for name, payload in zip(track_chain(track), job.payloads, strict=True):
            if is_unusual(payload):
                break
            sinks = 0 if codec(name).refines else min(context.tokens, profile.sinks)
            part = split_payload(payload, context, sinks, name)
            references = references or part.references
            model = profile.depth(name).coder
            index = coder.decode_indices(model, part.coded, context.tokens, below, references)
            out[track] = 8 * len(part.coded) / ideal_bits(model, index, below)
            below = index
    return out


def machine() -> Row:
    """Describe this machine."""
    model = "unknown"
    path = Path("/proc/cpuinfo")
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {"processor": model, "cores": cores(), "paths": list(coder.available_paths())}
