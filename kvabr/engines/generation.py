"""The generation of an engine's weights: the part of cache names that may change while the engine runs.

Trainers replace weights in memory, and the digest of the new weights is unknown. So after SGLang's ``clear()`` or
vLLM's ``reset_cache()``, cache names get a random part, and the engine shares no caches unless it declares a version.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path

from kvabr.store.files import FileVersion, read_text
from kvabr.types.errors import KvabrError, UsageError

_MAX_VERSION_BYTES = 4096


class Generation:
    """The current generation of one engine's weights. Thread-safe."""

    def __init__(self, declared: Callable[[], str | None] = lambda: None) -> None:
        """Start with the loaded weights.

        ``declared`` returns the declared version, or None. It is called often; its first call may raise `UsageError`.
        """
        self._declared = declared
        self._signalled = self._version = declared()
        self._unknown = ""

    @property
    def name(self) -> str:
        """Text to append to names; empty for the weights loaded at the start, unless a version is declared."""
        version = self._declared()
        if version != self._version:
            self._version, self._unknown = version, ""
        if not version and not self._unknown:
            return ""
        return hashlib.sha256(f"{version or ''}\0{self._unknown}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def salt(self, salt: bytes) -> bytes:
        """Return a tenant's salt combined with this generation."""
        name = self.name
        return hashlib.sha256(b"kvabr.generation/1\0" + name.encode() + salt).digest() if name else salt

    def changed(self) -> None:
        """Record that weights may have changed. A version declared since the last call belongs to the new weights."""
        before = self._signalled
        self._signalled = self._version = self._declared()
        self._unknown = secrets.token_hex(16) if self._version is None or self._version == before else ""


class VersionFile:
    """A file with the declared version of the weights. The tool that replaces weights writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: FileVersion | None = None
        self._text: str | None = None

    def __call__(self) -> str | None:
        """Return the file's text, or the last text if it is unreadable; raise `UsageError` if it was never readable."""
        found = FileVersion.of(self._path)
        if found is None or found != self._read:
            try:
                self._text = read_text(self._path, _MAX_VERSION_BYTES, unreadable=UsageError).strip()
                self._read = found
            except KvabrError:
                if self._text is None:
                    raise
        return self._text
