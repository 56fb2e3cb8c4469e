"""vLLM's KV-cache configuration as layer classes, and the block table of each layer.

vLLM's *KV cache groups* are layers of one kind that share a block table; a kind may have several groups. If a block
leaves a window, its table entry becomes 0. Does not import vLLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvabr.engines.vllm.drafts import DRAFT, DraftCaches
from kvabr.engines.vllm.interleaving import WHOLE, Interleaving
from kvabr.engines.vllm.states import KNOWN, RECURRENT, StateForm, forms_of
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import QUANTISED, LayerClass

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "latent",
}
"""Kinds of layer classes by the exact type of vLLM's spec."""
_FP8 = 1
"""vLLM's ``KVQuantMode`` for FP8 with two scales per layer, for keys and for values."""
NONE = DraftCaches()
ABSENT_BLOCK = 0
"""vLLM's null block, which belongs to no request."""


class UnknownCacheError(UsageError):
    """kvabr cannot exchange the model's cache in the form that vLLM uses."""


Scales = Mapping[str, tuple[float, float]]
"""FP8 scales of keys and values, by vLLM's layer name; default 1."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """vLLM's quantisation of its cache."""

    dtype: str = ""
    """Element type of codes, one of `QUANTISED`; empty if not quantised."""
    scales: Scales = field(default_factory=dict)


PLAIN = Quantisation()


@dataclass(frozen=True, slots=True)
class Pages:
    """Layers of one class that share a block table."""

    group: int
    """Index of the block table (KV-cache group)."""
    part: int
    """Index of the layer class; -1 for a table of other pipeline stages."""
    block: int
    """Tokens in a block, summed over all ranks that share it."""
    names: tuple[str, ...]
    rows: tuple[int, ...]
    passing: bool = False
    """True for windows and chunks, as vLLM drops their blocks."""
    form: StateForm | None = None
    interleaving: Interleaving = WHOLE

    @property
    def held(self) -> int:
        """Tokens of a block that this rank holds."""
        return self.block // self.interleaving.ranks

    def absent(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that vLLM has dropped."""
        if not self.passing:
            return 0
        return next((place for place, block in enumerate(blocks) if block != ABSENT_BLOCK), len(blocks))


@dataclass(frozen=True, slots=True)
class EngineCaches:
    """The layer classes of a model or pipeline stage, and vLLM's pages for them."""

    classes: tuple[LayerClass, ...]
    """Classes in the order of `kvabr.engines.transformers.spec_of`, with all heads, without rotary embeddings."""
    pages: tuple[Pages, ...]

    @property
    def block(self) -> int:
        """Tokens in a block: the least common multiple over all tables."""
        return math.lcm(*(each.block for each in self.pages))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens in a block of each table."""
        sizes = {each.group: each.block for each in self.pages}
        return tuple(sizes[group] for group in range(len(sizes)))

    def runs(self, tables: Sequence[Sequence[int]], first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of tokens ``first`` to ``last`` - 1 in each table."""
        pairs = zip(tables, self.blocks, strict=True)
        return tuple(tuple(table[first // size : last // size]) for table, size in pairs)

    @property
    def states(self) -> dict[int, int]:
        """Tokens in a block of each table of states; states are stored at ends of blocks."""
        return {each.group: each.block for each in self.pages if each.form is not None}

    @property
    def latent(self) -> bool:
        """True if keys and values share one vector (MLA)."""
        return any(one.kind == "latent" for one in self.classes)

    @property
    def passing(self) -> tuple[Pages, ...]:
        """Pages with blocks that leave a window."""
        return tuple(each for each in self.pages if each.passing)


@dataclass(frozen=True, slots=True, order=True)
class _Layer:
    number: int
    role: str
    kind: str
    window: int
    heads: int
    k_dim: int
    v_dim: int
    group: int
    block: int
    name: str
    shared: bool = False
    dtype: str = ""
    form: StateForm | None = field(default=None, compare=False)

    @property
    def title(self) -> tuple[object, ...]:
        return self.role, self.kind, self.window, self.heads, self.k_dim, self.v_dim, self.dtype


def engine_caches(
    config: Any,
    *,
    layers: range,
    dtype: str,
    held: torch.dtype,
    heads_of: Callable[[int], int] = lambda heads: heads,
    cpu: bool = False,
    draft: DraftCaches = NONE,
    interleaving: Interleaving = WHOLE,
    quantisation: Quantisation = PLAIN,
) -> EngineCaches:
    """Return the layer classes and pages of a ``vllm.v1.kv_cache_interface.KVCacheConfig``.

    ``layers`` are the layers of the model or pipeline stage. For unquantised classes, ``dtype`` is the published
    element type, and ``held`` that of the engine. ``heads_of`` maps the number of KV heads in a rank to that in the
    model. On a ``cpu`` some states have another form.

    Raise `UnknownCacheError` if a layer's cache has an unknown form, or for layers that are not the model's.
    """
    every = _layers(config, held, heads_of, cpu, interleaving, quantisation)
    found = sorted(_with_roles(every, draft, layers.stop))
    seen = [(layer.number, layer.role) for layer in found]
    main = sorted({layer.number for layer in found if not layer.role or layer.kind == "state"})
    if len(set(seen)) < len(seen) or main != list(layers):
        raise UnknownCacheError(
            f"vLLM keeps {len(found)} caches for {len(set(main))} of {len(layers)} layers of the model: kvabr needs "
            "one cache for each layer"
        )
    titles = list(dict.fromkeys(layer.title for layer in found))
    classes = []
    rows: dict[str, int] = {}
    for title in titles:
        own = [layer for layer in found if layer.title == title]
        rows |= {layer.name: place for place, layer in enumerate(own)}
        classes.append(_class_of(own, dtype, quantisation))
    shelves: dict[tuple[int, int, int], list[_Layer]] = {}
    for layer in found:
        shelves.setdefault((layer.group, titles.index(layer.title), layer.block), []).append(layer)
    pages = tuple(
        Pages(
            group,
            part,
            block,
            tuple(layer.name for layer in own),
            tuple(rows[layer.name] for layer in own),
            passing=classes[part].window is not None,
            form=own[0].form,
            interleaving=interleaving if own[0].shared else WHOLE,
        )
        for (group, part, block), own in sorted(shelves.items())
    )
    return EngineCaches(tuple(classes), (*pages, *_elsewhere(config, interleaving)))


def _with_roles(found: Iterator[_Layer], draft: DraftCaches, layers: int) -> Iterator[_Layer]:
    for layer in found:
        if not draft.has(layer.name, layer.number, layers):
            yield layer
        elif draft.why is not None or layer.kind == "state":
            raise UnknownCacheError(
                draft.why or f"vLLM keeps states of the draft model in {layer.name}, which kvabr does not support"
            )
        else:
            yield replace(layer, role=f"{DRAFT}{layer.role}")


def _elsewhere(config: Any, interleaving: Interleaving) -> Iterator[Pages]:
    for number, group in enumerate(config.kv_cache_groups):
        if not group.layer_names:
            spec = group.kv_cache_spec
            spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
            passing = _KINDS.get(type(spec).__name__) in ("window", "chunked")
            block = int(spec.block_size) * (interleaving.ranks if _shared(spec, interleaving) else 1)
            yield Pages(number, -1, block, (), (), passing=passing)


def _class_of(own: Sequence[_Layer], dtype: str, quantisation: Quantisation) -> LayerClass:
    one, numbers = own[0], tuple(layer.number for layer in own)
    dtype, scales = one.dtype or dtype, None
    if dtype in QUANTISED:
        pairs = (quantisation.scales.get(layer.name, (1.0, 1.0)) for layer in own)
        scales = tuple(scale for pair in pairs for scale in pair[: 2 if one.v_dim else 1])
        scales = scales[:1] if len(set(scales)) == 1 else scales  # use one spec for all caches with equal scales
    try:
        return LayerClass(
            one.kind,
            numbers,
            one.heads,
            one.k_dim,
            one.v_dim,
            dtype,
            window=one.window or None,
            scales=scales,
            role=one.role,
        )
    except FormatError as error:
        raise UnknownCacheError(f"vLLM's cache of {one.name}: {error}") from error


def _shared(spec: Any, interleaving: Interleaving) -> bool:
    if interleaving.ranks == 1:
        return False
    shared = getattr(spec, "dcp_sharded", None)
    if shared is None:
        raise UnknownCacheError("this vLLM does not report which layers ranks share: use 0.32 or later")
    if shared and int(spec.block_size) % interleaving.tokens:
        raise UnknownCacheError(
            f"vLLM's blocks of {spec.block_size} tokens are not a multiple of {interleaving.tokens} tokens: set "
            "--cp-kv-cache-interleave-size to a divisor"
        )
    return bool(shared)


def _layers(
    config: Any,
    held: torch.dtype,
    heads_of: Callable[[int], int],
    cpu: bool,
    interleaving: Interleaving,
    quantisation: Quantisation,
) -> Iterator[_Layer]:
    for number, group in enumerate(config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise UnknownCacheError(f"vLLM keeps {', '.join(group.layer_names)} in a place that connectors cannot read")
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            spec = group.kv_cache_spec if each is None else each[name]
            if type(spec).__name__ == "MambaSpec":
                yield from _states(name, number, spec, held, cpu, quantisation)
            else:
                layer = _layer(name, number, spec, held, heads_of, quantisation)
                shared = _shared(spec, interleaving)
                yield replace(layer, block=layer.block * (interleaving.ranks if shared else 1), shared=shared)


def _states(
    name: str, group: int, spec: Any, held: torch.dtype, cpu: bool, quantisation: Quantisation
) -> Iterator[_Layer]:
    kind, mode = getattr(spec.mamba_type, "name", spec.mamba_type), spec.mamba_cache_mode
    forms = forms_of(spec, cpu=cpu)
    if forms is None:
        raise UnknownCacheError(f"vLLM keeps {name} as states of {kind}; kvabr supports {', '.join(KNOWN)}")
    if mode != "align" or spec.num_speculative_blocks:
        raise UnknownCacheError(
            f'vLLM keeps the states of {name} in the mode "{mode}", which leaves no state at the end of a block: '
            "start it with --enable-prefix-caching, and without speculative decoding"
        )
    for form in forms:
        if form.dtype != torch.float32 and quantisation != PLAIN:
            raise UnknownCacheError(
                f"vLLM keeps a state of {name} in {str(form.dtype).removeprefix('torch.')} next to a quantised cache, "
                "which kvabr does not support: start it with --kv-cache-dtype auto"
            )
        if form.dtype not in (held, torch.float32):
            raise UnknownCacheError(
                f"vLLM keeps a state of {name} in {form.dtype} and its cache in {held}, which kvabr does not support"
            )
        heads, rows, columns = form.published
        wide = form.dtype == torch.float32 and form.role == RECURRENT
        yield _Layer(
            number=_number(name),
            role=form.role,
            kind="state",
            window=0,
            heads=heads,
            k_dim=rows,
            v_dim=columns,
            group=group,
            block=int(spec.block_size),
            name=name,
            dtype="float32" if wide else "",
            form=form,
        )


def _number(name: str) -> int:
    numbers = _LAYER.findall(name)
    if len(numbers) != 1:
        raise UnknownCacheError(f"unknown model: vLLM's cache {name!r} has no layer number in its name")
    return int(numbers[0])


def _layer(
    name: str, group: int, spec: Any, held: torch.dtype, heads_of: Callable[[int], int], quantisation: Quantisation
) -> _Layer:
    title = type(spec).__name__
    kind = _KINDS.get(title)
    if kind is None:
        raise UnknownCacheError(f"vLLM keeps {name} as {title}; kvabr supports {', '.join(_KINDS)}, and MambaSpec")
    if kind == "full" and (getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)):
        raise UnknownCacheError(
            f"vLLM keeps every token of {name}, although its attention uses only a part of them: start it with the "
            "hybrid KV cache manager (without --disable-hybrid-kv-cache-manager; with chunked attention also with "
            "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1)"
        )
    mode = int(getattr(spec, "kv_quant_mode", 0))
    codes = bool(quantisation.dtype) and mode == _FP8
    if (why := _unlike(spec, held, mode, codes=codes)) is not None:
        raise UnknownCacheError(f"vLLM keeps {name} {why}, which kvabr does not support")
    number, block = _number(name), int(spec.block_size)
    role = str(getattr(getattr(spec, "cache_role", None), "value", ""))
    window = spec.sliding_window if kind == "window" else spec.attention_chunk_size if kind == "chunked" else 0
    return _Layer(
        number=number,
        role="indexer" if role == "indexer" else "",
        kind=kind,
        window=int(window),
        heads=1 if kind == "latent" else heads_of(int(spec.num_kv_heads)),
        k_dim=int(spec.head_size),
        v_dim=int(spec.head_size_v),
        group=group,
        block=block,
        name=name,
        dtype=quantisation.dtype if codes else "",
    )


def _unlike(spec: Any, held: torch.dtype, mode: int, *, codes: bool) -> str | None:
    """Return how a layer's cache differs from unquantised keys and values of every token; None if it does not."""
    wanted = torch.uint8 if codes else held
    if spec.dtype != wanted or (mode > 0) != codes:
        return f"in {str(spec.dtype).removeprefix('torch.')} instead of {str(wanted).removeprefix('torch.')}"
    if getattr(spec, "state_content_bytes", None) is not None or getattr(spec, "num_head_slots", None) is not None:
        return "packed"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return "with several tokens per state"
    if getattr(spec, "non_causal", False):
        return "with attention to later tokens"
    if getattr(spec, "extra_retained_tokens", 0):
        return "with tokens beyond its window"
    return None
