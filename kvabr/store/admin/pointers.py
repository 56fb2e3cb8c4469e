"""Pointers that outlive the span they point to, because another span that stays has the same groups."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from kvabr.store.admin.survey import FIRST_BYTES, MAX_SMALL_BYTES, ObjectFormat
from kvabr.store.objects.leases import INTENTS, LeaseTiming, Note, Runtime, sweeps
from kvabr.store.objects.protocol import Objects
from kvabr.types.errors import FormatError, NotFoundError


async def read_head(objects: Objects, layout: ObjectFormat, span: str) -> bytes | memoryview:
    """Return the head of a span; raise `NotFoundError` or `FormatError`."""
    data = await objects.get(span, 0, FIRST_BYTES, limit=FIRST_BYTES)
    size = layout.head_bytes(data)
    if size > len(data):
        data = await objects.get(span, 0, size, limit=MAX_SMALL_BYTES)
    return data[:size]


async def repoint(
    objects: Objects,
    layout: ObjectFormat,
    pointers: Mapping[str, str],
    *,
    now_s: float,
    timing: LeaseTiming,
    runtime: Runtime,
) -> set[str]:
    """Let pointers point to spans that stay; return those that do now.

    As a publisher does, this writes an intent first, so that no other collector removes these spans.

    Args:
        objects: The tenant's objects.
        layout: How to read and write them.
        pointers: The span that each is to point to, which has the pointer's group.
        now_s: The store's time.
        timing: How long notes are believed.
        runtime: The process's clock.
    """
    spans = sorted(set(pointers.values()))
    if not spans:
        return set()
    intent = f"{INTENTS}{secrets.token_hex(16)}"
    await objects.put(intent, Note(tuple(spans)).dumps())
    try:
        if await sweeps(objects, spans, now_s, timing):
            return set()

        async def write(span: str) -> list[str]:
            own = [pointer for pointer, to in pointers.items() if to == span]
            try:
                data = layout.pointer_to(span, await read_head(objects, layout, span))
            except (NotFoundError, FormatError):
                return []
            for pointer in own:
                await objects.put(pointer, data)
            return own

        return {pointer for done in await runtime.spread(map(write, spans)) for pointer in done}
    finally:
        await objects.delete([intent])
