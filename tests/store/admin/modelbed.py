"""Objects in memory whose every request is a step, a scheduler that interleaves processes step by step, and a layout
that is short: what a model checker needs to try publishers, collectors and pins in all orders, with crashes.
"""

from __future__ import annotations

import json
import types
from dataclasses import dataclass

from kvabr.store.admin.survey import Manifest
from kvabr.store.objects.leases import CATALOGS, LeaseTiming, Runtime, offer_note, touch
from kvabr.store.objects.writer import PublishGuard
from kvabr.types.errors import AssetError, FormatError, NotFoundError

MODEL, OFFER, PROFILE = "test/model", "offer", "p/profile"
TIMING = LeaseTiming(intent_s=1000.0, sweep_s=100.0, wait_s=50.0, poll_s=1.0)
PAGE = 2
_OFFER = json.dumps({"id": OFFER, "model": MODEL, "profile": PROFILE}).encode()


@dataclass(frozen=True)
class Info:
    key: str
    size: int
    modified_s: float


@types.coroutine
def step():
    yield


class World:
    """Objects, and the one clock that the store and all processes have. Each request takes a tick."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.now_s = 1000.0
        self.steps = 0
        self.requests: list[tuple[str, str]] = []

    async def _request(self, what, key):
        await step()
        self.steps += 1
        self.now_s += 0.001
        self.requests.append((what, key))

    async def get(self, key, start=0, end=None, *, limit):
        await self._request("get", key)
        if key not in self.objects:
            raise NotFoundError(key)
        data = self.objects[key][0][start:end]
        assert len(data) <= limit
        return data

    async def head(self, key):
        await self._request("head", key)
        return self._info(key) if key in self.objects else None

    async def put_new(self, key, data):
        await self._request("put_new", key)
        if key in self.objects:
            return False
        self.objects[key] = bytes(data), self.now_s
        return True

    async def put(self, key, data):
        await self._request("put", key)
        self.objects[key] = bytes(data), self.now_s

    async def delete(self, keys):
        for key in keys:  # not atomic
            await self._request("delete", key)
            self.objects.pop(key, None)

    async def list(self, prefix):
        after = ""
        while True:
            await self._request("list", prefix)
            page = sorted(key for key in self.objects if key.startswith(prefix) and key > after)[:PAGE]
            for key in page:
                yield self._info(key)
            if len(page) < PAGE:
                return
            after = page[-1]

    def _info(self, key):
        data, modified_s = self.objects[key]
        return Info(key, len(data), modified_s)

    def add(self, key, value, age_s=0.0):
        self.objects[key] = json.dumps(value).encode(), self.now_s - age_s

    def value(self, key):
        return json.loads(self.objects[key][0])

    @property
    def runtime(self):
        async def sleep(seconds):
            await step()
            self.now_s += seconds

        return Runtime(now=lambda: self.now_s, sleep=sleep)

    def dangling(self) -> list[str]:
        """What catalogs and pointers name and is not there."""
        named = [(key, span) for key in self.keys(CATALOGS) for span in self.value(key)["spans"]]
        named += [(key, self.value(key)["span"]) for key in self.keys("i/")]
        return [f"{key} -> {span}" for key, span in named if span not in self.objects]

    def has_offer(self) -> bool:
        """Whether readers find the offer."""
        value = self.value("o/0") if "o/0" in self.objects else {}
        if "turn" in value:
            key = f"o/0.{value['turn']}"
            value = self.value(key) if key in self.objects else {}
        return bool(value)

    def keys(self, prefix):
        return sorted(key for key in self.objects if key.startswith(prefix))


class ShortLayout:
    """Objects are JSON."""

    def manifest(self, key, data):
        value = _loads(data)
        pointers = tuple(pointer_of(span, group) for span in value["spans"] for group in range(2))
        return Manifest(value["model"], 32, tuple(value["spans"]), value.get("profile"), pointers, {}, 16)

    def head_bytes(self, data):
        return len(data)

    def pointers_of(self, key, head):
        _loads(head)
        return tuple(pointer_of(key, group) for group in range(2))

    def pointer_to(self, span, head):
        _loads(head)
        return json.dumps({"span": span}).encode()

    def target_of(self, key, data):
        return _loads(data)["span"]

    def offer(self, data):
        value = _loads(data)
        return None if "turn" in value else (value["id"], value["model"], value.get("profile"))

    def first_offer_key(self, key):
        return key.partition(".")[0]

    def after_offer(self, key, first):
        first_key, _, turn = key.partition(".")
        if _loads(first).get("turn", 0) != int(turn or 0):
            return None
        return first_key, json.dumps({"turn": int(turn or 0) + 1}).encode()


def _loads(data):
    try:
        return json.loads(bytes(data))
    except ValueError as error:
        raise FormatError("not JSON") from error


def span_of(name):
    return f"s/{OFFER}/{name}"


def pointer_of(span, group):
    return f"i/{OFFER}/{span.rpartition('/')[2]}.{group}"


def world(*assets, age_s=500.0):
    """A bucket with assets that are long unused, each of the spans that are named, and spans without a catalog."""
    made = World()
    made.objects["o/0"] = _OFFER, made.now_s - age_s
    made.add(PROFILE, {}, age_s)
    for catalog, spans in assets:
        for name in spans:
            made.add(span_of(name), {"of": "the past"}, age_s)
            for group in range(2):
                made.add(pointer_of(span_of(name), group), {"span": span_of(name)}, age_s)
        if catalog is not None:
            value = {"model": MODEL, "spans": list(map(span_of, spans)), "profile": PROFILE}
            made.add(f"{CATALOGS}{catalog}", value, age_s)
    return made


async def put_offer(made):
    """Write the offer under the first key that is free, unless there is one, as the writer does."""
    for _ in range(10):
        key = "o/0"
        try:
            value = _loads(await made.get(key, limit=1000))
            if "turn" in value:
                key = f"{key}.{value['turn']}"
                value = _loads(await made.get(key, limit=1000))
        except NotFoundError:
            await made.put_new(key, _OFFER)
        else:
            assert value["id"] == OFFER
            return
    raise AssetError("offers come and go")


async def publish(made, catalog, spans, *, guarded=True):
    """Publish as `kvabr.store.objects.writer` does; return the asset, None if it could not."""
    keys = list(map(span_of, spans))
    what = {"model": MODEL, "catalog": catalog, "spans": [offer_note(OFFER), *keys, PROFILE]}
    guard = PublishGuard(made, **what, timing=TIMING, runtime=made.runtime)
    try:
        if guarded:
            await guard.__aenter__()
        await made.put_new(PROFILE, b"{}")
        await put_offer(made)
        for key in keys:
            if not await made.put_new(key, json.dumps({"of": catalog}).encode()):
                found = await made.head(key)
                if found is None or not guard.may_reuse(found.modified_s):
                    return None
            for group in range(2):
                await made.put_new(pointer_of(key, group), json.dumps({"span": key}).encode())
        if guarded:
            await guard.check()
        value = {"model": MODEL, "spans": keys, "profile": PROFILE}
        if not await made.put_new(f"{CATALOGS}{catalog}", json.dumps(value).encode()):
            await touch(made, catalog)
    except AssetError:
        return None
    finally:
        if guarded:
            await guard.__aexit__()
    return catalog


class Process:
    """A coroutine that takes one step at a time, and may be killed between two."""

    def __init__(self, work) -> None:
        self.work, self.result, self.error, self.alive = work, None, None, True
        self.steps = 0

    def advance(self) -> None:
        try:
            self.work.send(None)
            self.steps += 1
        except StopIteration as done:
            self.result, self.alive = done.value, False
        except Exception as error:  # noqa: BLE001 - whatever a process ends with
            self.error, self.alive = error, False

    def kill(self) -> None:
        """End it as SIGKILL does: nothing is cleaned up."""
        self.alive = False
        _LIMBO.append(self.work)  # a coroutine that is dropped is closed, and cleans up


_LIMBO: list = []


def finish_killed(made) -> None:
    """Close what was killed, with the world as it is: what they clean up now is undone."""
    kept = dict(made.objects)
    for work in _LIMBO:
        while True:
            try:
                work.throw(GeneratorExit)
            except BaseException:  # noqa: BLE001 - its end
                break
    _LIMBO.clear()
    made.objects = kept


def run(work):
    """Run one coroutine alone."""
    process = Process(work)
    while process.alive:
        process.advance()
    if process.error is not None:
        raise process.error
    return process.result


def interleave(works, switches, kills=()):
    """Run processes in turns: the first one, until ``switches`` (steps since the beginning) say to go to the next.

    ``kills`` has pairs of a process and the step of its own before which it is killed. The others run to their end.
    """
    processes = [Process(work) for work in works]
    turn, at = 0, 0
    switches, kills = set(switches), dict(kills)
    while any(each.alive for each in processes):
        if at in switches:
            turn += 1
        each = processes[turn % len(processes)]
        if not each.alive:
            turn += 1
            each = next(other for other in (*processes[turn % len(processes) :], *processes) if other.alive)
            turn = processes.index(each)
        if kills.get(processes.index(each)) == each.steps:
            each.kill()
        else:
            each.advance()
        at += 1
        assert at < 20_000, "does not end"
    return processes
