"""`kvabr calibrate`: make the codec profile of a model, or measure the loss of joining its passages."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from kvabr.cli.commands import load_extension
from kvabr.cli.fields import command
from kvabr.cli.options import Model, load, yield_processors
from kvabr.types.errors import UsageError
from kvabr.types.fields import Shown
from kvabr.types.naming import LAYERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvabr.codec.fit import FitConfig
    from kvabr.publish.target import Target
    from kvabr.types.kv import KVSpec

AC_TRACKS = (*LAYERS, "AC-5x")
"""Tracks that --target-track accepts."""

_LOAD = {"auto": None, "whole": False, "layers": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateCommand:
    """Run a model over texts and write the statistics for coding its AC tracks.

    Examples:
      kvabr calibrate --model smollm2 --out smollm2.profile.safetensors
      kvabr calibrate --model ./my-llama --text manual.txt code.py letters.txt --out my-llama.safetensors
      kvabr calibrate --model ./my-gemma --target-kl 0.002 --out my-gemma.safetensors
      kvabr calibrate --model ./llama-8b --load layers --out llama-8b.safetensors
      kvabr calibrate --model ./llama-8b --device cuda --dtype bfloat16 --out llama-8b.safetensors
      kvabr calibrate --blend --model ./my-llama --out my-llama.fusion.json

    The AC tracks code a cache with statistics of the model: channel means, the transform that decorrelates channels and
    layers, quantiser steps, probability tables. Calibrate once per model, on texts as diverse as its prompts; every
    player fetches the profile once. More components per layer make smaller caches and a larger profile. --step-scale
    makes all tracks smaller and coarser, or larger and finer. --target-kl measures losses and chooses steps for each
    layer class; all AC tracks move with AC-5x, or with the --target-track: AC-L0 or AC-L1 for slow links that deliver
    only the first layers. A coarse step leaves decoded values a little too small; --gain measures by how much, and
    decoders correct it at no cost.

    The model runs forwards over every context, and backwards through the last eighth of it, to find the channels in
    which errors matter. That takes minutes for a small model, and space for all caches twice in the temporary folder
    (TMPDIR). With --load layers, all contexts pass one layer before the next is read, so memory holds little more than
    the embedding, the head and one layer. This works with models that are plain sequences of layers, such as Llama,
    Mistral, Qwen and Gemma. NaN weights or caches are refused. The fit itself runs on the CPU. A profile fits only its
    own model, with all layer classes: windows, chunks, latents, states.

    --blend makes no profile. It joins a dozen prompts from passages, as `kvabr bench blend` does, and writes to --out
    the loss of joining for several shares of recomputed tokens. `kvabr encode --passage --fusion` writes it into the
    catalogs of this model's passages; players compute passages without it. It holds for passages computed in the same
    way: means over 4 contexts, or, with --base, after one text, or alone, like vLLM's. It needs the laboratory;
    `kvabr doctor` says how to add it.
    """

    model: Model = "smollm2"
    device: Annotated[str, Shown("--device NAME")] = "cpu"
    """Device of the model: cpu, cuda, cuda:1."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, Shown()] = None
    """Element type of the model (default: float32 on a CPU, else that of its weights)."""
    load: Annotated[str, Shown(choices=tuple(_LOAD))] = "auto"
    """Hold the whole model in memory, or one layer at a time (default: auto, layers if the weights take more than half
    of the memory)."""
    text: Annotated[tuple[Path, ...], Shown("--text FILE")] = ()
    """Texts to calibrate on, as diverse as possible (default: half of Python's manual, and made-up records)."""
    out: Annotated[Path, Shown("-o --out FILE", written=True)]
    """Profile to write."""
    contexts: Annotated[int | None, Shown("--contexts N")] = None
    """Contexts to cut from the texts (default: 24)."""
    context_tokens: Annotated[int | None, Shown("--context-tokens N")] = None
    """Tokens per context (default: 1024, or the model's whole context if that is shorter)."""
    kept: Annotated[tuple[int, int] | None, Ge(0), Shown("--kept K V")] = None
    """Components that the transform across layers keeps of each layer's keys (K) and values (V), per 512 channels; 0 0
    transforms each layer alone (default: 76 76).
    """
    step_scale: Annotated[float, Ge(0.01), Le(100), Shown("--step-scale X")] = 1.0
    """Scale every quantiser step."""
    target_kl: Annotated[float | None, Shown("--target-kl X")] = None
    """Choose the steps of every layer class so that AC-5x loses at most X nats per token, measured on a sixth of the
    contexts (default: the same steps for every model)."""
    target_track: Annotated[str | None, Shown("--target-track TRACK", choices=AC_TRACKS)] = None
    """Track that must meet --target-kl, with the layers that it refines: AC-L0, AC-L1, AC-L2, AC-L3 or AC-5x (default:
    AC-5x)."""
    gain: Annotated[bool, Shown()] = False
    """Scale decoded values of AC-L0 to minimise the loss, measured on a sixth of the contexts."""
    blend: Annotated[bool, Shown()] = False
    """Measure the loss of joining passages instead, and write it as JSON."""
    base: Annotated[Literal["mean", "behind", "alone"] | None, Shown(needs="blend")] = None
    """With --blend: how passages are computed (default: mean)."""


def run(args: CalibrateCommand) -> int:
    """Calibrate the model and write its profile or its fusion losses."""
    if args.blend:
        return int(load_extension("calibrate.blend", "calibrate --blend")(args))
    # Torch reads this at its first allocation. Huge pages save a tenth of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    yield_processors()
    from rich.console import Console

    from kvabr.cli.display import StageBar
    from kvabr.codec.columns import check_class
    from kvabr.publish.calibrate import CONTEXTS, calibrate
    from kvabr.publish.model import LayerEngine
    from kvabr.publish.texts import calibration_texts
    from kvabr.store.files import write_file

    # Check the arguments first.
    config = _config(args)
    texts = _texts(args.text) if args.text else calibration_texts()
    console = Console(stderr=True)
    start = time.perf_counter()
    loaded = load(args.model, console, device=args.device, dtype=args.dtype, by_layer=_LOAD[args.load])
    spec = loaded.engine.spec
    check_class(spec, "AC")
    notes: list[str] = []
    titles = stage_titles(
        spec, search=args.target_kl is not None, gain=args.gain, by_layer=isinstance(loaded.engine, LayerEngine)
    )
    with StageBar(titles, console) as bar:
        (profile,) = calibrate(
            loaded,
            texts,
            contexts=CONTEXTS if args.contexts is None else args.contexts,
            tokens=args.context_tokens,
            config=config,
            target=target_of(args.target_kl, args.target_track),
            gain=args.gain,
            progress=bar,
            notify=notes.append,
        )
    data = profile.to_bytes()
    write_file(args.out, data)
    seconds = time.perf_counter() - start
    print(f"profile of {profile.spec.model}: {args.out}, {len(data):,} bytes ({seconds:.0f} s)")
    print(f"SHA-256 {profile.digest}")
    for line in notes:
        print(line)
    for name, only in zip(spec.names, spec.classes, strict=True):
        if only.rope is None and only.kind != "state":
            print(
                "no invertible rotary embedding was found (an embedding that depends on the prompt's length is not "
                f"invertible): keys {'' if len(spec.classes) == 1 else f'of {name} '}are coded with their rotation"
            )
    return 0


add = command(CalibrateCommand, run)


def _texts(paths: Sequence[Path]) -> dict[str, str]:
    from kvabr.store.files import read_text

    texts: dict[str, str] = {}
    for path in paths:
        name = path.name if path.name not in texts else f"{path.name} {len(texts)}"
        texts[name] = read_text(path, unreadable=UsageError)
    return texts


def stage_titles(spec: KVSpec, *, search: bool, gain: bool = False, by_layer: bool = False) -> dict[str, str]:
    """Return the stages of a calibration with their titles, for a progress bar."""
    from kvabr.publish.calibrate import GAINS, SEARCH, stages

    units = {
        SEARCH: "measurements",
        GAINS: "measurements",
        "forward": "layers x contexts",
        "backward": "layers x contexts",
    }
    every = stages(spec, search=search, gain=gain, by_layer=by_layer)
    return {
        stage: f"{number} of {len(every)}: {stage} ({units.get(stage, 'contexts')})"
        for number, stage in enumerate(every, 1)
    }


def target_of(kl: float | None, track: str | None) -> Target | None:
    """Return the target of ``--target-kl`` and ``--target-track``; raise `UsageError` if it is invalid."""
    from kvabr.publish.target import Target

    if kl is None:
        if track is not None:
            raise UsageError("--target-track needs --target-kl, the maximum loss of this track")
        return None
    if not 1e-6 <= kl <= 1:
        raise UsageError("--target-kl must be from 0.000001 to 1 nats per token")
    return Target(kl) if track is None else Target(kl, track)


def _config(args: CalibrateCommand) -> FitConfig:
    from kvabr.codec.fit import FitConfig

    target_of(args.target_kl, args.target_track)
    if args.target_kl is not None and args.step_scale != 1:
        raise UsageError("--target-kl chooses the steps itself: leave out --step-scale")
    config = FitConfig()
    return (config if args.kept is None else replace(config, kept=args.kept)).scaled(args.step_scale)
