"""The cache of authorization tokens that a peer has registered (draft 18, section 10.2.2)."""

from __future__ import annotations

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.parameters import DELETE, REGISTER, USE_VALUE, Token

_OVERHEAD = 16
"""Bytes that an entry counts beside its value."""


class TokenCache:
    """Aliases of one peer."""

    def __init__(self, limit: int = 0) -> None:
        """An empty cache.

        Args:
            limit: bytes that it may hold, as announced by MAX_AUTH_TOKEN_CACHE_SIZE; 0: no aliases.
        """
        self._limit, self._size = limit, 0
        self._values: dict[int, bytes] = {}

    def resolve(self, tokens: tuple[Token, ...], *, setup: bool = False) -> tuple[bytes, ...]:
        """The values that the tokens of one message stand for.

        Raises:
            SessionFault: an unknown or repeated alias, too many tokens, or what a SETUP cannot have.
        """
        return tuple(value for token in tokens if (value := self._one(token, setup=setup)) is not None)

    def _one(self, token: Token, *, setup: bool) -> bytes | None:
        if token.alias_type == USE_VALUE or token.alias is None:
            return token.value
        alias = token.alias
        if token.alias_type == REGISTER:
            if alias in self._values:
                code = SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS
                raise SessionFault(f"the token alias {alias} is registered already", code)
            size = _OVERHEAD + len(token.value)
            if self._size + size <= self._limit:
                self._values[alias] = token.value
                self._size += size
            elif not setup:
                code = SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
                raise SessionFault(f"registered tokens exceed {self._limit} bytes", code)
            return token.value
        if setup:
            raise SessionFault("a SETUP refers to a token alias")
        if alias not in self._values:
            raise SessionFault(f"an unknown token alias {alias}", SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS)
        if token.alias_type == DELETE:
            self._size -= _OVERHEAD + len(self._values.pop(alias))
            return None
        return self._values[alias]
