"""LMCache's serde ``kvabr``: kvabr's codecs for objects in the daemon's own stores, such as a folder or Redis.

Importing this module registers the serde. A daemon imports only the modules of configured adapters, so configure
`CodedL2`, which wraps any adapter of LMCache.
"""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase, get_l2_adapter_config_class
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import get_registered_serde_types, register_serde_factory
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvabr.engines.lmcache.chunks import PLACES, ObjectLayout, object_key
from kvabr.engines.lmcache.coded_objects import ObjectCoder, SerdeSettings
from kvabr.types.errors import FormatError, UsageError

NAME = "kvabr"


class ObjectSerde(Serializer, Deserializer):  # type: ignore[misc]  # LMCache is not there when types are checked
    """LMCache's interface to `ObjectCoder`."""

    def __init__(self, coder: ObjectCoder) -> None:
        self._coder = coder

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Encode ``src`` into the bytes ``dst``; return the number of bytes."""
        layout, position = _layout_of(src), PLACES.at(key.chunk_hash)
        coded = self._coder.encode(_name_of(key, layout), layout, _bytes_of(src), _chunk_of(src, layout), position)
        _bytes_of(dst)[: len(coded)] = coded
        return len(coded)

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the size of a coded object in bytes."""
        return self._coder.size(ObjectLayout.of(layout_desc.shapes, layout_desc.dtypes))

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode the bytes ``src`` into ``dst``; raise `FormatError` if they are damaged."""
        layout = _layout_of(dst)
        self._coder.decode(_name_of(key, layout), layout, _bytes_of(src), _bytes_of(dst), _chunk_of(dst, layout))


class CodedL2(L2AdapterInterface):  # type: ignore[misc]
    """The class for ``--l2-adapter`` that adds the serde ``kvabr`` to another adapter of LMCache."""

    def __new__(cls, adapter_params: dict[str, Any], l1_memory_desc: object = None) -> L2AdapterInterface:
        """Return the adapter of LMCache that ``adapter_params`` describe."""
        kind = adapter_params.get("type")
        if not isinstance(kind, str):
            raise UsageError(
                '--l2-adapter, adapter_params: the "type" of an adapter of LMCache is missing, such as "fs"'
            )
        made = get_l2_adapter_config_class(kind)
        config: L2AdapterConfigBase = made.from_dict(adapter_params)
        config.persist_config = made._parse_persist_config(adapter_params)  # noqa: SLF001  # as LMCache itself does
        return create_l2_adapter(config, l1_memory_desc)


def _layout_of(held: MemoryObj) -> ObjectLayout:
    return ObjectLayout.of(held.get_shapes(), held.get_dtypes())


def _name_of(key: ObjectKey, layout: ObjectLayout) -> str:
    return f"{key.model_name}{object_key(key, layout.dtypes[0])}"


def _bytes_of(held: MemoryObj) -> memoryview:
    return memoryview(held.byte_array).cast("B")


def _chunk_of(held: MemoryObj, layout: ObjectLayout) -> torch.Tensor | None:
    if len(layout.shapes) != 1:
        return None
    chunk: torch.Tensor | None = held.tensor
    if chunk is None:
        raise FormatError("LMCache passed an object without memory")
    return chunk


def _create(given: dict[str, object]) -> AsyncSerdeProcessor:
    settings = SerdeSettings.read(given, '--l2-adapter, "serde"')
    serde = ObjectSerde(ObjectCoder(settings))
    return AsyncSerdeProcessor(serde, serde, max_workers=settings.max_workers)


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, _create)
PLACES.watch_hasher(TokenHasher)
