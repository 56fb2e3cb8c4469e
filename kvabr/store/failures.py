"""Classifies failed requests to object stores. Messages never contain text from a peer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvabr.store.url import CREDENTIALS
from kvabr.types.errors import (
    ConnectionLostError,
    ForbiddenError,
    NotFoundError,
    Reason,
    RequestError,
    StoreError,
    TransportError,
    UnauthorizedError,
)

Kind = Literal[
    "absent",
    "bucket",
    "busy",
    "clock",
    "conflict",
    "credentials",
    "denied",
    "foreign",
    "lost",
    "range",
    "rejected",
    "whole",
    "other",
]

UNREADABLE = (ValueError, OverflowError)
"""Errors that obstore raises for dates that Python does not have, such as the year 0."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>|\(code: ([A-Za-z0-9]{1,64})\)")
_KINDS_BY_CODE: dict[str, Kind] = {
    "NoSuchBucket": "bucket",
    "ContainerNotFound": "bucket",
    "InvalidBucketName": "bucket",
    "RequestTimeTooSkewed": "clock",
    "RequestExpired": "clock",
    "AccessDenied": "denied",
    "AuthorizationFailure": "denied",
    **dict.fromkeys(
        (
            "AuthenticationFailed",
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidAccessKeyId",
            "InvalidAuthenticationInfo",
            "InvalidClientTokenId",
            "InvalidSecurity",
            "InvalidToken",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
        ),
        "rejected",
    ),
}
_CAUSES = {
    "ConnectionRefused": "connection refused",
    "dns error": "no such host",
    "InvalidCertificate": "its certificate is not trusted",
    "InvalidContentType": "it does not speak TLS; is it an http:// endpoint?",
    "NetworkUnreachable": "network unreachable",
    "HostUnreachable": "host unreachable",
}
_NO_DESCRIPTORS = "this process has no file descriptors left"
_EMFILE = re.compile(r"\bos error 2[34]\b|\bcode: 2[34]\b")
_RANGE = ("Requested range", "Wanted range", "range")
_IGNORED_RANGE = re.compile(r"Range request not supported|non-partial response|Requested \d+\.\.\d+, got")
_LOST = ("error sending request", "body error", "decoding", "timed out", "timeout", "connection", "Connection")
_KINDS_BY_TYPE: dict[str, Kind] = {
    "FileNotFoundError": "absent",
    "AlreadyExistsError": "conflict",
    "PreconditionError": "conflict",
    "TimeoutError": "lost",
    "PermissionDeniedError": "denied",
    "UnauthenticatedError": "rejected",
}
_KINDS_BY_STATUS: dict[int | None, Kind] = {401: "rejected", 403: "denied", 404: "absent"}
_UNAUTHORIZED: dict[Kind, str] = {
    "clock": "this machine's clock is wrong{details}; set it, for example by NTP",
    "credentials": f"no credentials were found; {CREDENTIALS}",
    "rejected": f"these credentials are wrong or have expired{{details}}; {CREDENTIALS}",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request."""

    kind: Kind
    status: int | None = None
    code: str = ""
    cause: str = ""

    @property
    def details(self) -> str:
        """Status, code and cause, for messages."""
        return " ".join(str(part) for part in (self.status, self.code, self.cause) if part)

    @property
    def passes(self) -> bool:
        """True if the same request may soon succeed."""
        return self.kind in ("busy", "lost")

    @property
    def exhausted(self) -> bool:
        """True if this process has no file descriptors left."""
        return self.cause == _NO_DESCRIPTORS

    @property
    def refused(self) -> bool:
        """True if other credentials might be accepted. To a HEAD request, stores answer only status 403."""
        return self.kind in ("rejected", "credentials") or (self.kind == "denied" and not self.code)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Classify an error of obstore."""
        text, _, account = str(error).partition("Debug source:")
        text = text[:8000]
        found, coded = _STATUS.search(text), _CODE.search(text)
        status = None if found is None else int(found[1])
        code = "" if coded is None else coded[1] or coded[2]
        kind = _kind(error, text, status, code)
        cause = "the answer does not say its length" if "Content-Length Header missing" in text else ""
        if _EMFILE.search(account[:8000]) or _EMFILE.search(text):
            return cls("lost", None, "", _NO_DESCRIPTORS)
        if kind == "lost" and "kind: Connect" in account:
            cause = next((cause for word, cause in _CAUSES.items() if word in account[:8000]), "")
        return cls(kind, status, code, cause)

    def error(self, where: str, what: str) -> TransportError:
        """Return the error to raise: ``what`` failed (such as "cannot be read") at the URL ``where``."""
        details = f" ({self.details})" if self.details else ""
        if self.kind == "absent":
            return NotFoundError(f"{where}: no such object", reason=Reason.MISSING)
        if self.kind == "bucket":
            return StoreError(
                f"{where}: the bucket does not exist{details}; create it, or correct the URL or the endpoint"
            )
        if (why := _UNAUTHORIZED.get(self.kind)) is not None:
            return UnauthorizedError(f"{where}: {what}: {why.format(details=details)}")
        if self.kind == "denied":
            return ForbiddenError(
                f"{where}: {what}: the store refuses these credentials{details}: they do not permit this, or the "
                f"object does not exist and they do not permit listing; {CREDENTIALS}"
            )
        if self.kind == "busy":
            message = f"{where}: {what}: the store is overloaded{details}; try again later"
            return RequestError(message, reason=Reason.BUSY, retry_after_s=5.0)
        if self.kind == "lost":
            why = "cannot be reached" if self.cause else "did not answer, or the connection broke"
            return ConnectionLostError(f"{where}: {what}: the store {why}{details}")
        if self.kind == "whole":
            why = "the store, or a gateway in front of it, ignores ranges and sent other bytes"
            return RequestError(f"{where}: {what}: {why}", reason=Reason.WRONG)
        if self.kind == "foreign":
            why = "this is not the answer of an object store; correct the URL or the endpoint"
            return RequestError(f"{where}: {what}{details}: {why}", reason=Reason.WRONG)
        if self.kind == "range":
            return RequestError(f"{where}: {what}: the object is shorter than the range; it was replaced{details}")
        return RequestError(f"{where}: {what}{details}")


def strange(data: bytes | memoryview) -> str | None:
    """Return why an answer is not a JSON object (perhaps a gateway's page); None if it is."""
    begin, end = bytes(data[:64]).lstrip(), bytes(data[-64:]).rstrip()
    if begin.startswith(b"\x1f\x8b"):
        return "it is compressed (gzip)"
    if begin.startswith(b"<"):
        return "it is a page (HTML or XML)"
    if not begin.startswith(b"{"):
        return "it is not JSON"
    return None if end.endswith(b"}") else "it is truncated"


def _kind(error: BaseException, text: str, status: int | None, code: str) -> Kind:
    if (kind := _KINDS_BY_CODE.get(code)) is not None:
        return kind
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return "credentials"
    if (kind := _KINDS_BY_TYPE.get(type(error).__name__)) is not None:
        return kind
    if (kind := _KINDS_BY_STATUS.get(status)) is not None:
        return kind
    if status is None and _IGNORED_RANGE.search(text):
        return "whole"
    if status == 416 or (status is None and any(word in text for word in _RANGE)):
        return "range"
    if (status in (405, 501) and not code) or (status is None and "invalid list response" in text):
        return "foreign"
    if status == 429 or (status is not None and status >= 500 and status != 501):
        return "busy"
    if status is None and any(word in text for word in _LOST):
        return "lost"
    return "other"
