"""Media in requests: digests of the model's input are attached to placeholder tokens.

vLLM's own hash of a medium can be set by clients, and ignores processor options. So the digest covers the processor's
output. A thread computes it while the request waits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kvabr.types.errors import KvabrError, ModelError
from kvabr.types.media import MediaTokens, Medium

_DEPTH = 8

Features = Sequence[Any]
"""A list of vLLM's ``MultiModalFeatureSpec``."""


class Pictures:
    """Digests of the media in an engine's requests."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create without requests; a request waits at most ``patience_s`` seconds for its digests."""
        self._patience_s, self._clock = patience_s, clock
        self._pending: dict[str, tuple[Future[list[Medium]], float]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def waits(self, request: Any) -> bool:
        """Return True while digests of a request's media are being computed."""
        if not getattr(request, "mm_features", None):
            return False
        media, since_s = self._request_digests(request)
        return not media.done() and self._clock() < since_s + self._patience_s

    def tokens(self, request: Any) -> Sequence[int]:
        """Return the token ids of a prompt with its media digests; raise `ModelError` if a digest is unavailable."""
        ids = request.prompt_token_ids
        if not getattr(request, "mm_features", None):
            return tuple(ids)
        media, _ = self._request_digests(request)
        if not media.done():
            raise ModelError("their digests are still being computed")
        try:
            return MediaTokens(ids, media.result())
        except KvabrError as error:
            raise ModelError(str(error)) from error

    def over(self, name: str) -> None:
        """Forget a request."""
        media, _ = self._pending.pop(name, (None, 0.0))
        if media is not None:
            media.cancel()

    def _request_digests(self, request: Any) -> tuple[Future[list[Medium]], float]:
        name = request.request_id
        if name not in self._pending:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "kvabr-media")
            media = self._thread.submit(_media, tuple(request.mm_features))
            self._pending[name] = media, self._clock()
        return self._pending[name]


def _media(features: Features) -> list[Medium]:
    try:
        return [Medium(each.mm_position.offset, each.mm_position.length, _digest(each)) for each in features]
    except KvabrError:
        raise
    except Exception as error:  # torch may raise any error, and vLLM would end
        raise ModelError(f"vLLM passes media to the model that kvabr cannot read ({error})") from error


def _digest(feature: Any) -> str:
    if not isinstance(feature.data, Mapping) or not feature.data:
        raise ModelError(
            "vLLM's scheduler has no access to their contents; start it without --mm-processor-cache-type shm"
        )
    digest = hashlib.sha256(f"kvabr.medium/1\0{feature.modality}\0".encode())
    for name in sorted(feature.data):
        digest.update(f"\0{name}\0".encode())
        for piece in _pieces(feature.data[name].data, _DEPTH):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield f"tensor {value.dtype} {tuple(value.shape)}\0".encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, list | tuple) and depth:
        yield f"list {len(value)}\0".encode()
        for each in value:
            yield from _pieces(each, depth - 1)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        yield f"{type(value).__name__} {len(text)}\0".encode()
        yield text
    elif hasattr(value, "__array__"):
        yield from _pieces(torch.as_tensor(value), 0)
    else:
        raise ModelError(f"vLLM passes them to the model as {type(value).__name__}, which kvabr cannot compare")
