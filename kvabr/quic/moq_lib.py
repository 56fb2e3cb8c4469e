r"""What clients, origins and relays on moq-rs share: loading it, its names of things, its errors in our words.

moq-rs calls a namespace a broadcast and names it by a path: the fields joined with slashes, a slash within a field
written as ``\/``. It calls objects frames, and its priorities run the other way: the highest goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from importlib import import_module
from typing import Any

from kvabr.moqt.codes import RequestCode
from kvabr.quic.options import Names
from kvabr.types.errors import ConnectionLostError, FormatError, NotFoundError, RequestError, TransportError
from kvabr.types.naming import MAX_FULL_TRACK_NAME, ROOT, TrackNamespace

MAX_GROUP_BYTES = 32 << 20
"""Groups beyond this moq-rs neither sends nor takes, in any role."""

APP_CODES = 64
"""moq-rs adds this to the codes that an application gives when it refuses something."""

ROUTES = ("/".join(part for part in ROOT.split("/") if part), ROOT.replace("/", "\\/"))
"""What an origin or a relay announces: where kvabr's names begin, in both forms. Nothing tells what there is below."""

UNAUTHORIZED, BUSY, GOING_AWAY = 401, 503, 504
"""Codes by which a server of moq-rs turns connections away; of the first it makes UNAUTHORIZED, the others are ours."""

TURNED_AWAY = {
    f"app code={BUSY}": "it takes no more connections now; try another server, or later",
    f"app code={GOING_AWAY}": "it is going away; try another server, or later",
}
"""What such a server writes when it closes a connection, and what that means."""

_REMOTE_CODE = re.compile(r"remote error: code=(\d+)")
_RETRY_S = 0.1
"""When to ask again for what a full cache threw out."""


def load() -> Any:
    """The module ``moq``.

    Raises:
        TransportError: it is not installed, or not for this machine.
    """
    try:
        return import_module("moq")
    except (ImportError, OSError) as error:
        raise TransportError(
            f"moq-rs is not installed or does not load here ({error}); install it with: pip install 'kvabr[moq]'"
        ) from error


def path_of(namespace: TrackNamespace, names: Names) -> str:
    """The path of a namespace.

    Where two of moq-rs speak moq-lite with each other only ``split`` arrives as it was sent: a slash at the end of a
    field melts with the one after it.
    """
    fields = namespace.split_fields() if names == "split" else namespace.fields()
    return "/".join(field.decode().replace("\\", "\\\\").replace("/", "\\/") for field in fields)


def namespace_of(path: str) -> TrackNamespace:
    """Read a path of either form back, also if slashes have melted.

    Raises:
        FormatError: it is not a namespace of kvabr's.
    """
    if len(path) > 2 * MAX_FULL_TRACK_NAME:
        raise FormatError("track namespace: longer than a full track name may be")
    plain = re.sub(r"\\(.)", r"\1", path, flags=re.DOTALL)
    return TrackNamespace.from_fields([part.encode() for part in plain.split("/") if part])


def moq_priority(priority: int) -> int:
    """The priority for moq-rs of one of MoQT; the same function leads back."""
    return 255 - min(255, max(0, priority))


async def close(server: Any) -> None:
    """Close a server of moq-rs, in a thread: it waits until handshakes that failed just now are forgotten."""

    def run() -> None:
        with contextlib.suppress(StopIteration):
            server.__aexit__(None, None, None).send(None)

    await asyncio.to_thread(run)


def explain(moq: Any, error: Exception) -> str:
    """What an error of moq-rs says."""
    details = getattr(error, "details", None)
    if isinstance(error, moq.Error.Protocol) and details is not None:
        return str(details.message)
    values = getattr(error, "_values", ())
    return str(values[0]) if values else type(error).__name__.lower()


def as_ours(moq: Any, error: Exception, what: str) -> TransportError:
    """An error of a fetch, as one of `kvabr.quic.interface`.

    Args:
        moq: the module.
        error: one of ``moq.Error``.
        what: what was asked for.
    """
    errors, kinds, said = moq.Error, moq.ProtocolKind, explain(moq, error)
    if isinstance(error, errors.Protocol):
        details = error.details
        if details.scope == moq.ErrorScope.SESSION or details.kind in (kinds.SESSION_CLOSED, kinds.GOING_AWAY):
            return ConnectionLostError(f"{what}: the connection ended ({said})")
        if details.kind in (kinds.NOT_FOUND, kinds.UNROUTABLE, kinds.UNAUTHORIZED):
            return _missing(what, RequestCode.DOES_NOT_EXIST)
        if details.kind in (kinds.EVICTED, kinds.OLD, kinds.TOO_FAR_BEHIND):
            return RequestError(f"{what}: pushed out of a cache on the way ({said})", retry_after_s=_RETRY_S)
        return _refused(what, details.code - APP_CODES if details.kind == kinds.APP else details.code, said)
    if isinstance(error, errors.NotFound | errors.Unauthorized | errors.Forbidden):
        return _missing(what, RequestCode.DOES_NOT_EXIST)
    if isinstance(error, errors.Transport | errors.Closed | errors.Cancelled):
        return ConnectionLostError(f"{what}: the connection ended ({said})")
    if said == "invalid fetch range":
        return _missing(what, RequestCode.INVALID_RANGE)
    remote = _REMOTE_CODE.search(said)
    return _refused(what, int(remote[1]) if remote else RequestCode.INTERNAL_ERROR, said)


def _missing(what: str, code: int) -> NotFoundError:
    return NotFoundError(f"{what}: no such track or group, or none that this token may read", code=code)


def _refused(what: str, code: int, said: str) -> RequestError:
    if code in (RequestCode.DOES_NOT_EXIST, RequestCode.INVALID_RANGE):
        return _missing(what, code)
    if code == RequestCode.GOING_AWAY:
        return RequestError(f"{what}: the peer is going away", code=code, retry_after_s=_RETRY_S)
    if code == RequestCode.EXCESSIVE_LOAD:
        return RequestError(f"{what}: the peer has too much to do", code=code, retry_after_s=1.0)
    if said == "group too large":
        said = f"group too large: moq-rs carries at most {MAX_GROUP_BYTES >> 20} MiB; use --quic aioquic or qh3"
    return RequestError(f"{what}: refused or broken off by the peer ({said})", code=code)
