"""Requests of a MoQT connection: a `MoqtRequest` for each transfer, and the `RequestQueue` of its FETCHes."""

from __future__ import annotations

from heapq import heappop, heappush

from kvabr.moqt.codes import RequestCode, ResetCode, name_of, reason_of
from kvabr.moqt.messages import RequestErrorMessage as Refusal
from kvabr.moqt.objects import Item, ObjectHeader, RangeEnd
from kvabr.transfer.transfer import GroupTransfer
from kvabr.types.errors import NotFoundError, Reason, RequestError
from kvabr.types.events import Limit
from kvabr.types.naming import CATALOG_TRACK, MAX_RATE_KBPS, PROPERTY_GROUP_BYTES, PROPERTY_RATE

MAX_IN_FLIGHT = 64
"""Most FETCHes in flight; the others wait. Servers allow about 100 streams."""
_NOT_THERE = (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE)
_REQUEST_CODES = {
    ResetCode.CANCELLED: RequestCode.INTERNAL_ERROR,
    ResetCode.DELIVERY_TIMEOUT: RequestCode.TIMEOUT,
    ResetCode.SESSION_CLOSED: RequestCode.GOING_AWAY,
    ResetCode.GOING_AWAY: RequestCode.GOING_AWAY,
    ResetCode.TOO_FAR_BEHIND: RequestCode.TIMEOUT,
    ResetCode.UNKNOWN_OBJECT_STATUS: RequestCode.INTERNAL_ERROR,
    ResetCode.EXPIRED_AUTH_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
}
"""Request codes for reset codes with another meaning."""


class MoqtRequest:
    """A transfer requested from a connection."""

    def __init__(self, transfer: GroupTransfer, fields: tuple[bytes, ...]) -> None:
        self.transfer, self.request, self.fields = transfer, transfer.request, fields
        self.number: int | None = None
        """ID of its FETCH; None before, and for a group of a subscription."""
        self.rate = 0.0
        """Rate announced in the answer, bytes per second; 0.0: none."""

    def take(self, items: list[Item], limit: Limit) -> None:
        """Handle received objects, and what limited them."""
        transfer, request = self.transfer, self.transfer.request
        for item in items:
            if isinstance(item, memoryview):
                transfer.append(item)
                continue
            transfer.progressed(limit)
            if isinstance(item, RangeEnd):
                self._wrong("the peer does not have all of it", Reason.INTERNAL)
            elif not 0 <= item.group - request.group < request.groups:
                self._wrong(f"objects of group {item.group} were received", Reason.WRONG)
            elif max(item.size, _number(item, PROPERTY_GROUP_BYTES)) > request.limit:
                transfer.too_long()
            elif (kbps := _number(item, PROPERTY_RATE)) <= MAX_RATE_KBPS:
                self.rate = max(self.rate, kbps * 1000 / 8)
        transfer.progressed(limit)

    def finish(self, reset: int | None) -> None:
        """End with the stream, or with its reset code."""
        transfer = self.transfer
        if reset is not None:
            reason = name_of(reset, ResetCode)
            code = next((code for known, code in _REQUEST_CODES.items() if known == reset), reset)
            transfer.fail(RequestError(f"{self.request}: aborted by the peer ({reason})", reason=reason_of(code)))
        elif not transfer.received:
            transfer.fail(NotFoundError(f"{self.request}: the group is empty", reason=Reason.MISSING))
        else:
            transfer.finish()

    def refuse(self, message: Refusal) -> None:
        """Fail because of a refusal."""
        code, request = message.code, self.request
        details = f": {message.reason}" if message.reason else ""
        if code in _NOT_THERE:
            missing = f"{request}: not found{details}"
            if request.track == CATALOG_TRACK:
                name = f"{request.namespace.model}/{request.namespace.prompt}"
                missing = f"no such asset {name}, or none that your token opens"
            error: RequestError = NotFoundError(missing, reason=reason_of(code))
        else:
            retry_s = (message.retry_interval - 1) / 1000 if message.retry_interval else None
            name = name_of(code, RequestCode)
            error = RequestError(f"{request}: refused, {name}{details}", reason=reason_of(code), retry_after_s=retry_s)
        self.transfer.fail(error)

    def _wrong(self, why: str, reason: Reason) -> None:
        self.transfer.reject(RequestError(f"{self.request}: {why}", reason=reason))


def _number(header: ObjectHeader, wanted: int) -> int:
    return next((value for kind, value in header.properties if kind == wanted and isinstance(value, int)), 0)


class RequestQueue:
    """The unfinished FETCHes of one connection, in flight and waiting.

    The most urgent is sent first, then the earliest, in constant or logarithmic time.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, MoqtRequest] = {}
        self._places: dict[MoqtRequest, int] = {}
        self._heap: list[tuple[int, int, MoqtRequest]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def wait(self, request: MoqtRequest) -> None:
        """Add a waiting request, or apply its new priority."""
        self._entries += 1
        self._places[request] = self._entries
        heappush(self._heap, (request.transfer.priority, self._entries, request))

    def leave(self, request: MoqtRequest) -> None:
        """Remove a waiting request."""
        self._places.pop(request, None)

    def clear(self) -> list[MoqtRequest]:
        """Remove and return all waiting requests in order of arrival."""
        waiting = list(self._places)
        self._places.clear()
        self._heap.clear()
        return waiting

    def may_send(self) -> bool:
        """Return whether a request may be sent now."""
        return len(self.in_flight) < MAX_IN_FLIGHT

    def next(self) -> MoqtRequest | None:
        """Take the next request that may be sent, or None."""
        heap = self._heap
        while heap and self._places.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        if not heap or not self.may_send():
            return None
        request = heappop(heap)[2]
        del self._places[request]
        return request
