"""The connector's half in a worker of vLLM: plays into the engine's blocks, and publishes from them.

The engine's thread only begins things here and asks what has ended. Plays run on the fetcher's event loop; copies
between kvabr's caches and the engine's blocks in a thread of their own. That is safe: vLLM keeps the blocks of a
request, aborted or not, until it was told that its load, or its publication, is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from kvabr.client.blocking import Handle
from kvabr.client.options import PlayOptions
from kvabr.client.result import PlayedPrefix
from kvabr.engines.layouts import BlockLayout, indices, read_blocks, whole_blocks, write_blocks
from kvabr.engines.vllm.config import ServedModel, VllmSettings
from kvabr.engines.vllm.meta import Load, Publication, Step
from kvabr.engines.vllm.node import Node
from kvabr.engines.vllm.stats import ConnectorCounts
from kvabr.publish.publisher import Publisher, PublishOutcome, Slot
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, KvabrError, PlayError, UsageError
from kvabr.types.naming import chain

_log = logging.getLogger("vllm.kvabr")

_NAP_S = 0.005
"""Seconds that a step with nothing to compute waits for a load to end: vLLM would ask again at once, and keep a core
busy that decoding could use."""
_LEAST_TIMED = 64
"""Tokens that a step must compute for its time to say what a prefill costs."""
_GUESSED_RATE = 1000.0
"""Tokens per second that an engine prefills, as long as nothing is known."""
_EXACT = ("FP16", "BF16")
"""Tracks behind which what the engine computes is as good as if it had computed all."""


class WorkerHalf:
    """What `connector` passes on from vLLM's worker."""

    def __init__(
        self, settings: VllmSettings, model: ServedModel, node: Node | None, publisher: Publisher | None
    ) -> None:
        """Take part; nothing is begun before `register`.

        Args:
            settings: the user's.
            model: the engine's.
            node: where plays are begun; None: nothing is consumed.
            publisher: takes what is computed; None: nothing is published.
        """
        self._settings, self._model, self._node, self._publisher = settings, model, node, publisher
        self.counts = ConnectorCounts()
        self._layers: list[torch.Tensor] = []
        self._layout = BlockLayout.PLAIN
        self._copier = ThreadPoolExecutor(1, "kvabr-copy")
        self._stream: Any = None
        """Where copies run beside the engine's own work, if it is a GPU's."""
        self._fence: Any = None
        """What the engine had begun on the GPU when it last came by: copies come after it."""
        self._news = threading.Condition()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._failed: set[int] = set()
        self._plays: dict[str, Handle[PlayedPrefix]] = {}
        self._began_s: float | None = None
        self._scheduled = 0
        self._rate = 0.0
        self._lossy: OrderedDict[str, None] = OrderedDict()
        """Digests of groups that came with a loss and may be in the engine's own prefix cache: what is computed behind
        them is not to be passed on as exact."""
        self._most_lossy = 4096

    def register(self, layers: Mapping[int, torch.Tensor], layout: BlockLayout) -> None:
        """Take the engine's cache.

        Args:
            layers: by layer, [block, head, token, 2 x dim].
            layout: of all of them.

        Raises:
            UsageError: it is not the cache that the configuration promised.
        """
        spec, model = self._model.spec, self._model
        if sorted(layers) != list(range(spec.layers)):
            raise UsageError(f"vLLM has caches of {len(layers)} layers, its model {spec.layers}: not full attention?")
        wanted = (len(model.heads), model.block, 2 * spec.head_dim)
        for layer, cache in layers.items():
            if tuple(cache.shape[1:]) != wanted or cache.dtype != model.dtype:
                raise UsageError(
                    f"vLLM's cache of layer {layer} is {tuple(cache.shape)} {cache.dtype}, not [block, head, token, "
                    f"2 x dim] of {wanted} and {model.dtype}: this version lays it out as kvabr does not know"
                )
        self._layers = [layers[layer] for layer in range(spec.layers)]
        self._layout = layout
        self._most_lossy = max(self._most_lossy, 4 * self._layers[0].shape[0] * model.block // spec.group_tokens)
        if self._layers[0].device.type == "cuda":
            self._stream = torch.cuda.Stream(self._layers[0].device)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------ the engine's

    def begin(self, step: Step) -> None:
        """A step begins."""
        self._began_s, self._scheduled = time.perf_counter(), step.scheduled
        if self._stream is not None and (step.loads or step.publications):
            self._fence = torch.cuda.current_stream(self._layers[0].device).record_event()
        playing = len(step.loads) + sum(not play.done() for play in self._plays.values())
        for load in step.loads:
            self._play(load, playing)
        for publication in step.publications:
            self._publish(publication)

    def computed(self) -> None:
        """The step has been computed."""
        if self._began_s is not None and self._scheduled >= _LEAST_TIMED and self._stream is None:
            rate = self._scheduled / max(1e-6, time.perf_counter() - self._began_s)
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate
        self._began_s = None

    def collect(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """What has ended since the last time: requests whose blocks were published or given up, and loads.

        Args:
            finished: requests that have ended; plays for them are cancelled.
        """
        for request in finished:
            play = self._plays.get(request)
            if play is not None and not play.done():
                self.counts.add("plays_aborted")
                play.cancel()
        with self._news:
            if not self._scheduled and not self._received and not self._sent:
                self._news.wait(_NAP_S)
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
        for request in received:
            self._plays.pop(request, None)
        return sent, received

    def failed_blocks(self) -> set[int]:
        """Blocks that their loads did not fill, of the loads that were collected; each is told once."""
        with self._news:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """End; what waits to be published is."""
        for play in list(self._plays.values()):
            play.cancel()
        self._copier.shutdown(wait=True)
        if self._publisher is not None:
            self._publisher.close()
        self._layers = []

    # ----------------------------------------------------------------- loading

    def _play(self, load: Load, playing: int) -> None:
        assert self._node is not None  # noqa: S101  # the scheduler's half has one as well, or there are no loads
        catalog = load.found.catalog
        self.counts.add("plays")
        began_s = time.monotonic()
        try:
            options = PlayOptions(
                policy=self._settings.policy,
                estimator=self._settings.estimator,
                salt=load.salt,
                dtype=self._model.dtype,
                patience=1.0,
            )
            cost, skip = self._cost(load, playing), load.first // catalog.spec.group_tokens
            mine = self._model.shard
            if catalog.spec.model in (self._model.spec.model, mine.model):
                play = self._node.play(
                    load.found, options, deadline_s=load.deadline_s, cost=cost, skip=skip, behind=load.behind
                )
            else:
                play = self._node.play_mine(
                    mine,
                    load.tokens,
                    options,
                    deadline_s=load.deadline_s,
                    cost=cost,
                    skip=skip,
                    behind=load.behind,
                )
        except Exception as error:  # noqa: BLE001  # as in `_place`; here it would end the engine
            _log.warning(
                "kvabr: a play could not begin (%s); the request is computed", error, exc_info=not _expected(error)
            )
            self.counts.add("plays_failed")
            self._over(load, load.first)
            return
        self._plays[load.request] = play
        play.when_done(lambda ended: self._ended(load, ended, began_s))

    def _cost(self, load: Load, playing: int) -> PrefillCost:
        """What the engine takes for what a play leaves to it: other plays leave it some as well."""
        rate = self._settings.prefill_rate or self._rate
        prefill = load.found.catalog.prefill
        if not rate and prefill is not None:
            tokens = load.last - load.first
            rate = tokens / prefill.seconds(load.first, tokens)
        return PrefillCost.from_rate((rate or _GUESSED_RATE) / playing)

    def _ended(self, load: Load, play: Handle[PlayedPrefix], began_s: float) -> None:
        """A play is over; on the event loop's thread."""
        self.counts.play(time.monotonic() - began_s)
        try:
            self._copier.submit(self._place, load, play)
        except RuntimeError:  # closed
            self._over(load, load.first)

    def _place(self, load: Load, play: Handle[PlayedPrefix]) -> None:
        """Copy what a play brought into the engine's blocks; on the copying thread."""
        good = load.first
        try:
            prefix = play.result(0.0)
            end = min(load.last, prefix.first + prefix.tokens)
            good = max(load.first, whole_blocks(end, self._model.block))
            self.counts.add("bytes_fetched", prefix.bytes_fetched)
            self.counts.add("bytes_wasted", prefix.bytes_wasted)
            self.counts.add("loss", prefix.loss)
            if good > load.first:
                self._write(load, prefix, good)
        except PlayError as error:
            good = load.first
            _log.info("kvabr: %s: %s", load.request, error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            good = load.first
            self.counts.add("plays_failed")
            _log.warning("kvabr: a play failed (%s); the request is computed", error, exc_info=not _expected(error))
        self.counts.add("tokens_loaded", good - load.first)
        if good < load.last:
            self.counts.add("plays_cut")
            self.counts.add("tokens_missed", load.last - good)
        self._over(load, good)

    def _write(self, load: Load, prefix: PlayedPrefix, good: int) -> None:
        began_s = time.thread_time()
        count = (good - load.first) // self._model.block
        kv = prefix.kv[:, :, :, load.first - prefix.first : good - prefix.first]
        if kv.shape[2] != len(self._model.heads):
            kv = kv[:, :, self._model.heads.start : self._model.heads.stop]
        blocks = indices(load.blocks[:count], self._layers[0])
        with self._apart():
            for cache, part in zip(self._layers, kv, strict=True):
                write_blocks(cache, blocks, part, self._layout)
        group = prefix.first // load.found.catalog.spec.group_tokens
        chunks = self._chunks(load)[group:]
        for chunk, track in zip(chunks, prefix.coverage, strict=False):
            if track not in _EXACT:
                self._lossy[chunk] = None
                self._lossy.move_to_end(chunk)
        while len(self._lossy) > self._most_lossy:
            self._lossy.popitem(last=False)
        self.counts.add("copy_seconds", time.thread_time() - began_s)

    def _chunks(self, load: Load) -> Sequence[str]:
        """Digests of what was loaded, as this rank publishes it: by the name of its own heads."""
        mine = self._model.shard
        if mine is self._model.spec:
            return load.found.catalog.chunks
        return chain(
            load.tokens, model=mine.model, tokenizer=mine.tokenizer, group_tokens=mine.group_tokens, salt=load.salt
        )

    def _over(self, load: Load, good: int) -> None:
        with self._news:
            self._failed.update(load.blocks[(good - load.first) // self._model.block :])
            self._received.add(load.request)
            self._news.notify_all()

    # -------------------------------------------------------------- publishing

    def _publish(self, publication: Publication) -> None:
        """Begin to publish, or say at once that it will not be."""
        assert self._publisher is not None  # noqa: S101  # as in `_play`
        why = "failed"
        try:
            slot = self._publisher.reserve(publication.tokens, publication.salt)
        except UsageError as error:
            _log.warning("kvabr: not published: %s", error)
        else:
            if not isinstance(slot, Slot):
                why = slot
            elif not self._lossy.keys().isdisjoint(slot.chunks):
                why = "lossy"
                slot.leave()
            else:
                try:
                    self._copier.submit(self._take, publication, slot)
                except RuntimeError:  # closed
                    slot.leave()
                else:
                    return
        self.counts.add(f"publish_dropped_{why}")
        self._gone(publication)

    def _take(self, publication: Publication, slot: Slot) -> None:
        """Copy a cache out of the engine's blocks; on the copying thread. From then on they are the engine's again."""
        began_s = time.thread_time()
        try:
            model = self._model
            kv = torch.empty(
                (model.spec.layers, 2, len(model.heads), slot.tokens, model.spec.head_dim), dtype=model.dtype
            )
            blocks = indices(publication.blocks, self._layers[0])
            with self._apart():
                for cache, part in zip(self._layers, kv, strict=True):
                    read_blocks(cache, blocks, part, self._layout)
        except Exception as error:  # noqa: BLE001  # as in `_place`
            slot.leave()
            self._published(PublishOutcome("failed", why=str(error)))
        else:
            self.counts.add("copy_seconds", time.thread_time() - began_s)
            slot.fill(kv, self._published)
        finally:
            self._gone(publication)

    def _gone(self, publication: Publication) -> None:
        with self._news:
            self._sent.add(publication.request)
            self._news.notify_all()

    def _published(self, outcome: PublishOutcome) -> None:
        if outcome.verdict == "published":
            self.counts.add("published")
            self.counts.add("published_bytes", outcome.bytes)
        else:
            self.counts.add("publish_dropped_failed")
            _log.warning("kvabr: a cache could not be published: %s", outcome.why)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is copied inside is done at the end, and the engine's own stream does not notice."""
        if self._stream is None:
            yield
            return
        if self._fence is not None:
            self._stream.wait_event(self._fence)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _expected(error: Exception) -> bool:
    return isinstance(error, KvabrError | FormatError)
