"""The adapter for LMCache's daemon, next to its own stores: `KvabrL2`.

The daemon calls methods from its threads, and polls descriptors for results. All work runs on one event loop in a
separate thread, within the time limits of the settings. Late answers and objects count as misses.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import compress, count, groupby
from typing import Any, Generic, TypeVar

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.platform import create_event_notifier

from kvabr.client.blocking import LoopThread
from kvabr.client.result import expand_here
from kvabr.codec.base import codec
from kvabr.engines.chunk_store import LOG, ChunkStore, KeyedOrigin, KeyedSettings, head_dim_of, places
from kvabr.engines.lmcache import ADAPTER
from kvabr.engines.lmcache.chunks import PLACES, ObjectLayout, as_kv, object_key, object_name, object_spec
from kvabr.engines.settings import TroubleLog
from kvabr.types.errors import FormatError, KvabrError, UsageError

_MAX_KINDS = 64
"""Kinds of objects in one daemon: models, groups of layers, element types."""

_R = TypeVar("_R")


class CompletedTasks(Generic[_R]):
    """Results of tasks by number, with a descriptor that signals new results. Thread-safe."""

    def __init__(self, lock: threading.Lock) -> None:
        self._results: dict[int, _R] = {}
        self._lock, self.notifier = lock, create_event_notifier()

    def add(self, task: int, result: _R) -> None:
        """Add a result, and wake the daemon through the descriptor."""
        with self._lock:
            self._results[task] = result
        self.notifier.notify()

    def pop(self, task: int) -> _R | None:
        """Remove and return the result of a task; None if there is none."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, _R]:
        """Remove and return all results."""
        with self._lock:
            results, self._results = self._results, {}
        return results


@dataclass(frozen=True)
class ObjectKind:
    """Common properties of objects in one store."""

    model: str
    workers: int
    layout: ObjectLayout

    @classmethod
    def of(cls, key: ObjectKey, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> ObjectKind:
        """Return the kind of an object."""
        return cls(key.model_name, ObjectKey.WorldSizeFromKVRank(key.kv_rank), ObjectLayout.of(shapes, dtypes))


@dataclass(frozen=True)
class KindStore:
    """The store of one kind of objects."""

    store: ChunkStore
    slots: asyncio.Semaphore
    """Limits the number of waiting publications: LMCache stores a whole prompt at once."""


class KvabrL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there when types are checked
    """The ``class_name`` for ``--l2-adapter``."""

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: object = None) -> None:
        """Read ``adapter_params`` (see `KeyedSettings`); raise `UsageError` if they are wrong."""
        super().__init__()
        del l1_memory_desc
        ADAPTER.check()
        self._settings = KeyedSettings.read(adapter_params, "--l2-adapter, adapter_params")
        for track in self._settings.tracks or ():
            codec(track)
        self._trouble = TroubleLog(LOG)
        self._kinds: dict[ObjectKind, asyncio.Task[KindStore | None]] = {}
        self._lock = threading.Lock()
        self._tasks, self._running = 0, set[Future[None]]()
        self._stored = CompletedTasks[L2StoreResult](self._lock)
        self._looked_up = CompletedTasks[Bitmap](self._lock)
        self._loaded = CompletedTasks[Bitmap](self._lock)
        self._closing = False
        PLACES.watch_hasher(TokenHasher)
        self._loop = LoopThread()

        async def open_origin() -> KeyedOrigin:
            return KeyedOrigin(self._settings)

        try:
            self._origin = self._loop.call(open_origin())
        except BaseException:
            self._loop.close()
            raise

    # ------------------------------------------------------------------ LMCache's contract

    def get_store_event_fd(self) -> int:
        """Return the descriptor that signals finished store tasks."""
        return int(self._stored.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that signals finished lookups."""
        return int(self._looked_up.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that signals finished loads."""
        return int(self._loaded.notifier.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start to publish objects, which keep their memory until then; without ``publish``, report success."""
        _check_pairs(keys, objects)
        return self._submit(self._stored, L2StoreResult(False, 0), lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return finished store tasks. A task succeeds if all its objects are published, now or before."""
        return self._stored.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Start to look up objects. There are no locks: objects that disappear later are misses."""
        return self._submit(self._looked_up, Bitmap(len(keys)), lambda: self._look_up(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the objects to load after a lookup, once; None while it runs."""
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: there are no locks."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start to play objects into memory. After the task ends, the memory is not touched."""
        _check_pairs(keys, objects)
        return self._submit(self._loaded, Bitmap(len(keys)), lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the completely loaded objects, once; None while the load runs."""
        return self._loaded.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        """Return the state for LMCache's ``/status``."""
        return {
            "is_healthy": not self._closing,
            "type": type(self).__name__,
            "url": self._settings.url,
            "publish": None if self._settings.publish is None else str(self._settings.publish),
            "origin_answers": not self._origin.pause.active,
            "kinds": len(self._kinds),
            "tasks": len(self._running),
        }

    def close(self) -> None:
        """Publish waiting objects, and wait for running loads, which write to LMCache's memory."""
        with self._lock:
            if self._closing:
                return
            self._closing, running = True, list(self._running)
        wait(running)
        self._loop.call(self._close())
        self._loop.close()
        for each in (self._stored, self._looked_up, self._loaded):
            each.notifier.close()

    # ----------------------------------------------------------------------- tasks

    def _submit(self, done: CompletedTasks[_R], failed: _R, work: Callable[[], Coroutine[Any, Any, _R]]) -> int:
        async def run() -> None:
            (result,) = await self._all(failed, [work()])
            done.add(task, result)

        with self._lock:
            if self._closing:
                raise UsageError("kvabr: the adapter is closed")
            task = self._tasks
            self._tasks += 1
            running = self._loop.begin(run())
            self._running.add(running)
        running.add_done_callback(self._over)
        return task

    def _over(self, running: Future[None]) -> None:
        with self._lock:
            self._running.discard(running)

    async def _kind(self, kind: ObjectKind) -> KindStore | None:
        """Return the store of a kind of objects; log once and return None if unsupported."""
        if kind not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                self._trouble.warn("objects are not stored", f"more than {_MAX_KINDS} kinds")
                return None
            self._kinds[kind] = asyncio.get_running_loop().create_task(self._open(kind))
        return await asyncio.shield(self._kinds[kind])

    async def _open(self, kind: ObjectKind) -> KindStore | None:
        settings = self._settings
        try:
            bare = object_spec("model", kind.layout, lambda width: width)
            name = await asyncio.to_thread(object_name, settings, kind.model, bare, kind.workers)
            spec = await asyncio.to_thread(
                object_spec, name, kind.layout, lambda width: head_dim_of(name, width, settings)
            )
            store = ChunkStore(
                spec,
                settings,
                "a chunk of LMCache's daemon",
                max_tokens=kind.layout.tokens,
                min_tokens=kind.layout.tokens,
                unplaced="the position of a chunk is not known: this daemon did not hash its prompt's tokens",
                origin=self._origin,
                any_heads=True,
            )
        except KvabrError as error:
            self._trouble.warn(f"objects of {kind.model} are neither stored nor loaded", error)
            return None
        return KindStore(store, asyncio.Semaphore(settings.queue))

    async def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        if self._settings.publish is None:  # LMCache would log a warning for each prompt if this failed
            return L2StoreResult(True, 0)
        sizes = await self._all(None, map(self._store_one, keys, objects))
        new = [(key, size) for key, size in zip(keys, sizes, strict=True) if size]
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        return L2StoreResult(None not in sizes, sum(size for _, size in new))

    async def _store_one(self, key: ObjectKey, held: MemoryObj) -> int | None:
        """Publish an object; return its bytes, 0 if it was published before, None if it failed."""
        if (kind := await self._kind(_kind_of(key, held))) is None:
            return None
        kv = as_kv(_tensor(held), kind.store.spec)
        async with kind.slots:
            text, position = object_key(key, kv.dtype), PLACES.at(key.chunk_hash)
            return await asyncio.wrap_future(await asyncio.to_thread(kind.store.put, text, kv, position))

    async def _look_up(self, keys: Sequence[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        found = Bitmap(len(keys))
        # Group the chunks of a prompt, in order, by rank and group of layers.
        rows = [list(row) for _, row in groupby(range(len(keys)), lambda place: replace(keys[place], chunk_hash=b""))]
        offered = await self._all([], (self._offered([keys[place] for place in row], layouts) for row in rows))
        for row, there in zip(rows, offered, strict=True):
            found.batched_set(list(compress(row, there)))
        return found

    async def _offered(self, keys: Sequence[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> list[bool]:
        layout = layouts[keys[0].object_group_id]
        opening = self._kind(ObjectKind.of(keys[0], layout.shapes, layout.dtypes))
        try:
            kind = await asyncio.wait_for(opening, self._settings.lookup_s)
        except TimeoutError:
            self._trouble.warn("lookups are not possible yet", "the digest of the model's weights is being computed")
            return []
        if kind is None:
            return []
        texts = [object_key(key, layout.dtypes[0]) for key in keys]
        return await kind.store.offered(texts, [PLACES.possible(key.chunk_hash) for key in keys])

    async def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        came = Bitmap(len(keys))
        came.batched_set(list(compress(count(), await self._all(False, map(self._load_one, keys, objects)))))
        if loaded := came.gather(list(keys)):
            self._notify_keys_accessed(loaded)
        return came

    async def _load_one(self, key: ObjectKey, held: MemoryObj) -> bool:
        if (kind := await self._kind(_kind_of(key, held))) is None:
            return False
        chunk = _tensor(held)
        played = await kind.store.play(object_key(key, chunk.dtype), PLACES.possible(key.chunk_hash))
        if played is None:
            return False
        there = places(played, as_kv(chunk, played.spec))
        errors = await asyncio.get_running_loop().run_in_executor(None, expand_here, played.groups, there)
        if (wrong := next(filter(None, errors), None)) is not None:
            self._trouble.warn("a chunk cannot be decoded", wrong)
        return wrong is None

    async def _all(self, failed: _R, works: Iterable[Coroutine[Any, Any, _R]]) -> list[_R]:
        """Run all coroutines to the end; return ``failed`` in place of each that fails."""
        results = await asyncio.gather(*works, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                self._trouble.warn("an object of LMCache could not be stored or loaded", error)
        return [failed if isinstance(one, BaseException) else one for one in results]

    async def _close(self) -> None:
        for opening in self._kinds.values():
            opening.cancel()
        for kind in await asyncio.gather(*self._kinds.values(), return_exceptions=True):
            if isinstance(kind, KindStore):
                await kind.store.close()
        await self._origin.close()


def _check_pairs(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> None:
    if len(keys) != len(objects):
        raise ValueError(f"there must be one object for each of {len(keys)} keys, got {len(objects)}")


def _kind_of(key: ObjectKey, held: MemoryObj) -> ObjectKind:
    return ObjectKind.of(key, held.get_shapes(), held.get_dtypes())


def _tensor(held: MemoryObj) -> torch.Tensor:
    chunk: torch.Tensor | None = held.tensor
    if chunk is None:
        raise FormatError("LMCache passed an object without memory")
    return chunk
