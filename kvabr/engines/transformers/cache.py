"""Conversion between transformers' caches and kvabr's: a tensor [layer, K/V, head, token, dim] per layer class.

A layer of a cache has keys and values (of all tokens or a window), a state, or both. Everything except plain keys and
values has a role, which distinguishes its layer class:

- ``recurrent``: one matrix per head for all tokens (gated delta, KDA, Mamba-2, lightning attention).
- ``scan``: one matrix for all channels (Mamba-1).
- ``convolution``: the last inputs of a short convolution, [channel, tap].
- ``indexer``: one key per token for the selection in sparse attention (DeepSeek V3.2, GLM DSA).

A second state of the same kind has a letter after its role. A cache has states only after its last token; for shorter
prompts, a prefill keeps `SNAPSHOTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import pad

from kvabr.codec.payload import keys_and_values
from kvabr.engines.adapters import require
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import DTYPES, KVSpec, LayerClass
from kvabr.types.units import Span, snapshot_ends

_FLOATS = tuple(getattr(torch, name) for name in DTYPES)
SLIDING = "DynamicSlidingWindowLayer"
"""Type of a layer that keeps one token less than its window."""
_SLIDING_STATE = "LinearAttentionAndSlidingWindowAttentionLayer"
_FULL_LAYERS = {SLIDING: "DynamicLayer", _SLIDING_STATE: "LinearAttentionAndFullAttentionLayer"}
"""Types of window layers, each with the type of layer that replaces it to keep every token."""
LAYERS = (*_FULL_LAYERS, *_FULL_LAYERS.values(), "DynamicIndexedLayer", "LinearAttentionLayer")
RECURRENT, SCAN, CONVOLUTION, INDEXER = "recurrent", "scan", "convolution", "indexer"
_CACHELESS_TYPES = ("moe", "mlp")
EMPTY = "DummyLayer"
"""Type of the placeholder, from transformers 5.24 on, for a layer that has no cache or shares another layer's."""
SNAPSHOTS = "kvabr_snapshots"
"""Attribute of a cache that has snapshots of all its states (see `states_of`), by number of tokens."""

States = dict[tuple[int, str], torch.Tensor]
"""States by layer and role, each [head, row, column]."""


def new_cache(model: Any, *, whole: bool = False) -> Any:
    """Return an empty cache for a model; with ``whole``, window layers keep every token."""
    own = getattr(sys.modules[type(model.base_model).__module__], "MiniMaxCache", None)
    if own is not None:
        return own()
    transformers = require("transformers")
    cache = transformers.DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers if whole else ()):
        if (other := _FULL_LAYERS.get(type(layer).__name__)) is not None:
            states = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
            cache.layers[index] = getattr(transformers.cache_utils, other)(**states)
    return cache


def cache_argument(model: Any) -> str:
    """Return the name of a model's cache argument; from transformers 5.24 on always ``cache``."""
    takes = signature(model.base_model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in takes), "cache_params")


def is_state(part: KVSpec) -> bool:
    """Return True for a class of states."""
    return part.only.kind == "state"


def has_states(spec: KVSpec) -> bool:
    """Return True if any layer has states."""
    return any(each.kind == "state" for each in spec.classes)


def is_plain(spec: KVSpec) -> bool:
    """Return True if all layers have only keys and values of every token."""
    return all(each.kind == "full" and not each.role for each in spec.classes)


# ------------------------------------------------------------------ into a cache


def dynamic_cache(parts: Sequence[torch.Tensor], spec: KVSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `DynamicCache` with all tokens in all layers, for models that have only keys and values.

    ``parts`` has one tensor per layer class of ``spec``; layers are views of parts in the model's ``dtype`` and
    ``device``. The model appends to copies, and masks windows.
    """
    cache = require("transformers").DynamicCache()
    if parts[0].shape[3]:
        for layer, pair in sorted(_keys_and_values(parts, spec).items()):
            both = [part.to(device=device, dtype=dtype)[None] for part in pair]
            cache.update(*(part[:, :, :0] for part in both), layer)  # creates the layer without copying numbers
            cache.layers[layer].keys, cache.layers[layer].values = both
    return cache


def whole_cache(parts: Sequence[torch.Tensor], spec: KVSpec, model: Any) -> Any:
    """Return a cache with all tokens in all layers, like `dynamic_cache`, and the states after these tokens."""
    if not any(each.kind == "state" or each.role for each in spec.classes):
        return dynamic_cache(parts, spec, model.dtype, model.device)
    return _filled(new_cache(model, whole=True), parts, spec, model)


def windowed_cache(parts: Sequence[torch.Tensor], spans: Sequence[Span], spec: KVSpec, tokens: int, model: Any) -> Any:
    """Return a copy of the first ``tokens`` tokens of a played cache, in the form that the model creates.

    Window layers have only visible tokens. ``parts`` has one tensor per layer class: the tokens of the class's span, or
    for a state the snapshot after ``tokens`` tokens.
    """
    shown = [
        part if is_state(one) else part[:, :, :, : max(0, tokens - span.first)]
        for part, span, one in zip(parts, spans, spec.parts, strict=True)
    ]
    return _filled(new_cache(model), shown, spec, model, tokens)


def _filled(cache: Any, parts: Sequence[torch.Tensor], spec: KVSpec, model: Any, tokens: int | None = None) -> Any:
    places = _places(model)
    for layer, pair in sorted(_keys_and_values(parts, spec).items()):
        both = [part.to(device=model.device, dtype=model.dtype)[None] for part in pair]
        if not both[0].shape[2]:
            continue
        window = next(each.window for each in spec.classes if layer in each.layers and not each.role)
        place = places[layer] if places else layer
        if tokens is None or window is None:
            cache.update(*both, place)
            continue
        state = cache.layers[place]
        if type(state).__name__ not in _FULL_LAYERS:
            raise ModelError(f"{spec.model}: transformers keeps layer {layer} as {type(state).__name__}")
        # After a chunk boundary, fewer tokens are visible than the layer has space for; the missing ones are masked.
        missing = max(0, min(window - 1, tokens) - both[0].shape[2])
        state.update(*(pad(part, (0, 0, missing, 0)) for part in both))
        state.cumulative_length = tokens
    for part, one in zip(parts, spec.parts, strict=True):
        only = one.only
        for index, layer in enumerate(only.layers):
            place = places[layer] if places else layer
            if is_state(one):
                _put_state(cache, place, only, part[index, 0], model)
            elif only.role == INDEXER and part.shape[3]:
                cache.layers[place].update_indexer(part[index, 0].to(device=model.device, dtype=model.dtype))
    return cache


def _put_state(cache: Any, place: int, only: LayerClass, state: torch.Tensor, model: Any) -> None:
    number = _number(only.role)
    keeps = only.dtype == "float32" and not only.role.startswith(CONVOLUTION) and not hasattr(cache, "linear_cache")
    state = state.to(device=model.device, dtype=torch.float32 if keeps else model.dtype, copy=True)
    if only.role.startswith(RECURRENT):
        state = state[None]
    if hasattr(cache, "linear_cache"):
        cache.set_linear_cache(place, state)
        return
    layer = cache.layers[place]
    if not hasattr(layer, "conv_states"):
        raise ModelError(f"transformers keeps layer {place} as {type(layer).__name__}, without a state")
    if only.role.startswith(CONVOLUTION):
        layer.update_conv_state(state, number)
    else:
        layer.update_recurrent_state(state, number)
        layer.has_previous_state[number] = True


def replace_states(cache: Any) -> None:
    """Make layers replace a recurrent state instead of overwriting it, since an overwritten state has no gradient."""
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "recurrent_states"):

            def update(states: torch.Tensor, state_idx: int = 0, *, layer: Any = layer, **_: Any) -> torch.Tensor:
                layer.recurrent_states[state_idx] = states
                return states

            layer.update_recurrent_state = update


def rewind(cache: Any, spec: KVSpec, tokens: int) -> bool:
    """Truncate a cache to its first ``tokens`` tokens; return False if it has states, which cannot be truncated."""
    if any(each.kind == "state" or each.role for each in spec.classes):
        return False
    for layer in cache.layers:
        if layer.is_initialized and layer.keys is not None:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return True


def _number(role: str) -> int:
    base = next((name for name in (RECURRENT, SCAN, CONVOLUTION) if role.startswith(name)), None)
    if base is None:
        raise ModelError(f"unsupported role {role!r} of a state")
    return 0 if role == base else ord(role[len(base)]) - ord("a")


def _places(model: Any) -> list[int]:
    """Return the indices of layers with a cache; empty, meaning all, if the configuration has no layer types."""
    config = model.config.get_text_config(decoder=True)
    types, modes = getattr(config, "layer_types", None) or (), getattr(config, "kv_sharing_modes", None) or ()
    reused = {index for index, mode in enumerate(modes) if mode == "reuse"}
    return [index for index, kind in enumerate(types) if kind not in _CACHELESS_TYPES and index not in reused]


def _keys_and_values(parts: Sequence[torch.Tensor], spec: KVSpec) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values by layer, [head, token, dim]; a single vector per token serves as both."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part, one in zip(parts, spec.parts, strict=True):
        if not is_state(one) and not one.only.role:
            keys, values = keys_and_values(part, one)
            pairs = zip(keys, values if one.only.v_dim else keys, strict=True)
            layers.update(zip(one.only.layers, pairs, strict=True))
    return layers


# ------------------------------------------------------------------ out of a cache


def held_layers(cache: Any) -> list[int]:
    """Return the layers of a cache with content."""
    layers = cache.layers
    return [
        index
        for index in range(len(cache))
        if index >= len(layers)
        or (hasattr(layers[index], "keys") and type(layers[index]).__name__ != EMPTY)
        or _states(cache, index)
    ]


def states_of(cache: Any) -> States:
    """Return the current states of a cache, without copying."""
    return {
        (layer, role): state
        for layer, place in enumerate(held_layers(cache))
        for role, state in _states(cache, place).items()
    }


def _states(cache: Any, place: int) -> dict[str, torch.Tensor]:
    if hasattr(cache, "linear_cache"):
        kept = cache.linear_cache[place] if place < len(cache.linear_cache) else None
        return {RECURRENT: _one(kept, place)[0]} if isinstance(kept, torch.Tensor) else {}
    layer, found = cache.layers[place], {}
    for number, state in getattr(layer, "conv_states", {}).items():
        if state is not None:
            found[_role(CONVOLUTION, number)] = _one(state, place)
    for number, state in getattr(layer, "recurrent_states", {}).items():
        if state is not None:
            whole = _one(state, place)
            found[_role(RECURRENT if whole.dim() == 4 else SCAN, number)] = whole[0] if whole.dim() == 4 else whole
    return found


def _role(kind: str, number: int) -> str:
    return kind + (chr(ord("a") + number) if number else "")


def _one(state: torch.Tensor, place: int) -> torch.Tensor:
    if state.dim() not in (3, 4):
        raise ModelError(f"layer {place} of the cache has an unsupported state of shape {tuple(state.shape)}")
    if state.shape[0] != 1:
        raise UsageError(f"the cache holds {state.shape[0]} prompts; publish them one at a time")
    return state


def read_cache(
    cache: Any, spec: KVSpec, first: int, last: int, snapshots: Mapping[int, States] | None = None
) -> tuple[torch.Tensor, ...]:
    """Copy tokens ``first`` to ``last`` - 1 from a cache with all tokens to the CPU.

    States are the ``snapshots``, by number of tokens, of a cache of ``last`` tokens; None: the current state.
    """
    places, out = held_layers(cache), []
    for part in spec.parts:
        only = part.only
        if is_state(part):
            taken = [states_of(cache)] if snapshots is None else [snapshots[end] for end in snapshot_ends(part, last)]
            stacks = [torch.stack([held[layer, only.role] for layer in only.layers]) for held in taken]
            out.append(torch.cat(stacks, dim=2)[:, None].to("cpu", copy=True))
            continue
        layers = [cache.layers[places[layer]] for layer in only.layers]
        if only.role == INDEXER:
            keys = torch.stack([layer.indexer_keys[:, first:last] for layer in layers])
            out.append(keys[:, None].to("cpu", copy=True))
            continue
        kv = torch.empty(part.shape(last - first), dtype=layers[0].keys.dtype)
        keys, values = keys_and_values(kv, part)
        for place, layer in enumerate(layers):
            keys[place].copy_(layer.keys[0, :, first:last])
            if only.v_dim:
                values[place].copy_(layer.values[0, :, first:last])
        out.append(kv)
    return tuple(out)


def cache_kv(cache: Any, spec: KVSpec, tokens: int) -> tuple[torch.Tensor, ...]:
    """Copy the KV of the first tokens from the ``past_key_values`` of a model's output, for a batch of one.

    Returns:
        One tensor per layer class, [layer, K/V, head, token, dim] in the cache's dtype, on the CPU; for a state its
        snapshots, see `kvabr.types.units.cache_length`.

    Raises:
        ModelError: the cache is quantised, static, lacks tokens outside windows, or is from another model.
        UsageError: the cache does not hold exactly one prompt, or lacks tokens or snapshots.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ModelError(
            f"a {type(cache).__name__} is not a cache of transformers; pass the past_key_values of an output"
        )
    count, places = len({layer for each in spec.classes for layer in each.layers}), held_layers(cache)
    if len(places) != count:
        raise ModelError(f"the cache has {len(places)} layers, but {spec.model} has {count}")
    for index in places:
        kind = type(layers[index]).__name__ if index < len(layers) else "DynamicLayer"
        if kind in _FULL_LAYERS:
            raise ModelError(
                f"layer {index} keeps its cache as {kind}, which drops tokens that shorter prompts need: give the "
                "model past_key_values=DynamicCache(), made without its configuration, or use `prefill_prompt`"
            )
        if kind not in LAYERS:
            raise ModelError(
                f"layer {index} keeps its cache as {kind}: kvabr needs plain layers that hold every token "
                "unquantised; let generate() make a DynamicCache"
            )
    for each in spec.classes:
        for index in each.layers if each.kind != "state" else ():
            _check_layer(index, layers[places[index]], spec.model, each, tokens)
    return read_cache(cache, spec, 0, tokens, _checked_states(cache, spec, tokens))


def snapshots_of(cache: Any, spec: KVSpec) -> dict[int, States]:
    """Return the snapshots of a cache's states by number of tokens, including the current states."""
    kept: dict[int, States] = dict(getattr(cache, SNAPSHOTS, None) or {})
    main = next((each.layers[0] for each in spec.classes if each.kind != "state" and not each.role), None)
    places = held_layers(cache)
    if main is not None and main < len(places):
        keys = getattr(cache.layers[places[main]], "keys", None)
        if keys is not None:
            kept[int(keys.shape[2])] = states_of(cache)
    return kept


def _checked_states(cache: Any, spec: KVSpec, tokens: int) -> dict[int, States]:
    kept = snapshots_of(cache, spec) if has_states(spec) else {}
    ends = sorted(set().union(*(snapshot_ends(part, tokens) for part in spec.parts)))
    if missing := [end for end in ends if end not in kept]:
        raise UsageError(
            f"{spec.model} has states, and the cache has none after {missing[0]} tokens (only after "
            f"{', '.join(map(str, sorted(kept))) or 'none'}): prefill with `prefill_prompt`, which keeps them"
        )
    for part in spec.parts:
        only = part.only
        for end in snapshot_ends(part, tokens):
            for layer in only.layers:
                state = kept[end].get((layer, only.role))
                due = (only.heads, only.k_dim, only.v_dim)
                if state is None or tuple(state.shape) != due:
                    have = "none" if state is None else f"one of {tuple(state.shape)}"
                    raise ModelError(
                        f"layer {layer} must have a {only.role} state of {due}, got {have}: the cache belongs to "
                        "another model"
                    )
    return kept


def _check_layer(index: int, layer: Any, model: str, only: LayerClass, tokens: int) -> None:
    if only.role == INDEXER:
        keys = getattr(layer, "indexer_keys", None)
        if keys is None or keys.shape[0] != 1 or keys.shape[2] != only.k_dim or keys.shape[1] < tokens:
            raise ModelError(f"layer {index} of the cache has no indexer keys of {only.k_dim} for {tokens} tokens")
        return
    keys, values = layer.keys, layer.values
    if keys is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise ModelError(f"layer {index} of the cache is empty, or its keys and values differ in shape")
    batch, heads, held, dim = keys.shape
    if batch != 1:
        raise UsageError(f"the cache holds {batch} prompts; publish them one at a time")
    if (heads, dim, values.shape[3]) != (only.heads, only.k_dim, only.v_dim or only.k_dim):
        raise ModelError(
            f"layer {index} of the cache has {heads} heads of {dim}, but {model} has {only.heads} of {only.k_dim}: the "
            "cache belongs to another model"
        )
    if keys.dtype not in _FLOATS:
        raise ModelError(f"the cache must be one of {', '.join(DTYPES)}, got {keys.dtype}")
    if held < tokens:
        raise UsageError(f"the cache holds {held} tokens, fewer than the {tokens} given")
