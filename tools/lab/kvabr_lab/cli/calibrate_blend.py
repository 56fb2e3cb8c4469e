"""`kvabr calibrate --blend`: measure a model's loss from joining passages."""

from __future__ import annotations

import json
import time

from kvabr.cli.calibrate import CalibrateCommand
from kvabr.cli.options import load
from kvabr.types.errors import UsageError

_OF_PROFILES = ("text", "contexts", "context_tokens", "kept", "target_kl", "target_track")


def run(args: CalibrateCommand) -> int:
    """Measure, print and write the losses."""
    from rich.console import Console

    from kvabr.cli.display import StageBar, output, plain, table
    from kvabr.player.play_choices import DEFAULT_SELECTOR
    from kvabr.store.files import write_text
    from kvabr_lab.bench.blend import STAGES
    from kvabr_lab.bench.blend_model import measure_model

    unfit = [name for name in _OF_PROFILES if getattr(args, name) not in (None, ())]
    if unfit := unfit + ["step_scale"] * (args.step_scale != 1) + ["gain"] * args.gain:
        raise UsageError(
            f"--{unfit[0].replace('_', '-')} is not for --blend, which makes no profile: leave out one of them"
        )
    if args.load == "layers":
        raise UsageError("--load layers is not for --blend, which needs the whole model in memory")
    console, start = Console(stderr=True), time.perf_counter()
    loaded = load(args.model, console, device=args.device, dtype=args.dtype, by_layer=False)
    with StageBar(STAGES, console) as bar:
        found, intervals = measure_model(loaded, bar, args.base or "mean")
    write_text(args.out, json.dumps(found.to_json(), indent=1) + "\n")
    lines = [
        (f"{share:.0%}", f"{each.mean:.4f} [{each.low:.4f}, {each.high:.4f}]")
        for (share, _), each in zip(found.losses, intervals, strict=True)
    ]
    title = f"{found.spec.model}: loss of each passage of a prompt, nats per generated token"
    output().print(table(title, (f"recomputed ({DEFAULT_SELECTOR})", "loss, with its 95 % interval"), lines))
    plain(f"fusion losses: {args.out} ({time.perf_counter() - start:.0f} s)")
    return 0
