"""Calibrates a profile: runs the model over diverse texts and lets the codec take its statistics."""

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
from kvabr.engines.transformers.model_loader import LoadedModel
from kvabr.types.errors import AssetError, UsageError
from kvabr.types.kv import KVSpec

CONTEXTS = 24
"""Contexts that a profile is calibrated on by default."""

CONTEXT_TOKENS = 1024
"""Tokens of each."""

_ASKED = 4
"""One part of so many of a context is what the model is asked about, to see what it minds in the cache of the rest."""

STAGES = ("prefill", *PASSES)
"""What `calibrate` does, in this order, each once for every context."""

Progress = Callable[[str, int, int], None]
"""Told of every step: what is being done, steps done, steps in all."""


def cut_contexts(texts: Mapping[str, Sequence[int]], contexts: int, tokens: int) -> list[tuple[str, Sequence[int]]]:
    """Cut contexts out of tokenised texts: evenly spaced, more from longer texts, at least one from each.

    Args:
        texts: token ids by name.
        contexts: how many; never fewer than there are texts.
        tokens: length of each; a shorter text gives one context of what it has.

    Returns:
        Pairs of a text's name and the context's token ids, which do not overlap.

    Raises:
        UsageError: there is no text.
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
    bed: LoadedModel,
    texts: Mapping[str, str],
    *,
    contexts: int = CONTEXTS,
    tokens: int | None = None,
    config: FitConfig | None = None,
    progress: Progress = lambda _stage, _done, _all: None,
) -> Profile:
    """Make a profile of a model from texts.

    Args:
        bed: the model and its tokenizer.
        texts: texts by name; the more they differ, the better the profile fits what it never saw.
        contexts: contexts to cut out of them, see `cut_contexts`.
        tokens: tokens of each; None: `CONTEXT_TOKENS`, or as many as the model sees. Their caches and gradients wait in
            temporary files, 16 bits an element; memory holds one at a time.
        config: what the profile is to be like.
        progress: told of every context in every one of `STAGES`.

    Raises:
        UsageError: no text, or contexts longer than the model sees.
        AssetError: there is no room for the caches.
    """
    if tokens is None:
        tokens = min(CONTEXT_TOKENS, bed.engine.context)
    if contexts < 1 or not 16 <= tokens <= bed.engine.context:
        raise UsageError(f"a calibration takes at least 1 context of 16 to {bed.engine.context} tokens")
    cuts = cut_contexts({name: bed.encode(text) for name, text in texts.items()}, contexts, tokens)
    folder = tempfile.gettempdir()
    engine = bed.engine
    try:
        with tempfile.TemporaryFile(prefix="kvabr-calibrate-") as one, tempfile.TemporaryFile() as other:
            caches, gradients = _Spool(one, engine.spec), _Spool(other, engine.spec, torch.bfloat16)
            for done, (_, ids) in enumerate(cuts):
                cache = engine.prefill(ids)
                caches.add(cache)
                asked = len(ids) // _ASKED
                # A cache of 16 bits may hold infinities, behind which a model says nothing.
                asking = clean(cache[:, :, :, :-asked])[0]
                gradients.add(engine.gradient(asking, ids[-asked:], seed=done))
                progress("prefill", done + 1, len(cuts))
            return fit(
                engine.spec,
                caches.read,
                config,
                lambda stage, done: progress(stage, done, len(cuts)),
                gradients=gradients.read,
            )
    except OSError as error:
        raise AssetError(f"{folder}: no room for the caches of {len(cuts)} contexts ({error})") from error


class _Spool:
    """Caches in a file, one after the other."""

    def __init__(self, file: IO[bytes], spec: KVSpec, dtype: torch.dtype | None = None) -> None:
        self._file, self._spec, self._dtype = file, spec, dtype or spec.torch_dtype
        self._tokens: list[int] = []

    def add(self, cache: torch.Tensor) -> None:
        """Append a cache."""
        self._file.write(raw(cache.to(self._dtype)))
        self._tokens.append(cache.shape[3])

    def read(self) -> Iterator[torch.Tensor]:
        """All of them."""
        self._file.seek(0)
        for tokens in self._tokens:
            shape = self._spec.shape(tokens)
            data = bytearray(math.prod(shape) * self._dtype.itemsize)
            self._file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
            yield torch.frombuffer(data, dtype=self._dtype).reshape(shape)
