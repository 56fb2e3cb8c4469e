"""Make the result of an ended play: a cache, an error for missing groups, or a compressed prefix."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import torch

from kvabr.client.compute import compute
from kvabr.client.play import EndedPlay, upgrade
from kvabr.client.result import IncompleteError, Played, PlayedPrefix, listed
from kvabr.client.runner import PlayCall
from kvabr.player.blend_plan import delivered_loss
from kvabr.player.prefixes import PlacedPrefix, prefix_loss
from kvabr.player.session_types import PlayRecord
from kvabr.types.catalog import Catalog
from kvabr.types.errors import KvabrError, ModelError
from kvabr.types.events import CacheDelivered, PlayGaveUp
from kvabr.types.loss import played_loss, predicted_loss, promised_loss


async def report_whole(call: PlayCall, ended: EndedPlay) -> Played:
    """Return a play's cache; errors as `AsyncClient.play`.

    If groups are missing and the engine cannot compute single groups, it computes the whole prompt.
    """
    options, clock, record = call.options, call.clock, ended.record
    if record.gave_up is not None:
        options.note(PlayGaveUp(clock.now() - ended.lookup_s, record.gave_up))
        error = ended.driver.engine_error
        if call.engine is not None and not ended.prepared.catalog.even and error is None:
            return await compute(call)
        if isinstance(error, KvabrError):
            raise error
        message = f"no complete cache after {clock.now():.2f} s: {record.gave_up}"
        if error is not None:
            raise ModelError(call.with_trouble(message)) from error
        raise _incomplete(call, ended, message, record.gave_up)
    assembler, prepared, catalog = ended.assembler, ended.prepared, ended.prepared.catalog
    take = partial(assembler.take_classes, upgrades=options.after is not None)
    # A GPU may wait for a batch, or for kernels to compile.
    parts = await asyncio.to_thread(take) if assembler.together else take()
    ttft_s = clock.now()
    record.met = ttft_s + ended.rest_s <= clock.deadline_s
    record.tail, record.tail_s = prepared.tail, prepared.tail_s
    coverage = tuple(track or "" for track in assembler.coverage)
    loss, blend = promised_loss(catalog, coverage, delivered_loss(catalog, record)), record.blend
    options.note(CacheDelivered(ttft_s - ended.lookup_s, record.met, loss))
    return replace(
        _played(ended, catalog, parts, coverage, ttft_s, loss),
        met=record.met,
        fusion_loss=0.0 if blend is None else blend.fusion_loss,
        computed_again=assembler.computed_again,
        tail=prepared.tail,
        upgrades=None if options.after is None else upgrade(call, ended, options.after),
    )


def _played(
    ended: EndedPlay,
    catalog: Catalog,
    parts: tuple[torch.Tensor, ...],
    coverage: tuple[str, ...],
    s: float,
    loss: float,
) -> Played:
    prepared, tokens = ended.prepared, catalog.tokens
    played = Played(parts, tokens, coverage, s, ended.lookup_s, False, loss, ended.record, catalog.spec, catalog)
    return replace(played, catalog_sha256=prepared.sha256, limited_by=prepared.limited_by)


def _incomplete(call: PlayCall, ended: EndedPlay, message: str, reason: str) -> IncompleteError:
    prepared, record, catalog = ended.prepared, ended.record, ended.prepared.catalog
    missing, prefix = record.missing, None
    usable = missing[0] if missing and catalog.every_token else catalog.groups
    parts, found = ended.assembler.take_prefix(usable)
    if found.tokens:
        rest = catalog.tokens - found.tokens
        begin = catalog.with_tail(catalog.spec.groups(found.tokens), rest)
        coverage = _tracks(ended, found)
        if catalog.every_token:
            loss = promised_loss(begin, coverage, played_loss(begin, _steps_before(record, usable)))
        else:
            loss = predicted_loss(begin, coverage)
        prefix = _played(ended, begin, parts, coverage, call.clock.now(), loss)
        prefix = replace(prefix, tail=rest + prepared.tail)
    tokens = 0 if prefix is None else prefix.tokens
    if missing:
        names = map(str if catalog.every_token else catalog.title, missing)
        message += f"; missing groups: {listed(names)}; in place before them: {tokens:,} of {catalog.tokens:,} tokens"
    return IncompleteError(call.with_trouble(message), reason, missing, record, prefix)


def report_coded(call: PlayCall, ended: EndedPlay) -> PlayedPrefix:
    """Return a compressed cache; raise `IncompleteError` if groups are missing."""
    record = ended.record
    if record.gave_up is not None:
        call.options.note(PlayGaveUp(call.clock.now(), record.gave_up))
        message = f"no complete cache after {call.clock.now():.2f} s: {record.gave_up}"
        raise IncompleteError(call.with_trouble(message), record.gave_up, record.missing, record, None)
    return report_prefix(call, ended, 1)


def report_prefix(call: PlayCall, ended: EndedPlay, block: int) -> PlayedPrefix:
    """Return the whole blocks before the first missing group, compressed."""
    prepared, record, catalog = ended.prepared, ended.record, ended.prepared.catalog
    groups, found = ended.assembler.take_coded(record.used, block)
    coverage = _tracks(ended, found)
    unused = sum(one.bytes for one in record.groups) - sum(record.groups[group].bytes for group in found.groups)
    cut = prepared.cut
    if record.missing or record.used is not None:
        cut = record.cut or record.gave_up or "the play ended"
        if record.missing and not catalog.every_token:
            cut += f"; missing: {listed(map(catalog.title, record.missing))}"
        if record.gave_up is None:  # else the reason has it
            cut = "; ".join((cut, *ended.driver.session.retries.last_faults))
    return PlayedPrefix(
        spec=catalog.spec,
        groups=groups,
        dtype=call.options.dtype,
        spans=found.spans,
        first=catalog.first_token,
        tokens=found.tokens,
        requested=catalog.tokens + prepared.tail,
        units=tuple(map(catalog.unit, found.groups)),
        coverage=coverage,
        loss=prefix_loss(catalog, found, coverage),
        bytes_fetched=record.bytes_fetched,
        bytes_wasted=record.bytes_wasted + unused,
        seconds=call.clock.now(),
        cut=cut,
        damaged=len(record.damaged),
        failed=record.failed,
        tail=prepared.tail,
        live=record.live,
    )


def _tracks(ended: EndedPlay, found: PlacedPrefix) -> tuple[str, ...]:
    coverage = ended.assembler.coverage
    return tuple(coverage[group] or "" for group in found.groups)


def _steps_before(record: PlayRecord, groups: int) -> list[tuple[str, int, int | str]]:
    return [
        (kind, where, min(what, groups) if isinstance(what, int) else what)
        for kind, where, what in record.steps
        if where < groups
    ]
