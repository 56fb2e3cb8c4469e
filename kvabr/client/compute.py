"""Compute a whole prompt with the engine, without fetching."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch

from kvabr.client.engine_work import on_engine, timed
from kvabr.client.result import Played
from kvabr.client.runner import PlayCall
from kvabr.codec.quantised import all_finite, as_type, check_wanted, convert
from kvabr.player.session_types import ENGINE_PATIENCE, GroupRecord, PlayRecord
from kvabr.types.catalog import RECOMPUTED
from kvabr.types.engine import Engine, ResidentEngine, prefill_classes
from kvabr.types.errors import KvabrError, ModelError, UsageError
from kvabr.types.events import CacheDelivered, RecomputeDone, RecomputeStarted
from kvabr.types.kv import KVSpec
from kvabr.types.units import computed_shape


async def compute(call: PlayCall) -> Played:
    """Compute the whole prompt; raise `ModelError` if the engine fails or does not end."""
    engine, tokens, options, clock = call.engine, call.tokens, call.options, call.clock
    if engine is None:
        raise UsageError("there is no engine to recompute with")
    spec, lookup_s = engine.spec, clock.now()
    groups = spec.groups(len(tokens))
    patience_s = call.patience_s + ENGINE_PATIENCE * call.engine_s(0, len(tokens)) + call.first_call_s
    options.note(RecomputeStarted(0.0, 0, groups))
    try:
        async with asyncio.timeout(patience_s):
            work = partial(timed, asyncio.get_running_loop().time, _checked, engine, tokens)
            parts, engine_s = await on_engine(engine, work)
        parts = _placed(call, parts, spec)
        call.memory.costs.of(engine).note(0, len(tokens), engine_s)
        call.save_costs()
    except TimeoutError as error:
        raise ModelError(f"no group was fetched, and the engine did not end within {patience_s:.1f} s") from error
    except KvabrError:
        raise
    except Exception as error:  # engines raise arbitrary errors
        raise ModelError(f"no group was fetched, and the engine failed: {error!r}") from error
    ttft_s = clock.now()
    took_s, met = ttft_s - lookup_s, ttft_s <= clock.deadline_s
    options.note(RecomputeDone(took_s, 0, groups))
    options.note(CacheDelivered(took_s, met, 0.0))
    record = PlayRecord(
        [GroupRecord(group, RECOMPUTED, requested_s=0.0, ready_s=took_s, source=RECOMPUTED) for group in range(groups)],
        delivered_s=took_s,
        met=met,
        tokens_recomputed=len(tokens),
        recompute_s=took_s,
        steps=[("compute", 0, groups)],
    )
    return Played(parts, len(tokens), (RECOMPUTED,) * groups, ttft_s, lookup_s, met, 0.0, record, spec)


def _checked(engine: Engine, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    resident = engine.reside(len(tokens)) if isinstance(engine, ResidentEngine) else None
    parts = prefill_classes(engine, tokens) if resident is None else (resident.prefill(tokens, 0),)
    for kv, part in zip(parts, engine.spec.parts, strict=True):
        due = computed_shape(part, len(tokens))
        if tuple(kv.shape) != due or not all_finite(kv):
            raise ModelError(f"the engine must return {due} without NaN or infinity, got {tuple(kv.shape)}")
    return parts


def _placed(call: PlayCall, parts: tuple[torch.Tensor, ...], spec: KVSpec) -> tuple[torch.Tensor, ...]:
    options, tokens = call.options, len(call.tokens)
    if options.out is None:
        wanted = [options.dtype or part.torch_dtype for part in spec.parts]
        for dtype, part in zip(wanted, spec.parts, strict=True):
            check_wanted(dtype, part)
        pairs = zip(parts, wanted, spec.parts, strict=True)
        return tuple(as_type(kv.cpu(), dtype, part) for kv, dtype, part in pairs)
    place = options.out[:, :, :, :tokens]
    if tuple(place.shape) != spec.shape(tokens):
        have, needed = tuple(options.out.shape), spec.shape(tokens)
        raise UsageError(f"`out` must have room for {needed}, got {have}")
    check_wanted(place.dtype, spec)
    convert(parts[0], place, spec)
    return (place,)
