"""One FETCH of a QUIC connection: its objects become the bytes of a transfer, its end becomes that of the transfer."""

from __future__ import annotations

from kvabr.moqt.codes import RequestCode, ResetCode, name_of, reason_of
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.transfer.transfer import GroupRequest, GroupTransfer
from kvabr.types.errors import NotFoundError, Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, PROPERTY_GROUP_BYTES

_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)
_SAME = {
    ResetCode.CANCELLED: RequestCode.INTERNAL_ERROR,
    ResetCode.DELIVERY_TIMEOUT: RequestCode.TIMEOUT,
    ResetCode.SESSION_CLOSED: RequestCode.GOING_AWAY,
    ResetCode.GOING_AWAY: RequestCode.GOING_AWAY,
    ResetCode.TOO_FAR_BEHIND: RequestCode.TIMEOUT,
    ResetCode.UNKNOWN_OBJECT_STATUS: RequestCode.INTERNAL_ERROR,
    ResetCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
}
"""What resets of streams mean in the codes of requests, where the same number means something else."""


class QuicFetch:
    """A transfer that a connection has asked for, or will ask for."""

    def __init__(self, transfer: GroupTransfer, fields: tuple[bytes, ...]) -> None:
        """Begin without bytes; ``fields`` are those of the namespace as the peer is asked for it."""
        self.transfer, self.fields = transfer, fields
        self.number: int | None = None
        """Request ID; None before it has been asked for."""

    @property
    def request(self) -> GroupRequest:
        """What is asked for."""
        return self.transfer.request

    @property
    def priority(self) -> int:
        """Priority of the transfer."""
        return self.transfer.priority

    @property
    def held(self) -> bool:
        """See `GroupTransfer.held`."""
        return self.transfer.held

    def take(self, items: list[Item], limit: Limit) -> None:
        """Handle objects that have come, and what limited them."""
        transfer, request = self.transfer, self.transfer.request
        for item in items:
            if isinstance(item, memoryview):
                transfer.append(item)
                continue
            transfer.came(limit)
            if isinstance(item, RangeEnd):
                self._wrong("the peer does not have all of it", Reason.INTERNAL)
            elif not 0 <= item.group - request.group < request.groups:
                self._wrong(f"objects of group {item.group} came", Reason.WRONG)
            elif max(item.size, _declared_bytes(item)) > request.limit:
                transfer.too_long()
        transfer.came(limit)

    def finish(self, reset: int | None) -> None:
        """End with the stream, or with the code that reset it."""
        transfer = self.transfer
        if reset is not None:
            reason = name_of(reset, ResetCode)
            code = next((code for known, code in _SAME.items() if known == reset), reset)
            transfer.fail(RequestError(f"{self.request}: broken off by the peer ({reason})", reason=reason_of(code)))
        elif not transfer.received:
            transfer.fail(NotFoundError(f"{self.request}: nothing there", reason=Reason.MISSING))
        else:
            transfer.finish()

    def refuse(self, message: Refusal) -> None:
        """Fail because the peer has refused the request."""
        code, request = message.code, self.request
        said = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{request}: not found{said}"
            if request.track == CATALOG_TRACK:
                name = f"{request.namespace.model}/{request.namespace.prompt}"
                missing = f"no such asset {name}, or none that your token opens"
            error: RequestError = NotFoundError(missing, reason=reason_of(code))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(f"{request}: refused, {name}{said}", reason=reason_of(code), retry_after_s=retry_s)
        self.transfer.fail(error)

    def _wrong(self, why: str, reason: Reason) -> None:
        self.transfer.reject(RequestError(f"{self.request}: {why}", reason=reason))


def _declared_bytes(header: ObjectHeader) -> int:
    """Return the bytes of the whole group, where its publisher says so; otherwise 0."""
    for kind, value in header.properties:
        if kind == PROPERTY_GROUP_BYTES and isinstance(value, int):
            return value
    return 0
