"""`kvabr inspect`: show the tracks of an asset, and check that it is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.cli.network import Connecting, checked
from kvabr.types.catalog import Catalog
from kvabr.types.errors import FormatError, KvabrError, TransportError, UsageError
from kvabr.types.fields import Shown
from kvabr.types.words import counted

if TYPE_CHECKING:
    from kvabr.store.asset import Asset
    from kvabr.types.passage import PassageNotes

_MAX_ENDS = 8
"""Maximum number of listed prefixes that end with a snapshot."""
_SHOWN = ("source", "tokens", "groups", "fp16_bytes", "profile_bytes", "loss_method")
"""Fields of the catalog to include in the JSON."""
_MAX_ASKED = 3
"""Maximum number of listed groups that matter most for questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectCommand:
    """Show the tracks of an asset with size, ratio and loss, and how well losses of mixes are predicted.

    Examples:
      kvabr inspect assets                      the only asset of a store
      kvabr inspect assets/DIGEST --check       read every group and compare it with the catalog
      kvabr inspect assets/DIGEST --json tracks.json
      kvabr inspect 'moqt://origin.example/#kvcache:MODEL/DIGEST'

    loss is the expected KL divergence from the exact cache in nats per generated token: the mean of the KL over the
    first 8 tokens, the first 32 tokens, and all measured tokens. KL, ΔNLL and top-1 cover all measured tokens, with the
    real model and the whole cache on that track. ms/group is the decode time on one thread of the publisher's machine.
    """

    asset: Annotated[str, Shown("ASSET|CATALOG|URL")]
    """STORE/DIGEST, a store with one asset, a catalog, or an asset at an origin."""
    check: Annotated[bool, Shown()] = False
    """Read every part; exit 1 if any is damaged."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the tables as JSON, with the size and loss of every group."""
    peer: Connecting


def run(args: InspectCommand) -> int:
    """Print the tables, and check the groups if requested."""
    from kvabr.cli import display

    catalog, asset = _open(args)
    out = display.output()
    _head(catalog)
    out.print(display.track_table(catalog))
    display.plain(*_loss_lines(catalog))
    if (tails := display.tail_table(catalog)) is not None:
        out.print(tails)
    display.plain(*_tail_lines(catalog))
    if catalog.mixes:
        out.print(display.mix_table(catalog))
    bad = _check(asset) if args.check and asset is not None else None
    result: dict[str, Any] = {
        "model": catalog.spec.model,
        **{name: getattr(catalog, name) for name in _SHOWN},
        "prefill": None if catalog.prefill is None else catalog.prefill.to_json(),
        "tracks": display.track_rows(catalog),
        "asked": list(catalog.asked),
        "mixes": display.mix_rows(catalog),
    }
    if catalog.passage is not None:
        result["passage"] = catalog.passage.to_json()
    if not catalog.every_token:
        result |= {"classes": list(catalog.spec.names), "units": list(catalog.titles)}
        result |= {"needed_groups": catalog.to_play.groups, "needed_fp16_bytes": catalog.to_play.fp16_bytes}
    for row, track in zip(result["tracks"], catalog.tracks, strict=True):
        row["group_bytes"], row["group_loss"] = list(track.bytes), list(track.loss)
    if bad is not None:
        result["bad"] = bad
    display.write_result(args.json, "inspect", result)
    if bad:
        raise FormatError(
            f"{args.asset}: {counted(len(bad), 'part')} cannot be read, see above; encode or copy the asset again"
        )
    return 0


add = command(InspectCommand, run)


def _open(args: InspectCommand) -> tuple[Catalog, Asset | None]:
    from kvabr.store.locations import is_store, open_catalog

    catalog, asset = open_catalog(args.asset) if is_store(args.asset) else (_fetch_catalog(args), None)
    if args.check and asset is None:
        raise UsageError("--check needs an asset: a catalog alone has no groups to read")
    return catalog, asset


def _fetch_catalog(args: InspectCommand) -> Catalog:
    import asyncio

    from kvabr.client.lookup import fetch_catalog
    from kvabr.client.origins import asset_of, dialling

    connecting, namespace = dialling(args.asset, checked(args.peer)), asset_of(args.asset)
    if namespace is None:
        raise UsageError(f"{args.asset}: names no asset; append #kvcache:MODEL/DIGEST to the URL")

    async def fetch() -> Catalog:
        async with connecting as origin, asyncio.timeout(args.peer.timeout_s):
            return (await fetch_catalog(origin, namespace)).catalog

    try:
        return run_async(fetch())
    except TimeoutError as error:
        raise TransportError(
            f"{args.asset}: the catalog did not arrive within {args.peer.timeout_s:g} s (--timeout)"
        ) from error


def _head(catalog: Catalog) -> None:
    from kvabr.cli.display import plain
    from kvabr.types.digests import TITLES

    spec = catalog.spec
    classes = len(spec.classes)
    several = f"; {counted(catalog.groups, 'group')} in {classes} layer classes" if classes > 1 else ""
    lines = [
        f"{spec.model}: {spec.summary}",
        f"{counted(catalog.tokens, 'token')} in {counted(len(catalog.chunks), 'group')} of {spec.group_tokens}"
        + several,
        f"{catalog.fp16_bytes:,} bytes as FP16; profile {catalog.profile_bytes:,} bytes",
    ]
    if not catalog.every_token:
        play = catalog.to_play
        lines.append(f"a play of all tokens needs {play.groups:,} of these groups, {play.fp16_bytes:,} bytes as FP16")
    if any(only.kind == "state" for only in spec.classes):
        ends = [count for count in range(1, len(catalog.chunks) + 1) if catalog.playable(count)[0] == count]
        tokens = [f"{min(count * spec.group_tokens, catalog.tokens):,}" for count in ends]
        shown = tokens if len(tokens) <= _MAX_ENDS else [*tokens[:_MAX_ENDS], "...", tokens[-1]]
        lines.append(f"prompts can share its first {', '.join(shown)} tokens, where snapshots of its states are stored")
    if catalog.passage is not None:
        lines += _passage_lines(catalog.passage)
    if catalog.source:
        lines.append(f"made from: {catalog.source}")
    lines.append(f"digests of groups: {TITLES[catalog.digest_kind]}")
    lines.append(f"{'prompt' if catalog.passage is None else 'passage'} digest: {catalog.namespace.prompt}")
    if catalog.passage is None:
        lines.append(f"name for kvabr fetch: #kvcache:{catalog.namespace.model}/{catalog.namespace.prompt}")
    if catalog.prefill is not None:
        seconds = catalog.prefill.seconds(0, catalog.tokens)
        lines.append(f"prefill on the publisher's machine: {seconds:.1f} s ({catalog.tokens / seconds:.0f} tokens/s)")
    plain(*lines)


def _loss_lines(catalog: Catalog) -> list[str]:
    """Return what the columns loss and KL mean; the JSON has the whole method."""
    early = [
        str(first)
        for first in (8, 32)
        if any(
            track.measured is not None and getattr(track.measured, f"kl{first}") is not None for track in catalog.tracks
        )
    ]
    if not early:
        return [f"loss: {catalog.loss_method.partition(';')[0].removesuffix('.')}"] if catalog.loss_method else []
    return [
        f"loss: the mean of the KL over the first {', '.join(early)} and all measured tokens; players use it",
        "KL: divergence of this cache from the exact one over all measured tokens; both are nats per token",
    ]


def _tail_lines(catalog: Catalog) -> list[str]:
    """Return lines about how strongly losses depend on the text after the cache."""
    known = [tail for track in catalog.tracks for tail in track.tails]
    if any(tail.spread for tail in known):
        most = sorted(range(len(catalog.asked)), key=catalog.asked.__getitem__, reverse=True)[:_MAX_ASKED]
        shares = ", ".join(f"{catalog.title(group)} {catalog.asked[group]:.0%}" for group in most)
        return [
            "rows: loss before a question or other tokens that an engine computes; varies by: factor between texts",
            *([f"groups with the largest shares of the loss before questions: {shares}"] if shares else []),
        ]
    if known:
        return [
            "losses before a question were measured with one text; others can change them by a factor of up to five"
        ]
    return ["the loss before a question was not measured: usually it is a tenth to all of the loss above"]


def _passage_lines(notes: PassageNotes) -> list[str]:
    contexts = f" over {counted(notes.contexts, 'context')}" if notes.contexts else ""
    lines = [f"a passage, playable anywhere in a prompt; its cache was computed: {notes.base}{contexts}"]
    if not notes.fusion:
        lines.append(
            "the loss of joining this passage was not measured: players recompute it, unless their max_loss is infinite"
        )
    for share, loss in notes.fusion:
        lines.append(f"fusion loss with {share:.0%} of its tokens recomputed: {loss:.4f} nats per token")
    if notes.method:
        lines.append(f"measured: {notes.method}")
    lines.append(f"tokens are {'' if notes.order else 'not '}ranked by the gain of recomputing them")
    return lines


def _check(asset: Asset) -> list[str]:
    from kvabr.cli.display import plain
    from kvabr.replay.verify import load_profile

    bad: list[str] = []
    reads: list[Callable[[], object]] = [lambda: load_profile(asset)]
    if asset.has_prompt():
        reads.append(asset.prompt)
    for name, track in asset.catalog.published.items():
        reads += [partial(asset.frame, group, name) for group in range(len(track.bytes))]
    for read in reads:
        try:
            read()
        except KvabrError as error:
            bad.append(str(error))
    plain(*(f"bad: {line}" for line in bad), f"checked {counted(len(reads), 'part')}: {len(bad)} bad")
    return bad
