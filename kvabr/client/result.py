"""What a play returns, what it shows of itself while it runs, and a played cache as a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.store.files import replacing
from kvabr.types.catalog import RECOMPUTED, Catalog
from kvabr.types.errors import AssetError
from kvabr.types.kv import KVSpec

if TYPE_CHECKING:
    import torch

    from kvabr.client.upgrades import Upgrades
    from kvabr.player.assembler import Assembler
    from kvabr.player.session import Session
    from kvabr.player.session_types import PlayRecord
    from kvabr.quic.interface import ConnectionStats

FORMAT = "kvabr.cache/1"


@dataclass(frozen=True, slots=True)
class Played:
    """A complete cache."""

    kv: torch.Tensor
    """The cache of the prompt's first `tokens` tokens, [layer, K/V, head, token, dim]."""
    tokens: int
    """Tokens that it covers, at least one group; the engine computes the rest of the prompt as usual."""
    coverage: tuple[str, ...]
    """Per group, the track it came on, or ``recomputed``."""
    ttft_s: float
    """Seconds from the call until the cache was in place."""
    lookup_s: float
    """Seconds of these until catalog and profile were known."""
    met: bool
    """Whether the engine had, within the deadline, the time it needs for the rest of the prompt."""
    loss: float
    """Expected loss against the exact cache, nats per generated token."""
    record: PlayRecord
    """What happened to every group; its times count from the end of the lookup."""
    spec: KVSpec
    catalog: Catalog | None = None
    """What was played; None if the engine computed everything."""
    catalog_sha256: str | None = None
    """SHA-256 of the catalog as the origin has it, hex."""
    upgrades: Upgrades | None = None
    """Upgrades that continue now that the cache is in use; None if `PlayOptions.after` did not ask for any."""


@dataclass(frozen=True, slots=True)
class NothingCached:
    """The origin has nothing of the prompt, and there is no engine to compute it."""

    spec: KVSpec | None
    """Model that was asked for; None if neither the caller nor the origin has a spec of it."""
    lookup_s: float
    """Seconds from the call until the origin had answered."""


@dataclass(frozen=True, slots=True)
class PlayedPrefix:
    """What a prefix play brought before its first miss, possibly nothing."""

    kv: torch.Tensor
    """Cache of `tokens` tokens from token `first` on, [layer, K/V, head, token, dim]."""
    first: int
    """First token of the first group that was played."""
    tokens: int
    """Tokens in place; 0 if not even the first group is."""
    wanted: int
    """Tokens that were asked for, from `first` on."""
    coverage: tuple[str, ...]
    """Track of each group in place."""
    loss: float
    """Expected loss of these groups, nats per generated token."""
    bytes_fetched: int
    bytes_wasted: int
    seconds: float
    """Seconds from the call to the end of the play."""
    cut: str | None
    """Why it is not all that was asked for; None if it is."""


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A group on its way."""

    track: str
    share: float
    """Share of its bytes that have come, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a play, for progress displays."""

    now: float
    """Seconds since the play began, which is when the catalog was known."""
    deadline_s: float
    """The deadline on the same clock, seconds."""
    offers: tuple[str, ...]
    """The asset's tracks, smallest first."""
    tracks: tuple[str | None, ...]
    """Per group, the track in place, ``recomputed``, or None."""
    transfers: dict[int, TransferProgress]
    """Groups on their way, by number."""
    rate: float
    """Expected rate, bytes per second; 0.0 while it is unknown."""
    lower_bound: float
    """Rate that the link should exceed most of the time, bytes per second."""
    slack_s: float | None
    """Time left minus the time that the rest needs at the lower bound, seconds; None while it is unknown."""
    bytes_fetched: int
    bytes_wasted: int
    requests: int
    """Requests under way."""
    decode_backlog_s: float
    """Decoding that waits, seconds."""
    computing: bool
    """Whether any group is left to the engine and not yet in place."""
    network: ConnectionStats

    @classmethod
    def of(cls, session: Session, assembler: Assembler, network: ConnectionStats, now: float) -> Snapshot:
        """Take a snapshot of a session."""
        view, record = session.view, session.record
        slack = view.slack_s()
        tracks = assembler.coverage
        return cls(
            now=now,
            deadline_s=view.deadline_s,
            offers=tuple(track.name for track in sorted(view.catalog.tracks, key=lambda track: track.total_bytes)),
            tracks=tracks,
            transfers={
                transfer.group: TransferProgress(transfer.track, transfer.received / transfer.bytes)
                for transfer in view.in_flight.values()
            },
            rate=view.rate,
            lower_bound=view.lower_bound,
            slack_s=None if slack == float("-inf") else slack,
            bytes_fetched=record.bytes_fetched,
            bytes_wasted=record.bytes_wasted,
            requests=len(view.in_flight),
            decode_backlog_s=view.decode_backlog_s,
            computing=any(
                wanted == RECOMPUTED and there is None for wanted, there in zip(view.track_of, tracks, strict=True)
            ),
            network=network,
        )


def save(played: Played, path: Path) -> None:
    """Write a cache as safetensors, whole or not at all: the tensor ``kv``, [layer, K/V, head, token, dim].

    The metadata has one string, ``kvabr``, which is JSON: ``format``, ``spec``, ``tokens`` (how many), ``tracks`` (one
    per group), ``namespace`` and ``catalog_sha256`` (null if everything was recomputed), ``loss``.

    Raises:
        AssetError: the file cannot be written; nothing is left behind.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  # most plays are never written
    from safetensors.torch import save_file  # noqa: PLC0415

    catalog = played.catalog
    namespace = None if catalog is None else {"model": catalog.namespace.model, "prompt": catalog.namespace.prompt}
    facts = {
        "format": FORMAT,
        "spec": played.spec.to_json(),
        "tokens": played.tokens,
        "tracks": list(played.coverage),
        "namespace": namespace,
        "catalog_sha256": played.catalog_sha256,
        "loss": played.loss,
    }
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise AssetError(f"{path}: is not an ordinary file; name another")
    try:
        with replacing(path) as file:
            # By its name: safetensors writes to a path alone.
            save_file({"kv": played.kv.contiguous()}, file.name, metadata={"kvabr": json.dumps(facts, sort_keys=True)})
    except SafetensorError as error:
        raise AssetError(f"{path}: cannot be written ({error})") from error
