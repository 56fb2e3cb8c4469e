"""Recomputes any tokens of a transformers cache, and measures a question's attention (`BlendEngine` protocol).

The model gets only the tokens to compute, with their positions and a mask. In each layer, their keys and values replace
the cached ones before attention. A torch function mode, active in this thread, reads the weights of the model's
attention (sdpa or eager).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvabr.engines.adapters import require
from kvabr.engines.transformers.cache import cache_argument, is_plain
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.types.engine import AttentionReduction
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import KVSpec

_MASKED = ("sdpa", "eager")
"""Attention implementations that apply a caller's mask; flash kernels do not."""


def blend_engine(engine: TransformersEngine) -> TransformersBlendEngine:
    """Return an engine of the same model that can recompute any tokens of a cache.

    Raise `ModelError` if its cache cannot be joined from passages, `UsageError` for another kind of engine.
    """
    if not issubclass(given := type(engine), TransformersEngine):
        raise UsageError(f"blend_engine needs a TransformersEngine (a loaded model's .engine), got {given.__name__}")
    return TransformersBlendEngine(engine.model, engine.spec, context=engine.context)


class TransformersBlendEngine(TransformersEngine):
    """A transformers model as a blend engine; see `kvabr.types.engine.BlendEngine`."""

    def __init__(self, model: Any, spec: KVSpec, *, context: int) -> None:
        """Wrap a model with a context of ``context`` tokens; raise `ModelError` if its caches cannot be joined."""
        super().__init__(model, spec, context=context)
        if (reason := _unfit(model, spec)) is not None:
            raise ModelError(f"{spec.model} cannot play passages: {reason}")

    @torch.inference_mode()
    def recompute(
        self, tokens: Sequence[int], at: Sequence[int], kv: torch.Tensor, *, layers: int | None = None
    ) -> torch.Tensor:
        """Recompute tokens ``at`` of a prompt over its cache; see `kvabr.types.engine.BlendEngine.recompute`."""
        count = self.spec.layers if layers is None else layers
        if not 1 <= count <= self.spec.layers:
            raise ModelError(f"layers of {self.spec.model} must be 1 to {self.spec.layers}, got {count}")
        cached = self._check_cache(kv)
        _check_positions(tokens, at, cached)
        self.check(tokens)
        work = self._workspace(kv[:count], at[-1] + 1)
        self._run(tokens, at, work)
        out = torch.empty((count, *self.spec.shape(len(at))[1:]), dtype=self.dtype)
        places = torch.tensor(at)
        for layer, pair in enumerate(work):
            for half, part in enumerate(pair):
                out[layer, half] = part[0, :, places.to(part.device)]
        return out

    @torch.inference_mode()
    def attention(
        self,
        question: Sequence[int],
        kv: torch.Tensor,
        *,
        layers: Sequence[int] | None = None,
        reduce: AttentionReduction = "sum",
    ) -> torch.Tensor:
        """Return a question's attention; see `kvabr.types.engine.BlendEngine.attention`."""
        wanted = range(self.spec.layers) if layers is None else layers
        if not wanted or not all(0 <= layer < self.spec.layers for layer in wanted):
            raise ModelError(f"{self.spec.model} has {self.spec.layers} layers, numbered from 0, got {list(wanted)}")
        cached = self._check_cache(kv)
        if not question:
            raise ModelError("the question is empty: give at least one token")
        self.check(question, cached)
        rows = {layer: torch.zeros(cached, device=self.device) for layer in wanted}
        end = cached + len(question)
        work = self._workspace(kv[: max(wanted) + 1], end)
        self._run([0] * cached + list(question), range(cached, end), work, _Watch(rows, reduce))
        return torch.stack([rows[layer] for layer in wanted]).cpu()

    def _run(
        self,
        tokens: Sequence[int],
        at: Sequence[int],
        work: Sequence[tuple[torch.Tensor, torch.Tensor]],
        watch: _Watch | None = None,
    ) -> None:
        """Compute tokens, and replace their keys and values in ``work``; run as many layers as ``work`` has."""
        ids, places = (torch.tensor(list(each), device=self.device) for each in (tokens, at))
        step = self.pass_tokens(len(tokens))
        for first in range(0, len(at), step):
            here = places[first : first + step]
            seen = int(here[-1]) + 1
            # The cache update of an additional layer ends the pass.
            every = [*work, (None, None)]
            layers = [_layer_class()(*pair, here, seen, watch, index) for index, pair in enumerate(every)]
            # Eager attention adds its mask, so a boolean mask would hide no token.
            mask = torch.zeros(1, 1, len(here), seen, dtype=self.dtype, device=self.device)
            hidden = torch.arange(seen, device=self.device)[None] > here[:, None]
            mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
            given = {"input_ids": ids[here][None], "position_ids": here[None], "attention_mask": mask}
            past = require("transformers").Cache(layers=layers)
            with suppress(_EnoughLayers), watch or nullcontext():
                self.model.base_model(**given, **{cache_argument(self.model): past}, use_cache=True)

    def _workspace(self, kv: torch.Tensor, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a copy of a cache with space for ``tokens`` tokens: keys and values of each layer, [1, head, ...]."""
        out = []
        for layer in kv:
            pair = []
            for part in layer:
                room = torch.empty(1, part.shape[0], tokens, part.shape[2], dtype=self.dtype, device=self.device)
                held = min(tokens, part.shape[1])
                room[0, :, :held] = part[:, :held]
                pair.append(room)
            out.append((pair[0], pair[1]))
        return out

    def _check_cache(self, kv: torch.Tensor) -> int:
        if kv.dim() != 5 or tuple(kv.shape) != self.spec.shape(kv.shape[3]):
            raise ModelError(
                f"the cache does not fit {self.spec.model}: got the shape {tuple(kv.shape)}, expected "
                f"{self.spec.shape(1)} for one token"
            )
        return int(kv.shape[3])


class _EnoughLayers(Exception):  # noqa: N818 - ends a forward pass, and is no error
    """Ends a forward pass once the requested layers are computed."""


class _Watch(TorchFunctionMode):
    """Reads attention weights from attention calls in the current thread."""

    def __init__(self, rows: dict[int, torch.Tensor], reduce: AttentionReduction) -> None:
        """Add computed tokens' attention weights for cached tokens to ``rows``, [cached token] float32 by layer."""
        super().__init__()
        self.layer = -1
        """Layer of the next attention call, or -1 to ignore the call."""
        self._rows, self._reduce = rows, reduce

    def begin(self, layer: int) -> None:
        self.layer = layer if layer in self._rows else -1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.layer >= 0 and func in _ATTENTION and out.dim() == 4:
            weights = out if func is functional.softmax else _weights(*args, **kwargs)
            row = self._rows[self.layer]
            seen = weights[..., : len(row)].float()
            if self._reduce == "sum":
                row += seen.sum(dim=(0, 1, 2))
            else:
                torch.maximum(row, seen.amax(dim=(0, 1, 2)), out=row)
            self.layer = -1
        return out


_ATTENTION = (functional.scaled_dot_product_attention, functional.softmax)
"""Functions that sdpa and eager attention call once per layer."""


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    _value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the weights of a scaled dot-product attention call with an additive mask, float32."""
    heads = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(heads, dim=1) if heads > 1 else key
    # Stay in the model's type: copying all keys to float32 takes longer than the product.
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[3] ** -0.5 if scale is None else scale)
    return torch.softmax(scores if attn_mask is None else scores + attn_mask, dim=-1)


@cache
def _layer_class() -> Any:
    class PatchedLayer(require("transformers").cache_utils.DynamicLayer):  # type: ignore[misc]
        def __init__(
            self, keys: Any, values: Any, at: torch.Tensor, seen: int, watch: _Watch | None, index: int
        ) -> None:
            super().__init__()
            self.keys, self.values = keys, values
            self.is_initialized = keys is not None
            self._at, self._seen, self._watch, self._index = at, seen, watch, index

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            if self.keys is None:
                raise _EnoughLayers
            self.keys[:, :, self._at], self.values[:, :, self._at] = key_states, value_states
            if self._watch is not None:
                self._watch.begin(self._index)
            return self.keys[:, :, : self._seen], self.values[:, :, : self._seen]

    return PatchedLayer


def _check_positions(tokens: Sequence[int], at: Sequence[int], cached: int) -> None:
    if not at or any(a >= b for a, b in pairwise(at)) or at[0] < 0 or at[-1] >= len(tokens):
        raise ModelError(
            f"positions to compute must ascend within 0 to {len(tokens) - 1}, and there must be at least one"
        )
    after = [place for place in at if place >= cached]
    if after and after != list(range(cached, cached + len(after))):
        raise ModelError(f"tokens computed after the {cached} cached ones must follow them without a gap")


def _unfit(model: Any, spec: KVSpec) -> str | None:
    if not is_plain(spec) or len(spec.classes) != 1 or spec.only.halves != 2:
        kinds = sorted({each.role or each.kind for each in spec.classes})
        return f"not all of its layers keep keys and values of every token in one shape (it has: {', '.join(kinds)})"
    if spec.only.rope is None:
        return "its keys cannot be moved, because their rotation is not one that kvabr can undo"
    if (own := getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)) not in _MASKED:
        return f"it was loaded with attention {own!r}, which ignores masks; load it with attn_implementation='sdpa'"
    takes = signature(model.base_model.forward).parameters
    if "position_ids" not in takes or cache_argument(model) not in takes:
        return "its forward pass takes no positions"
    return None
