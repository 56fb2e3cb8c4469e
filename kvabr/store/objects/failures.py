"""What a failed request to an object store means, and what to tell the user. No text of a peer's gets into messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvabr.moqt.codes import RequestCode
from kvabr.store.objects.url import CREDENTIALS
from kvabr.types.errors import (
    ConnectionLostError,
    NotFoundError,
    RequestError,
    StoreError,
    TransportError,
    UnauthorizedError,
)

Kind = Literal["absent", "bucket", "busy", "clock", "conflict", "credentials", "denied", "lost", "range", "other"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>|\(code: ([A-Za-z0-9]{1,64})\)")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_DENIED = {"AccessDenied", "AuthorizationFailure", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_RANGE = ("Requested range", "Wanted range", "range")
_LOST = ("error sending request", "body error", "decoding", "timed out", "timeout", "connection", "Connection")
_KINDS_BY_TYPE: dict[str, Kind] = {
    "FileNotFoundError": "absent",
    "AlreadyExistsError": "conflict",
    "PreconditionError": "conflict",
    "PermissionDeniedError": "denied",
    "UnauthenticatedError": "denied",
    "PermissionError": "denied",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What a request failed of."""

    kind: Kind
    status: int | None = None
    """Status of the HTTP answer; None if there was none."""
    code: str = ""
    """The store's own word for it."""

    @property
    def told(self) -> str:
        """Status and word, for messages."""
        return " ".join(str(part) for part in (self.status, self.code) if part)

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return self.kind in ("busy", "lost")

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Read an error of obstore's."""
        text = str(error).partition("Debug source:")[0][:8000]
        found, coded = _STATUS.search(text), _CODE.search(text)
        status = None if found is None else int(found[1])
        code = "" if coded is None else coded[1] or coded[2]
        return cls(_kind(error, text, status, code), status, code)

    @classmethod
    def of_status(cls, status: int) -> Failure:
        """Return what an HTTP answer with a status says that is no success."""
        return cls(_kind(ValueError(), "", status, ""), status)

    def error(self, where: str, what: str) -> TransportError:
        """Return the error to raise: ``what`` failed, for example "cannot be read", at the URL ``where``."""
        told = f" ({self.told})" if self.told else ""
        if self.kind == "absent":
            return NotFoundError(f"{where}: there is no such object", code=RequestCode.DOES_NOT_EXIST)
        if self.kind == "bucket":
            return StoreError(f"{where}: the bucket does not exist{told}; make it, or correct the URL or the endpoint")
        if self.kind == "clock":
            return UnauthorizedError(
                f"{where}: {what}: this machine's clock is wrong{told}; set it, for example by NTP"
            )
        if self.kind == "credentials":
            return UnauthorizedError(f"{where}: {what}: no credentials were found; {CREDENTIALS}")
        if self.kind == "denied":
            return UnauthorizedError(
                f"{where}: {what}: the store refuses these credentials{told}; {CREDENTIALS}. An identity that may read "
                "but not list is refused for objects that do not exist, too"
            )
        if self.kind == "busy":
            told = f"{where}: {what}: the store is overloaded{told}; try again later"
            return RequestError(told, code=RequestCode.EXCESSIVE_LOAD, retry_after_s=5.0)
        if self.kind == "lost":
            return ConnectionLostError(f"{where}: {what}: the store did not answer, or the connection broke{told}")
        if self.kind == "range":
            return RequestError(f"{where}: {what}: the object is shorter than was asked for; it was replaced{told}")
        return RequestError(f"{where}: {what}{told}")


def _kind(error: BaseException, text: str, status: int | None, code: str) -> Kind:
    if code in _NO_BUCKET:
        return "bucket"
    if code in _CLOCK:
        return "clock"
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return "credentials"
    if (kind := _KINDS_BY_TYPE.get(type(error).__name__)) is not None:
        return kind
    if status in (401, 403) or code in _DENIED:
        return "denied"
    if status == 404:
        return "absent"
    if status == 416 or (status is None and any(word in text for word in _RANGE)):
        return "range"
    if status == 429 or (status is not None and status >= 500 and status != 501):
        return "busy"
    if status is None and any(word in text for word in _LOST):
        return "lost"
    return "other"
