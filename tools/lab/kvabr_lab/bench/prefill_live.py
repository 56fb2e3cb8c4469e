"""One machine prefills, another decodes: measures plays of a cache during its prefill with a real model.

Producer, origin, link and decoder are processes on one machine with a common clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import Limits, PlayOptions
from kvabr.client.result import NothingCached
from kvabr.engines.transformers.cache import new_cache
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.engines.transformers.model_loader import load_model
from kvabr.engines.transformers.publish import cache_publisher, prefill_live, publish_cache, runs
from kvabr.publish.encoding_threads import SHARE
from kvabr.publish.live_publisher import LivePublisher
from kvabr.replay.trace import BYTES_PER_MBIT, Trace
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import KvabrError
from kvabr.types.kv import KVSpec
from kvabr.types.live import PublishedFrames
from kvabr.types.peer import PeerOptions, Quic
from kvabr_lab.live.child import Child
from kvabr_lab.live.packet_schedule import Conditions
from kvabr_lab.live.shaper import Shaper

Kind = Literal["alone", "live", "end"]
"""``alone``: not published; ``live``: played during the prefill; ``end``: published at the end."""

_PATIENCE_S = 600.0
_WAIT_S = 1.0
"""Seconds that lookups wait for a producer; the next lookup finds a shorter production."""
_RETRY_S = 0.005
"""Seconds between lookups of a cache that will soon appear at an origin."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Results of a producer. Times are on the machine's clock."""

    began_s: float
    runs: tuple[tuple[int, float], ...]
    published_s: tuple[float, ...] = ()
    """Publication time of each group's base, for live caches."""
    whole_s: tuple[float, ...] = ()
    """Publication time of each group's last track while the cache grows."""
    left_out: int = 0
    encoding_s: float = 0.0
    """Processor time of encoding until the last token, seconds."""
    idle_s: float = 0.0
    """The part of `encoding_s` at idle priority, seconds."""

    @property
    def ended_s(self) -> float:
        """Time of the last token."""
        return self.runs[-1][1]

    @property
    def seconds(self) -> float:
        """Duration of the prefill, seconds."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Decoded:
    """Results of a decoder. Times are on the machine's clock."""

    asked_s: float
    ready_s: float
    groups_s: tuple[float, ...]
    coverage: tuple[str, ...]
    loss: float
    bytes_fetched: int


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to produce and play, with options."""

    tokens: tuple[int, ...]
    kind: Kind = "live"
    run_tokens: int = 512
    deadline_s: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `kvabr.client.options.PlayOptions`."""
    threads: int | None = None
    share: float = SHARE
    """Maximum encoding time as a fraction of the prefill, see `LivePublisher`."""


class PrefillProducer(Child):
    """A process with a model."""

    patience_s = _PATIENCE_S

    def __init__(self, model: str, folder: Path, tracks: Sequence[str] | None, warm: Sequence[int]) -> None:
        """Load the model, and compute one prompt as a warm-up."""
        super().__init__("producer", _produce, model, folder, tracks, tuple(warm))
        self.spec: KVSpec = self.greeting


class Decoder(Child):
    """A process that plays caches."""

    patience_s = _PATIENCE_S

    def __init__(self, url: str, fingerprint: str, quic: Quic, spec: KVSpec) -> None:
        """Connect to an origin or relay."""
        super().__init__("decoder", _decode, url, fingerprint, quic, spec)


@dataclass(frozen=True, slots=True)
class Link:
    """A link of one rate."""

    mbit_s: float
    rtt_s: float

    def begin(self, shaper: Shaper) -> None:
        """Set the shaper to this link."""
        rate = self.mbit_s * BYTES_PER_MBIT
        shaper.begin(Trace("link", "constant", (0.0,), (rate,), 3600.0), 0.0, Conditions(rtt_s=self.rtt_s))


def run(job: PrefillJob, producer: PrefillProducer, decoders: Sequence[Decoder] = ()) -> tuple[Prefill, list[Decoded]]:
    """Compute a prompt, and play it on all decoders at the same time; raise a `KvabrError` if a process fails.

    Live plays start before the prefill; others once the cache is published.
    """
    if job.kind == "live":
        for decoder in decoders:
            decoder.send(job)
    prefill: Prefill = _checked(producer.ask(job))
    if job.kind == "end":  # published only at the end
        for decoder in decoders:
            decoder.send(job)
    return prefill, [_checked(decoder.answer()) for decoder in decoders if job.kind != "alone"]


def _checked(answer: Any) -> Any:
    if isinstance(answer, str):
        raise KvabrError(answer)
    return answer


def _produce(pipe: Connection, model: str, folder: Path, tracks: Sequence[str] | None, warm: Sequence[int]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            engine = load_model(model).engine
            messages: list[tuple[float, PublishedFrames]] = []
            live = LivePublisher(
                cache_publisher(engine, folder, tracks=tracks),
                on_announced=lambda news: messages.append((time.monotonic(), news)),
            )
            usual = torch.get_num_threads()
            _job(live, engine, PrefillJob(tuple(warm), "alone"), messages)
            _job(live, engine, PrefillJob(tuple(warm)), messages)
            pipe.send(engine.spec)
            while True:
                job = pipe.recv()
                torch.set_num_threads(job.threads or usual)
                try:
                    pipe.send(_job(live, engine, job, messages))
                except KvabrError as error:
                    pipe.send(str(error))
        except (KvabrError, OSError, ImportError) as error:
            pipe.send(str(error) or repr(error))


def _job(
    live: LivePublisher, engine: TransformersEngine, job: PrefillJob, messages: list[tuple[float, PublishedFrames]]
) -> Prefill:
    done: list[tuple[int, float]] = []
    messages.clear()
    began_s = time.monotonic()

    def progress(tokens: int, _all: int) -> None:
        done.append((tokens, time.monotonic()))

    if job.kind == "live":
        live.share = job.share
        _, outcome = prefill_live(
            live, engine, job.tokens, pace=PrefillCost.from_rate(500.0), run_tokens=job.run_tokens, progress=progress
        )
        result = outcome.result()
        if result.verdict != "published":
            raise KvabrError(f"not published: {result.verdict} {result.why}")
        base_s: dict[int, float] = {}
        whole_s: dict[int, float] = {}
        for at_s, news in messages:
            base_s.setdefault(news.group, at_s)
            whole_s[news.group] = at_s
        return Prefill(
            began_s, tuple(done), tuple(base_s[group] for group in sorted(base_s)),
            tuple(whole_s[group] for group in sorted(whole_s)), result.left_out, result.encoding_s, result.idle_s,
        )  # fmt: skip
    cache, ids = new_cache(engine.model, whole=True), torch.tensor([job.tokens], dtype=torch.long)
    for first, last in pairwise((0, *runs(len(job.tokens), job.run_tokens, engine.spec.group_tokens))):
        engine.extend(cache, ids[:, first:last], first)
        progress(last, len(job.tokens))
    if job.kind == "end":
        publish_cache(live.publisher, engine, cache, job.tokens).result()
    return Prefill(began_s, tuple(done))


def _decode(pipe: Connection, url: str, fingerprint: str, quic: Quic, spec: KVSpec) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            asyncio.run(_serve(pipe, url, fingerprint, quic, spec))
        except (KvabrError, OSError, ImportError) as error:
            pipe.send(str(error) or repr(error))


async def _serve(pipe: Connection, url: str, fingerprint: str, quic: Quic, spec: KVSpec) -> None:
    limits = Limits(memory_bytes=0)
    async with AsyncClient(
        url, PeerOptions(fingerprint=fingerprint, quic=quic, timeout_s=60.0), limits=limits
    ) as client:
        await client.connect()
        pipe.send(True)
        while True:
            job = await asyncio.to_thread(pipe.recv)
            try:
                pipe.send(await _play(client, spec, job))
            except KvabrError as error:
                pipe.send(str(error))


async def _play(client: AsyncClient, spec: KVSpec, job: PrefillJob) -> Decoded:
    asked_s = time.monotonic()
    wait_s = _WAIT_S if job.kind == "live" else 0.0
    options = PlayOptions(wait_for_producer_s=wait_s, **job.options)
    while True:
        began_s = time.monotonic()
        played = await client.play(job.tokens, deadline=job.deadline_s, model=spec, options=options)
        if not isinstance(played, NothingCached) and played.tokens == len(job.tokens):
            break
        if began_s > asked_s + job.deadline_s:
            raise KvabrError("nothing was published")
        await asyncio.sleep(_RETRY_S)
    start_s = began_s + played.lookup_s
    return Decoded(
        asked_s,
        began_s + played.ttft_s,
        tuple(start_s + (group.ready_s or 0.0) for group in played.record.groups),
        played.coverage,
        played.loss,
        played.record.bytes_fetched,
    )


_WIDTH, _LEFT, _ROW_HEIGHT = 900, 110, 46
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.s{font-size:11px}.p{fill:#8a7bc8}.n{fill:#4c9be8}.d{fill:#3aa57a}"
    ".l{stroke:#999}.e{stroke:#c0392b;stroke-dasharray:4 3}"
)


def picture(prefill: Prefill, decoded: Decoded, title: str) -> str:
    """Return an SVG with three rows over time: computed tokens, published groups, and groups in place."""
    began_s, groups = prefill.began_s, len(decoded.groups_s)
    last_s = max(decoded.ready_s, prefill.ended_s) - began_s
    x: Callable[[float], float] = lambda at_s: _LEFT + (_WIDTH - _LEFT - 20) * (at_s - began_s) / last_s  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} 260" width="{_WIDTH}" height="260">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22">{title}</text>',
    ]
    tops = [40 + row * (_ROW_HEIGHT + 16) for row in range(3)]
    total = prefill.runs[-1][0]
    rows = (("prefill", "tokens", total), ("live edge", "groups", groups), ("decoder", "groups", groups))
    for (name, what, most), top in zip(rows, tops, strict=True):
        parts.append(f'<text x="8" y="{top + _ROW_HEIGHT / 2 - 4}">{name}</text>')
        parts.append(f'<text class="s" x="8" y="{top + _ROW_HEIGHT / 2 + 12}">height: {what}</text>')
        parts.append(f'<text class="s" x="{_LEFT - 6}" y="{top + 9}" text-anchor="end">{most:,}</text>')
        parts.append(
            f'<line class="l" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{top + _ROW_HEIGHT}" y2="{top + _ROW_HEIGHT}"/>'
        )
    for (before, first_s), (tokens, at_s) in pairwise(((0, began_s), *prefill.runs)):
        height = _ROW_HEIGHT * tokens / total
        parts.append(
            f'<rect class="p" x="{x(first_s):.1f}" y="{tops[0] + _ROW_HEIGHT - height:.1f}" '
            f'width="{max(1.0, x(at_s) - x(first_s) - 1):.1f}" height="{height:.1f}">'
            f"<title>tokens {before} to {tokens}: {at_s - first_s:.3f} s</title></rect>"
        )
    for row, css, times in ((1, "n", prefill.published_s), (2, "d", decoded.groups_s)):
        for group, at_s in enumerate(times):
            height = _ROW_HEIGHT * (group + 1) / max(1, groups)
            track = f" on {decoded.coverage[group]}" if row == 2 else ""
            parts.append(
                f'<rect class="{css}" x="{x(at_s) - 2:.1f}" y="{tops[row] + _ROW_HEIGHT - height:.1f}" width="4" '
                f'height="{height:.1f}"><title>group {group}{track}: {at_s - began_s:.3f} s</title></rect>'
            )
    end = x(prefill.ended_s)
    parts.append(f'<line class="e" x1="{end:.1f}" x2="{end:.1f}" y1="32" y2="{tops[2] + _ROW_HEIGHT}"/>')
    after_ms = 1e3 * (decoded.ready_s - prefill.ended_s)
    low = tops[2] + _ROW_HEIGHT + 18
    parts.append(f'<text x="{_LEFT}" y="{low}">0 s</text>')
    caption = f"{last_s:.2f} s: in place {after_ms:.0f} ms after the last token"
    parts.append(f'<text x="{_WIDTH - 20}" y="{low}" text-anchor="end">{caption}</text></svg>')
    return "\n".join(parts) + "\n"
