"""Errors of kvabr. Messages state the problem and the remedy.

Errors that a user can cause derive from `KvabrError`. The command line prints them without a traceback and exits with
status 1, or 2 for wrong usage.
"""

from __future__ import annotations

import codecs
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto


class KvabrError(Exception):
    """Base class of all errors that kvabr raises on purpose."""


class UsageError(KvabrError):
    """Invalid arguments of a command or call (exit status 2)."""


class ForkedError(UsageError):
    """An object with threads or sockets was used in a forked child process, which does not have these."""

    def __init__(self, message: str, *, made_in: int = 0, used_in: int = 0) -> None:
        super().__init__(message)
        self.made_in, self.used_in = made_in, used_in


class FormatError(KvabrError):
    """A frame, profile or catalog is truncated, corrupt, or of another version."""


class VersionError(FormatError):
    """Bytes of another version of kvabr that appear undamaged."""


class ForeignError(FormatError):
    """A valid frame or profile of another model, prompt, group or track."""


class AssetError(KvabrError):
    """An asset is incomplete on disk, or cannot be written."""


class TraceError(KvabrError):
    """A network trace is empty, malformed, or carries no bytes."""


class PolicyError(KvabrError):
    """A plug-in, such as a policy, cannot be loaded, raised an error, or returned an invalid decision."""


class UnknownPolicyError(PolicyError, UsageError):
    """No policy, estimator or selector has this name (exit status 2)."""


class MissingAssetError(AssetError, UsageError):
    """The named asset, store or result does not exist (exit status 2)."""


class MissingTraceError(TraceError, UsageError):
    """The named trace does not exist, is empty, or is of another kind (exit status 2)."""


class NotFiniteError(KvabrError):
    """A cache contains NaN or infinity. Its prefill failed, and it must not be published."""

    def __init__(self, message: str, *, layer: int = 0, half: str = "", first: int = 0, last: int = 0) -> None:
        """Record the model's layer; ``keys``, ``values`` or ``vectors``; and the first and last token (or row)."""
        super().__init__(message)
        self.layer, self.half, self.first, self.last = layer, half, first, last


class TraceQuestionError(TraceError, UsageError):
    """A trace is ambiguous; an option resolves it (exit status 2)."""

    def __init__(self, problem: str, option: str = "") -> None:
        super().__init__(problem)
        self.option = option
        """Option of ``kvabr traces`` that resolves the ambiguity."""


class HoleError(KvabrError):
    """A requested cache has groups that were neither fetched nor recomputed."""


class ModelError(KvabrError):
    """The model is not installed, or a text or cache does not fit it."""


class PlayError(KvabrError):
    """A play ended without a complete cache; the message states the missing parts and the reason."""


class BusyError(PlayError):
    """The client has reached its limit of plays, and refused this one early."""


class TransportError(KvabrError):
    """A peer is unreachable, refuses a request, closes the connection, or violates the protocol."""


class Reason(Enum):
    """Why a request failed, on any transport."""

    INTERNAL = auto()
    UNAUTHORIZED = auto()
    MALFORMED_TOKEN = auto()
    EXPIRED_TOKEN = auto()
    TIMEOUT = auto()
    UNSUPPORTED = auto()
    AWAY = auto()
    BUSY = auto()
    MISSING = auto()
    WRONG = auto()
    OTHER = auto()


class RequestError(TransportError):
    """The peer refused or reset one request; the connection stays open."""

    def __init__(self, message: str, *, reason: Reason = Reason.INTERNAL, retry_after_s: float | None = None) -> None:
        """A retry may succeed after ``retry_after_s`` seconds; None: a retry is pointless."""
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class NotFoundError(RequestError):
    """The track does not exist, or this connection may not read it. The two cases are indistinguishable on purpose."""


class NoAnswerError(TransportError):
    """An address does not respond, or the host name cannot be resolved at present."""


class ConnectionLostError(TransportError):
    """The connection ended. Its requests are lost, but reconnecting may succeed."""


class StoreError(TransportError):
    """The object store does not exist, or does not have a required feature."""


class UnauthorizedError(ConnectionLostError):
    """The peer rejected our token: missing, wrong, or revoked."""


class ForbiddenError(UnauthorizedError):
    """A store accepts the credentials, but not for this request; many stores report missing objects this way."""


class ExhaustedError(PlayError, TransportError):
    """This process has run out of file descriptors, threads or memory, perhaps temporarily."""


_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_CAUSES = 8
codecs.lookup("idna")  # Python resolves names with this codec and, after one failed import, never tries again.
_NO_THREAD, _NO_MEMORY = "can't start new thread", ("can't allocate memory", "not enough memory")


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return the `ExhaustedError` for an error that reports an exhausted resource; None for other errors."""
    seen: BaseException | None = error
    for _ in range(_CAUSES):
        if seen is None or isinstance(seen, KvabrError):
            break
        if isinstance(seen, OSError) and seen.errno in _DESCRIPTORS:
            return ExhaustedError(
                f"no file descriptors are left ({seen.strerror}): close some files or connections, or raise the limit "
                "(ulimit -n)"
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
def exhaustion_as_error() -> Iterator[None]:
    """Raise `ExhaustedError` for errors that report an exhausted resource."""
    try:
        yield
    except Exception as error:
        if (replaced := exhausted(error)) is None:
            raise
        raise replaced from error


def may_pass(error: BaseException) -> bool:
    """Return True if a retry may succeed: a peer or store was unreachable or overloaded, and did not refuse."""
    if isinstance(error, AssetError) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    if isinstance(error, ExhaustedError):
        return True
    if isinstance(error, RequestError):
        return error.retry_after_s is not None
    return isinstance(error, ConnectionLostError) and not isinstance(error, UnauthorizedError)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'NAME'?)`` with the known name most similar to ``word``, or an empty string."""
    from difflib import get_close_matches  # noqa: PLC0415 - only failures need it

    names = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


class HomeProcess:
    """The process that created an object; detects use of the object in a forked child.

    A forked child inherits the object but not its threads: queued work is lost, waits never end, and writes to a shared
    socket reach the parent's peer. Objects with threads, sockets or files have a `HomeProcess` and raise `ForkedError`
    in a child; closing such an object in a child has no effect.
    """

    __slots__ = ("_made_in", "_what")

    def __init__(self, what: str) -> None:
        """Record this process; ``what`` starts the error message, such as ``the publisher``."""
        self._what, self._made_in = what, os.getpid()

    @property
    def here(self) -> bool:
        """True in the process that created this object."""
        return os.getpid() == self._made_in

    def check(self) -> None:
        """Raise `ForkedError` in any other process."""
        if not self.here:
            made_in, used_in = self._made_in, os.getpid()
            raise ForkedError(
                f"{self._what} was created in process {made_in} and is used in its forked child {used_in}, which does "
                "not have its threads: create another one in the child, or start the child with "
                'multiprocessing.get_context("spawn")',
                made_in=made_in,
                used_in=used_in,
            )
