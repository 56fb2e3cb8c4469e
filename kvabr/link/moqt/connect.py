"""Connects to an origin or a relay: parses its URL, chooses a transport, and dials its addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from kvabr.link.moqt.connection import MoqtConnection
from kvabr.link.moqt.options import DRAFTS, DialOptions, trust
from kvabr.link.quic.backend import IDLE_S, LibraryName, QuicLibrary, installed_libraries, library
from kvabr.link.quic.transport import protocol_class
from kvabr.link.tcp.tls import client_context
from kvabr.link.tcp.transport import QmuxTransport
from kvabr.transfer.peer import Peer
from kvabr.types.errors import FormatError, NoAnswerError, TransportError, UnauthorizedError, UsageError
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import PeerOptions

DEFAULT_PORT = 443
FRAGMENT_TYPE = "kvcache"
"""Type of the URL fragment that names an asset (draft-ietf-moq-transport-18, Fragment Identifiers; not registered)."""
HEAD_START_S = 0.25
"""Seconds between the dials of a host's addresses (RFC 8305, section 5)."""
_MAX_ADDRESSES = 8

_TCP_HEAD_START_S = 1.0
"""Seconds by which an established TCP connection precedes a dial over QUIC, to complete TLS and MoQT's SETUP."""
Over = Literal["quic", "tcp"]
TransportName = LibraryName | Literal["tcp"]
Address = tuple[socket.AddressFamily, Any]

A = TypeVar("A")
C = TypeVar("C", bound=MoqtConnection)


def parse_url(url: str) -> tuple[str, int, str]:
    """Return host, port, and path with query of a ``moqt`` URL; raise `UsageError`. `asset_of` reads the fragment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url}: not a URL ({error})") from error
    if parts.scheme != "moqt":
        raise UsageError(f"{url}: the URL of an origin must begin with moqt://, such as moqt://origin.example:4443/")
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{parts.scheme}://{parts.hostname}: a URL must not contain a user or password; use a token")
    if not parts.hostname or any(letter <= " " or letter == "\x7f" for letter in url):
        raise UsageError(f"{url}: the host is missing, or the URL contains a space")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:  # a lookup would raise it
        raise UsageError(f"{url}: {parts.hostname[:80]} is not the name of a host ({error})") from error
    if port == 0:
        raise UsageError(f"{url}: the port must be 1 to 65535")
    path = parts.path or "/"
    return parts.hostname, port or DEFAULT_PORT, f"{path}?{parts.query}" if parts.query else path


def asset_of(url: str) -> TrackNamespace | None:
    """Return the asset of a URL's fragment ``#kvcache:<model>/<prompt digest>``, or None."""
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
            f"{name[:200]!r} does not name an asset: give <model>/<prompt digest of 64 hex digits>"
        ) from error


def connect(
    url: str,
    how: PeerOptions | None = None,
    *,
    drafts: tuple[str, ...] = DRAFTS,
    needed: bool = True,
) -> Peer:
    """Return an origin or a relay, dialled when its context manager is entered, or by the first request.

    It is redialled after a lost connection and after GOAWAY. ``url`` is ``moqt://host[:port][/path][?query]``; the port
    defaults to 443. ``drafts`` are protocols to offer, preferred first. ``needed``: raise on entering if the peer does
    not answer or its name is unknown; otherwise requests dial again.

    Raises:
        UsageError: the URL or an option is wrong.
        TransportError: from ``async with``: the peer cannot be reached, speaks another protocol, or refuses us.
    """
    how = how or PeerOptions()
    host, port, path = parse_url(url)
    return Peer(MoqtDialler(DialOptions(host, port, path, how.secret(), how, drafts)), needed=needed)


def peer_name(where: str, over: Over) -> str:
    """Return a peer's name (`Connection.peer`), with the transport, since QUIC and TCP to one host differ in speed."""
    return where if over == "quic" else f"{where} tcp"


class MoqtDialler:
    """Dials an origin or a relay; a `kvabr.transfer.peer.Dialler`."""

    def __init__(self, options: DialOptions) -> None:
        self._options = options
        self._where = f"{options.host}:{options.port}"
        self.names = tuple(dict.fromkeys(peer_name(self._where, over) for over in get_args(Over)))
        self.max_connections = options.how.connections
        self._works: Over | None = None

    async def dial(self) -> MoqtConnection:
        how = self._options.how
        if how.token_file is not None:
            with contextlib.suppress(UsageError):  # the previous token may still be valid
                self._options = replace(self._options, token=how.secret())
        if how.transport == "auto" and how.quic == "auto":
            return await self._auto()
        return await self._dial_over("quic" if how.transport == "auto" else how.transport)

    async def _auto(self) -> MoqtConnection:
        """Dial over TCP, and over QUIC if TCP fails or is slow; start with the transport that worked last time.

        TCP takes a fraction of the processor time, and origins may have a congestion control that tolerates losses.
        """
        # A silent TCP server may be another service.
        order: list[tuple[Over, float | None]] = [("quic", None), ("tcp", None)]
        if self._works != "quic":
            order.insert(0, ("tcp", HEAD_START_S))
        failed: dict[Over, TransportError] = {}

        async def attempt(how: tuple[Over, float | None]) -> MoqtConnection:
            over, connect_s = how
            try:
                return await self._dial_over(over, connect_s)
            except UnauthorizedError:
                raise
            except TransportError as error:
                failed[over] = error
            # The TCP port may belong to another service, so its answer counts only after QUIC's.
            raise NoAnswerError(str(failed[over])) if over == "tcp" else failed[over]

        try:
            return await first_of(order, attempt, _TCP_HEAD_START_S)
        except NoAnswerError as error:
            answer = next((each for each in failed.values() if not isinstance(each, NoAnswerError)), None)
            raise answer or failed.get("quic", error) from None

    async def _dial_over(self, over: Over, connect_s: float | None = None) -> MoqtConnection:
        name: TransportName = "tcp" if over == "tcp" else installed_libraries(self._options.how.quic)[0]
        connection = await dial(self._options, name, connect_s)
        connection.peer = peer_name(self._where, over)
        self._works = over
        return connection


async def dial(options: DialOptions, name: TransportName = "aioquic", connect_s: float | None = None) -> MoqtConnection:
    """Connect once, to the address that answers first, and wait for its SETUP; raise `TransportError`.

    ``connect_s``: seconds for the TCP connection alone, before TLS; None: the whole timeout.
    """
    where = f"{options.host}:{options.port}"
    end_s = asyncio.get_running_loop().time() + options.how.timeout_s
    try:
        addresses = await asyncio.wait_for(addresses_of(options.host, options.port), options.how.timeout_s)
    except TimeoutError as error:
        raise NoAnswerError(f"{where}: the name server did not answer within {options.how.timeout_s:.3g} s") from error
    except OSError as error:
        raise NoAnswerError(
            f"{where}: no such host ({error.strerror or error}); check the host's name in the URL"
        ) from error

    async def attempt(address: Address) -> MoqtConnection:
        return await _dial_address(name, options, address, end_s, connect_s)

    try:
        return await first_of(addresses[:_MAX_ADDRESSES], attempt, HEAD_START_S)
    except TransportError as error:
        raise type(error)(f"{where}: {error}") from error


async def addresses_of(host: str, port: int) -> Sequence[Address]:
    """Return the distinct addresses of a host; raise `OSError` if it has none."""
    with contextlib.suppress(socket.gaierror):  # a name
        return _found(host, port, socket.AI_NUMERICHOST)
    answer: Future[Sequence[Address]] = Future()
    answer.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            answer.set_result(_found(host, port))
        except Exception as error:  # noqa: BLE001  # raised in the caller
            answer.set_exception(error)

    # The system call cannot be cancelled: silent name servers would occupy all of the event loop's threads.
    try:
        threading.Thread(target=look_up, name="kvabr-names", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from error  # the system has no more threads
    return await asyncio.wrap_future(answer)


def _found(host: str, port: int, flags: int = 0) -> Sequence[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


async def first_of(candidates: Sequence[A], attempt: Callable[[A], Coroutine[Any, Any, C]], head_start_s: float) -> C:
    """Return the connection of the first successful attempt; close later ones. There is one attempt per candidate.

    An attempt starts once the previous one has failed, or after ``head_start_s`` seconds. Once all have started and one
    has received an error as its answer, wait ``head_start_s`` for the others. Then raise that error, or `NoAnswerError`
    if there was no answer at all. An `UnauthorizedError` is raised at once.
    """
    tasks: list[asyncio.Task[C]] = []
    waiting = list(candidates)
    chosen: C | None = None
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
                if (error := task.exception()) is None:
                    chosen = task.result()
                    return chosen
                if isinstance(error, UnauthorizedError):  # the other addresses would refuse, too
                    raise error
            if not waiting and not done and not patient:
                break
        raise _answer(tasks) or NoAnswerError("no address to dial") from None
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException) and result is not chosen:
                await result.close()


def _answer(tasks: Sequence[asyncio.Task[C]]) -> BaseException | None:
    """Return an error that is a peer's answer; if all attempts failed without an answer, the first error; else None."""
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    answers = [error for error in errors if not isinstance(error, NoAnswerError)]
    return answers[0] if answers else errors[0] if len(errors) == len(tasks) else None


async def _dial_quic(lib: QuicLibrary, options: DialOptions, address: Address) -> MoqtConnection:
    family, where = address
    configuration = lib.configure(client=True, alpn=options.drafts, server_name=options.host)
    trust(configuration, options)
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


async def _dial_tcp(options: DialOptions, address: Address, connect_s: float) -> MoqtConnection:
    family, where = address
    context = client_context(options)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        try:
            sock.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, where), connect_s)
            connection = MoqtConnection("tcp", options)
            transport = QmuxTransport(sock, connection, context, client=True, idle_s=IDLE_S, host=options.host)
        except TimeoutError as error:
            raise NoAnswerError(f"no answer on TCP within {connect_s:.3g} s") from error
        except OSError as error:
            why = error.strerror or error
            raise NoAnswerError(f"no TCP connection ({why}); does the server listen there?") from error
        except ValueError as error:  # from TLS
            raise TransportError(f"{options.host!r} cannot be the name of a server ({error})") from error
        stack.pop_all()
    transport.start()
    return connection


async def _dial_address(
    name: TransportName, options: DialOptions, address: Address, end_s: float, connect_s: float | None
) -> MoqtConnection:
    def left_s() -> float:
        return max(0.0, end_s - asyncio.get_running_loop().time())

    if name == "tcp":
        connection = await _dial_tcp(options, address, connect_s or left_s())
    else:
        connection = await _dial_quic(library(name), options, address)
    try:
        await asyncio.wait_for(asyncio.shield(connection.ready), left_s())
    except TimeoutError as error:
        await connection.close()
        within = f"within {options.how.timeout_s:.3g} s"
        if connection.shaken:
            raise TransportError(f"the peer accepted the connection but sent no SETUP {within}") from error
        over = "TCP" if name == "tcp" else "UDP"
        raise NoAnswerError(
            f"no answer {within}; is a server running there, and is {over} allowed? timeout_s= (--timeout) allows more"
        ) from error
    except TransportError as error:
        await connection.close()
        if isinstance(error, UnauthorizedError):
            raise
        raise TransportError(str(error)) from error  # the peer answered: it is not lost
    except BaseException:
        await connection.close()
        raise
    return connection
