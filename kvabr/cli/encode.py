"""`kvabr encode`: run a model over a text, and publish its KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from kvabr.cli import encode_passage
from kvabr.cli.encode_passage import PassageOptions
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
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.fields import OptionGroup, Shown
from kvabr.types.kv import MAX_GROUP_TOKENS
from kvabr.types.words import counted

if TYPE_CHECKING:
    from kvabr.engines.transformers.model_loader import LoadedModel
    from kvabr.publish.encoder import PassageBase
    from kvabr.store.prompt import Prompt
    from kvabr.types.catalog import Catalog

STAGES = {
    "prefill": "prefill (tokens)",
    "encode": "encode (groups x tracks)",
    "time": "time decoding and prefill",
    "answers": "answers to compare (questions)",
    "measure": "measure loss (tracks)",
    "tails": "measure loss (before tails)",
    "groups": "measure loss (single groups)",
    "mix": "measure mixed caches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeCommand:
    """Publish the KV cache of a text on every track as an asset, with the loss of each track measured by the model.

    Examples:
      kvabr encode --text README.md --tokens 512 --out assets
      kvabr encode --text book.txt --tokens 4096 --tracks Int8 Int4 AC-5x --out assets --force
      kvabr encode --text book.txt --tokens 2048 --model ./my-llama --profile my-llama.safetensors --out assets

    The AC tracks need a profile of the model (`kvabr calibrate`). Without one, their tables are estimated from the
    asset and published with it: that works for any model, but takes two to three times the bytes.

    The first --tokens tokens of the text are the prompt. The model measures the loss of every track on the next
    --continuation tokens, and the loss before questions on its own answers. That takes most of the time.

    --quick measures nothing: losses are estimated from another asset of the model (--prior), and the catalog says so.
    Its tracks are FP16, Int8 and Int4, with a profile also AC-L0 to L3.

    Anyone who can guess a prompt can compute its name and ask an origin whether it is cached. With --salt-file they
    need the salt, too; give the same file to `kvabr fetch`. The asset does not contain the salt: keep it.

    With --passage the text is a passage, which can be played anywhere in a prompt. Its cache is the mean of its caches
    after a neutral text and --contexts - 1 others, which is closest to the exact one. The losses of tracks are measured
    after the neutral text. The loss of joining is measured after three other texts, with and without tokens computed
    again; or it is that of the model (--fusion).
    """

    text: TextFile
    tokens: Annotated[int, Ge(1), Shown("--tokens N")]
    """Tokens of the prompt."""
    out: Annotated[str, Shown("-o --out ASSET")]
    """Folder to create, or an object store: s3://BUCKET/PREFIX."""
    model: Model = "smollm2"
    continuation: Annotated[int, Ge(2), Shown("--continuation M")] = 128
    """Tokens after the prompt on which losses are measured."""
    group_tokens: Annotated[int | None, Ge(1), Le(MAX_GROUP_TOKENS), Shown("--group-tokens N")] = None
    """Tokens per group (default: 128)."""
    snapshots_every: Annotated[int | None, Shown("--snapshots-every N")] = None
    """Tokens between snapshots of recurrent states, a multiple of the group size; shorter prompts can share the cache
    up to any snapshot (default: one snapshot, at the end).
    """
    tracks: Annotated[tuple[str, ...] | None, Shown("--tracks TRACK")] = None
    """Tracks to encode (default: all but FP4; with --quick fewer)."""
    profile: Annotated[Path | None, Shown("--profile FILE")] = None
    """Codec profile of the model (default: the profile that kvabr ships for SmolLM2-135M or Gemma 3 270M; otherwise
    estimated from the asset).
    """
    digest: Digest = SHA256
    salt_file: SaltFile = None
    quick: Annotated[bool, Shown()] = False
    """Measure nothing: estimate losses and decode times from --prior."""
    prior: Annotated[str | None, Shown("--prior ASSET", needs="quick")] = None
    """With --quick: asset or catalog with losses and decode times of the model (default: a catalog of smollm2)."""
    force: Annotated[bool, Shown()] = False
    """Replace an existing asset."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the measurements as JSON."""
    passages: Annotated[PassageOptions, OptionGroup("passages")]


def run(args: EncodeCommand) -> int:
    """Encode the text's cache and print its tracks."""
    yield_processors()
    from rich.console import Console

    from kvabr.cli.display import StageBar
    from kvabr.engines.transformers.publish import find_profile
    from kvabr.publish.encoder import ordered_tracks, publish, published_spec
    from kvabr.publish.fusion import FusionLosses
    from kvabr.publish.offer import TrackOffer
    from kvabr.publish.tails import questions
    from kvabr.publish.texts import cut_prompt
    from kvabr.store.files import read_salt
    from kvabr.store.locations import open_store
    from kvabr.types.digests import check_kind

    # First check everything that needs no model.
    text = prompt_text(args.text)
    ordered_tracks(args.tracks)
    check_kind(args.digest)
    if args.passages.fusion is not None:
        FusionLosses.read(args.passages.fusion).check_base("mean", encode_passage.contexts(args.passages))
    passage = args.passages.passage
    if passage and args.snapshots_every is not None:
        raise UsageError("--snapshots-every is not for --passage: a model with recurrent states cannot have passages")
    prior = _prior(args)
    salt = read_salt(args.salt_file)
    store = open_store(args.out)
    writer = store.writer(force=args.force)

    def check_new(digest: str) -> None:
        """Refuse to replace an existing asset, before minutes are spent."""
        if not args.force and store.has(digest):
            raise UsageError(f"{store.location}: asset {digest} already exists; add --force to replace it")

    console = Console(stderr=True)
    start = time.perf_counter()
    check_text(args.model, text, args.tokens, args.continuation)
    loaded = load(args.model, console)
    prompt = cut_prompt(loaded, text, args.tokens, args.continuation, passage=passage)
    profile = find_profile(loaded.engine.spec, args.profile)
    unusual: list[str] = []
    spec = published_spec(loaded.engine.spec, args.group_tokens, args.snapshots_every)
    source = f"{args.text.name}, its first {args.tokens} tokens"
    offer = None
    if prior is not None:
        offer = TrackOffer(spec, prior=prior, tracks=args.tracks, profile=profile, source=source)
    with writer, StageBar(STAGES, console) as bar:
        catalog = publish(
            loaded.engine,
            prompt,
            ordered_tracks(args.tracks, spec) if offer is None else offer.tracks,
            profile,
            writer,
            passage=_passage(loaded, prompt, args.passages, bar) if passage else None,
            group_tokens=args.group_tokens,
            snapshots_every=args.snapshots_every,
            source=source,
            salt=salt,
            digest=args.digest,
            questions=questions(loaded, args.tokens),
            estimate=None if offer is None else offer.catalog,
            named=check_new,
            progress=bar,
            notify=unusual.append,
        )
        writer.prompt(prompt.sealed(catalog.namespace.prompt) if salt else prompt)
        writer.commit(catalog)
    _report(args, catalog, writer.location, time.perf_counter() - start, unusual)
    return 0


add = command(EncodeCommand, run)


def _report(args: EncodeCommand, catalog: Catalog, location: str, seconds: float, unusual: Sequence[str]) -> None:
    from kvabr.cli.display import mix_rows, mix_table, output, plain, track_rows, track_table, write_result

    result = {
        "asset": location,
        "model": catalog.spec.model,
        "tokens": catalog.tokens,
        "passage": None if catalog.passage is None else catalog.passage.to_json(),
        "estimated": catalog.estimated,
        "seconds": round(seconds, 3),
        "tracks": track_rows(catalog),
        "mixes": mix_rows(catalog),
    }
    write_result(args.json, "encode", result)
    out = output()
    out.print(
        track_table(
            catalog, f"{catalog.spec.model}: {counted(catalog.tokens, 'token')} in {counted(catalog.groups, 'group')}"
        )
    )
    if catalog.mixes:
        out.print(mix_table(catalog))
    if catalog.estimated:
        plain(f"losses and decode times are estimated; {catalog.loss_method}")
    if catalog.passage is not None:
        plain(encode_passage.joining_loss(catalog.passage))
    plain(*unusual, f"asset: {location} ({seconds:.0f} s)")


def _prior(args: EncodeCommand) -> Catalog | None:
    """Return the catalog whose losses --quick uses; raise `UsageError` for --passage."""
    from kvabr.data import default_catalog
    from kvabr.store.locations import open_catalog

    if not args.quick:
        return None
    if args.passages.passage:
        raise UsageError("--quick is not for --passage: the loss of joining a passage must be measured")
    return default_catalog() if args.prior is None else open_catalog(args.prior)[0]


def _passage(
    loaded: LoadedModel, prompt: Prompt, options: PassageOptions, progress: Callable[[str, int, int], None]
) -> PassageBase:
    from kvabr.cli.display import plain
    from kvabr.engines.transformers.blend import blend_engine
    from kvabr.types.passage import check_movable

    check_movable(loaded.engine.spec)
    try:
        engine = blend_engine(loaded.engine)
    except ModelError as error:
        plain(f"no fusion losses: {error}")
        return encode_passage.compute(loaded, None, prompt, options, progress)
    return encode_passage.compute(loaded, engine, prompt, options, progress)
