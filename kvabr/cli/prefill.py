"""`kvabr prefill`: compute and publish the KV cache of a text, with --live during the computation."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from kvabr.cli.fields import command
from kvabr.cli.options import (
    Digest,
    Model,
    SaltFile,
    TextFile,
    check_text,
    load,
    prompt_text,
    yield_processors,
)
from kvabr.types.digests import SHA256
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.fields import Shown
from kvabr.types.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kvabr.engines.transformers.engine import TransformersEngine
    from kvabr.engines.transformers.model_loader import LoadedModel
    from kvabr.publish.live_publisher import LivePublisher, LiveSlot
    from kvabr.publish.publisher import PublishOutcome
_RUN_TOKENS = 512
"""Tokens computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCommand:
    """Run a model over a text and publish its KV cache; with --live, players receive it during the prefill.

    A prefill here, and a decoder elsewhere that plays the growing cache:
      mkdir -p assets && kvabr serve assets --dev                         (prints the URL and the fingerprint)
      kvabr prefill --text book.txt --tokens 4096 --out assets --live     (in another terminal)
      kvabr fetch URL --fingerprint HEX --text book.txt --model smollm2 --deadline 300  (once it can be played)

    The deadline must cover the rest of the prefill. With --wait-for-producer 60 the fetch may start first.

    Without --live the cache is published once it is complete, as engines do. With --live each group can be played a
    moment after it was computed; when the prefill ends, players lack only the last group.

    Losses are not measured, as by `kvabr encode`, but taken from --prior, an asset of the same model. The AC layers,
    which a slow link needs, require a profile (`kvabr calibrate`).

    After Ctrl-C, or if the model fails, the computed groups remain as the cache of a shorter prompt. If the process is
    killed, they remain only if `kvabr serve` is serving that folder.
    """

    text: TextFile
    tokens: Annotated[int | None, Ge(1), Shown("--tokens N")] = None
    """Tokens of the prompt (default: all of the text)."""
    out: Annotated[Path, Shown("-o --out FOLDER")]
    """Folder of the store; created if missing."""
    live: Annotated[bool, Shown()] = False
    """Publish during the prefill."""
    model: Model = "smollm2"
    tracks: Annotated[tuple[str, ...] | None, Shown("--tracks TRACK")] = None
    """Tracks to make (default: FP16 Int8 Int4, with a profile AC-L0 to L3)."""
    edge: Annotated[tuple[str, ...] | None, Shown("--edge TRACK", needs="live")] = None
    """With --live: tracks to publish during the prefill; the others follow at its end (default: the
    AC layers, if any).
    """
    profile: Annotated[Path | None, Shown("--profile FILE")] = None
    """Codec profile of the model (default: the profile that kvabr ships for SmolLM2-135M or Gemma 3 270M)."""
    prior: Annotated[str | None, Shown("--prior ASSET")] = None
    """Asset or catalog with losses of the model (default: a catalog of smollm2)."""
    digest: Digest = SHA256
    salt_file: SaltFile = None
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the outcome as JSON."""


def run(args: PrefillCommand) -> int:
    """Compute and publish."""
    yield_processors()
    from rich.console import Console

    from kvabr.cli.display import plain, write_result
    from kvabr.engines.transformers.publish import cache_publisher, find_profile
    from kvabr.publish.live_publisher import LivePublisher
    from kvabr.store.files import read_salt
    from kvabr.store.locations import open_catalog, open_store
    from kvabr.types.digests import check_kind
    from kvabr.types.naming import chain

    # First check everything that needs no model.
    text = _checked_text(args)
    salt = read_salt(args.salt_file)
    check_kind(args.digest)
    prior = None if args.prior is None else open_catalog(args.prior)[0]
    if args.tokens is not None:
        check_text(args.model, text, args.tokens)
    console = Console(stderr=True)
    loaded = load(args.model, console)
    engine, ids = loaded.engine, _prompt(loaded, text, args.tokens)
    spec, profile = engine.spec, find_profile(engine.spec, args.profile)
    name = chain(ids, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt)[-1]
    store = open_store(args.out)
    if store.has(name):
        store.open(name).check_parts()
        plain(f"this cache is already published: {args.out / name}")
        return 0
    publisher = cache_publisher(engine, args.out, profile=profile, prior=prior, tracks=args.tracks, digest=args.digest)
    live = LivePublisher(publisher, edge=args.edge)
    began_s = time.perf_counter()
    try:
        outcome, prefill_s = _prefill(args, live, engine, ids, salt, console)
    finally:
        live.close()
    seconds = time.perf_counter() - began_s
    if outcome.verdict not in ("published", "known"):
        raise AssetError(f"{args.out}: not published ({outcome.why}){_left(outcome)}")
    result = {
        "asset": str(args.out / name),
        "model": spec.model,
        "tokens": len(ids),
        "live": args.live,
        "verdict": outcome.verdict,
        "bytes": outcome.bytes,
        "left_out": outcome.left_out,
        "prefill_s": round(prefill_s, 3),
        "seconds": round(seconds, 3),
    }
    write_result(args.json, "prefill", result)
    if outcome.verdict == "known":
        plain(f"another process is publishing this cache: {args.out / name}")
        return 0
    if outcome.left_out:
        plain(
            f"encoding was slower than the prefill: {counted(outcome.left_out, 'frame')} were published after its last "
            "token"
        )
    plain(f"asset: {args.out / name} ({counted(len(ids), 'token')}, prefill {prefill_s:.1f} s, total {seconds:.1f} s)")
    return 0


add = command(PrefillCommand, run)


def _checked_text(args: PrefillCommand) -> str:
    """Return the text; raise `UsageError` for impossible options."""
    from kvabr.publish.encoder import ordered_tracks
    from kvabr.store.files import check_makeable

    text = prompt_text(args.text)
    for tracks in (args.tracks, args.edge):
        ordered_tracks(tracks)
    check_makeable(args.out)
    return text


def _prefill(
    args: PrefillCommand,
    live: LivePublisher,
    engine: TransformersEngine,
    ids: list[int],
    salt: bytes,
    console: Console,
) -> tuple[PublishOutcome, float]:
    from kvabr.cli.display import StageBar, plain
    from kvabr.engines.transformers.publish import prefill_live
    from kvabr.publish.encoder import compute_cache
    from kvabr.publish.publisher import PublishOutcome, Slot

    done: Future[PublishOutcome] = Future()
    began_s = time.perf_counter()
    ended_s = began_s
    growing: list[LiveSlot] = []

    def progress(tokens: int, total: int) -> None:
        nonlocal ended_s
        ended_s = time.perf_counter()
        bar("prefill", tokens, total)

    def begun(slot: LiveSlot) -> None:
        nonlocal began_s
        began_s = time.perf_counter()  # exclude the time of the first timing
        growing.append(slot)
        plain(f"can be played from now on: {engine.spec.model}/{slot.chunks[-1]}")

    try:
        with StageBar({"prefill": "prefill (tokens)"}, console) as bar:
            if args.live:
                _, done = prefill_live(
                    live, engine, ids, salt=salt, run_tokens=_RUN_TOKENS, always=False, begun=begun,
                    progress=progress,
                )  # fmt: skip
            elif isinstance(slot := live.publisher.reserve(ids, salt), Slot):
                slot.fill(compute_cache(engine, ids, progress), done.set_result)
            else:
                done.set_result(PublishOutcome(slot))
            try:
                return done.result(), ended_s - began_s
            except KeyboardInterrupt:
                for each in growing:
                    each.fail("interrupted")
                raise
    except KeyboardInterrupt:
        live.close()
        left = [_left(outcome) for slot in growing if (outcome := slot.production.outcome) is not None]
        raise KeyboardInterrupt(*(text.removeprefix("; ") for text in left if text)) from None


def _left(outcome: PublishOutcome) -> str:
    return f"; the cache of its first {outcome.tokens} tokens is published" if outcome.tokens else ""


def _prompt(loaded: LoadedModel, text: str, tokens: int | None) -> list[int]:
    """Return the token ids of the prompt; raise `UsageError` if the text or the model is too short."""
    from kvabr.publish.model import opened
    from kvabr.publish.texts import too_short

    ids, context = list(opened(loaded, loaded.encode(text))), loaded.engine.context
    wanted = len(ids) if tokens is None else tokens
    if len(ids) < wanted:
        raise too_short(len(ids), wanted)
    if wanted > context:
        raise UsageError(
            f"{wanted} tokens do not fit the context of {loaded.engine.spec.model} ({context}): give at most --tokens "
            f"{context}"
        )
    return ids[:wanted]
