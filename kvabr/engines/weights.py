"""The name of a model in a folder: its base name and a digest of all its weights, or a declared name.

The digest (SHA-256) covers every byte of the files that an engine may load: weights in any format, configurations,
indices, and code, but no tokenizers. A file is read again only if its size, times or inode differ from a record in the
folder (``.kvabr-weights.json``), or in the user's cache directory if the folder is read-only. If several processes need
the digest, such as ranks, one reads and the others wait.

An operator may declare a name or version in ``kvabr-name.json`` in the folder: ``{"version": "2026-11"}`` replaces the
digest, ``{"model": "assistant-1f0c2a3b"}`` the whole name.

Imports neither torch nor an engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from kvabr.store.files import FileVersion, read_bytes, read_text, write_file
from kvabr.types.errors import AssetError, KvabrError, ModelError
from kvabr.types.naming import DIGITS, LOOSE, safe_name, with_facts

LOG = logging.getLogger("kvabr.engines")

Progress = Callable[[int, int], object]
"""Called with the bytes read and all bytes, from any thread, a few times per second."""

DECLARED = "kvabr-name.json"
RECORD = ".kvabr-weights.json"
_SCHEMA = "kvabr.weights/1"
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".msgpack", ".h5", ".py"})
_CONFIGS = re.compile(r"config\.json|params\.json|adapter_config\.json|.*quant.*\.json|.*\.index\.json")
_PIECE_BYTES, _READ_BYTES = 32 << 20, 1 << 20
_THREADS = 16
_MAX_RECORD_BYTES = 16 << 20
_MAX_DECLARED_BYTES = 1 << 16
_SETTLED_S = 2.0
"""Seconds after which a file's times reliably reveal the next change, despite coarse clocks."""
_REPORT_S = 0.2
_LOG_S = 10.0


def model_name(folder: Path, progress: Progress | None = None) -> str:
    """Return the name for caches of the model in a folder with a ``config.json``.

    ``progress`` is called while weights are read; None: progress is logged. Raise `ModelError` if a file cannot be read
    or changes while it is read, or if ``kvabr-name.json`` is malformed.
    """
    declared = _declared(folder)
    if "model" in declared:
        return declared["model"]
    title = _title(folder.resolve())
    if "version" in declared:
        return with_facts(title, declared)
    return f"{title}-{weights_digest(folder, progress)[:DIGITS]}"


def weights_digest(folder: Path, progress: Progress | None = None) -> str:
    """Return a digest of all weights in a folder, 64 hex digits; arguments and errors as for `model_name`."""
    found = _versions(folder)
    known = _known(folder, found)
    if len(known) < len(found):
        with _locked(folder):
            known = _known(folder, found)  # another process may have read the file in the meantime
            todo = [name for name in found if name not in known]
            if todo:
                known |= _hashed(folder, todo, progress or _LogProgress(folder))
                if changed := sorted({*found.items()} ^ {*_versions(folder).items()}):
                    path = folder / changed[0][0]
                    raise ModelError(f"{path}: has changed while it was read; load the model when the file is complete")
                _keep(folder, found, known)
    digest = hashlib.sha256(_SCHEMA.encode())
    for name in sorted(found):
        digest.update(f"\0{name}\0{found[name].size}\0{known[name]}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def local_folder(name: str, marker: str = "config.json") -> Path | None:
    """Return a model's folder if the engine's name for the model is a path with a ``marker`` file; else None."""
    with contextlib.suppress(OSError, ValueError):
        if (Path(name) / marker).is_file():
            return Path(name)
    return None


def cached_folder(name: str, revision: str | None = None, *, marker: str = "config.json") -> Path | None:
    """Return a model's folder: ``name`` itself, or a snapshot in Hugging Face's local cache; None if there is none.

    ``name`` is a folder with a ``marker`` file, or a repository such as ``org/model``; ``revision`` its branch, tag or
    commit, default ``main``.
    """
    if (found := local_folder(name, marker)) is not None:
        return found
    with contextlib.suppress(OSError, ValueError):
        home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        repository, wanted = hub / f"models--{name.replace('/', '--')}", revision or "main"
        reference = repository / "refs" / wanted
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
        snapshot = repository / "snapshots" / commit
        if (snapshot / marker).is_file():
            return snapshot
    return None


def _title(folder: Path) -> str:
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return safe_name(repository.removeprefix("models--").replace("--", "/"), LOOSE)
    return safe_name(folder.name, LOOSE)


def _declared(folder: Path) -> dict[str, str]:
    path = folder / DECLARED
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, _MAX_DECLARED_BYTES))
    except (KvabrError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    one = isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("model", "version")
    if not one or not all(isinstance(text, str) and 0 < len(text) <= 200 for text in value.values()):
        raise ModelError(f'{path}: must be {{"version": TEXT}} or {{"model": NAME}}, of at most 200 characters')
    return dict(value)


def _versions(folder: Path) -> dict[str, FileVersion]:
    found: dict[str, FileVersion] = {}
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read ({error.strerror})") from error
    for name in names:
        if (Path(name).suffix in _WEIGHTS or _CONFIGS.fullmatch(name)) and not name.startswith("."):
            path = folder / name
            version = FileVersion.of(path)
            if version is None:
                raise ModelError(f"{path}: cannot be read; is it a broken link?")
            if path.is_file():
                found[name] = version
    return found


def _hashed(folder: Path, names: list[str], progress: Progress) -> dict[str, str]:
    sizes: dict[str, int] = {}
    for name in names:
        sizes[name] = (folder / name).stat().st_size
    meter = _Meter(sum(sizes.values()), progress)
    pieces = [(name, at) for name in names for at in range(0, max(1, sizes[name]), _PIECE_BYTES)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kvabr-weights") as threads:
        try:
            parts = list(threads.map(lambda piece: _piece(folder / piece[0], piece[1], meter), pieces))
        except OSError as error:
            raise ModelError(f"{folder}: its weights cannot be read ({error})") from error
    whole = {name: hashlib.sha256() for name in names}
    for (name, _), part in zip(pieces, parts, strict=True):
        whole[name].update(part)
    return {name: digest.hexdigest() for name, digest in whole.items()}


def _piece(path: Path, at: int, meter: _Meter) -> bytes:
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        left = _PIECE_BYTES
        while left and (count := file.readinto(view[: min(left, _READ_BYTES)])):
            digest.update(view[:count])
            left -= count
            meter.add(count)
    return digest.digest()


class _Meter:
    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._done, self._reported_s = 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._reported_s < _REPORT_S:
                return
            self._reported_s, done = now, self._done
        self._progress(done, self._total)


class _LogProgress:
    def __init__(self, folder: Path) -> None:
        self._folder, self._next_s = folder, time.monotonic() + _LOG_S / 5

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_S
            LOG.info(
                "kvabr: reading the weights in %s, once, to name their caches: %.1f of %.1f GB",
                self._folder,
                done / 1e9,
                total / 1e9,
            )


class _Entry(NamedTuple):
    version: tuple[int, ...]
    sha256: str


def _stamp(version: FileVersion) -> tuple[int, ...]:
    """Return the identity of a file's content, without the device number, which differs between machines."""
    return version.inode, version.size, version.modified_ns, version.changed_ns


def _known(folder: Path, found: Mapping[str, FileVersion]) -> dict[str, str]:
    known: dict[str, str] = {}
    for path in (_cached(folder, ".json"), folder / RECORD):
        for name, entry in _entries(path).items():
            if name in found and _stamp(found[name]) == entry.version:
                known[name] = entry.sha256
    return known


def _entries(path: Path) -> dict[str, _Entry]:
    try:
        value = json.loads(read_bytes(path, _MAX_RECORD_BYTES))
        if value["schema"] != _SCHEMA:
            return {}
        return {
            name: _Entry(tuple(map(int, each["version"])), bytes.fromhex(each["sha256"]).hex())
            for name, each in value["files"].items()
        }
    except (KvabrError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _keep(folder: Path, found: Mapping[str, FileVersion], known: Mapping[str, str]) -> None:
    settled_ns = time.time_ns() - int(_SETTLED_S * 1e9)
    files: dict[str, Any] = {
        name: {"version": _stamp(version), "sha256": known[name]}
        for name, version in found.items()
        if max(version.modified_ns, version.changed_ns) < settled_ns
    }
    if not files:
        return
    data = json.dumps({"schema": _SCHEMA, "files": files}).encode()
    for path in (folder / RECORD, _cached(folder, ".json")):
        with contextlib.suppress(AssetError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data, mode=0o644)
            return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = None
    with contextlib.suppress(OSError):
        path = _cached(folder, ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _cached(folder: Path, suffix: str) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return user_cache_path("kvabr", appauthor=False) / "weights" / f"{name}{suffix}"
