"""Code points of moq-transport and the exception for faults."""

from __future__ import annotations

from enum import IntEnum

from kvabr.types.errors import Reason


class SessionCode(IntEnum):
    """Reasons to close a session (draft 18, section 15.10.1)."""

    NO_ERROR = 0x0
    INTERNAL_ERROR = 0x1
    UNAUTHORIZED = 0x2
    PROTOCOL_VIOLATION = 0x3
    INVALID_REQUEST_ID = 0x4
    DUPLICATE_TRACK_ALIAS = 0x5
    KEY_VALUE_FORMATTING_ERROR = 0x6
    INVALID_PATH = 0x8
    MALFORMED_PATH = 0x9
    GOAWAY_TIMEOUT = 0x10
    CONTROL_MESSAGE_TIMEOUT = 0x11
    DATA_STREAM_TIMEOUT = 0x12
    AUTH_TOKEN_CACHE_OVERFLOW = 0x13
    DUPLICATE_AUTH_TOKEN_ALIAS = 0x14
    VERSION_NEGOTIATION_FAILED = 0x15
    MALFORMED_AUTH_TOKEN = 0x16
    UNKNOWN_AUTH_TOKEN_ALIAS = 0x17
    EXPIRED_AUTH_TOKEN = 0x18
    INVALID_AUTHORITY = 0x19
    MALFORMED_AUTHORITY = 0x1A
    TOO_MANY_REQUEST_UPDATES = 0x1B
    """Draft 20."""


class RequestCode(IntEnum):
    """Reasons to refuse a request (draft 18, section 15.10.2)."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TIMEOUT = 0x2
    NOT_SUPPORTED = 0x3
    MALFORMED_AUTH_TOKEN = 0x4
    EXPIRED_AUTH_TOKEN = 0x5
    GOING_AWAY = 0x6
    EXCESSIVE_LOAD = 0x9
    DOES_NOT_EXIST = 0x10
    INVALID_RANGE = 0x11
    MALFORMED_TRACK = 0x12
    DUPLICATE_SUBSCRIPTION = 0x19
    UNINTERESTED = 0x20
    PREFIX_OVERLAP = 0x30
    NAMESPACE_TOO_LARGE = 0x31
    INVALID_JOINING_REQUEST_ID = 0x32
    UNSUPPORTED_EXTENSION = 0x33
    REDIRECT = 0x34
    CONFLICTING_FILTERS = 0x35
    """Like `INVALID_FILTER`, from draft 20."""
    INVALID_FILTER = 0x36


class ResetCode(IntEnum):
    """Reasons to reset or stop a stream (draft 18, section 15.10.4)."""

    INTERNAL_ERROR = 0x0
    CANCELLED = 0x1
    DELIVERY_TIMEOUT = 0x2
    SESSION_CLOSED = 0x3
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    UNKNOWN_OBJECT_STATUS = 0x6
    EXPIRED_AUTH_TOKEN = 0x7
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class PublishDoneCode(IntEnum):
    """Reasons to end a subscription, in PUBLISH_DONE (draft 18, section 15.10.3)."""

    INTERNAL_ERROR = 0x0
    UNAUTHORIZED = 0x1
    TRACK_ENDED = 0x2
    GOING_AWAY = 0x4
    TOO_FAR_BEHIND = 0x5
    EXPIRED = 0x6
    UPDATE_FAILED = 0x8
    EXCESSIVE_LOAD = 0x9
    MALFORMED_TRACK = 0x12


class Param(IntEnum):
    """Message parameters (draft 18, section 15.7, and those that draft 20 adds)."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    AUTHORIZATION_TOKEN = 0x03
    RENDEZVOUS_TIMEOUT = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    EXPIRES = 0x08
    MAX_OBJECT = 0x09
    FILL_TIMEOUT = 0x0A
    FORWARD = 0x10
    SUBSCRIBER_PRIORITY = 0x20
    LOCATION_FILTER = 0x21
    GROUP_ORDER = 0x22
    FILL_PARAMETERS = 0x23
    SUBGROUP_FILTER = 0x25
    OBJECTID_FILTER = 0x26
    PRIORITY_FILTER = 0x27
    OBJECT_PROPERTY_FILTER = 0x28
    TRACK_PROPERTY_FILTER = 0x29
    NEW_GROUP_REQUEST = 0x32
    TRACK_NAMESPACE_PREFIX = 0x34
    INCLUDE_PROPERTIES = 0x35


RANGE_FILTERS = frozenset({
    Param.SUBGROUP_FILTER, Param.OBJECTID_FILTER, Param.PRIORITY_FILTER, Param.OBJECT_PROPERTY_FILTER,
    Param.TRACK_PROPERTY_FILTER,
})  # fmt: skip
"""Filters by criteria other than location (draft 20, section 5.1.4)."""


class SetupOption(IntEnum):
    """Setup options (draft 18, section 15.4)."""

    PATH = 0x01
    AUTHORIZATION_TOKEN = 0x03
    MAX_AUTH_TOKEN_CACHE_SIZE = 0x04
    AUTHORITY = 0x05
    MAX_FILTER_RANGES = 0x06
    """This end never sends this option, so peers may not use range filters."""
    MOQT_IMPLEMENTATION = 0x07
    MAX_REQUEST_UPDATES = 0x08


class Property(IntEnum):
    """Properties of tracks and objects (draft 18, section 15.8)."""

    OBJECT_DELIVERY_TIMEOUT = 0x02
    MAX_CACHE_DURATION = 0x04
    SUBGROUP_DELIVERY_TIMEOUT = 0x06
    IMMUTABLE_PROPERTIES = 0x0B
    DEFAULT_PUBLISHER_PRIORITY = 0x0E
    DEFAULT_PUBLISHER_GROUP_ORDER = 0x22
    DYNAMIC_GROUPS = 0x30
    PRIOR_GROUP_ID_GAP = 0x3C
    PRIOR_OBJECT_ID_GAP = 0x3E


MANDATORY_TRACK_PROPERTIES = range(0x4000, 0x8000)
"""Properties that a receiver must understand to use the track (draft 18, section 2.5.1)."""


class SessionFault(Exception):  # noqa: N818  # the peer's fault, not an error here
    """The peer broke the protocol; close the session with `code`."""

    def __init__(self, message: str, code: SessionCode = SessionCode.PROTOCOL_VIOLATION) -> None:
        super().__init__(message)
        self.code = code


def name_of(code: int, kind: type[IntEnum]) -> str:
    """Return a code's name, or its number if it has none."""
    try:
        return kind(code).name
    except ValueError:
        return f"code 0x{code:x}"


_CODES = {
    Reason.INTERNAL: RequestCode.INTERNAL_ERROR,
    Reason.UNAUTHORIZED: RequestCode.UNAUTHORIZED,
    Reason.TIMEOUT: RequestCode.TIMEOUT,
    Reason.UNSUPPORTED: RequestCode.NOT_SUPPORTED,
    Reason.MALFORMED_TOKEN: RequestCode.MALFORMED_AUTH_TOKEN,
    Reason.EXPIRED_TOKEN: RequestCode.EXPIRED_AUTH_TOKEN,
    Reason.AWAY: RequestCode.GOING_AWAY,
    Reason.BUSY: RequestCode.EXCESSIVE_LOAD,
    Reason.MISSING: RequestCode.DOES_NOT_EXIST,
    Reason.WRONG: RequestCode.MALFORMED_TRACK,
}
_REASONS = {int(code): reason for reason, code in _CODES.items()} | {int(RequestCode.INVALID_RANGE): Reason.MISSING}


def reason_of(code: int) -> Reason:
    """Return the meaning of a refused request's code."""
    return _REASONS.get(code, Reason.OTHER)


def code_of(reason: Reason) -> RequestCode:
    """Return the wire code of a reason."""
    return _CODES.get(reason, RequestCode.INTERNAL_ERROR)
