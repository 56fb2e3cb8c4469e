"""The token ids of an asset's prompt, for recomputing and verification. Servers never send them."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from kvabr.types.records import decode, read_schema

MAX_PROMPT_BYTES = 64 << 20
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
_PROMPT_SCHEMA = "kvabr.prompt/1"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of an asset."""

    tokens: tuple[TokenId, ...]
    continuation: tuple[TokenId, ...]
    """Ids of the tokens that follow the prompt, on which losses are measured."""
    seal: str | None = None
    """Binds a salted prompt to its asset, see `sealed`."""

    def sealed(self, name: str) -> Prompt:
        """Return this prompt bound to ``name``, the last chained digest, which cannot be checked without the salt."""
        return replace(self, seal=self._seal(name))

    def is_sealed_for(self, name: str) -> bool:
        """Return True if the seal matches ``name`` and these token ids."""
        return self.seal == self._seal(name)

    def _seal(self, name: str) -> str:
        parts = [name.encode()] + [struct.pack(f"<{len(ids)}I", *ids) for ids in (self.tokens, self.continuation)]
        return hashlib.sha256(
            b"kvabr.seal/1\0" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        ).hexdigest()

    def dumps(self) -> str:
        """Return the prompt as JSON text."""
        value = {"schema": _PROMPT_SCHEMA, "tokens": list(self.tokens), "continuation": list(self.continuation)}
        return json.dumps(value if self.seal is None else {**value, "seal": self.seal})

    @classmethod
    def loads(cls, text: str | bytes) -> Prompt:
        """Parse a result of `dumps`; raise `FormatError` if it is invalid."""
        data = text.encode(errors="replace") if isinstance(text, str) else text
        read_schema(data, "prompt", _PROMPT_SCHEMA)
        return decode(data, cls, "prompt")
