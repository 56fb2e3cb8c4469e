"""`kvabr bench codec` without its command line: caches to time codecs on, and LMCache beside them on the same ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from kvabr.codec.ac import split_payload
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.native import bench as raw
from kvabr.codec.native import coder
from kvabr.codec.native.model import Index
from kvabr.codec.native.reference import ideal_bits
from kvabr.codec.profile import Profile
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.lab.bench import synthetic
from kvabr.lab.bench.cachegen import Quantised
from kvabr.lab.bench.peers import Peer
from kvabr.lab.bench.speed import Job, chain, coder_path, cores, paths, time_track
from kvabr.publish.encoder import cut_prompt
from kvabr.publish.texts import measuring_texts
from kvabr.types.kv import GROUP_TOKENS, KVSpec

SCHEMA = "kvabr.bench.codec/1"
RAW_BITS = 3.0
"""Rate at which the entropy coder alone is timed, bits a symbol, no symbol skipped."""

Row = dict[str, Any]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """A group of one model's cache, and its profile."""

    name: str
    spec: KVSpec
    group: torch.Tensor
    profile: Profile | None


def real(loaded: LoadedModel, profile: Profile | None) -> Subject:
    """A group that a model computed, from a text that no profile was calibrated on."""
    prompt = cut_prompt(loaded, next(iter(measuring_texts().values())), GROUP_TOKENS, 2)
    group = loaded.engine.prefill(prompt.tokens).to(loaded.engine.spec.torch_dtype)
    return Subject(loaded.engine.spec.model, loaded.engine.spec, group, profile)


def llama(work: Path) -> Subject:
    """A synthetic group of the shape of Llama-3.1-8B; its profile takes a minute or two and is kept in ``work``."""
    path = work / "synthetic-llama.profile.safetensors"
    made: Profile | None = None
    if path.is_file():
        try:
            made = Profile.from_bytes(path.read_bytes())
            made.check(synthetic.LLAMA)
        except (OSError, ValueError):
            made = None  # of an older kvabr
    if made is None:
        made = synthetic.profile(synthetic.LLAMA)
        work.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.to_bytes())
    name = f"{synthetic.LLAMA.model} (synthetic)"
    return Subject(name, synthetic.LLAMA, synthetic.cache(made, GROUP_TOKENS), made)


def measure(
    subject: Subject,
    tracks: Sequence[str],
    wanted: Sequence[str] | None,
    *,
    seconds: float = 0.5,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Time tracks by every path of the coder.

    Args:
        subject: what to code.
        tracks: which ones.
        wanted: paths; None for all that this machine has but the reference.
        seconds: processor time for each stage.
        progress: called after every track and path.
    """
    for track in tracks:
        native = codec(track).needs_profile
        if native and subject.profile is None:
            continue
        for path in paths(wanted) if native else paths(wanted)[:1]:
            with coder_path(path):
                job = Job.make(subject.group, subject.spec, subject.profile, track)
                yield {"subject": subject.name, **asdict(time_track(job, seconds=seconds))}
            progress()


def against_lmcache(subject: Subject, peer: Peer, rounds: int = 3) -> Row:
    """LMCache's codec on the same group, after a round that compiles its kernels.

    Returns:
        Millions of elements a second: ``encode`` and ``decode`` on one core, in processor time; ``decode_all`` on all
        cores by the wall; ``bits`` an element.

    Raises:
        PeerError: it failed.
    """
    million = subject.group.numel() / 1e6
    keys, values = Quantised().levels(subject.spec.layers)
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
    """The entropy coder without anything around it, by path: every symbol coded, about `RAW_BITS` bits each."""
    sample = raw.synthetic(raw.SMOLLM2, RAW_BITS, dense=True)
    rows = []
    for path in paths(wanted):
        with coder_path(path):
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
    """Coded size of the indices over their code length under the profile's own tables, by track; a layer's own only."""
    profile, out = subject.profile, {}
    for track in tracks:
        if profile is None or not codec(track).needs_profile:
            continue
        job = Job.make(subject.group, subject.spec, profile, track)
        context = GroupContext(subject.spec, 0, subject.group.shape[3], profile)
        below: Index | None = None
        for name, payload in zip(chain(track), job.payloads, strict=True):
            sinks = 0 if codec(name).refines else min(context.tokens, profile.sinks)
            coded = split_payload(payload, context, sinks, name).coded
            model = profile.depth(name).coder
            index = coder.decode_indices(model, coded, context.tokens, below)
            out[track] = 8 * len(coded) / ideal_bits(model, index, below)
            below = index
    return out


def machine() -> Row:
    """What it was measured on."""
    model = "unknown"
    path = Path("/proc/cpuinfo")
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {"processor": model, "cores": cores(), "paths": list(coder.available_paths())}
