"""The errors of kvabr: each says what is wrong and what to do about it.

Every error that a user can cause derives from `KvabrError`; the command line prints its text without a traceback
and exits with status 1 (2 for bad usage).
"""

from __future__ import annotations

from collections.abc import Iterable


class KvabrError(Exception):
    """Base of all errors that kvabr raises on purpose."""


class UsageError(KvabrError):
    """A command or call was given arguments that make no sense (exit status 2)."""


class FormatError(KvabrError):
    """Bytes that should be a frame, a profile or a catalog are not: truncated, corrupt, or a newer version."""


class ForeignError(FormatError):
    """A well-formed frame or profile that belongs to something else: another model, prompt, group or track."""


class AssetError(KvabrError):
    """An asset on disk is missing something, or cannot be written."""


class TraceError(KvabrError):
    """A network trace is empty, malformed, or carries nothing."""


class PolicyError(KvabrError):
    """A policy plug-in cannot be loaded, raised, or asked for something that does not exist."""


class HoleError(KvabrError):
    """A cache was asked for while some of its groups are neither fetched nor recomputed."""


class ModelError(KvabrError):
    """The real-model bed is not installed, or a text or cache does not fit the model."""


class PlayError(KvabrError):
    """A play ended without its cache; the message says what was missing, and why."""


class BusyError(PlayError):
    """A node has as many plays as it may have; this one was refused while there was time to do without its cache."""


class TransportError(KvabrError):
    """A peer cannot be reached, refuses, breaks off, or does not keep to the protocol."""


class RequestError(TransportError):
    """The peer refused or broke off one request; the connection goes on."""

    def __init__(self, message: str, *, code: int = 0, retry_after_s: float | None = None) -> None:
        """Say what happened.

        Args:
            message: what was asked for, and what the peer answered.
            code: the REQUEST_ERROR or reset code of moq-transport.
            retry_after_s: when asking again may help; None: it will not.
        """
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class NotFoundError(RequestError):
    """There is no such track, or none that this connection may read: the two cannot be told apart, on purpose."""


class ConnectionLostError(TransportError):
    """The connection ended; whatever was under way on it is gone, but a new one may be had."""


class UnauthorizedError(ConnectionLostError):
    """The peer refused our token: it is missing, wrong, or was revoked."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'NAME'?)`` for the known name closest to ``word``, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415 - only failures need it

    names = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
