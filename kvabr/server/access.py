"""The assets that one connection may read, by the token of its SETUP or of a request, and until when.

While connections are open, tokens may expire or be withdrawn, and grants may be narrowed.
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
    """A reason to refuse a token, with the codes for a session, a request, and a stream."""

    result: str
    reason: str
    session: SessionCode = SessionCode.UNAUTHORIZED
    request: RequestCode = RequestCode.UNAUTHORIZED
    reset: ResetCode = ResetCode.EXPIRED_AUTH_TOKEN
    done: PublishDoneCode = PublishDoneCode.UNAUTHORIZED


WRONG = Denial("unauthorized", "the token is missing or wrong")
WITHDRAWN = Denial("withdrawn", "the token is no longer accepted")
EXPIRED = Denial(
    "expired", "the token has expired",
    SessionCode.EXPIRED_AUTH_TOKEN, RequestCode.EXPIRED_AUTH_TOKEN, done=PublishDoneCode.EXPIRED,
)  # fmt: skip
REMOVED = Denial(
    "removed", "the asset was removed or replaced, or the token no longer gives access to it",
    SessionCode.INTERNAL_ERROR, RequestCode.DOES_NOT_EXIST, ResetCode.INTERNAL_ERROR, PublishDoneCode.TRACK_ENDED,
)  # fmt: skip


class Access:
    """The assets that one connection may read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.grant: Grant | None = None
        """Grant of the SETUP's token; None: the connection must close."""
        self.expires_s = float("inf")
        """Earliest expiry of its tokens, in seconds since 1970."""

    def enter(self, token: bytes | None) -> Grant | Denial:
        """Set and return the grant of the SETUP's token, or return why it is denied."""
        grant = self._of(token)
        self.grant = None if isinstance(grant, Denial) else grant
        return grant

    def for_request(self, tokens: Sequence[bytes]) -> Grant | Denial:
        """Return the grant of a request's own token, if it has one, else of the SETUP's."""
        if self.grant is None:
            return WRONG
        return self._of(tokens[0]) if tokens else self.grant  # only the first, since each check takes time

    def recheck(self, now_s: float) -> Denial | None:
        """Return why the connection must close at ``now_s`` (seconds since 1970), or None."""
        if self.grant is None:
            return None  # already closed
        self.expires_s = float("inf")
        renewed = self._renew(self.grant, now_s)
        if isinstance(renewed, Denial):
            return renewed
        self.grant = renewed
        return None

    def recheck_request(self, grant: Grant, publication: Publication, now_s: float) -> Denial | None:
        """Return why a request must end at ``now_s``, or None. Call `recheck` first."""
        renewed = self._renew(grant, now_s)
        if isinstance(renewed, Denial):
            return renewed
        return None if publication.readable(renewed) else REMOVED

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
