"""Connects to an origin or a relay: parses its URL, chooses a transport, dials its addresses, redials."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, get_args
from urllib.parse import unquote, urlsplit

from kvabr.link.moqt.connection import MoqtConnection
from kvabr.link.moqt.names import addresses_of
from kvabr.link.moqt.options import (
    DRAFTS,
    DialOptions,
    Names,
    trust,
    trusted_itself,
    why_refused,
)
from kvabr.link.quic.backend import IDLE_S, LIBRARIES, LibraryName, QuicLibrary, installed_libraries, library
from kvabr.link.quic.transport import protocol_class
from kvabr.link.tcp.tls import certificate_at, client_context
from kvabr.link.tcp.transport import QmuxTransport
from kvabr.moqt.wire import DRAFTS as KNOWN_DRAFTS
from kvabr.transfer.peer import Peer
from kvabr.types.errors import FormatError, NoAnswerError, TransportError, UnauthorizedError, UsageError
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import PeerOptions

DEFAULT_PORT = 443
FRAGMENT_TYPE = "kvcache"
"""Type of the fragment that names an asset (draft-ietf-moq-transport-18, Fragment Identifiers; not registered)."""
HEAD_START_S = 0.25
"""Head start of each address of a host before the next one is tried (RFC 8305, section 5)."""
_MAX_ADDRESSES = 8

_TCP_HEAD_START_S = 1.0
"""Head start of TCP over QUIC, for TLS and MoQT's SETUP, once it has connected."""
_REFUSED_S = 2.0
"""Seconds for QUIC to answer after TCP was refused: the host is up, but probably without a server."""
Over = Literal["quic", "tcp"]
TransportName = LibraryName | Literal["tcp"]
"""A transport: QUIC by a library, or QMux on TCP."""

A = TypeVar("A")
C = TypeVar("C")


def parse_url(url: str) -> tuple[str, int, str]:
    """Return host, port, and path with query of a ``moqt`` URL, or raise UsageError; `asset_of` reads the fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url}: not a URL ({error})") from error
    if parts.scheme != "moqt":
        raise UsageError(f"{url}: an origin's URL begins with moqt://, as in moqt://origin.example:4443/")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{parts.scheme}://{parts.hostname}: a URL must not contain a user or password; use a token")
    if not parts.hostname or any(letter <= " " or letter == "\x7f" for letter in url):
        raise UsageError(f"{url}: the host is missing, or there is a blank in the URL")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:  # which a lookup would raise
        raise UsageError(f"{url}: {parts.hostname[:80]} is not the name of a host ({error})") from error
    if port == 0:
        raise UsageError(f"{url}: the port must be 1 to 65535")
    path = parts.path or "/"
    return parts.hostname, port or DEFAULT_PORT, f"{path}?{parts.query}" if parts.query else path


def asset_of(url: str) -> TrackNamespace | None:
    """Return the asset of a URL's fragment ``#kvcache:<model>/<prompt digest>``; None without a fragment."""
    _, _, fragment = url.partition("#")
    if not fragment:
        return None
    kind, colon, name = fragment.partition(":")
    if kind != FRAGMENT_TYPE or not colon:
        raise UsageError(f"#{fragment}: name an asset like this: #{FRAGMENT_TYPE}:<model>/<prompt digest>")
    return parse_namespace(unquote(name))


def parse_namespace(name: str) -> TrackNamespace:
    """Parse ``<model>/<prompt digest>``, or raise UsageError."""
    model, _, prompt = name.strip().rpartition("/")
    try:
        return TrackNamespace(model, prompt.lower())
    except FormatError as error:
        raise UsageError(
            f"{name[:200]!r} does not name an asset: use <model>/<prompt digest of 64 hex digits>"
        ) from error


def connect(
    url: str,
    how: PeerOptions | None = None,
    *,
    drafts: tuple[str, ...] = DRAFTS,
    names: Names = "draft",
    needed: bool = True,
) -> Peer:
    """Return an origin or a relay, dialled on entering its context manager or by the first request.

    It is redialled after a lost connection and after GOAWAY.

    Args:
        url: ``moqt://host[:port][/path][?query]``; the default port is 443.
        how: see `PeerOptions`.
        drafts: protocols to offer, preferred first.
        names: notation of namespaces; ``split`` is for peers that cannot carry a slash inside a field.
        needed: raise on entering if the peer does not answer or its name is unknown; otherwise requests dial again.

    Raises:
        UsageError: the URL or an option is wrong. From ``async with``:
        TransportError: the peer cannot be reached, speaks another protocol, or refuses us.
    """
    how = how or PeerOptions()
    host, port, path = parse_url(url)
    return Peer(MoqtDialler(DialOptions(host, port, path, how.secret(), how, drafts, names)), needed=needed)


def peer_name(where: str, over: Over) -> str:
    """Return the name of a peer (`Connection.peer`): QUIC and TCP to one host are links of different speed."""
    return where if over == "quic" else f"{where} tcp"


class MoqtDialler:
    """Dials an origin or a relay; a `kvabr.transfer.lane.Dialler`."""

    def __init__(self, options: DialOptions) -> None:
        self._options = options
        self._where = f"{options.host}:{options.port}"
        self.names = tuple(dict.fromkeys(peer_name(self._where, over) for over in get_args(Over)))
        self.most_lanes = options.how.lanes
        self._works: TransportName | None = None
        """The transport that reached the peer last."""

    async def dial(self) -> MoqtConnection:
        how = self._options.how
        if how.token_file is not None:
            with contextlib.suppress(UsageError):  # the previous token may still be good
                self._options = replace(self._options, token=how.secret())
        if how.transport == "auto" and how.quic == "auto":
            made = await self._auto()
        else:
            made = await self._dial_over("quic" if how.transport == "auto" else how.transport)
        self._works = cast("TransportName", made.backend)
        return made

    async def _auto(self) -> MoqtConnection:
        """Dial over TCP, and over QUIC if TCP fails or is slow; start with the transport that worked before.

        TCP takes a fraction of the processor time, and origins may have a congestion control that tolerates losses.
        """
        # A silent TCP server may be another service.
        order: list[tuple[Over, float | None]] = [("quic", None), ("tcp", None)]
        if self._over != "quic":
            order.insert(0, ("tcp", HEAD_START_S))
        both = _Attempts(self._dial_over, f"{self._options.host}:{self._options.port}")
        chosen: MoqtConnection | UnauthorizedError | None = None
        try:
            chosen = await first_of(order, both.attempt, _TCP_HEAD_START_S)
        except NoAnswerError as error:
            answer = next((each for each in both.failed.values() if not isinstance(each, NoAnswerError)), None)
            raise answer or both.failed.get("quic", error) from None
        finally:
            for connection in both.made:  # both may have succeeded at the same time
                if connection is not chosen:
                    await connection.close()
        if isinstance(chosen, UnauthorizedError):
            raise chosen
        return chosen

    @property
    def _over(self) -> Over | None:
        return None if self._works is None else "tcp" if self._works == "tcp" else "quic"

    async def _dial_over(self, over: Over, connect_s: float | None = None) -> MoqtConnection:
        """Connect over one transport, with QUIC by the first library that can talk to the peer."""
        causes: dict[str, None] = {}
        for name in self._names(over):
            try:
                connection = await dial(self._options, name, connect_s)
            except (NoAnswerError, UnauthorizedError):
                raise  # another library would fail as well
            except TransportError as error:
                causes[str(error)] = None
            else:
                connection.peer = peer_name(self._where, over)
                return connection
        raise TransportError("; ".join(causes))

    def _names(self, over: Over) -> Sequence[TransportName]:
        if over != "quic":
            return (over,)
        works = next((name for name in LIBRARIES if name == self._works), None)
        return installed_libraries(works or self._options.how.quic)


async def dial(options: DialOptions, name: TransportName = "aioquic", connect_s: float | None = None) -> MoqtConnection:
    """Connect once to the address that answers first, and wait for its SETUP; raise TransportError if that fails.

    ``connect_s``: seconds for the TCP connection alone, before TLS; None: all of the timeout.
    """
    if name in LIBRARIES:
        library(name)  # raise before dialling if it is not installed
    where = f"{options.host}:{options.port}"
    loop = asyncio.get_running_loop()
    end_s = loop.time() + options.how.timeout_s
    try:
        addresses = await asyncio.wait_for(addresses_of(options.host, options.port), options.how.timeout_s)
    except TimeoutError as error:
        raise NoAnswerError(f"{where}: the name server did not answer within {options.how.timeout_s:.3g} s") from error
    except OSError as error:
        raise NoAnswerError(
            f"{where}: no such host ({error.strerror or error}); check the host's name in the URL"
        ) from error
    known = {draft.alpn for draft in KNOWN_DRAFTS}
    alpn = [draft for draft in options.drafts if draft in known]
    if not alpn:
        raise TransportError(f"{where}: {', '.join(options.drafts)}: this kvabr speaks {', '.join(sorted(known))}")

    made: list[MoqtConnection] = []

    async def attempt(address: tuple[int, Any]) -> MoqtConnection:
        made.append(await _dial_address(name, options, alpn, address, max(0.0, end_s - loop.time()), connect_s))
        return made[-1]

    chosen: MoqtConnection | None = None
    try:
        chosen = await first_of(addresses[:_MAX_ADDRESSES], attempt, HEAD_START_S)
    except TransportError as error:
        raise type(error)(f"{where}: {error}") from error
    finally:
        for connection in made:  # two may have succeeded at the same time
            if connection is not chosen:
                await connection.close()
    return chosen


class _Attempts:
    """Attempts over QUIC and TCP at the same time, and their results."""

    def __init__(
        self, dial_over: Callable[[Over, float | None], Coroutine[Any, Any, MoqtConnection]], where: str
    ) -> None:
        self.made: list[MoqtConnection] = []
        self.failed: dict[Over, TransportError] = {}
        self._dial_over, self._where = dial_over, where
        self._refused = False
        self._limit: asyncio.Timeout | None = None

    async def attempt(self, how: tuple[Over, float | None]) -> MoqtConnection | UnauthorizedError:
        """Dial over one transport, with a limit for TCP's handshake; return an `UnauthorizedError`."""
        over, connect_s = how
        try:
            made = await (self._dial_quic() if over == "quic" else self._dial_over(over, connect_s))
        except UnauthorizedError as error:
            return error  # the other transport would be refused as well
        except TransportError as error:
            self.failed[over] = error
            if over == "quic":
                raise
            self._refused = _is_refused(error)
            if self._refused and self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time() + _REFUSED_S)
            # The port may belong to another service, and QUIC's may still be ours.
            raise NoAnswerError(str(error)) from error
        self.made.append(made)
        return made

    async def _dial_quic(self) -> MoqtConnection:
        try:
            async with asyncio.timeout(_REFUSED_S if self._refused else None) as self._limit:
                return await self._dial_over("quic", None)
        except TimeoutError as error:
            raise NoAnswerError(f"{self._where}: TCP refused, UDP silent; does a server run there?") from error
        finally:
            self._limit = None


async def first_of(candidates: Sequence[A], attempt: Callable[[A], Coroutine[Any, Any, C]], head_start_s: float) -> C:
    """Return the first successful result, of one attempt per candidate.

    Each attempt starts when the previous one has failed or has had its head start. Once all have started and one has
    been answered with an error, wait one more head start for the silent ones. Then raise the error of an answer, or
    `NoAnswerError` if there was none. Remaining attempts are cancelled.
    """
    tasks: list[asyncio.Task[C]] = []
    waiting = list(candidates)
    try:
        while waiting or not all(task.done() for task in tasks):
            if waiting:
                tasks.append(asyncio.get_running_loop().create_task(attempt(waiting.pop(0))))
            pending = {task for task in tasks if not task.done()}
            patient = not waiting and _answer(tasks) is None
            done, _ = await asyncio.wait(
                pending, timeout=None if patient else head_start_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if task.exception() is None:
                    return task.result()
            if not waiting and not done and not patient:
                break
        raise _answer(tasks) or NoAnswerError("no address to dial") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # some may have failed meanwhile


def _is_refused(error: BaseException | None) -> bool:
    """Return whether an attempt failed because of a closed port."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _answer(tasks: Sequence[asyncio.Task[C]]) -> BaseException | None:
    """Return the error of an attempt with an answer; if all failed without one, the first error."""
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    answers = [error for error in errors if not isinstance(error, NoAnswerError)]
    return answers[0] if answers else errors[0] if len(errors) == len(tasks) else None


async def _dial_quic(
    lib: QuicLibrary, options: DialOptions, alpn: list[str], address: tuple[int, Any]
) -> MoqtConnection:
    family, where = address
    configuration = lib.configure(client=True, alpn=alpn, server_name=options.host)
    trust(configuration, options, lib.name)
    connection = MoqtConnection(lib.name, options)
    cls = protocol_class(lib, lambda _: connection)
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104  # a client's port
        transport, protocol = await lib.open_socket(sock, lambda: cls(lib.connection(configuration=configuration)))
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot open a socket ({error})") from error
    protocol.streams.socket = transport
    protocol.connect(where)
    return connection


async def _dial_tcp(
    options: DialOptions, alpn: list[str], address: tuple[int, Any], connect_s: float
) -> MoqtConnection:
    family, where = address
    context = client_context(options, alpn)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, where), connect_s)
        connection = MoqtConnection("tcp", options)
        transport = QmuxTransport(sock, connection, context, client=True, idle_s=IDLE_S, host=options.host)
    except TimeoutError as error:
        sock.close()
        raise NoAnswerError(f"no answer on TCP within {connect_s:.3g} s") from error
    except OSError as error:
        sock.close()
        raise NoAnswerError(f"no TCP connection ({error.strerror or error}); does the server listen there?") from error
    except ValueError as error:  # from TLS
        sock.close()
        raise TransportError(f"{options.host!r} cannot be the name of a server ({error})") from error
    except BaseException:
        sock.close()
        raise
    transport.start()
    return connection


async def _dial_address(
    name: TransportName,
    options: DialOptions,
    alpn: list[str],
    address: tuple[int, Any],
    timeout_s: float,
    connect_s: float | None,
) -> MoqtConnection:
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    if name == "tcp":
        connection = await _dial_tcp(options, alpn, address, connect_s or timeout_s)
    else:
        connection = await _dial_quic(library(name), options, alpn, address)
    try:
        await asyncio.wait_for(asyncio.shield(connection.ready), max(0.0, end_s - clock()))
    except TimeoutError as error:
        await connection.close()
        within = f"within {options.how.timeout_s:.3g} s"
        if connection.shaken:
            raise TransportError(f"the peer accepted the connection but sent no SETUP {within}") from error
        over = "TCP" if name == "tcp" else "UDP"
        raise NoAnswerError(
            f"no answer {within}; is a server running there, and is {over} allowed? timeout_s= (--timeout) allows more"
        ) from error
    except (TransportError, OSError, ssl.SSLError) as error:
        await connection.close()
        why, transport = str(error), connection.transport
        if isinstance(transport, QmuxTransport) and isinstance(transport.failure, ssl.SSLCertVerificationError):
            connection.refused = await certificate_at(address[1], options.host, max(0.0, end_s - clock()))
            why = why_refused(connection.refused, options.host)
        if (itself := trusted_itself(connection.refused, options)) is not None:
            return await _dial_address(
                name,
                replace(options, how=replace(options.how, fingerprint=itself)),
                alpn,
                address,
                timeout_s,
                connect_s,
            )
        kind = UnauthorizedError if isinstance(error, UnauthorizedError) else TransportError
        raise kind(why) from error
    except BaseException:
        await connection.close()
        raise
    return connection
