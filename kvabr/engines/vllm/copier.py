"""A thread that copies to and from the engine's blocks; on a GPU, it has a separate stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Copier:
    """Runs submitted copies in order."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._stream: Any = None
        self._fence: Any = None
        self._last: Future[None] | None = None

    @property
    def on_gpu(self) -> bool:
        """True if the blocks are in GPU memory."""
        return self._stream is not None

    def use(self, device: Any) -> None:
        """Copy to and from blocks on this device."""
        if device.type == "cuda":
            # The lowest priority, which is also that of the engine's stream: the streams do not wait for each other.
            self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Make later copies wait for the engine's current GPU work; call this on the engine's thread."""
        if self._stream is not None:
            self._fence = torch.cuda.current_stream(self._stream.device).record_event()

    def submit(self, work: Callable[..., None], *args: object) -> None:
        """Queue a copy; do nothing once closed."""
        with contextlib.suppress(RuntimeError):
            self._last = self._thread.submit(work, *args)

    @property
    def busy(self) -> bool:
        """True while submitted work is unfinished."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Wait for all submitted copies."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Finish the submitted copies and end."""
        self._thread.shutdown(wait=True)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Run copies on the separate stream, and wait for them at the end."""
        if self._stream is None:
            yield
            return
        if self._fence is not None:
            self._stream.wait_event(self._fence)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
