"""Conversion between kvabr's KV, a tensor [layer, K/V, head, token, dim] per layer class, and transformers' caches.

A layer of a cache keeps keys and values, of all tokens or of a window, a state, or both. What it keeps besides its keys
and values has a role, by which its layer class is known:

- ``recurrent``: one matrix per head that stands for all tokens (gated delta, KDA, Mamba-2, lightning attention).
- ``scan``: one matrix for all channels (Mamba-1).
- ``convolution``: the last inputs of a short convolution, [channel, tap].
- ``indexer``: one key per token, by which sparse attention picks tokens (DeepSeek V3.2, GLM DSA).

A second state of the same kind has a letter behind its role. A state exists only behind the tokens that were computed.
What shorter prompts need has to be kept while they are (`SNAPSHOTS`).
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
"""The layer of a cache that keeps only the last tokens, one fewer than its window has."""
_SLIDING_STATE = "LinearAttentionAndSlidingWindowAttentionLayer"
_WHOLE = {SLIDING: "DynamicLayer", _SLIDING_STATE: "LinearAttentionAndFullAttentionLayer"}
"""Layers with windows, and those that keep every token instead."""
LAYERS = (*_WHOLE, *_WHOLE.values(), "DynamicIndexedLayer", "LinearAttentionLayer")
"""The layers that are known."""
RECURRENT, SCAN, CONVOLUTION, INDEXER = "recurrent", "scan", "convolution", "indexer"
_NOTHING = ("moe", "mlp")
"""Layers, by their type in a configuration, that keep nothing."""
EMPTY = "DummyLayer"
"""What a cache has for layers that keep nothing, or use what another one keeps, from transformers 5.24 on."""
SNAPSHOTS = "kvabr_snapshots"
"""Attribute of a cache: by tokens before it, a snapshot of all its states, as `states_of` returns them."""

States = dict[tuple[int, str], torch.Tensor]
"""States by layer and role, each [head, row, column]."""


def new_cache(model: Any, *, whole: bool = False) -> Any:
    """Return an empty cache for a model; with ``whole`` one whose layers with windows keep every token."""
    own = getattr(sys.modules[type(model.base_model).__module__], "MiniMaxCache", None)
    if own is not None:
        return own()
    transformers = require("transformers")
    cache = transformers.DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers if whole else ()):
        if (other := _WHOLE.get(type(layer).__name__)) is not None:
            states = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
            cache.layers[index] = getattr(transformers.cache_utils, other)(**states)
    return cache


def cache_argument(model: Any) -> str:
    """Return the name of the argument that a model takes its cache by: from transformers 5.24 on always ``cache``."""
    takes = signature(model.base_model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in takes), "cache_params")


def is_state(part: KVSpec) -> bool:
    """Return whether the class of this part is a state."""
    return part.only.kind == "state"


def has_states(spec: KVSpec) -> bool:
    """Return whether there are layers with states."""
    return any(each.kind == "state" for each in spec.classes)


def is_plain(spec: KVSpec) -> bool:
    """Return whether all layers keep keys and values of every token, and nothing else."""
    return all(each.kind == "full" and not each.role for each in spec.classes)


# ------------------------------------------------------------------ into a cache


def dynamic_cache(parts: Sequence[torch.Tensor], spec: KVSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `DynamicCache` of all tokens in all layers, which keep keys and values alone.

    ``parts`` are a tensor per layer class of ``spec``; ``dtype`` and ``device`` are the model's. Where they are those
    of the parts, the layers are views: the model appends to copies. Layers with windows keep all tokens, and the model
    masks them.
    """
    cache = require("transformers").DynamicCache()
    if parts[0].shape[3]:
        for layer, pair in sorted(_keys_and_values(parts, spec).items()):
            both = [part.to(device=device, dtype=dtype)[None] for part in pair]
            cache.update(*(part[:, :, :0] for part in both), layer)  # makes the layer; it would copy numbers
            cache.layers[layer].keys, cache.layers[layer].values = both
    return cache


def whole_cache(parts: Sequence[torch.Tensor], spec: KVSpec, model: Any) -> Any:
    """Return a cache for a model of all tokens in all layers, as `dynamic_cache`, and of the states behind them."""
    if not any(each.kind == "state" or each.role for each in spec.classes):
        return dynamic_cache(parts, spec, model.dtype, model.device)
    return _filled(new_cache(model, whole=True), parts, spec, model)


def windowed_cache(parts: Sequence[torch.Tensor], spans: Sequence[Span], spec: KVSpec, tokens: int, model: Any) -> Any:
    """Return a cache with a copy of the first ``tokens`` tokens of a played one, as a model makes it.

    Layers with windows hold what can still be seen. ``parts`` are a tensor per layer class, with the tokens of
    ``spans``; that of a state holds the snapshot behind ``tokens`` tokens.
    """
    shown = [
        part if is_state(one) else part[:, :, :, : max(0, tokens - span.first)]
        for part, span, one in zip(parts, spans, spec.parts, strict=True)
    ]
    return _filled(new_cache(model), shown, spec, model, tokens)


def _filled(cache: Any, parts: Sequence[torch.Tensor], spec: KVSpec, model: Any, tokens: int | None = None) -> Any:
    """Copy a cache into an empty one; with ``tokens`` only the ends of windows, which have moved on to there."""
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
        if type(state).__name__ not in _WHOLE:
            raise ModelError(f"{spec.model}: transformers keeps layer {layer} as {type(state).__name__}")
        # Of a chunk that has just begun less is needed than the layer has room for: the rest is masked.
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
    """Copy one state, [head, row, column], into a layer of a cache."""
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
    """Have the layers of a cache replace a recurrent state that changes: overwritten, it has no gradient."""
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "recurrent_states"):

            def update(states: torch.Tensor, state_idx: int = 0, *, layer: Any = layer, **_: Any) -> torch.Tensor:
                layer.recurrent_states[state_idx] = states
                return states

            layer.update_recurrent_state = update


def rewind(cache: Any, spec: KVSpec, tokens: int) -> bool:
    """Have a cache of all tokens forget those behind the first ones; return False if it keeps what cannot go back."""
    if any(each.kind == "state" or each.role for each in spec.classes):
        return False
    for layer in cache.layers:
        if layer.is_initialized and layer.keys is not None:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return True


def _number(role: str) -> int:
    """Return which of its layer's states of one kind a role means."""
    base = next((name for name in (RECURRENT, SCAN, CONVOLUTION) if role.startswith(name)), None)
    if base is None:
        raise ModelError(f"a state in the role {role!r} is not known here")
    return 0 if role == base else ord(role[len(base)]) - ord("a")


def _places(model: Any) -> list[int]:
    """Return where a model's cache has each layer that keeps anything; none if all do."""
    config = model.config.get_text_config(decoder=True)
    types, modes = getattr(config, "layer_types", None) or (), getattr(config, "kv_sharing_modes", None) or ()
    reused = {index for index, mode in enumerate(modes) if mode == "reuse"}
    return [index for index, kind in enumerate(types) if kind not in _NOTHING and index not in reused]


def _keys_and_values(parts: Sequence[torch.Tensor], spec: KVSpec) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values by layer, [head, token, dim]; only one vector per token is both."""
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part, one in zip(parts, spec.parts, strict=True):
        if not is_state(one) and not one.only.role:
            keys, values = keys_and_values(part, one)
            pairs = zip(keys, values if one.only.v_dim else keys, strict=True)
            layers.update(zip(one.only.layers, pairs, strict=True))
    return layers


# ------------------------------------------------------------------ out of a cache


def held_layers(cache: Any) -> list[int]:
    """Return the layers of a cache that keep anything."""
    layers = cache.layers
    return [
        index
        for index in range(len(cache))
        if index >= len(layers)
        or (hasattr(layers[index], "keys") and type(layers[index]).__name__ != EMPTY)
        or _states(cache, index)
    ]


def states_of(cache: Any) -> States:
    """Return the states of a cache as they are now, not copied."""
    return {
        (layer, role): state
        for layer, place in enumerate(held_layers(cache))
        for role, state in _states(cache, place).items()
    }


def _states(cache: Any, place: int) -> dict[str, torch.Tensor]:
    """Return the states of one layer by role, [head, row, column]."""
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
        raise ModelError(f"layer {place} of the cache keeps a state of {tuple(state.shape)}, which is not known here")
    if state.shape[0] != 1:
        raise UsageError(f"the cache holds {state.shape[0]} prompts; publish them one at a time")
    return state


def read_cache(
    cache: Any, spec: KVSpec, first: int, last: int, snapshots: Mapping[int, States] | None = None
) -> tuple[torch.Tensor, ...]:
    """Copy tokens ``first`` to ``last`` - 1 out of a cache of ``spec`` that holds all tokens, to the CPU.

    Of a state, the ``snapshots`` that a cache of ``last`` tokens has come one behind the other; they are given by the
    tokens before them. None: it is taken as it is now.
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
    """Copy the KV of the first tokens out of the ``past_key_values`` of a model's output, for a batch of one.

    Returns:
        A tensor per layer class, [layer, K/V, head, token, dim] in the cache's dtype, on the CPU; of a state its
        snapshots, see `kvabr.types.units.cache_length`.

    Raises:
        ModelError: the cache is quantised, static, has dropped what left its windows, or is another model's.
        UsageError: it does not hold exactly one prompt, holds fewer tokens, or not the snapshots of its states.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ModelError(
            f"a {type(cache).__name__} is not a cache of transformers; pass the past_key_values of an output"
        )
    count, places = len({layer for each in spec.classes for layer in each.layers}), held_layers(cache)
    if len(places) != count:
        raise ModelError(f"a cache of {len(places)} layers is not one of {spec.model}, which has {count}")
    for index in places:
        kind = type(layers[index]).__name__ if index < len(layers) else "DynamicLayer"
        if kind in _WHOLE:
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
    """Return the snapshots that a cache has of its states, by the tokens before them: those kept, and the last."""
    kept: dict[int, States] = dict(getattr(cache, SNAPSHOTS, None) or {})
    main = next((each.layers[0] for each in spec.classes if each.kind != "state" and not each.role), None)
    places = held_layers(cache)
    if main is not None and main < len(places):
        keys = getattr(cache.layers[places[main]], "keys", None)
        if keys is not None:
            kept[int(keys.shape[2])] = states_of(cache)
    return kept


def _checked_states(cache: Any, spec: KVSpec, tokens: int) -> dict[int, States]:
    """Return the snapshots that a published cache of ``tokens`` tokens has, checked."""
    kept = snapshots_of(cache, spec) if has_states(spec) else {}
    ends = sorted(set().union(*(snapshot_ends(part, tokens) for part in spec.parts)))
    if missing := [end for end in ends if end not in kept]:
        raise UsageError(
            f"{spec.model} has states, and the cache has none behind {missing[0]} tokens (only behind "
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
                        f"layer {layer} has no {only.role} state of {due}, but {have}: it is another model's"
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
            f"layer {index} of the cache has {heads} heads of {dim}, {model} has {only.heads} of {only.k_dim}: it is "
            "another model's"
        )
    if keys.dtype not in _FLOATS:
        raise ModelError(f"the cache is {keys.dtype}; kvabr takes {', '.join(DTYPES)}")
    if held < tokens:
        raise UsageError(f"the cache holds {held} tokens, fewer than the {tokens} given")
