"""What one connection may read: by the token of its SETUP or of a request, and for how long.

Tokens expire, are withdrawn, or open less than before while connections are open. `Access` says what that ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvabr.moqt.codes import PublishDoneCode, RequestCode, ResetCode, SessionCode
from kvabr.server.grants import Grant
from kvabr.server.publication import Publication, Source


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a token does not open something, in the codes of a session, of a request, and of a stream."""

    result: str
    """For metrics."""
    reason: str
    session: SessionCode
    request: RequestCode
    reset: ResetCode
    done: PublishDoneCode


WRONG = Denial(
    "unauthorized", "the token is missing or wrong",
    SessionCode.UNAUTHORIZED, RequestCode.UNAUTHORIZED, ResetCode.EXPIRED_AUTH_TOKEN, PublishDoneCode.UNAUTHORIZED,
)  # fmt: skip
EXPIRED = Denial(
    "expired", "the token has expired",
    SessionCode.EXPIRED_AUTH_TOKEN, RequestCode.EXPIRED_AUTH_TOKEN, ResetCode.EXPIRED_AUTH_TOKEN,
    PublishDoneCode.EXPIRED,
)  # fmt: skip
WITHDRAWN = Denial(
    "withdrawn", "the token is no longer accepted",
    SessionCode.UNAUTHORIZED, RequestCode.UNAUTHORIZED, ResetCode.EXPIRED_AUTH_TOKEN, PublishDoneCode.UNAUTHORIZED,
)  # fmt: skip
REMOVED = Denial(
    "removed", "the asset was removed or replaced, or the token opens it no longer",
    SessionCode.INTERNAL_ERROR, RequestCode.DOES_NOT_EXIST, ResetCode.INTERNAL_ERROR, PublishDoneCode.TRACK_ENDED,
)  # fmt: skip


class Access:
    """What one connection may read."""

    def __init__(self, source: Source) -> None:
        """Allow nothing before `enter`."""
        self._source = source
        self.grant: Grant | None = None
        """Of the token in the SETUP; None: the connection may not stay."""
        self.expires_s = float("inf")
        """When the first of its tokens expires, seconds since 1970."""

    def enter(self, token: bytes | None) -> Grant | Denial:
        """Return what the token of the SETUP opens, or why it is denied."""
        grant = self._of(token)
        self.grant = None if isinstance(grant, Denial) else grant
        return grant

    def of_request(self, tokens: Sequence[bytes]) -> Grant | Denial:
        """Return what a request may read: its own token decides, else that of the SETUP."""
        if self.grant is None:
            return WRONG
        return self._of(tokens[0]) if tokens else self.grant  # checking takes the longer the more tokens there are

    def lost(self, now_s: float) -> Denial | None:
        """Return why the connection may not stay any longer, at a time in seconds since 1970; None: it may."""
        if self.grant is None:
            return None  # it is closed already
        self.expires_s = float("inf")
        renewed = self._renew(self.grant, now_s)
        if isinstance(renewed, Denial):
            return renewed
        self.grant = renewed
        return None

    def lost_request(self, grant: Grant, publication: Publication | None, now_s: float) -> Denial | None:
        """Return why a request under a grant may not go on; None: it may. Call `lost` before."""
        renewed = self._renew(grant, now_s)
        if isinstance(renewed, Denial):
            return renewed
        return None if publication is None or self._source.holds(renewed, publication) else REMOVED

    def _of(self, token: bytes | None) -> Grant | Denial:
        grant = self._source.admit(token)
        return WRONG if grant is None else self._checked(grant, time.time())

    def _renew(self, grant: Grant, now_s: float) -> Grant | Denial:
        renewed = self._source.renewed(grant)
        return WITHDRAWN if renewed is None else self._checked(renewed, now_s)

    def _checked(self, grant: Grant, now_s: float) -> Grant | Denial:
        if grant.expired(now_s):
            return EXPIRED
        if grant.expires_s is not None:
            self.expires_s = min(self.expires_s, grant.expires_s)
        return grant
