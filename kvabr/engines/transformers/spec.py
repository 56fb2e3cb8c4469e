"""The spec of a transformers model's cache, checked on a real cache of a few tokens.

Supported rotary embeddings are plain ones and those with a constant scaling: linear (position interpolation; Chen et
al., 2023), Llama 3 (the Llama 3.1 models) and YaRN (Peng et al., 2023). LongRoPE rotates keys of long and short prompts
differently, which a spec cannot express. Within the model's context, "dynamic" scaling equals the plain embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from kvabr.engines.adapters import require
from kvabr.engines.transformers.cache import (
    CONVOLUTION,
    EMPTY,
    INDEXER,
    LAYERS,
    cache_argument,
    held_layers,
    new_cache,
    states_of,
)
from kvabr.types.errors import FormatError, ModelError
from kvabr.types.kv import KVSpec, LayerClass, RopeSpec

_PROBED = 8
_PROBE_POSITION = 500
"""Position of the probe's last token: far enough to reveal slow rotations, near enough for exact float32 angles."""
_DIGITS = 9
"""Significant digits of a frequency, so that a spec's digest is the same on every machine."""
_TOLERANCE = 1e-3
_COARSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Maximum error of a rotated key, relative to the largest key; 16-bit models round sines and keys."""
_MIN_STATE_DIFFERENCE = 0.02
"""Minimum relative difference between two states of a first layer that is not due to rounding, also in 16 bits."""
_MAX_FREQUENCY_ERROR = 1e-5
"""Maximum relative difference between float32 and float64 frequencies."""
Scaled = tuple[list[float], float]
"""Frequencies, and the factor by which cosines and sines are multiplied."""


def spec_of(
    model: Any,
    *,
    name: str,
    tokenizer: str,
    dtype: str,
    whole_windows: bool = False,
    snapshots_every: int | None = None,
) -> KVSpec:
    """Return the spec of a loaded causal language model's cache, checked on a real cache of a few tokens.

    Args:
        model: the model.
        name: the model's name, as in the track namespace.
        tokenizer: digest of the tokenizer.
        dtype: element type of the published cache, a key of `kvabr.types.kv.DTYPES`; float32 states keep theirs.
        whole_windows: True to treat window layers as full attention, for measurements on caches of all tokens.
        snapshots_every: tokens between published snapshots of a state within a prompt, a multiple of the group size;
            None: only one snapshot, at the end.

    Layers that differ in kind, window or shape form separate classes, and so do states and indexer keys. If keys and
    values are one vector, it is published once. Layers without a cache are not numbered. A class has a rotary embedding
    if one embedding explains the keys of all its layers; if all layers have full attention, only the first layer is
    checked.

    Raises:
        ModelError: a layer is unsupported, or the model does not continue from its own cache.
    """
    told = _kinds(model, name)
    positions = _probe_positions(model)
    layers = _probe(model, name, positions)
    found: dict[_Alike, list[int]] = {}
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places, others = _others(model, dtype)
    if any(each.kind == "state" for own in others for each in own):
        _check_continues(model, name)
    for index, place in enumerate(places):
        pair = layers[place] if place < len(layers) else None
        if pair is not None:
            kind, window = ("full", None) if whole_windows else told[place]
            shape = int(pair[0].shape[0]), int(pair[0].shape[2]), 0 if _is_one(*pair) else int(pair[1].shape[2])
            found.setdefault(_Alike(kind, window, *shape, dtype), []).append(index)
            pairs[index] = pair
        for other in others[index]:
            found.setdefault(other, []).append(index)
    if not found:
        raise ModelError(f"{name}: its cache is empty")
    plain = len(found) == 1 and all(kind == "full" for kind, _ in told)
    types = list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [None] * len(layers))
    classes = []
    for one, indices in found.items():
        rope = None
        if not one.role:
            seen = indices[:1] if plain else indices
            ropes = {rope_of(model, *pairs[index], positions, types[places[index]]) for index in seen}
            rope = ropes.pop() if len(ropes) == 1 else None
        kind, window, heads, k_dim, v_dim, own, role = one
        every = snapshots_every if kind == "state" else None
        classes.append(LayerClass(kind, tuple(indices), heads, k_dim, v_dim, own, rope, window, every, role=role))
    return KVSpec(name, tokenizer, tuple(classes))


class _Alike(NamedTuple):
    """Common properties of the layers of a class, see `LayerClass`."""

    kind: str
    window: int | None
    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    role: str = ""


@torch.inference_mode()
def _others(model: Any, dtype: str) -> tuple[list[int], list[list[_Alike]]]:
    """Return the indices of layers that have a cache, and each layer's contents other than keys and values."""
    cache = new_cache(model, whole=True)
    ids = torch.full((1, 1), 100, device=model.device)
    model.base_model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    places, states, found = held_layers(cache), states_of(cache), []
    for index, place in enumerate(places):
        own = []
        indexer = getattr(cache.layers[place], "indexer_keys", None) if place < len(cache.layers) else None
        if indexer is not None:
            own.append(_Alike("latent", None, 1, int(indexer.shape[2]), 0, dtype, INDEXER))
        for role in sorted(role for held, role in states if held == index):
            state = states[index, role]
            heads, rows, columns = map(int, state.shape)
            wide = state.dtype == torch.float32 and not role.startswith(CONVOLUTION)
            own.append(_Alike("state", None, heads, rows, columns, "float32" if wide else dtype, role))
        found.append(own)
    return places, found


@torch.inference_mode()
def _check_continues(model: Any, name: str) -> None:
    """Raise `ModelError` if a prompt computed in two pieces leaves other states than in one piece.

    In transformers 5.19, layers of Mamba-1 (Jamba) begin every run of several tokens with an empty state.
    """
    ids = torch.arange(100, 100 - _PROBED, -1, device=model.device)[None]
    found = []
    for cuts in ((0, _PROBED), (0, _PROBED - 2, _PROBED)):
        cache = new_cache(model, whole=True)
        for first, last in pairwise(cuts):
            positions = torch.arange(first, last, device=model.device)[None]
            given = {"position_ids": positions} if _takes_positions(model) else {}
            model.base_model(input_ids=ids[:, first:last], use_cache=True, **{cache_argument(model): cache}, **given)
        found.append(states_of(cache))
    checked: set[str] = set()
    for layer, role in sorted(found[0]):
        if role in checked:  # inputs of later layers have rounding errors
            continue
        checked.add(role)
        state, other = (states[layer, role].float() for states in found)
        if not float((other - state).norm()) <= _MIN_STATE_DIFFERENCE * float(state.norm()):
            raise ModelError(
                f"{name}: layer {layer} computes another {role} state after a cache than for the whole prompt: "
                "transformers does not continue from the state, so a played cache would be ignored"
            )


def _is_one(keys: torch.Tensor, values: torch.Tensor) -> bool:
    return bool(keys.any()) and torch.equal(keys, values)


def _kinds(model: Any, name: str) -> list[tuple[str, int | None]]:
    types = list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [])
    kinds: list[tuple[str, int | None]] = []
    for index, layer in enumerate(require("transformers").DynamicCache(config=model.config).layers):
        own = types[index] if index < len(types) else type(layer).__name__
        if type(layer).__name__ not in (*LAYERS, EMPTY):
            raise ModelError(f"{name}: layer {index} is {own}; kvabr needs layers that keep keys and values, or states")
        window = getattr(layer, "sliding_window", None)
        if window is None:
            kinds.append(("full", None))
        else:
            kinds.append(("chunked" if own == "chunked_attention" else "window", int(window)))
    return kinds


def _probe_positions(model: Any) -> torch.Tensor:
    positions = torch.arange(_PROBED)
    context = getattr(model.config, "max_position_embeddings", None)
    if isinstance(context, int) and _takes_positions(model):
        positions[-1] = max(_PROBED - 1, min(context - 1, _PROBE_POSITION))
    return positions


def _takes_positions(model: Any) -> bool:
    return "position_ids" in signature(model.base_model.forward).parameters


@torch.inference_mode()
def _probe(model: Any, name: str, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Return each layer's keys and values, [head, position, dim], for one token id at all positions; None: no keys.

    Each position is a separate prompt of one token, so keys differ only by rotation. A model without position arguments
    gets one prompt instead.
    """
    cache = new_cache(model, whole=True)
    alone = _takes_positions(model)
    shape = (len(positions), 1) if alone else (1, len(positions))
    given = {"position_ids": positions[:, None].to(model.device)} if alone else {}
    ids = torch.full(shape, 100, device=model.device)
    model.base_model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **given)
    out: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for index, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        if keys is None:
            out.append(None)  # a state, or no cache
            continue
        if keys.dim() != 4 or keys.shape[:3] != layer.values.shape[:3]:
            kind = type(layer).__name__
            raise ModelError(f"{name}: layer {index} keeps its cache as {kind}; kvabr needs keys and values")
        if (keys.shape[0], keys.shape[2]) != shape:
            raise ModelError(f"{name}: layer {index} of the cache does not hold every token")
        both = ((part[:, :, 0].transpose(0, 1) if alone else part[0]) for part in (keys, layer.values))
        out.append((next(both), next(both)))
    return out


def rope_of(
    model: Any, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, kind: str | None = None
) -> RopeSpec | None:
    """Return the rotary embedding of a layer if it explains the keys of one token id; else None.

    ``keys``, [head, position, dim], differ only by rotation, see `_probe`; the first of ``positions`` is 0. Latent
    attention stores rotated keys in place of ``values``, with another dim. ``kind`` is the layer's type in the model's
    configuration.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = _parameters(config, kind)
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    scaling = parameters.get("rope_type", "default")
    if theta is None or scaling == "longrope":
        return None
    module = getattr(model.base_model, "rotary_emb", None)
    frequencies = getattr(module, f"{kind}_inv_freq", getattr(module, "inv_freq", None))
    factor = float(getattr(module, f"{kind}_attention_scaling", getattr(module, "attention_scaling", 1.0)))
    dim = int(keys.shape[-1])
    both = keys if keys.shape == values.shape else torch.cat((keys, values), dim=-1)
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    sizes = [int(dim * float(share))]
    if isinstance(frequencies, torch.Tensor):
        sizes.append(2 * frequencies.numel())
    layouts: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    for rotary in dict.fromkeys(sizes):
        if not 2 <= rotary <= dim or rotary % 2:
            continue
        plain = RopeSpec(float(theta), rotary)
        try:
            rope = _scaled(plain, {**parameters, "rope_type": scaling}) if scaling in _SCALINGS else plain
            rope.check(both.shape[-1])
        except (FormatError, KeyError, TypeError, ValueError, ArithmeticError):
            continue  # the configuration is invalid
        if rope is not plain and not _is_the_models(rope, frequencies, factor):
            continue
        places = dict.fromkeys((0, dim - rotary, both.shape[-1] - rotary))
        found = (replace(rope, layout=layout, first=first) for first in places for layout in layouts)
        if (one := next((one for one in found if _explains(one, both, positions)), None)) is not None:
            return one
    return None


def _parameters(config: Any, kind: str | None) -> dict[str, Any]:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if kind in parameters:
        return dict(parameters[kind] or {})
    return parameters


def _scaled(plain: RopeSpec, parameters: Mapping[str, Any]) -> RopeSpec:
    """Return the scaled embedding that a configuration describes; the plain one if scaling changes nothing."""
    frequencies, factor = _SCALINGS[parameters["rope_type"]](plain, parameters)
    rounded = tuple(map(_rounded, frequencies))
    if _rounded(factor) == 1 and rounded == tuple(map(_rounded, _powers(plain))):
        return plain
    return replace(plain, frequencies=rounded, factor=_rounded(factor))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _powers(rope: RopeSpec) -> list[float]:
    return [rope.theta ** (-2 * pair / rope.rotary_dim) for pair in range(rope.rotary_dim // 2)]


def _linear(plain: RopeSpec, parameters: Mapping[str, Any]) -> Scaled:
    return [each / float(parameters["factor"]) for each in _powers(plain)], 1.0


def _llama3(plain: RopeSpec, parameters: Mapping[str, Any]) -> Scaled:
    """Keep pairs that rotate often within the original context, slow down those that rotate rarely, and interpolate."""
    context, factor = float(parameters["original_max_position_embeddings"]), float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    out = []
    for each in _powers(plain):
        turns = context * each / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(each * (kept + (1 - kept) / factor))
    return out, 1.0


def _yarn(plain: RopeSpec, parameters: Mapping[str, Any]) -> Scaled:
    """Like `_llama3`, but interpolate by the index of the pair instead of its turns, and multiply keys by a factor."""
    context, factor = float(parameters["original_max_position_embeddings"]), float(parameters["factor"])
    rotary = plain.rotary_dim

    def pair(turns: float) -> float:
        """Return the (fractional) pair of dims that rotates ``turns`` times within the original context."""
        return rotary * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(plain.theta))

    first = pair(float(parameters.get("beta_fast") or 32))
    last = pair(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary - 1)
    if first == last:
        last += 0.001
    out = []
    for index, each in enumerate(_powers(plain)):
        slowed = min(1.0, max(0.0, (index - first) / (last - first)))
        out.append(each * (1 - slowed + slowed / factor))

    def longer(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given, one, other = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return out, float(given)
    return out, longer(float(one)) / longer(float(other)) if one and other else longer(1.0)


_SCALINGS: dict[str, Callable[[RopeSpec, Mapping[str, Any]], Scaled]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _is_the_models(rope: RopeSpec, own: object, factor: float) -> bool:
    """Return True if the model has the same frequencies and factor; its keys do not reveal them precisely."""
    if not isinstance(own, torch.Tensor) or rope.frequencies is None or own.shape != (len(rope.frequencies),):
        return False
    ours = torch.tensor(rope.frequencies, dtype=torch.float64)
    near = torch.allclose(own.detach().double().cpu(), ours, rtol=_MAX_FREQUENCY_ERROR, atol=0.0)
    return near and math.isclose(factor, rope.factor, rel_tol=_MAX_FREQUENCY_ERROR)


def _explains(rope: RopeSpec, keys: torch.Tensor, positions: torch.Tensor) -> bool:
    rotary = rope.rotary_dim
    wave = keys[..., rope.first : rope.first + rotary].double().cpu()
    frequencies = torch.tensor(_powers(rope) if rope.frequencies is None else rope.frequencies, dtype=torch.float64)
    angle = positions.double()[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angle), angle)
    if rope.layout == "half":
        pairs = torch.complex(wave[..., : rotary // 2], wave[..., rotary // 2 :])
    else:
        pairs = torch.complex(wave[..., 0::2], wave[..., 1::2])
    error = (pairs - pairs[:, :1] * turn).abs().max().item()
    return math.isfinite(error) and error <= _COARSE.get(keys.dtype, _TOLERANCE) * pairs.abs().max().item()
