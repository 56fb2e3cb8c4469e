"""What is known of a store: its offers, heads of its spans, and where the groups of the assets in use are.

Reads small objects only. Nothing that comes is believed unchecked: `kvabr.store.objects.layout` parses it, in a thread,
and a span is used only as far as its chained digests are those that were asked for. Many plays may wait for one small
object: an answer that never comes must not cost them much, so it is asked for again while the first request is waited
for, and an answer that is merely late is not lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from cachetools import LRUCache, TTLCache

from kvabr.link.objects.lanes import LANES, SPARE_LANES
from kvabr.link.objects.span_search import Ask, SpanSearch, found_prefix, parsed_heads
from kvabr.store.objects import layout, spans
from kvabr.store.objects.failures import strange
from kvabr.store.objects.layout import StoredCatalog, StoreOffer
from kvabr.store.objects.protocol import Objects, StoredObject
from kvabr.store.objects.spans import SpanHead
from kvabr.transfer.interface import FoundPrefix
from kvabr.transfer.work import cancel_all, decoders
from kvabr.types.errors import (
    ConnectionLostError,
    ForbiddenError,
    FormatError,
    NotFoundError,
    Reason,
    RequestError,
    UnauthorizedError,
)
from kvabr.types.kv import KVSpec
from kvabr.types.naming import LOOKUP_RUN, MAX_PREFIX_DIGESTS, TrackNamespace, parse_prefix_track
from kvabr.types.units import with_snapshots_of

LOG = logging.getLogger("kvabr.store.objects")
T = TypeVar("T")

_AGAIN_S = 0.5
"""Seconds after which what was not answered is asked for again; then after twice as many more."""
_SILENCE_S = 2.0
"""Seconds for which the first request may bring nothing; doubled for each further one."""
_TRIES = 3


async def first_answer(ask: Callable[[float], Coroutine[Any, Any, T]]) -> T:
    """Return the first answer to a request, which is made up to three times while nothing comes.

    ``ask`` makes it, and takes the seconds for which it may bring nothing. An error is an answer, except that a
    connection that is lost or silent leaves those that were made besides.
    """
    tasks: list[asyncio.Task[T]] = []
    pending: set[asyncio.Task[T]] = set()
    try:
        while True:
            if len(tasks) < _TRIES:
                tasks.append(asyncio.get_running_loop().create_task(ask(_SILENCE_S * 2.0 ** len(tasks))))
                pending.add(tasks[-1])
            pause_s = None if len(tasks) == _TRIES else _AGAIN_S * 2.0 ** (len(tasks) - 1)
            done, pending = await asyncio.wait(pending, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not pending or not isinstance(task.exception(), ConnectionLostError):
                    return task.result()
    finally:
        await cancel_all(tasks)  # several may have ended in one turn


_FIRST_OFFERS, _MORE_OFFERS = LANES + SPARE_LANES, 8
"""Offers that are asked for at the same time. The first also open the connections that plays need."""
_OFFERS_S = 5.0
"""Seconds for which there are believed to be no more offers; a prompt that is found whole does not ask for them."""
_LATE_S = 1.0
"""Seconds for which the others are waited for once an offer has come, or a search has found something, since another
has."""
_WARN_S = 60.0
"""Seconds between warnings of what is in a store and cannot be used."""
_WHOLE_S = 60.0
"""Seconds after which offers are read again that are known: the bucket may have been emptied."""
_MAX_OFFERS_SEARCHED = 4
_SPANS_AT_ONCE, _RUNS = 32, 1024
_HEADS, _HEADS_S = 512, 60.0
"""Heads that are kept, and for how many seconds: a lifecycle rule may remove a span."""
_PLACED = 4096
"""Assets of which it is kept where their groups are."""
_AT_ONCE = 64
"""Small objects that are asked for at the same time."""
_HEAD_ROOM = 512
"""Bytes of a head besides its lists."""
_ENTRY_BYTES = 64
"""Bytes of a packed head for each frame and each group; the largest head that came corrects the guess."""


@dataclass(frozen=True)
class Placed:
    """Where the groups of an asset are: its spans."""

    offer: str
    names: tuple[str, ...]
    heads: tuple[SpanHead, ...]

    def place(self, track: str, group: int) -> tuple[str, int, int, str] | None:
        """Return key, first byte, end and SHA-256 of a group of a published track; None if there is none."""
        firsts, numbers = self._firsts.get(track, ([], []))
        at = bisect_right(firsts, group) - 1
        if at < 0:
            return None
        name, head = self.names[numbers[at]], self.heads[numbers[at]]
        own = head.by_name[track]
        if group - own.first >= len(own.bytes):
            return None
        return layout.span_key(self.offer, name), *head.place(track, group), own.digests[group - own.first]

    @cached_property
    def _firsts(self) -> dict[str, tuple[list[int], list[int]]]:
        """By track: the number of the first unit in each span that has some, and which span that is."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, head in enumerate(self.heads):
            for track in head.tracks:
                firsts, numbers = found.setdefault(track.name, ([], []))
                firsts.append(track.first)
                numbers.append(number)
        return found


@dataclass
class StrangeAnswers:
    """Whether a store, or a gateway in front of it, answers with something else than was published."""

    now: bool = False
    """Whether the last answers were strange: then one offer is asked for, and no more until it is right."""
    warn_s: float = -math.inf
    """When a warning may follow the last one."""


class StoreIndex:
    """The small objects of one bucket, for one event loop."""

    def __init__(
        self,
        bucket: Objects,
        heard: Callable[[int, float], None] = lambda _size, _seconds: None,
        strange_answers: StrangeAnswers | None = None,
    ) -> None:
        """Ask for nothing yet.

        Args:
            bucket: the store.
            heard: is called with the bytes of every small object that came, and the seconds that it took.
            strange_answers: those of earlier connections to the same store.
        """
        self._bucket, self._heard = bucket, heard
        self._offers: list[StoreOffer | None] = []
        """By number; None for one that cannot be read, as of a newer version."""
        self._offers_s = self._whole_s = -math.inf
        """When offers were asked for, and when all of them."""
        self._strange = StrangeAnswers() if strange_answers is None else strange_answers
        self._reading: asyncio.Task[None] | None = None
        self._heads: TTLCache[tuple[str, str], tuple[str, SpanHead]] = TTLCache(_HEADS, _HEADS_S, time.monotonic)
        """Name and head of spans, by offer and the digest or name that they were asked for by."""
        self._gone: TTLCache[str, bool] = TTLCache(_HEADS, _HEADS_S, time.monotonic)
        """Keys of spans that were not there although something named them, as a pointer may for a while."""
        self._head_bytes: dict[str, int] = {}
        self._runs: LRUCache[tuple[str, str], Sequence[str]] = LRUCache(_RUNS)
        """Digests of prompts up to a group that was found, by offer and the name of that group."""
        self._placed: LRUCache[TrackNamespace, tuple[Placed, ...]] = LRUCache(_PLACED)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._admitted = False
        """Whether any object could be read: then a refusal means that there is none, as S3 tells those who may not
        list."""
        self.requests = 0
        """GETs so far."""

    # ------------------------------------------------------------- offers

    async def open(self) -> None:
        """Read the offers, unless they are known: raise `TransportError` if the store cannot be read."""
        if math.isinf(self._offers_s):
            await self._read_offers()

    async def models(self, *, fresh: bool = False) -> bytes:
        """Return the list of models, as an origin tells it; ``fresh``: ask in any case."""
        if fresh or time.monotonic() > self._offers_s + _OFFERS_S:
            await self._read_offers()
        specs = {offer.spec.digest(): offer.spec for offer in self._offers if offer is not None}
        return json.dumps({"models": [spec.to_json() for spec in specs.values()]}).encode()

    async def _read_offers(self) -> None:
        """Read the offers that are not known yet; callers share one reading, which goes on without them."""
        await asyncio.shield(self._begin_reading())

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_new_offers())
            self._reading.add_done_callback(self._read_done)
        return self._reading

    def _read_done(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()  # for its waiters, if there are any left

    async def _read_new_offers(self) -> None:
        begun_s = time.monotonic()
        whole = None in self._offers or begun_s > self._whole_s + _WHOLE_S
        offers, step = [] if whole else list(self._offers), 1 if self._strange.now else _FIRST_OFFERS
        while (first := len(offers)) < layout.MAX_OFFERS:
            came = await self._those_that_come(range(first, min(first + step, layout.MAX_OFFERS)))
            self._strange.now = False
            offers += came
            if len(came) < step:
                break
            step = _MORE_OFFERS
        self._offers = offers
        self._offers_s = time.monotonic()
        self._whole_s = begun_s if whole else self._whole_s

    async def _those_that_come(self, numbers: range) -> list[StoreOffer | None]:
        """Return offers up to the first that does not exist; None, or what was known, for those that cannot be read.

        Once any has come, the others are not waited for long: one object must not hold up the plays of all.
        """
        tasks = [asyncio.get_running_loop().create_task(self._offer(number)) for number in numbers]
        pending, some = set(tasks), False
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_LATE_S if some else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                some = some or any(task.exception() is None and isinstance(task.result(), StoreOffer) for task in done)
        finally:
            await cancel_all(tasks)
        errors = [None if task.cancelled() else task.exception() for task in tasks]
        found = list[StoreOffer | None]()
        for number, task, error in zip(numbers, tasks, errors, strict=True):
            if isinstance(error, NotFoundError):
                break
            if error is not None and (not some or isinstance(error, UnauthorizedError)):
                raise error
            known = self._offers[number] if number < len(self._offers) else None
            found.append(known if error is not None or task.cancelled() else task.result())
        return found

    async def _offer(self, number: int) -> StoreOffer | None:
        """Return the offer of a number; None if it cannot be read, as of a newer version. Raises `NotFoundError`."""
        data = await self._get(layout.offer_key(number), layout.MAX_OFFER_BYTES)
        if data is None:
            raise NotFoundError(f"no offer {number}")
        try:
            return StoreOffer.loads(data)
        except FormatError as error:  # of a newer version, or damaged: players of this one find nothing in it
            if (why := strange(data)) is not None:
                raise self._wrong(layout.offer_key(number), why) from error
            self._warn(layout.offer_key(number), str(error))
        return None

    def _wrong(self, key: str, why: str) -> RequestError:
        """Return the error for an answer that nobody has published, and warn of it."""
        self._strange.now = True
        self._warn(key, why)
        told = f"{self._bucket.below(key)}: the answer is not what was published: {why}; a gateway or a login page?"
        return RequestError(told, reason=Reason.WRONG)

    def _warn(self, key: str, why: str) -> None:
        """Say, once in a while, that something in the store cannot be used."""
        if time.monotonic() > self._strange.warn_s:
            self._strange.warn_s = time.monotonic() + _WARN_S
            LOG.warning("%s: cannot be used: %s", self._bucket.below(key), why)

    async def close(self) -> None:
        """End what is being read."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    # ------------------------------------------------------------- lookups

    async def find(self, spec: KVSpec, digests: Sequence[str], *, any_dtype: bool) -> FoundPrefix | None:
        """See `PrefixFinder.find`."""
        await self.open()
        tried = self._fitting(spec, any_dtype=any_dtype)
        best = await self._best(tried, digests)
        if best is None and time.monotonic() > self._offers_s + _OFFERS_S:
            await self._read_offers()
            more = [offer for offer in self._fitting(spec, any_dtype=any_dtype) if offer not in tried]
            best = await self._best(more, digests)
        if best is not None and (best.catalog is None or len(best.catalog.chunks) < len(digests)):
            self._read_if_old()
        return best

    async def lookup(self, namespace: TrackNamespace, track: str) -> bytes:
        """Return what a relay asks for by the name of a lookup: the catalog of the longest prefix.

        Of a prompt so long that the name has not all of its groups, whole spans are found and what follows the last
        one; the client asks again for groups inside the first span that is not there.

        Raises:
            NotFoundError: there is none.
            RequestError: what there is does not fit together.
            TransportError: the store cannot be asked.
        """
        try:
            names = [layout.span_name(namespace.prompt), *(key.hex() for key in parse_prefix_track(track))]
        except FormatError as error:
            raise NotFoundError(str(error)) from error
        await self.open()
        offers = [
            offer for offer in reversed(self._offers) if offer is not None and offer.spec.model == namespace.model
        ]
        try:
            best = await self._best(offers[:_MAX_OFFERS_SEARCHED], names, named=True)
        except FormatError as error:
            raise RequestError(f"{self._bucket.url}: {error}; publish it again") from error
        self._read_if_old()
        if best is None or best.catalog is None:
            raise NotFoundError(f"nothing of this prompt is in {self._bucket.url}")
        return best.catalog.dumps().encode()

    def _read_if_old(self) -> None:
        """Read new offers without waiting for them: more of a prompt may be in one."""
        if time.monotonic() > self._offers_s + _OFFERS_S:
            self._begin_reading()

    def _fitting(self, spec: KVSpec, *, any_dtype: bool) -> list[StoreOffer]:
        """Return the offers of a spec, the latest first."""
        found = []
        for offer in reversed(self._offers):
            if offer is not None:
                wanted = with_snapshots_of(spec, offer.spec)
                wanted = wanted.with_dtypes(offer.spec) if any_dtype else wanted
                if wanted.digest() == offer.spec.digest():
                    found.append(offer)
        return found[:_MAX_OFFERS_SEARCHED]

    async def _best(
        self, offers: Iterable[StoreOffer], digests: Sequence[str], *, named: bool = False
    ) -> FoundPrefix | None:
        """Return the longest prefix in any of some offers; raise an error only if nothing is found.

        ``named``: the digests are those in the name of a lookup, which may be thinned.
        """
        search = self._search_named if named else self._search
        tasks = [asyncio.get_running_loop().create_task(search(offer, digests)) for offer in offers]
        pending, found, errors = set(tasks), list[FoundPrefix](), list[BaseException]()
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_LATE_S if found else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                errors += [error for task in done if (error := task.exception()) is not None]
                answers = [task.result() for task in done if task.exception() is None]
                found += [answer for answer in answers if answer is not None]
        finally:
            await cancel_all(tasks)
        if errors and not found:
            raise errors[0]

        return max(found, key=lambda one: 0 if one.catalog is None else one.catalog.tokens, default=None)

    async def _search_named(self, offer: StoreOffer, keys: Sequence[str]) -> FoundPrefix | None:
        """Search for a prompt of which a lookup names the first group, and others as `prefix_positions` says."""
        plain, digests = await asyncio.gather(self._search(offer, keys), self._whole_digests(offer, keys))
        found = plain if digests is None else await self._search(offer, digests)
        if found is not None and found.catalog is not None:
            chunks = found.catalog.chunks
            for end in range(len(chunks), max(0, len(chunks) - offer.span_groups), -1):
                self._runs[offer.id, layout.span_name(chunks[end - 1])] = chunks[:end]
        return found

    async def _whole_digests(self, offer: StoreOffer, keys: Sequence[str]) -> list[str] | None:
        """Return the digests of the groups of a prompt from the first one on, as far as a lookup tells them.

        Spans tell the digests between those that the lookup names. None: the lookup names all of them.
        """
        if len(keys) > (MAX_PREFIX_DIGESTS + 1) // LOOKUP_RUN and (run := await self._run(offer, keys[1:])):
            return [*run, *keys[1 + len(run) // offer.span_groups :]]
        # The second lookup of a prompt begins where the first one ended.
        known = self._runs.get((offer.id, keys[1])) if len(keys) > 1 else None
        return None if known is None else [*known, *keys[2:]]

    async def _run(self, offer: StoreOffer, keys: Sequence[str]) -> list[str]:
        """Return the digests in the full spans from the first group on that are there, of those named ``keys``."""
        run, size = list[str](), offer.span_groups
        while len(run) < size * len(keys):
            first = len(run) // size
            end = min(len(keys), first + (_SPANS_AT_ONCE if run else 1))
            asks = [Ask("span", at) for at in range(first, end)]
            for number, answer in enumerate(await self._ask(offer, asks, keys), first):
                head = answer and answer[1]
                whole = head is not None and head.first == number * size and len(head.digests) == size
                if head is None or not whole or not head.digests[-1].startswith(keys[number]):
                    return run
                run += head.digests
        return run

    async def _search(self, offer: StoreOffer, digests: Sequence[str]) -> FoundPrefix | None:
        search = SpanSearch(digests, offer.span_groups, states=layout.has_states(offer.spec))
        names: dict[int, str] = {}
        while asks := search.wanted():
            answers = dict(zip(asks, await self._ask(offer, asks, digests), strict=True))
            names |= {id(head): name for name, head in filter(None, answers.values())}
            search.take({ask: answer and answer[1] for ask, answer in answers.items()})
        heads = tuple(search.found)
        if not heads:
            return None
        placed = Placed(offer.id, tuple(names[id(head)] for head in heads), heads)
        made = await asyncio.get_running_loop().run_in_executor(decoders(), found_prefix, offer, heads)
        if made.catalog is not None:
            self._keep(made.catalog.namespace, placed)
        return made

    async def _ask(
        self, offer: StoreOffer, asks: Sequence[Ask], digests: Sequence[str]
    ) -> list[tuple[str, SpanHead] | None]:
        """Return name and head of each of some spans; None for what is not there, or is no span of this offer."""
        keys = [(offer.id, f"{ask.kind} {layout.span_name(digests[ask.group])}") for ask in asks]
        unknown = [number for number, key in enumerate(keys) if key not in self._heads]
        came = await asyncio.gather(*(self._read_head(offer, asks[at], digests[asks[at].group]) for at in unknown))
        parsed = await asyncio.get_running_loop().run_in_executor(decoders(), partial(parsed_heads, offer, came))
        parsed = [None if each and layout.span_key(offer.id, each[0]) in self._gone else each for each in parsed]
        for number, answer in zip(unknown, parsed, strict=True):
            if answer is not None:
                self._heads[keys[number]] = answer
                known = self._head_bytes.get(offer.id, 0)
                self._head_bytes[offer.id] = max(known, answer[1].begin)
        fresh = dict(zip(unknown, parsed, strict=True))
        return [fresh[number] if number in fresh else self._heads.get(key) for number, key in enumerate(keys)]

    async def _read_head(self, offer: StoreOffer, ask: Ask, digest: str) -> tuple[str | None, memoryview] | None:
        """Return a span's name and its first bytes, with all of its head; or None and a pointer; or None."""
        if ask.kind == "pointer":
            data = await self._get(layout.pointer_key(offer.id, digest), spans.MAX_POINTER_BYTES)
            return None if data is None else (None, data)
        name = layout.span_name(digest, end=ask.kind == "end")
        key = layout.span_key(offer.id, name)
        size = self._guess(offer)
        data = await self._get(key, size, end=size)
        if data is None:
            return None
        try:
            missing = spans.head_bytes(data) - len(data)
        except FormatError as error:
            self._warn(key, str(error))
            return None
        if missing > 0 and len(data) == size:
            rest = await self._get(key, missing, start=size, end=size + missing)
            data = memoryview(bytes(data) + bytes(rest or b""))
        return name, data

    def _guess(self, offer: StoreOffer) -> int:
        """Return how many bytes to ask for of a span so that its whole head is likely to be among them."""
        known = self._head_bytes.get(offer.id)
        if known is not None:
            return min(known + known // 8, spans.MAX_HEAD_BYTES)
        entries = offer.span_groups * (1 + len(offer.published))
        return min(_HEAD_ROOM + _ENTRY_BYTES * entries, spans.HEAD_BYTES)

    # ------------------------------------------------------------- assets

    async def catalog(self, namespace: TrackNamespace) -> bytes:
        """Return the catalog of an asset by its name, as it was published.

        Raises:
            NotFoundError: there is none.
            RequestError: it is damaged, or of another model.
        """
        key = layout.catalog_key(namespace.prompt)
        data = await self._get(key, layout.MAX_STORED_CATALOG_BYTES)
        if data is None:
            raise NotFoundError(f"no such asset {namespace.model}/{namespace.prompt} in {self._bucket.url}")
        try:
            stored, placed, model = await asyncio.get_running_loop().run_in_executor(decoders(), _parsed_catalog, data)
        except FormatError as error:
            if (why := strange(data)) is not None:
                raise self._wrong(key, why) from error
            raise RequestError(f"{self._bucket.below(key)}: {error}; publish it again") from error
        if model != namespace.model:
            raise NotFoundError(f"{self._bucket.below(key)}: is of the model {model}, not {namespace.model}")
        self._keep(namespace, placed)
        return stored.catalog

    def place(
        self, namespace: TrackNamespace, track: str, group: int, digest: str | None
    ) -> tuple[str, int, int] | None:
        """Return key, first byte and end of a group of an asset that was found; None if it is not known.

        Of several tracks of one name the one whose frame has the SHA-256 ``digest`` is meant.
        """
        found = [
            place for placed in self._placed.get(namespace, ()) if (place := placed.place(track, group)) is not None
        ]
        best = next((place for place in found if place[3] == digest), found[0] if found else None)
        return None if best is None else best[:3]

    def knows(self, namespace: TrackNamespace) -> bool:
        """Return whether `place` knows of an asset."""
        return namespace in self._placed

    async def profile_bytes(self, sha256: str) -> int:
        """Return the size of a codec profile; `NotFoundError` if there is none."""
        sizes = (offer.profile_bytes for offer in self._offers if offer is not None and offer.profile == sha256)
        size = next(sizes, None)
        if size is None:
            info = await first_answer(partial(self._looked_for, layout.profile_key(sha256)))
            size = None if info is None else info.size
        if not size:
            raise NotFoundError(f"no codec profile {sha256} in {self._bucket.url}")
        return size

    async def _looked_for(self, key: str, wait_s: float) -> StoredObject | None:
        try:
            async with asyncio.timeout(wait_s):
                return await self._bucket.head(key)
        except TimeoutError as error:
            raise self._bucket.silent(key, wait_s) from error

    def lost(self, key: str) -> None:
        """Note that a span is gone: what was known of it is no longer believed, and a pointer to it not for a while."""
        self._gone[key] = True
        _, offer, name = key.split("/")
        for known, (span, _) in list(self._heads.items()):
            if known[0] == offer and span == name:
                self._heads.pop(known, None)

    # -------------------------------------------------------------- internals

    def _keep(self, namespace: TrackNamespace, placed: Placed) -> None:
        others = tuple(each for each in self._placed.get(namespace, ()) if each.offer != placed.offer)
        self._placed[namespace] = (placed, *others[: _MAX_OFFERS_SEARCHED - 1])

    async def _get(self, key: str, limit: int, *, start: int = 0, end: int | None = None) -> memoryview | None:
        """Return an object, or bytes of it; None if there is none."""
        async with self._turns:
            self.requests += 1
            begun_s = time.monotonic()
            try:
                data = await first_answer(lambda wait_s: self._bucket.get(key, start, end, limit=limit, wait_s=wait_s))
            except NotFoundError:
                self._admitted = True
                data = None
            except ForbiddenError:
                if not self._admitted:
                    raise
                data = None
            else:
                self._admitted = True
            self._heard(0 if data is None else len(data), time.monotonic() - begun_s)
            return data


def _parsed_catalog(data: memoryview) -> tuple[StoredCatalog, Placed, str]:
    """Return a stored catalog, where its groups are, and its model."""
    stored = StoredCatalog.loads(data)
    catalog = stored.parsed()
    listed = spans.units_by_span(catalog, stored.span_groups)
    heads = [
        replace(spans.head_of(catalog, number, units, stored.span_groups), begin=begin)
        for number, (units, begin) in enumerate(zip(listed, stored.begins, strict=True))
    ]
    return stored, Placed(stored.offer, stored.spans, tuple(heads)), catalog.spec.model
