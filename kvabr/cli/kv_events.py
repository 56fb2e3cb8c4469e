"""The options of commands that tell KV events, and the publisher that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvabr.cli.options import is_loopback
from kvabr.types.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from structlog.typing import FilteringBoundLogger

    from kvabr.server.seen_prompts import SeenPrompts
    from kvabr.telemetry.kv_events.hashes import BlockHashes
    from kvabr.telemetry.kv_events.told import Reason, ToldPrompt

_WHY: dict[Reason, str] = {
    "no tokens": "its token ids are not kept beside it; engines tell such by themselves, or keep them: publish_tokens",
    "salted": "tokens of salted prompts are told to nobody",
    "passage": "passages begin no prompt",
    "short": "it is shorter than a block",
    "another model": "it is of another model than those that are told: --kv-events-topic, --kv-events-model",
    "unreadable": "its token ids are damaged, or cannot be read",
}
_USUAL = {
    "kv_events_replay": None,
    "kv_events_block": 16,
    "kv_events_hash": "sha256",
    "kv_events_topic": "kv@kvabr@{model}",
    "kv_events_model": "*",
}
"""Options that say nothing without ``--kv-events``, and their defaults."""
T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `telling` reads."""
    group = parser.add_argument_group(
        "KV events",
        "Tell routers (vLLM's, Dynamo's, llm-d's) what is available here, over ZeroMQ. Events have the tokens of"
        " prompts in the clear, and anyone who can reach the address can read them: bind it to this machine, or a"
        " network that you trust.",
    )
    where = "where to tell them, such as tcp://127.0.0.1:5557 (default: nowhere)"
    group.add_argument("--kv-events", metavar="ENDPOINT", help=where)
    group.add_argument("--kv-events-replay", metavar="ENDPOINT", help="where to tell again what a reader has missed")
    block = "tokens of a block, as the engines have it (default: 16)"
    group.add_argument("--kv-events-block", type=int, metavar="N", help=block)
    group.add_argument(
        "--kv-events-hash",
        choices=("sha256", "sha256_cbor"),
        help="how blocks are named, as vLLM's --prefix-caching-hash-algo (default: sha256); PYTHONHASHSEED counts too",
    )
    topic = "topic of the messages, kv@INSTANCE@MODEL for llm-d (default: kv@kvabr@{model}, {model} as assets name it)"
    group.add_argument("--kv-events-topic", metavar="TEXT", help=topic)
    group.add_argument("--kv-events-model", metavar="PATTERN", help="models that are told, as assets name them")
    parser.set_defaults(**_USUAL)


@contextmanager
def telling(
    args: argparse.Namespace,
    read: Callable[[T], ToldPrompt | Reason],
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
    from kvabr.telemetry.kv_events.publisher import EventSockets, KVEventMetrics, KVEventPublisher, host_of
    from kvabr.telemetry.kv_events.told import ToldAssets

    check(args)
    if args.kv_events is None:
        yield
        return

    def warn(name: str, why: Reason) -> None:
        log.warning("not told in KV events", asset=name, why=_WHY[why], hint="others like it are counted only")

    told = ToldAssets(_hashes(args), read, topic=args.kv_events_topic, models=args.kv_events_model, warn=warn)
    sockets, metrics = EventSockets(args.kv_events, args.kv_events_replay), KVEventMetrics(registry)
    publisher = KVEventPublisher(sockets, told, assets, log, metrics)
    listen(publisher.changed)
    log.info("KV events", endpoint=publisher.endpoint, replay=publisher.replay, block=args.kv_events_block)
    for endpoint in (publisher.endpoint, publisher.replay):
        if endpoint is not None and (host := host_of(endpoint)) is not None and not is_loopback(host):
            hint = "who can reach this address hears the tokens of all prompts that are told"
            log.warning("KV events are open to all", endpoint=endpoint, hint=hint)
    with publisher:
        yield


@contextmanager
def relaying(args: argparse.Namespace, log: FilteringBoundLogger, registry: CollectorRegistry) -> Iterator[SeenPrompts]:
    """Tell what is looked up through a relay, if the options ask for it, with the tokens that its origin tells.

    Errors as of `telling`; a `UsageError`, too, if the origin's events are not named.
    """
    from kvabr.server.seen_prompts import SeenPrompts
    from kvabr.telemetry.kv_events.publisher import EventSockets
    from kvabr.telemetry.kv_events.subscriber import KVEventSubscriber

    prompts, origin = SeenPrompts(), args.upstream_kv_events
    if (origin is None) != (args.kv_events is None):
        raise UsageError("--kv-events and --upstream-kv-events belong together: a relay learns tokens from its origin")
    with telling(args, lambda prompt: prompt, prompts.assets, prompts.listen, log, registry):
        if origin is None:
            yield prompts
            return
        sockets = EventSockets.parse(origin, "--upstream-kv-events")
        with KVEventSubscriber(sockets, prompts.hear, lambda _: None, log):
            yield prompts


def check(args: argparse.Namespace) -> None:
    """Check the options; `UsageError` if one is wrong, or has no use."""
    from kvabr.telemetry.kv_events.publisher import check_endpoint

    if args.kv_events is None:
        for name, usual in _USUAL.items():
            if getattr(args, name) != usual:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is for --kv-events ENDPOINT, which says where events are told")
        return
    check_endpoint(args.kv_events, "--kv-events")
    if args.kv_events_replay is not None:
        check_endpoint(args.kv_events_replay, "--kv-events-replay")
    _hashes(args)


def _hashes(args: argparse.Namespace) -> BlockHashes:
    from kvabr.telemetry.kv_events.hashes import BlockHashes

    try:
        return BlockHashes(args.kv_events_block, args.kv_events_hash)
    except UsageError as error:
        raise UsageError(f"--kv-events-block {args.kv_events_block}: {error}") from error
