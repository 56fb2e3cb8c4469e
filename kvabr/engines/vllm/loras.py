"""LoRA adapters of requests: cache names contain a digest of the adapter's content.

A thread reads an adapter's files once, while its first requests wait. vLLM may read the files again later, so if they
changed, the adapter's caches are neither played nor published.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvabr.engines.transformers.adapter_digest import CONFIG, WEIGHTS, folder_digest
from kvabr.engines.weights import cached_folder
from kvabr.store.files import FileVersion
from kvabr.types.errors import KvabrError, ModelError

_MAX_ADAPTERS = 4096
"""Maximum number of remembered adapters."""

_Versions = tuple[FileVersion | None, ...]


@dataclass(frozen=True, slots=True)
class _Adapter:
    folder: Path
    versions: _Versions
    digest: Future[str]
    since_s: float


class Adapters:
    """Digests of the adapters that an engine has used."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create without adapters; requests wait at most ``patience_s`` seconds for a digest."""
        self._patience_s, self._clock = patience_s, clock
        self._seen: dict[str, _Adapter] = {}
        self._thread: ThreadPoolExecutor | None = None

    def waits(self, request: Any) -> bool:
        """Return True while the digest of a request's adapter is being computed."""
        adapter = self._adapter(request)
        late_s = self._clock() - self._patience_s
        return adapter is not None and not adapter.digest.done() and adapter.since_s > late_s

    def digest(self, request: Any) -> str | None:
        """Return the digest of a request's adapter, None without an adapter; raise `ModelError` if unavailable."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        if getattr(lora, "load_inplace", False):
            raise ModelError("it is loaded in place, so its weights may change under its name")
        adapter = self._adapter(request)
        if adapter is None:
            raise ModelError(f"{_MAX_ADAPTERS:,} other adapters were used before it, the most that kvabr keeps apart")
        if not adapter.digest.done():
            raise ModelError(f"{adapter.folder} is still being read")
        found = adapter.digest.result()
        if _versions(adapter.folder) != adapter.versions:
            raise ModelError(
                f"{adapter.folder} has changed since vLLM first loaded it; load changed weights from another folder"
            )
        return found

    def _adapter(self, request: Any) -> _Adapter | None:
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        path = str(lora.lora_path)
        if path not in self._seen and len(self._seen) < _MAX_ADAPTERS:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "kvabr-adapters")
            folder = _folder(path)
            versions = _versions(folder)
            made = self._thread.submit(_digest, folder, versions)
            self._seen[path] = _Adapter(folder, versions, made, self._clock())
        return self._seen.get(path)


def _folder(path: str) -> Path:
    folder = Path(os.path.expanduser(path))  # noqa: PTH111  # pathlib raises if the user does not exist
    return cached_folder(str(folder), marker=CONFIG) or cached_folder(path, marker=CONFIG) or folder


def _versions(folder: Path) -> _Versions:
    try:
        return tuple(FileVersion.of(folder / name) for name in (CONFIG, WEIGHTS))
    except ValueError:  # a NUL character in the name
        return (None, None)


def _digest(folder: Path, versions: _Versions) -> str:
    try:
        digest = folder_digest(folder)
    except KvabrError:
        raise
    except Exception as error:  # safetensors and torch may raise any error
        raise ModelError(f"{folder}: cannot be read ({error})") from error
    if _versions(folder) != versions:
        raise ModelError(f"{folder} has changed while it was read; load changed weights from another folder")
    return digest
