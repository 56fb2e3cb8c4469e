"""Which weights an engine computes with, as far as it tells: the part of its caches' names that may change as it runs.

An engine loads the weights that its model's name stands for. Trainers replace them in its memory, where their digest is
not known. So after a signal that they may have changed (SGLang's ``clear()``, vLLM's ``reset_cache()``) names get a
part that nobody else has: what was published before is not played, and what is published now is not played by those who
have other weights. A version that somebody declares says more: engines with one version share their caches.
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
    """The weights of one engine. For several threads."""

    def __init__(self, declared: Callable[[], str | None] = lambda: None) -> None:
        """Begin with the weights that are loaded.

        Args:
            declared: returns the version that is declared now, None if there is none; is called often. It may raise a
                `UsageError`, the first time.
        """
        self._declared = declared
        self._signalled = self._version = declared()
        self._unknown = ""

    @property
    def name(self) -> str:
        """What it adds to names; nothing as long as the weights are the loaded ones, and no version is declared."""
        version = self._declared()
        if version != self._version:
            self._version, self._unknown = version, ""
        if not version and not self._unknown:
            return ""
        return hashlib.sha256(f"{version or ''}\0{self._unknown}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def salt(self, salt: bytes) -> bytes:
        """Return what a tenant's salt is for these weights."""
        name = self.name
        return hashlib.sha256(b"kvabr.generation/1\0" + name.encode() + salt).digest() if name else salt

    def changed(self) -> None:
        """Note a signal that weights may have changed. If another version was declared since the last, they have it."""
        before = self._signalled
        self._signalled = self._version = self._declared()
        self._unknown = secrets.token_hex(16) if self._version is None or self._version == before else ""


class VersionFile:
    """A file in which somebody declares the version of the weights: whoever replaces these writes it."""

    def __init__(self, path: Path) -> None:
        """Take the file, which is read when it is asked for, and again when it has changed."""
        self._path = path
        self._read: FileVersion | None = None
        self._text: str | None = None

    def __call__(self) -> str | None:
        """Return the text of the file; the last one while it cannot be read. `UsageError` if it never could."""
        found = FileVersion.of(self._path)
        if found is None or found != self._read:
            try:
                self._text = read_text(self._path, _MAX_VERSION_BYTES, unreadable=UsageError).strip()
                self._read = found
            except KvabrError:
                if self._text is None:
                    raise
        return self._text
