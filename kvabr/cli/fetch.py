"""`kvabr fetch`: play a cache from an origin, show its progress, and write it to a file."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvabr.cli import network
from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.cli.network import Connecting
from kvabr.cli.options import Deadline, DiskGib, SaltFile, load, prompt_text, read_tokens
from kvabr.player.play_choices import PlayChoices
from kvabr.types.errors import KvabrError, PlayError, UsageError
from kvabr.types.events import PlayEvent
from kvabr.types.fields import Heading, OptionGroup, Shown
from kvabr.types.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kvabr.client.async_client import AsyncClient
    from kvabr.client.result import NothingCached, Played
    from kvabr.transfer.interface import Connection
    from kvabr.types.engine import Engine
    from kvabr.types.naming import TrackNamespace

_HOW = (
    "name the cache: moqt://HOST/#kvcache:MODEL/DIGEST, or --name MODEL/DIGEST (`kvabr inspect ASSET` shows both "
    "parts), or give the prompt: --text FILE --model smollm2"
)
_NOT_STORED_STATUS = 3
"""Exit status of a complete play if groups or a profile could not be stored."""
_METRIC = "kvabr_client_failed_writes_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCommand:
    """Play a KV cache from an origin or a relay before a deadline, show the progress, and write it as safetensors.

    Examples:
      kvabr fetch 'moqt://origin.example/#kvcache:MODEL/DIGEST' --deadline 2 --out cache.safetensors
      kvabr fetch moqt://localhost:4443/ --fingerprint HEX --name MODEL/DIGEST --out cache.safetensors
      kvabr fetch moqt://origin.example/ --text README.md --recompute smollm2 --out cache.safetensors

    Name the cache (`kvabr inspect` shows its name), or give the prompt: --text with --model, or --prompt. kvabr plays
    the longest prefix of the prompt that the origin has. With --recompute, the engine computes late groups, further
    groups if that pays off (--gpu-price), and the whole cache if the origin cannot be reached. A cache that is still
    being prefilled is played as its groups are published. The deadline starts once the connection is open.

    The play ends at the deadline, or with --recompute once the engine has completed the cache. If groups are still
    missing, the command lists them, writes the tokens before them to --out, and exits with status 1. --patience 3 waits
    for three deadlines.

    The exit status is 0 if a complete cache was played, 1 if groups are missing or the prompt is not cached, and 3 if a
    complete cache was played, but its groups could not be stored in --disk, or its codec profile in --cache.
    """

    url: Annotated[str, Shown("URL")]
    """moqt://HOST[:PORT]/ or s3://BUCKET/PREFIX, [#kvcache:MODEL/DIGEST]."""
    source: Annotated[tuple[str, ...], Shown("--source URL", repeated=True)] = ()
    """Another origin, relay or store of the same caches, used in parallel; may be repeated."""
    salt_file: SaltFile = None

    which: ClassVar = Heading("which cache")
    name: Annotated[str | None, Shown("--name MODEL/DIGEST")] = None
    """Name of the cache."""
    prompt: Annotated[Path | None, Shown("--prompt F.json", alone="prompt")] = None
    """Token ids of the prompt: a JSON list, or a file from the private/ folder of a store."""
    text: Annotated[Path | None, Shown("--text F", alone="prompt")] = None
    """The prompt as text."""
    model: Annotated[str | None, Shown("--model smollm2|DIR")] = None
    """Model of the prompt, for its tokenizer (default: the model of --recompute; with --prompt, the only model at the
    origin).
    """
    no_live: Annotated[bool, Shown()] = False
    """Skip caches that are still being prefilled."""

    how: ClassVar = Heading("how to play")
    deadline: Deadline = 2.0
    recompute: Annotated[str | None, Shown("--recompute smollm2|DIR")] = None
    """Engine that computes late groups, and other groups if that pays off."""
    play: Annotated[PlayChoices, OptionGroup()]
    cache: Annotated[Path | None, Shown("--cache DIR")] = None
    """Folder that keeps codec profiles and the speed of peers (default: the user's cache folder)."""
    disk: Annotated[str | None, Shown("--disk DIR|URL")] = None
    """Keep groups for later plays in this folder or object store."""
    disk_gib: DiskGib = 16.0
    peer: Connecting

    results: ClassVar = Heading("results")
    out: Annotated[Path | None, Shown("-o --out F.safetensors", written=True)] = None
    """Write the cache."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the outcome as JSON."""
    log: Annotated[Path | None, Shown("--log F.jsonl", written=True)] = None
    """Write every decision and event."""

    @property
    def urls(self) -> list[str]:
        """All sources, without the fragment that names the asset."""
        return [url.partition("#")[0] for url in (self.url, *self.source)]


def run(args: FetchCommand) -> int:
    """Fetch, and return the exit status."""
    from rich.console import Console

    from kvabr.cli.display import write_result
    from kvabr.client.origins import dialling

    # Find all errors that need no network.
    network.checked(args.peer)
    _ = [dialling(url, args.peer) for url in (args.url, *args.source)]
    namespace = _namespace(args)
    if args.out is not None and args.out.exists() and not args.out.is_file():
        raise UsageError(f"--out {args.out}: not a regular file; give another path")
    console = Console(stderr=True)
    engine, model, tokens = read_prompt(args, console)
    lines: list[PlayEvent] = []
    try:
        result = run_async(_fetch(args, namespace, engine, model, tokens, lines, console))
    finally:
        if args.log is not None:
            _write_log(args.log, lines)
    write_result(args.json, "fetch", result)
    unwritten = "" if args.out is None else f"; {args.out} was not written"
    if "incomplete" in result:
        written = "" if args.out is None else f"; {args.out} has the first {result['tokens']:,} tokens"
        cores = ", or more cores" if "to be decoded" in result["incomplete"] else ""
        more = f"; allow more time: --deadline, --patience{cores}" if result["late"] else ""
        raise PlayError(result["incomplete"] + (written if result["tokens"] else unwritten) + more)
    if not result["tokens"]:
        why = f"no snapshot of {result['limited_by']} within this prompt is cached at the origin"
        if result["limited_by"] is None:
            producer = ", and no producer has started to prefill it" if args.play.wait_for_producer_s else ""
            why = f"no part of this prompt is cached at the origin{producer}"
        raise PlayError(f"{why} ({result['lookup_s']:.2f} s){unwritten}")
    return _NOT_STORED_STATUS if result["unkept"] else 0


add = command(FetchCommand, run)


def _namespace(args: FetchCommand) -> TrackNamespace | None:
    """Return the name of the cache; None for a prompt. Raises `UsageError` for contradictory options."""
    from kvabr.client.origins import asset_of, parse_namespace

    namespace = asset_of(args.url)
    if args.name is not None:
        if namespace is not None:
            raise UsageError("--name and the URL both name a cache; give only one of them")
        namespace = parse_namespace(args.name)
    if namespace is None and args.prompt is None and args.text is None:
        raise UsageError(_HOW)
    if args.recompute is not None and args.prompt is None and args.text is None:
        raise UsageError("--recompute needs the prompt: --prompt or --text")
    if (wait_s := args.play.wait_for_producer_s) and (args.no_live or namespace or wait_s >= args.deadline):
        raise UsageError(
            f"--wait-for-producer {wait_s:g} needs --text or --prompt instead of a name, a --deadline above {wait_s:g} "
            "s that also covers the prefill, and no --no-live"
        )
    return namespace


def _write_log(path: Path, lines: Sequence[PlayEvent]) -> None:
    from kvabr.store.files import PRIVATE, write_text

    try:
        write_text(path, "".join(json.dumps(line.to_json()) + "\n" for line in lines), mode=PRIVATE)
    except KvabrError as error:
        print(f"kvabr: {error}", file=sys.stderr)  # raising would hide the result of the play


def read_prompt(args: FetchCommand, console: Console) -> tuple[Engine | None, str | None, tuple[int, ...]]:
    """Return the engine and the model's name, if any, and the tokens of the prompt.

    Weights are loaded only for an engine, after a connection to an origin has succeeded.
    """
    if args.recompute is not None and args.model not in (None, args.recompute):
        raise UsageError(
            "--model and --recompute name different models; an engine computes caches of its own model only"
        )
    tokens = () if args.prompt is None else read_tokens(args.prompt, "--prompt")
    wanted = args.recompute or args.model
    if wanted is None:
        if args.text is not None:
            raise UsageError("--text needs --model, for its tokenizer")
        return None, None, tokens
    text = None if args.text is None else prompt_text(args.text)
    engine: Engine | None = None
    if args.recompute is not None:
        run_async(_reach(args, console))
        loaded = load(wanted, console)
        engine, name, tokenizer = loaded.engine, loaded.engine.spec.model, loaded.tokenizer
    else:
        from kvabr.cli.display import waiting
        from kvabr.engines.transformers.model_loader import load_tokenizer

        with waiting("loading the tokenizer", console):
            name, tokenizer = load_tokenizer(wanted)
    if text is not None:
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        if not tokens:
            raise UsageError(f"{args.text}: is empty")
    return engine, name, tokens


async def _reach(args: FetchCommand, console: Console) -> None:
    """Connect once, to report an unreachable origin before the model is loaded.

    With an engine, an unreachable origin is no error unless a cache is named: the engine computes the whole prompt.
    """
    from kvabr.cli.display import printable, say
    from kvabr.client.origins import asset_of, dialling
    from kvabr.types.errors import TransportError

    named = args.name is not None or asset_of(args.url) is not None
    for number, url in enumerate(args.urls):
        try:
            async with dialling(url, args.peer):
                return
        except TransportError as error:
            if number < len(args.source):
                continue
            if named or not _is_silent(error):
                raise
            say(console, printable(f"{error}; the engine computes the whole cache"), highlight=False)


def _is_silent(error: BaseException) -> bool:
    """Return True if no origin answered. Other errors, such as refused tokens, must be fixed by the user."""
    from kvabr.types.errors import ConnectionLostError, NoAnswerError, UnauthorizedError

    return isinstance(error, NoAnswerError | ConnectionLostError) and not isinstance(error, UnauthorizedError)


async def _fetch(
    args: FetchCommand,
    namespace: TrackNamespace | None,
    engine: Engine | None,
    model: str | None,
    tokens: tuple[int, ...],
    lines: list[PlayEvent],
    console: Console,
) -> dict[str, Any]:
    from platformdirs import user_cache_path

    from kvabr.cli.overlay import Overlay
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.options import Limits, PlayOptions
    from kvabr.client.result import IncompleteError, NothingCached, save
    from kvabr.store.files import read_salt
    from kvabr.types.errors import TransportError

    if args.play.tail and not args.play.question_tokens:
        raise UsageError("--tail needs --question: the engine computes both together; give both, or neither")
    options = PlayOptions(
        **{field.name: getattr(args.play, field.name) for field in fields(PlayChoices)}
        | {"live": not args.no_live}
        | ({} if args.play.question_tokens else {"tail": 0}),
        recompute=args.recompute is not None,
        salt=read_salt(args.salt_file),
        log=lines.append if args.log is not None else None,
    )
    client = AsyncClient(
        args.urls,
        args.peer,
        model=model if engine is None else None,
        engine=engine,
        options=options,
        cache=args.cache or user_cache_path("kvabr", appauthor=False),
        limits=Limits(disk=args.disk, disk_bytes=int(args.disk_gib * (1 << 30))),
    )
    async with client:
        start = time.monotonic()
        origin: Connection | None = None
        try:
            origin = await client.connect()
        except TransportError as error:
            if engine is None or namespace is not None or not _is_silent(error):
                raise
        connect_s = time.monotonic() - start
        how = "not reached" if origin is None else f"by {origin.backend}, {origin.protocol}"
        title = f"{args.url.partition('#')[0]} {how}"
        with Overlay(title, console, lambda: _trouble(client, args)) as overlay:
            options = replace(options, watch=overlay.show)
            played: Played | NothingCached
            try:
                if namespace is not None:
                    played = await client.play_asset(namespace, deadline=args.deadline, tokens=tokens, options=options)
                else:
                    played = await client.play(tokens, deadline=args.deadline, options=options)
            except IncompleteError as error:
                _print_missing_sources(client, args, console)
                if args.out is not None and error.prefix is not None:
                    save(error.prefix, args.out)
                result = _result(args, origin, error.prefix, connect_s)
                return result | {
                    "incomplete": str(error),
                    "missing": list(error.missing),
                    "late": error.record.gave_up_late,
                }
        _print_missing_sources(client, args, console)
        result = _result(args, origin, played, connect_s)
        if isinstance(played, NothingCached):
            return result
        if args.out is not None:
            save(played, args.out)
        _print_result(args, played, len(tokens))
    result["unkept"] = [what for what in ("groups", "profile") if client.metrics.value(_METRIC, what=what)]
    return result


def _trouble(client: AsyncClient, args: FetchCommand) -> str | None:
    return next(
        (why for url in dict.fromkeys(args.urls) if (why := client.peer(url, args.peer).peer.trouble) is not None), None
    )


def _print_missing_sources(client: AsyncClient, args: FetchCommand, console: Console) -> None:
    """Print the sources that are not connected, and why."""
    from kvabr.cli.display import printable, say

    for url in dict.fromkeys(args.urls):
        peer = client.peer(url, args.peer).peer
        if not peer.reached:
            say(console, printable(f"{url} is not used: {peer.trouble}"), highlight=False)


def _print_result(args: FetchCommand, played: Played, tokens: int) -> None:
    from kvabr.cli.display import plain
    from kvabr.client.result import listed
    from kvabr.types.catalog import RECOMPUTED

    record = played.record
    groups = len(played.coverage)
    counts = {track: played.coverage.count(track) for track in dict.fromkeys(played.coverage)}
    of = f" of {tokens}" if tokens else ""
    tail = 0 if played.catalog is None else played.catalog.tail
    verdict = "in time" if played.met else f"late, the deadline was {args.deadline:g} s"
    lines = [
        f"{played.tokens}{of} tokens in place after {played.ttft_s:.2f} s: {verdict}",
        f"{counted(groups, 'group')}: "
        + ", ".join(f"{count} {'' if track == RECOMPUTED else 'on '}{track}" for track, count in counts.items()),
        f"expected loss {played.loss:.2g} nats per token"
        + (f" after {counted(tail, 'token')} that an engine computes" if tail else ""),
        f"{record.bytes_fetched:,} bytes fetched, {record.bytes_wasted:,} of them replaced or lost",
    ]
    if played.tail:
        lines.append(
            f"the last {counted(played.tail, 'token')} of the cache are left for the engine to compute with the "
            "question"
        )
    if record.damaged:
        counts = Counter(f"group {group} on {track}" for group, track, _ in record.damaged)
        names = listed(frame + (f" ({count} times)" if count > 1 else "") for frame, count in counts.items())
        lines.append(f"damaged: {names}: {record.damaged[0][2]}; run `kvabr store verify --deep` at the origin")
    if played.limited_by is not None:
        lines.append(f"more of the prompt is cached, but without a snapshot of layer class {played.limited_by}")
    if (live := played.live) is not None:
        if live.complete_s is not None:
            after_s = max(0.0, played.ttft_s - played.lookup_s - live.complete_s)
            lines.append(
                f"prefilled during the play: in place {1000 * after_s:.0f} ms after the last group was published"
            )
        else:
            why = "the play ended first" if live.stopped is None else live.stopped
            lines.append(f"prefilled during the play, up to group {live.published} of {groups}: {why}")
        if live.sooner_alone_s is not None:
            lines.append(f"computing it here would have finished {live.sooner_alone_s:.2f} s earlier")
    for who, text in (("cpu", "this machine's processor"), ("publisher", "the publisher")):
        if held := record.bytes_held_up.get(who):
            lines.append(f"{text} was the bottleneck for {held:,} bytes, not the network")
    if args.out is not None:
        lines.append(f"written: {args.out}")
    plain(*lines)


def _result(
    args: FetchCommand, origin: Connection | None, played: Played | NothingCached | None, connect_s: float
) -> dict[str, Any]:
    from kvabr.client.result import NothingCached

    result: dict[str, Any] = {
        "url": args.urls[0],
        "backend": origin and origin.backend,
        "protocol": origin and origin.protocol,
        "policy": args.play.policy,
        "deadline_s": args.deadline,
        "connect_s": connect_s,
        "lookup_s": None if played is None else played.lookup_s,
        "rtt_s": origin and origin.stats().rtt_s,
        "missing": [],
    }
    if played is None or isinstance(played, NothingCached):
        return result | {"tokens": 0, "groups": [], "limited_by": played and played.limited_by}
    record, catalog = played.record, played.catalog
    titles = () if catalog is None or len(played.coverage) < len(record.groups) else catalog.titles
    if len(played.spec.classes) == 1:
        groups = [asdict(one) | {"track": track} for one, track in zip(record.groups, played.coverage, strict=False)]
    else:
        groups = [asdict(one) | {"unit": title} for one, title in zip_longest(record.groups, titles)]
    return result | {
        "asset": None if catalog is None else f"{catalog.namespace.model}/{catalog.namespace.prompt}",
        "catalog_sha256": played.catalog_sha256,
        "ttft_s": played.ttft_s,
        "met": played.met,
        "loss": played.loss,
        "tokens": played.tokens,
        "tail": played.tail,
        "limited_by": played.limited_by,
        "live": None if played.live is None else asdict(played.live),
        "tokens_recomputed": record.tokens_recomputed,
        "recompute_s": record.recompute_s,
        "division": None if record.division is None else record.division.to_json(),
        "bytes_fetched": record.bytes_fetched,
        "bytes_wasted": record.bytes_wasted,
        "bytes_held_up": record.bytes_held_up,
        "damaged": [{"group": group, "track": track, "what": what} for group, track, what in record.damaged],
        "groups": groups,
    }
