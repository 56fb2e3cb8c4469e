"""Upgrades into a cache that ``generate()`` reads: between two of the model's steps, and never within one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from kvabr.client.result import Played
from kvabr.engines.transformers.engine import TransformersEngine
from kvabr.engines.transformers.play import Ready
from kvabr.types.errors import UsageError


class Steps:
    """A hook for `kvabr.client.upgrades.Upgrades.into`, and a context manager around ``generate()``.

    In full::

        ready = play_cache(client, engine, input_ids, deadline=2.0, options=PlayOptions(after=math.inf))
        with Steps(engine, ready) as steps:
            if ready.upgrades is not None:
                ready.upgrades.into(steps)
            output = model.generate(input_ids, past_key_values=ready.cache)

    What was generated before an upgrade stays as it is, and so does what it put into the cache. Outside the context
    nothing is written any more.
    """

    def __init__(self, engine: TransformersEngine, ready: Ready) -> None:
        self._model, self._cache = engine.model, ready.cache
        if not isinstance(ready.played, Played):
            raise UsageError("nothing was played, so there is nothing to upgrade")
        self._kv, self._tokens = ready.played.kv, ready.tokens
        self._lock = threading.Lock()
        self._hooks: list[Any] = []
        self.rewritten = 0
        """Times that tokens of the prompt were rewritten."""

    def __enter__(self) -> Self:
        def begin(*_: object) -> None:
            self._lock.acquire()

        def end(*_: object) -> None:
            self._lock.release()

        self._hooks = [
            self._model.register_forward_pre_hook(begin),
            self._model.register_forward_hook(end, always_call=True),  # also if the step fails
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def __call__(self, first: int, last: int, write: Callable[[], None]) -> bool:
        """Write between two steps; see `kvabr.client.upgrades.Rewrite`."""
        with self._lock, torch.no_grad():
            if not self._hooks:
                return False
            write()
            last = min(last, self._tokens)
            for layer, state in enumerate(self._cache.layers):
                for kept, played in zip((state.keys, state.values), self._kv[layer], strict=True):
                    kept[0, :, first:last] = played[:, first:last].to(device=kept.device, dtype=kept.dtype)
            self.rewritten += 1
        return True
