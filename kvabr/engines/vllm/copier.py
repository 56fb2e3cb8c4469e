"""A thread that fills the engine's blocks, or copies out of them; on a GPU with a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Copier:
    """Works in the order in which it is submitted."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._thread = ThreadPoolExecutor(1, name)
        self._stream: Any = None
        """CUDA stream of the copies; None on a CPU."""
        self._fence: Any = None
        """CUDA event of the engine's work so far; copies wait for it."""
        self._last: Future[None] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the blocks are in a GPU's memory."""
        return self._stream is not None

    def use(self, device: Any) -> None:
        """Copy to and from the blocks of this device."""
        if device.type == "cuda":
            # The lowest priority, which is that of the engine's: one stream does not wait for the other.
            self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Have the copies to come wait for what the engine has begun on its GPU; called on its thread."""
        if self._stream is not None:
            self._fence = torch.cuda.current_stream(self._stream.device).record_event()

    def submit(self, work: Callable[..., None], *args: object) -> None:
        """Copy behind all that was submitted before; nothing once it is closed."""
        with contextlib.suppress(RuntimeError):
            self._last = self._thread.submit(work, *args)

    @property
    def busy(self) -> bool:
        """Whether something that was submitted is not over."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Wait for all copies that were submitted."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End, behind what was submitted."""
        self._thread.shutdown(wait=True)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Run copies on the stream, and wait for them at the end."""
        if self._stream is None:
            yield
            return
        if self._fence is not None:
            self._stream.wait_event(self._fence)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
