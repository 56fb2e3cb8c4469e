"""Tokens of QUIC's Retry: proof that a client receives what is sent to its address (RFC 9000, section 8.1.2).

The libraries bring their own, but that of qh3 decrypts RSA for every packet that claims to have one, and raises what
nobody catches. These are bound to the address and to the time by an HMAC, and are as good for a server of one process.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import Any

LIFETIME_S = 30.0
"""A client returns its token at once."""
_MAC_BYTES = 16


class RetryTokens:
    """Makes and checks them, called as qh3 and early versions of aioquic do it, or as later ones of aioquic."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def create_token(
        self,
        addr: Any = None,
        original_destination_connection_id: bytes = b"",
        retry_source_connection_id: bytes = b"",
        *,
        address: Any = None,
        now: float | None = None,
    ) -> bytes:
        """A token.

        Args:
            addr: the client's address, as the socket gives it.
            original_destination_connection_id: of the client's first packet.
            retry_source_connection_id: ours in the Retry.
            address: another name of ``addr``.
            now: the library's clock, which is not needed.
        """
        del now
        body = int(time.monotonic() * 1000).to_bytes(8, "big")
        for part in (original_destination_connection_id, retry_source_connection_id):
            body += bytes([len(part)]) + part
        return body + self._mac(addr or address, body)

    def validate_token(
        self,
        addr: Any = None,
        token: bytes = b"",
        *,
        address: Any = None,
        destination_cid: bytes | None = None,
        now: float | None = None,
    ) -> bytes | tuple[bytes, bytes]:
        """The connection IDs of a token: both, or, if the one in the Retry is given, the other.

        Raises:
            ValueError: it is not ours, not for that address or connection, or too old.
        """
        del now
        body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(addr or address, body)):
            raise ValueError("a token that is not ours")
        if time.monotonic() - int.from_bytes(body[:8], "big") / 1000 > LIFETIME_S:
            raise ValueError("a token that has expired")
        original = body[9 : 9 + body[8]]
        source = body[10 + len(original) :]
        if destination_cid is None:
            return original, source
        if source != destination_cid:
            raise ValueError("a token of another connection")
        return original

    def _mac(self, address: Any, body: bytes) -> bytes:
        where = f"{address[0]} {address[1]} ".encode()
        return hmac.new(self._key, where + body, hashlib.sha256).digest()[:_MAC_BYTES]


class NoTokens(RetryTokens):
    """Takes none: whoever comes is turned away before anything is kept of it."""

    def validate_token(self, *_: Any, **__: Any) -> bytes | tuple[bytes, bytes]:
        """No token will do.

        Raises:
            ValueError: always.
        """
        raise ValueError("no more connections")
