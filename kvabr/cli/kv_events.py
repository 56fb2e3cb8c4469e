"""The options of commands that tell KV events, and the publisher that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from kvabr.cli.options import is_loopback
from kvabr.types.errors import UsageError
from kvabr.types.fields import Heading, Shown

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.seen_prompts import SeenPrompts
    from kvabr.telemetry.kv_events.announced import AnnouncedPrompt, Reason
    from kvabr.telemetry.kv_events.hashes import BlockHashes

_WHY: dict[Reason, str] = {
    "no tokens": "its token ids are not kept beside it; engines tell such by themselves, or keep them: publish_tokens",
    "salted": "tokens of salted prompts are told to nobody",
    "passage": "passages begin no prompt",
    "short": "it is shorter than a block",
    "another model": "it is of another model than those that are told: --kv-events-topic, --kv-events-model",
    "unreadable": "its token ids are damaged, or cannot be read",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventOptions:
    """The options of commands that publish KV events."""

    about: ClassVar = Heading(
        "KV events",
        "Tell routers (vLLM's, Dynamo's, llm-d's) what is available here, over ZeroMQ. Events have the tokens of"
        " prompts in the clear, and anyone who can reach the address can read them: bind it to this machine, or a"
        " network that you trust.",
    )
    to: Annotated[str | None, Shown("--kv-events ENDPOINT")] = None
    """Where to tell them, such as tcp://127.0.0.1:5557 (default: nowhere)."""
    replay: Annotated[str | None, Shown("--kv-events-replay ENDPOINT", needs="to")] = None
    """Where to tell again what a reader has missed."""
    block: Annotated[int, Shown("--kv-events-block N", needs="to")] = 16
    """Tokens of a block, as the engines have it."""
    hash: Annotated[Literal["sha256", "sha256_cbor"], Shown("--kv-events-hash", needs="to")] = "sha256"
    """How blocks are named, as vLLM's --prefix-caching-hash-algo (default: sha256); PYTHONHASHSEED counts too."""
    topic: Annotated[str, Shown("--kv-events-topic TEXT", needs="to")] = "kv@kvabr@{model}"
    """Topic of the messages, kv@INSTANCE@MODEL for llm-d (default: kv@kvabr@{model}, {model} as assets name it)."""
    model: Annotated[str, Shown("--kv-events-model PATTERN", needs="to")] = "*"
    """Models that are told, as assets name them (default: all)."""


@contextmanager
def telling(
    args: KVEventOptions,
    read: Callable[[T], AnnouncedPrompt | Reason],
    assets: Callable[[], Mapping[str, T]],
    listen: Callable[[Callable[[], None]], None],
    log: FilteringBoundLogger,
    registry: CollectorRegistry,
) -> Iterator[None]:
    """Tell the assets of a store until the context ends, if the options ask for it.

    Args:
        args: the options.
        read: returns the prompt of an asset, or why it is not told; called in a thread.
        assets: returns what there is, by name; called in a thread.
        listen: takes what is called when there may be other assets.
        log: receives events.
        registry: gets the metrics.

    Raises:
        UsageError: an option is wrong, or ZeroMQ is not installed.
        TransportError: an address cannot be bound.
    """
    from kvabr.telemetry.kv_events.announced import AnnouncedAssets
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
        log.warning("not told in KV events", asset=name, why=_WHY[why], hint="others like it are counted only")

    announced = AnnouncedAssets(_hashes(args), read, topic=args.topic, models=args.model, warn=warn)
    sockets, metrics = EventSockets(args.to, args.replay), KVEventMetrics(registry)
    publisher = KVEventPublisher(sockets, announced, assets, log, metrics)
    listen(publisher.changed)
    log.info("KV events", endpoint=publisher.endpoint, replay=publisher.replay, block=args.block)
    for endpoint in (publisher.endpoint, publisher.replay):
        if endpoint is not None and (host := host_of(endpoint)) is not None and not is_loopback(host):
            hint = "who can reach this address hears the tokens of all prompts that are told"
            log.warning("KV events are open to all", endpoint=endpoint, hint=hint)
    with publisher:
        yield


@contextmanager
def relaying(
    args: KVEventOptions, origin: str | None, log: FilteringBoundLogger, registry: CollectorRegistry
) -> Iterator[SeenPrompts]:
    """Tell what is looked up through a relay, if the options ask for it, with the tokens that its origin tells.

    Errors as of `telling`; a `UsageError`, too, if the origin's events are not named.
    """
    from kvabr.server.seen_prompts import SeenPrompts
    from kvabr.telemetry.kv_events.publisher import EventSockets
    from kvabr.telemetry.kv_events.subscriber import KVEventSubscriber

    prompts = SeenPrompts()
    if (origin is None) != (args.to is None):
        raise UsageError("--kv-events and --upstream-kv-events belong together: a relay learns tokens from its origin")
    with telling(args, lambda prompt: prompt, prompts.assets, prompts.listen, log, registry):
        if origin is None:
            yield prompts
            return
        sockets = EventSockets.parse(origin, "--upstream-kv-events")
        with KVEventSubscriber(sockets, prompts.hear, lambda _: None, log):
            yield prompts


def _hashes(args: KVEventOptions) -> BlockHashes:
    from kvabr.telemetry.kv_events.hashes import BlockHashes

    try:
        return BlockHashes(args.block, args.hash)
    except UsageError as error:
        raise UsageError(f"--kv-events-block {args.block}: {error}") from error
