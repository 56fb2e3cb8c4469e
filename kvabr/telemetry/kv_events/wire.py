"""Messages of KV events, as exchanged by vLLM, Dynamo, llm-d, LMCache and SGLang.

A message has three frames: a topic, a sequence number (8 bytes, big-endian), and a MessagePack batch: an array of the
time, a list of events and a data parallel rank. An event is a map with its name under ``type`` (current vLLM), or an
array of its name and its fields in the order of the classes here (older vLLM, SGLang). Both forms are read; maps are
written. Unknown fields and events are skipped.

A replay is requested on another socket with its first sequence number. Each answer is an empty frame followed by a
message; the last has the sequence number `END`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Raw, Struct

from kvabr.types.errors import FormatError
from kvabr.types.records import convert, message_decoder

MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a received batch."""
MAX_TOPIC_BYTES = 1024
STORAGE = "STORAGE"
"""vLLM's name for storage other than memory. Dynamo skips unknown media, ``REMOTE``, and events that name an owner."""
_MAX_BLOCK = 1 << 16

BlockHash = Annotated[int, Meta(ge=-(1 << 63))] | Annotated[bytes, Meta(min_length=1, max_length=64)]
_Text = Annotated[str, Meta(max_length=1024)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class KVBlocksStored(Struct, frozen=True, tag="BlockStored"):
    """Consecutive blocks of a prompt are available."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Hash of the previous block; None at the start of the prompt."""
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=0, le=_MAX_BLOCK)]
    """Tokens per block."""
    lora_id: int | None = None
    medium: _Text | None = None
    """Storage medium; None: the engine's own cache."""
    lora_name: _Text | None = None
    extra_keys: Any = None
    """For each block, additional contents of its hash."""
    group_idx: int | None = None
    kv_cache_spec_kind: _Text | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: _Text | None = None
    ownership: _Text | None = None
    session_id: _Text | None = None
    kvabr_asset: _Text | None = None
    """Digest in kvabr's asset name; readers other than kvabr skip this field."""


class KVBlocksRemoved(Struct, frozen=True, tag="BlockRemoved"):
    """Blocks are no longer available."""

    block_hashes: list[BlockHash]
    medium: _Text | None = None
    group_idx: int | None = None
    locality: _Text | None = None
    ownership: _Text | None = None


class KVBlocksCleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """All earlier blocks of the publisher are invalid."""


KVEvent = KVBlocksStored | KVBlocksRemoved | KVBlocksCleared


class _Batch(Struct, array_like=True):
    ts: float
    events: list[Raw]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_BATCHES = message_decoder(_Batch)
_KINDS: dict[str, type[KVEvent]] = {
    "BlockStored": KVBlocksStored,
    "BlockRemoved": KVBlocksRemoved,
    "AllBlocksCleared": KVBlocksCleared,
}
_MAPS = message_decoder(cast("type[KVEvent]", KVEvent))
_REQUIRED = frozenset({"parent_block_hash", "lora_id", "medium", "lora_name"})
"""Fields that vLLM's reader requires, even if they are None."""
_MAX_FIELDS, _ARRAY_FIELDS = 32, 11
"""For events as arrays: maximum number of fields, and number of fields that have the same position in all versions."""
_ARRAYS = message_decoder(cast("type[list[Any]]", Annotated[list[Any], Meta(min_length=1, max_length=_MAX_FIELDS)]))


class MessageDecoder:
    """Decodes batches from an untrusted peer."""

    def __init__(self) -> None:
        self.skipped = 0

    def events(self, payload: bytes | memoryview) -> list[KVEvent]:
        """Return the events of a batch, skipping malformed ones; raise `FormatError` if the batch is malformed."""
        if len(payload) > MAX_MESSAGE_BYTES:
            raise FormatError(f"KV events: a batch must have at most {MAX_MESSAGE_BYTES} bytes, got {len(payload)}")
        try:
            batch = _BATCHES.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FormatError(f"KV events: not a batch of events: {error}") from error
        return list(self._known(batch.events))

    def _known(self, raw: Sequence[Raw]) -> Iterator[KVEvent]:
        for each in raw:
            try:
                yield _event(each)
            except (msgspec.MsgspecError, FormatError, RecursionError, UnicodeDecodeError):
                self.skipped += 1


def _event(raw: Raw) -> KVEvent:
    if _is_map(memoryview(raw)[0]):
        return _MAPS.decode(raw)
    tag, *values = _ARRAYS.decode(raw)
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise msgspec.ValidationError("unknown kind of event")
    fields = dict(zip(("type", *kind.__struct_fields__[:_ARRAY_FIELDS]), (tag, *values), strict=False))
    return convert(fields, kind, "KV events")


def _is_map(code: int) -> bool:
    return 0x80 <= code < 0x90 or code in (0xDE, 0xDF)


def encoded(events: Sequence[KVEvent], at_s: float) -> bytes:
    """Encode a batch of events at ``at_s``, seconds since 1970, with a rank, since Dynamo requires one."""
    return _ENCODER.encode((at_s, [_as_map(event) for event in events], 0))


def _as_map(event: KVEvent) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    return {
        "type": type(event).__struct_config__.tag,
        **{k: v for k, v in fields.items() if v is not None or k in _REQUIRED},
    }


END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""
MAX_SEQUENCE = (1 << 63) - 1


def sequence_in(frame: bytes) -> int:
    """Parse a sequence number; raise `FormatError` if malformed."""
    if len(frame) != len(END) or (number := int.from_bytes(frame, "big")) > MAX_SEQUENCE:
        raise FormatError(f"KV events: {frame[:16]!r} is not a sequence number")
    return number


def sequence_frame(number: int) -> bytes:
    """Return the frame of a sequence number."""
    return number.to_bytes(len(END), "big")
