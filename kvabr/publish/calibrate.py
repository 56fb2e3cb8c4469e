"""Calibrates a codec profile: run the model over diverse texts, and take the statistics of its caches."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import torch

from kvabr.codec.fit import PASSES, FitConfig, fit
from kvabr.codec.group import clean
from kvabr.codec.payload import raw
from kvabr.codec.profile import Profile
from kvabr.publish.model import TextModel
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.kv import KVSpec

CONTEXTS = 24
"""Default number of contexts."""

CONTEXT_TOKENS = 1024
"""Default tokens of a context."""

_SCORED_SHARE = 4
"""The last quarter of a context is scored, to see which errors in the cache of the rest matter."""

STAGES = ("prefill", *PASSES)
"""Stages of `calibrate`, in order; each has one step per context."""

Progress = Callable[[str, int, int], None]
"""Called with a stage, its steps done, and its steps in all."""


def cut_contexts(texts: Mapping[str, Sequence[int]], contexts: int, tokens: int) -> list[tuple[str, Sequence[int]]]:
    """Cut contexts out of tokenised texts: evenly spaced, none overlapping, more from longer texts, one from each.

    Args:
        texts: token ids by name; `UsageError` if there is none.
        contexts: how many; there is at least one per text.
        tokens: length of each; a shorter text gives one shorter context.

    Returns:
        Pairs of a text's name and a context's token ids.
    """
    sizes = {name: len(ids) for name, ids in texts.items() if ids}
    if not sizes:
        raise UsageError("calibration needs at least one text that is not empty")
    total = sum(sizes.values())
    out = []
    for name, size in sizes.items():
        count = max(1, min(size // tokens, round(contexts * size / total)))
        length = min(tokens, size)
        for index in range(count):
            start = index * (size - length) // max(1, count - 1)
            out.append((name, texts[name][start : start + length]))
    return out


def calibrate(
    model: TextModel,
    texts: Mapping[str, str],
    *,
    contexts: int = CONTEXTS,
    tokens: int | None = None,
    config: FitConfig | None = None,
    progress: Progress = lambda _stage, _done, _all: None,
) -> Profile:
    """Return a profile of a model, made from texts.

    Args:
        model: the model with its tokenizer.
        texts: by name; the more they differ, the better the profile fits other texts.
        contexts: contexts to cut out of them, see `cut_contexts`.
        tokens: tokens of each; None: `CONTEXT_TOKENS`, or as many as the model sees. Caches and gradients are kept in
            temporary files, 16 bits per element; memory holds one at a time.
        config: settings of the fit.
        progress: called after every context in each of `STAGES`.

    Raises:
        UsageError: there is no text, or contexts are longer than the model sees.
        AssetError: the disk has no room for the caches.
    """
    if tokens is None:
        tokens = min(CONTEXT_TOKENS, model.engine.context)
    if contexts < 1 or not 16 <= tokens <= model.engine.context:
        raise UsageError(f"a calibration takes at least 1 context of 16 to {model.engine.context} tokens")
    cuts = cut_contexts({name: model.encode(text) for name, text in texts.items()}, contexts, tokens)
    engine = model.engine
    try:
        with tempfile.TemporaryFile(prefix="kvabr-calibrate-") as one, tempfile.TemporaryFile() as other:
            caches, gradients = _Spool(one, engine.spec), _Spool(other, engine.spec, torch.bfloat16)
            for done, (_, ids) in enumerate(cuts):
                cache = engine.prefill(ids)
                caches.add(cache)
                scored = len(ids) // _SCORED_SHARE
                # A cache of 16 bits may hold infinities, behind which all probabilities are NaN.
                kept = clean(cache[:, :, :, :-scored])[0]
                gradients.add(engine.gradient(kept, ids[-scored:], seed=done))
                progress("prefill", done + 1, len(cuts))
            return fit(
                engine.spec,
                caches.read,
                config,
                lambda stage, done: progress(stage, done, len(cuts)),
                gradients=gradients.read,
            )
    except OSError as error:
        raise AssetError(
            f"{tempfile.gettempdir()}: no room for the caches of {len(cuts)} contexts ({error})"
        ) from error


class _Spool:
    """Tensors of one spec in a file, one after the other: `add` appends, `read` yields all."""

    def __init__(self, file: IO[bytes], spec: KVSpec, dtype: torch.dtype | None = None) -> None:
        self._file, self._spec, self._dtype = file, spec, dtype or spec.torch_dtype
        self._tokens: list[int] = []

    def add(self, cache: torch.Tensor) -> None:
        self._file.write(raw(cache.to(self._dtype)))
        self._tokens.append(cache.shape[3])

    def read(self) -> Iterator[torch.Tensor]:
        self._file.seek(0)
        for tokens in self._tokens:
            shape = self._spec.shape(tokens)
            data = bytearray(math.prod(shape) * self._dtype.itemsize)
            self._file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
            yield torch.frombuffer(data, dtype=self._dtype).reshape(shape)
