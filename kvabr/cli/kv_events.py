"""Options for publishing KV events, and the publisher that serves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvabr.cli.options import is_loopback
from kvabr.types.errors import UsageError
from kvabr.types.fields import Heading, Shown

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.published_assets import PublishedAssets
    from kvabr.telemetry.kv_events.announced import Reason
    from kvabr.telemetry.kv_events.hashes import BlockHashes

_WHY: dict[Reason, str] = {
    "no tokens": "its token ids are not stored; set publish_tokens in the engine, or let the engine announce it",
    "salted": "tokens of salted prompts are never announced",
    "passage": "a passage never begins a prompt",
    "short": "it is shorter than a block",
    "another model": "its model is excluded by --kv-events-topic or --kv-events-model",
    "unreadable": "its token ids are damaged or cannot be read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventOptions:
    """Options of `kvabr serve` for KV events."""

    about: ClassVar = Heading(
        "KV events",
        "Announce available caches to routers (vLLM's, Dynamo's, llm-d's) over ZeroMQ. Events contain the tokens of"
        " prompts in the clear, and anyone who can reach the address can read them: bind it to this machine, or to a"
        " network that you trust.",
    )
    to: Annotated[str | None, Shown("--kv-events ENDPOINT")] = None
    """Address of the publisher, such as tcp://127.0.0.1:5557 (default: none)."""
    replay: Annotated[str | None, Shown("--kv-events-replay ENDPOINT", needs="to")] = None
    """Address for replaying missed events."""
    block: Annotated[int, Shown("--kv-events-block N", needs="to")] = 16
    """Tokens per block; must be the block size of the engines."""
    hash: Annotated[Literal["sha256", "sha256_cbor"], Shown("--kv-events-hash", needs="to")] = "sha256"
    """Hash of blocks; must match vLLM's --prefix-caching-hash-algo (default: sha256), and so must PYTHONHASHSEED."""
    topic: Annotated[str, Shown("--kv-events-topic TEXT", needs="to")] = "kv@kvabr@{model}"
    """Topic of the messages, kv@INSTANCE@MODEL for llm-d (default: kv@kvabr@{model}, with the model name of assets)."""
    model: Annotated[str, Shown("--kv-events-model PATTERN", needs="to")] = "*"
    """Models to announce, by their names in assets (default: all)."""


@contextmanager
def announcements(
    args: KVEventOptions, library: PublishedAssets, log: FilteringBoundLogger, registry: CollectorRegistry
) -> Iterator[None]:
    """Announce the assets of a server until the context ends, if the options request it.

    ``registry`` collects the metrics.

    Raises:
        UsageError: an option is wrong, or ZeroMQ is not installed.
        TransportError: an address cannot be bound.
    """
    from kvabr.telemetry.kv_events.announced import AnnouncedAssets, everything, prompt_of
    from kvabr.telemetry.kv_events.publisher import (
        EventSockets,
        KVEventMetrics,
        KVEventPublisher,
        check_endpoint,
        host_of,
    )

    if args.to is None:
        yield
        return
    check_endpoint(args.to, "--kv-events")
    if args.replay is not None:
        check_endpoint(args.replay, "--kv-events-replay")

    def warn(name: str, why: Reason) -> None:
        log.warning("not announced in KV events", asset=name, why=_WHY[why], hint="similar assets are only counted")

    announced = AnnouncedAssets(_hashes(args), prompt_of, topic=args.topic, models=args.model, warn=warn)
    sockets, metrics = EventSockets(args.to, args.replay), KVEventMetrics(registry)
    publisher = KVEventPublisher(sockets, announced, lambda: everything(library.assets), log, metrics)
    library.listen(publisher.changed)
    log.info("KV events", endpoint=publisher.endpoint, replay=publisher.replay, block=args.block)
    for endpoint in (publisher.endpoint, publisher.replay):
        if endpoint is not None and (host := host_of(endpoint)) is not None and not is_loopback(host):
            hint = "anyone who can reach this address can read the tokens of all announced prompts"
            log.warning("KV events are open to all", endpoint=endpoint, hint=hint)
    with publisher:
        yield


def _hashes(args: KVEventOptions) -> BlockHashes:
    from kvabr.telemetry.kv_events.hashes import BlockHashes

    try:
        return BlockHashes(args.block, args.hash)
    except UsageError as error:
        raise UsageError(f"--kv-events-block {args.block}: {error}") from error
