"""The two halves of the connector without vLLM, called as vLLM would: blocks in plain tensors."""

import time
from types import SimpleNamespace

import torch

from kvabr.data import default_catalog
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.settings import INSIDE
from kvabr.engines.vllm.blocks import EngineBlocks
from kvabr.engines.vllm.caches import EngineCaches, Pages
from kvabr.engines.vllm.config import ServedModel, VllmSettings
from kvabr.engines.vllm.plays import leave_client, take_client
from kvabr.engines.vllm.publishing import Publishers
from kvabr.engines.vllm.scheduler import SchedulerHalf
from kvabr.engines.vllm.worker import WorkerHalf
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.publisher import Publisher, with_layers
from tests.client.served import LIMIT_S
from tests.engines.paging import paged_blocks
from tests.toymodel import SPEC, ToyModel, prompt

BLOCK = 8
TOKENS = list(prompt(70).tokens)
LONGEST = """
from kvabr.abr.policies.cheapfirst import CheapFirst

class Longest(CheapFirst):
    def choose_tail(self, offers, costs):
        return len(offers) - 1
"""
"""A policy that leaves as much to the engine as it may."""


def request(name="r", tokens=TOKENS, **more):
    """The part of vLLM's requests that the halves read."""
    return SimpleNamespace(
        **{
            "request_id": name,
            "prompt_token_ids": tokens,
            "num_prompt_tokens": len(tokens or ()),
            "num_computed_tokens": len(tokens or ()),
            "lora_request": None,
            "mm_features": [],
            "cache_salt": None,
            "kv_transfer_params": None,
        }
        | more
    )


def lora(path, name="adapter", **more):
    """The part of a request's adapter that the halves read."""
    return SimpleNamespace(**{"lora_name": name, "lora_path": str(path), "load_inplace": False} | more)


def medium(first, tokens, value, **more):
    """The part of vLLM's ``MultiModalFeatureSpec`` that the halves read: a picture of a few pixels of one value."""
    data = {"pixel_values": SimpleNamespace(data=torch.full((2, 2), value))}
    place = SimpleNamespace(offset=first, length=tokens)
    told = {"data": data, "modality": "image", "identifier": f"picture {value}", "mm_position": place}
    return SimpleNamespace(**told | more)


def plain(spec):
    """One table of blocks for all layers."""
    layers = spec.only.layers
    return EngineCaches(spec.classes, (Pages(0, 0, BLOCK, tuple(map(str, layers)), layers),))


class Bench:
    """Both halves, as vLLM would call them, one step after the other."""

    def __init__(
        self, served, publish=None, *, heads=None, layers=None, spec=SPEC, caches=None, waits=False, **options
    ):
        """``caches``: vLLM's tables, or its description of a model, as ``(ServedModel, tensors by layer)``."""
        constants = {name: options.pop(name) for name in ("plays", "queue", "tail") if name in options}
        self.options = type("Settings", (VllmSettings,), {"tail": 0, **constants})(
            url=served.url,
            fingerprint=served.fingerprint,
            **({"policy": "fixed:FP16", "deadline_s": LIMIT_S, "player": INSIDE} | options),
        )
        given, named = caches if isinstance(caches, tuple) else (None, None)
        spec, caches = (spec, caches or plain(spec)) if given is None else (given.spec, given.caches)
        held = spec if layers is None else with_layers(spec, layers)
        each = tuple(heads or range(one.heads) for one in held.classes)
        self.model = given or ServedModel(spec, torch.float32, caches, each, waits=waits, layers=layers)
        self.client = take_client(self.options)
        self.client.begin(lambda client: client.round_trip()).result()
        made = None
        if publish is not None:
            tracks = list(self.options.tracks or ("FP16",))
            made = Publisher(publish, self.model.shard, prior=default_catalog(), tracks=tracks)
        self.evicted = set()
        """Blocks that were taken out of the prefix cache."""
        self.scheduler = SchedulerHalf(
            self.options, self.model, self.client, produces=made is not None, evict=self.evicted.update
        )
        self.publisher = made
        given = None
        if made is not None:
            given = Publishers(made, LivePublisher(made) if self.options.publish_live else None)
        self.worker = WorkerHalf(self.options, self.model, self.client, given)
        self.named = {}
        for pages in caches.pages:
            if pages.form is not None:
                size = pages.form.offset + torch.Size(pages.form.shape).numel() * pages.form.dtype.itemsize
                for name in pages.names:  # all ones: not numbers in any type
                    self.named[name] = torch.full((40, 1, 1, size), -1, dtype=torch.int8)
                continue
            if not pages.names:
                continue
            one = self.model.shard.classes[pages.part]
            shape = (40, one.heads, pages.held, sum(one.split))
            self.named |= {name: torch.full(shape, float("nan")) for name in pages.names}
        self.named = named or self.named
        self.caches = list(self.named.values())
        self.worker.register(self.named, lambda _: BlockLayout.PLAIN if named else BlockLayout.TRANSPOSED)
        self.running, self.tables = {}, {}

    def matched(self, asked, computed=0):
        """The answer to vLLM, after as many steps as it takes."""
        end_s = time.monotonic() + LIMIT_S
        while (answer := self.scheduler.matched(asked, computed))[0] is None:
            assert self.step() == (set(), set(), set())
            assert time.monotonic() < end_s
        return answer

    def step(self):
        """A step without computation: (published or given up, loaded, failed blocks)."""
        self.worker.begin(self.scheduler.step(self.running, self.tables.get))
        self.worker.computed()
        sent, received = self.worker.collect()
        for play in self.worker.placed():
            self.scheduler.placed(play)
        self.scheduler.received(received)
        return sent, received, self.worker.failed_blocks()

    def prefilled(self):
        """Write the cache of the prompt's whole groups into the first blocks, as the engine's prefill does."""
        paged_blocks(self.caches, list(range(8)), BlockLayout.TRANSPOSED).write(ToyModel().prefill(TOKENS[:64]))

    def published(self):
        """Wait until all publications have ended."""
        end_s = time.monotonic() + LIMIT_S
        while self.publisher._known:
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def steps(self):
        end_s = time.monotonic() + LIMIT_S
        while not any(ended := self.step()):
            assert time.monotonic() < end_s
        return ended

    def load(self, asked, computed=0, blocks=range(20)):
        """Return the promised tokens, and the blocks that were not filled."""
        count, waits = self.matched(asked, computed)
        assert waits == bool(count)  # no step is held up
        self.scheduler.allocated(asked, [list(blocks)], count)
        if not count:
            assert self.step() == (set(), set(), set())
            return count, set()
        _, received, failed = self.steps()
        assert received == {asked.request_id}
        return count, failed

    def blocks(self, numbers):
        heads = self.caches[0].shape[1]
        out = torch.empty(SPEC.layers, 2, heads, len(numbers) * BLOCK, SPEC.head_dim)
        paged_blocks(self.caches, numbers, BlockLayout.TRANSPOSED).read(out)
        return out

    def close(self):
        self.worker.close()
        leave_client(self.options)


def read(bench, runs):
    """Return the contents of blocks, a tensor per layer class."""
    sizes = {pages.part: len(runs[pages.group]) * pages.block for pages in bench.model.caches.pages}
    out = [torch.empty(part.shape(sizes[number])) for number, part in enumerate(bench.model.shard.parts)]
    EngineBlocks(bench.model, bench.named, lambda _: BlockLayout.TRANSPOSED).read(runs, out)
    return out


def exact(first, last):
    return ToyModel().prefill(TOKENS)[:, :, :, first:last]


def near(kv, wanted):
    return kv.shape == wanted.shape and torch.allclose(kv, wanted, rtol=2e-3, atol=2e-3)
