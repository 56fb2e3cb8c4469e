"""Errors of kvabr. Each message says what is wrong and what to do about it.

Every error that a user can cause derives from `KvabrError`. The command line prints its text without a traceback and
exits with status 1, or 2 for wrong usage.
"""

from __future__ import annotations

import codecs
import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto


class KvabrError(Exception):
    """Base class of all errors that kvabr raises on purpose."""


class UsageError(KvabrError):
    """Invalid arguments of a command or call (exit status 2)."""


class ForkedError(UsageError):
    """An object with threads or sockets of its own is used in a forked child, which has none of them."""

    def __init__(self, message: str, *, made_in: int = 0, used_in: int = 0) -> None:
        """Describe the misuse, with the numbers of the processes that made the object and that use it."""
        super().__init__(message)
        self.made_in, self.used_in = made_in, used_in


class FormatError(KvabrError):
    """Bytes that should be a frame, a profile or a catalog are truncated, corrupt, or of another version."""


class VersionError(FormatError):
    """Undamaged bytes of another version of kvabr, as far as one can tell."""


class ForeignError(FormatError):
    """A valid frame or profile that belongs to another model, prompt, group or track."""


class AssetError(KvabrError):
    """An asset is incomplete on disk, or cannot be written."""


class TraceError(KvabrError):
    """A network trace is empty, malformed, or carries no bytes."""


class PolicyError(KvabrError):
    """A plug-in, such as a policy, cannot be loaded, raised an error, or asked for something that does not exist."""


class UnknownPolicyError(PolicyError, UsageError):
    """There is no policy, estimator or selector of that name (exit status 2)."""


class MissingAssetError(AssetError, UsageError):
    """There is no asset, store or result where one was named (exit status 2)."""


class MissingTraceError(TraceError, UsageError):
    """There is no trace where one was named: no file, an empty one, or one of another kind (exit status 2)."""


class NotFiniteError(KvabrError):
    """A cache has a number that is NaN or infinite: its prefill went wrong, and it must not be published."""

    def __init__(self, message: str, *, layer: int = 0, half: str = "", first: int = 0, last: int = 0) -> None:
        """Describe it: the model's layer; ``keys``, ``values`` or ``vectors``; the first and last token (row)."""
        super().__init__(message)
        self.layer, self.half, self.first, self.last = layer, half, first, last


class TraceQuestionError(TraceError, UsageError):
    """A trace could be read in more than one way; an option says which (exit status 2)."""

    def __init__(self, problem: str, option: str = "") -> None:
        super().__init__(problem)
        self.option = option
        """The option of ``kvabr traces`` that answers the question."""


class HoleError(KvabrError):
    """A cache was requested although some of its groups are neither fetched nor recomputed."""


class ModelError(KvabrError):
    """The model is not installed, or a text or cache does not fit it."""


class PlayError(KvabrError):
    """A play ended without a complete cache; the message says what is missing, and why."""


class BusyError(PlayError):
    """The client is at its limit of plays and refused this one while there was time to do without its cache."""


class TransportError(KvabrError):
    """A peer is unreachable, refuses, closes the connection, or violates the protocol."""


class Reason(Enum):
    """Why a request failed, whatever it was sent over."""

    INTERNAL = auto()
    """Something went wrong, or the request was cancelled."""
    UNAUTHORIZED = auto()
    MALFORMED_TOKEN = auto()
    EXPIRED_TOKEN = auto()
    TIMEOUT = auto()
    UNSUPPORTED = auto()
    AWAY = auto()
    """The peer is going away."""
    BUSY = auto()
    MISSING = auto()
    """There is no such thing, or nothing that this connection may read."""
    WRONG = auto()
    """What came is not what was asked for."""
    OTHER = auto()


class RequestError(TransportError):
    """The peer refused or reset one request; the connection stays open."""

    def __init__(self, message: str, *, reason: Reason = Reason.INTERNAL, retry_after_s: float | None = None) -> None:
        """Describe the failure. A retry may succeed after ``retry_after_s`` seconds; None: do not retry."""
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class NotFoundError(RequestError):
    """The track does not exist, or this connection may not read it. The two are deliberately indistinguishable."""


class NoAnswerError(TransportError):
    """Nothing came from an address, or the host's name has none at the moment, so nobody may be there."""


class ConnectionLostError(TransportError):
    """The connection ended. Its requests are lost, but reconnecting may succeed."""


class StoreError(TransportError):
    """There is no such object store, or it lacks what kvabr needs."""


class UnauthorizedError(ConnectionLostError):
    """The peer refused our token: it is missing, wrong, or was revoked."""


class ForbiddenError(UnauthorizedError):
    """A store knows our credentials, but not for this; many say the same of objects that do not exist."""


class ExhaustedError(PlayError, TransportError):
    """This process has no file descriptors, threads or memory left; the message says which. It may pass."""


_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_CAUSES = 8
"""Errors that are looked at of those that caused each other."""
codecs.lookup("idna")  # Python resolves names with it, and does without it for ever if it cannot open the module once.
_NO_THREAD, _NO_MEMORY = "can't start new thread", ("can't allocate memory", "not enough memory")


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return what to raise instead of an error that says that the process has run out of something; None: it does not.

    Libraries say so in many ways, and anywhere: a module may be imported, or a file be opened, at any time.
    """
    seen: BaseException | None = error
    for _ in range(_CAUSES):
        if seen is None or isinstance(seen, KvabrError):
            break
        if isinstance(seen, OSError) and seen.errno in _DESCRIPTORS:
            return ExhaustedError(
                f"no file descriptors are left ({seen.strerror}): close what is open, or raise the limit (ulimit -n)"
            )
        if isinstance(seen, RuntimeError) and _NO_THREAD in str(seen):
            return ExhaustedError(
                "no thread can be started: memory is short, or the limit of processes is reached (ulimit -u)"
            )
        memory = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        memory |= isinstance(seen, RuntimeError) and any(words in str(seen) for words in _NO_MEMORY)
        if memory or isinstance(seen, MemoryError):
            return ExhaustedError("no memory is left: free some, raise the limit, or play fewer caches at once")
        seen = seen.__cause__
    return None


@contextmanager
def told_if_exhausted(relieve: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise `ExhaustedError` for whatever says that the process has run out of something, after ``relieve``."""
    try:
        yield
    except Exception as error:
        if (told := exhausted(error)) is None:
            raise
        relieve()
        raise told from error


def may_pass(error: BaseException) -> bool:
    """Return whether the same may succeed later: a peer or store was out of reach or overloaded; it refused nothing."""
    if isinstance(error, AssetError) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    if isinstance(error, ExhaustedError):
        return True
    if isinstance(error, RequestError):
        return error.retry_after_s is not None
    return isinstance(error, ConnectionLostError) and not isinstance(error, UnauthorizedError)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'NAME'?)`` for the known name closest to ``word``, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415 - only failures need it

    names = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
