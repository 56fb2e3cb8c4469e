"""A peer that sends without end what carries no data: records of TLS, and frames of QMux."""

import contextlib
import hmac
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvabr.qmux.frames import FrameType, TransportParameters, frame
from tests.qmux.ends import record

_APPLICATION_DATA, _HANDSHAKE = 23, 22
_KEY_UPDATE = 24
_SECRETS = {False: "CLIENT_TRAFFIC_SECRET_0", True: "SERVER_TRAFFIC_SECRET_0"}
_PIECE = 500
"""Records, or frames, that are sent at a time."""
PARAMETERS = TransportParameters(
    max_data=1 << 24, max_stream_data_bidi_remote=1 << 20, max_stream_data_uni=1 << 20, max_streams_uni=8
)


class RawTls:
    """One end of TLS 1.3 that makes its own records once the handshake is over (RFC 8446, sections 5 and 7)."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        """Shake hands on a blocking socket."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "keys"
            context.keylog_filename = str(log)
            self._shake(sock, context, server=server)
            lines = [line.split() for line in log.read_text().splitlines() if line.startswith(_SECRETS[server])]
        self._secret = bytes.fromhex(lines[-1][2])
        self._expand_keys()
        self._number = context.num_tickets if server else 0

    def _shake(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        came, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(came, out, server_side=server)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(out.read())
                came.write(sock.recv(1 << 16))
        sock.sendall(out.read())
        name, _, bits = tls.cipher() or ("", "", 0)
        self._hash, self._key_bytes = "sha384" if name.endswith("384") else "sha256", bits // 8

    def data(self, data: bytes) -> bytes:
        return self._record(_APPLICATION_DATA, data)

    def key_update(self, *, answer: bool, padding: int = 0) -> bytes:
        """Return a KeyUpdate, which may ask for one in return; later records use the next keys."""
        made = self._record(_HANDSHAKE, bytes((_KEY_UPDATE, 0, 0, 1, answer)), padding)
        self._secret = self._expand(b"traffic upd", len(self._secret))
        self._expand_keys()
        return made

    def _expand_keys(self) -> None:
        self._key, self._number = AESGCM(self._expand(b"key", self._key_bytes)), 0
        self._nonce = int.from_bytes(self._expand(b"iv", 12), "big")

    def _record(self, kind: int, data: bytes, padding: int = 0) -> bytes:
        inner = data + bytes((kind,)) + bytes(padding)
        head = b"\x17\x03\x03" + (len(inner) + 16).to_bytes(2, "big")
        nonce = (self._nonce ^ self._number).to_bytes(12, "big")
        self._number += 1
        return head + self._key.encrypt(nonce, inner, head)

    def _expand(self, label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes((len(label),)) + label + b"\0"
        out = part = b""
        for number in range(1, 3):
            part = hmac.digest(self._secret, part + info + bytes((number,)), self._hash)
            out += part
        return out[:size]


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["qmux-01.moqt-19", "moqt-19"])
    return context


def _updates(answer: bool) -> Callable[[RawTls], bytes]:  # of `FLOODS` alone
    return lambda tls: b"".join(tls.key_update(answer=answer) for _ in range(_PIECE))


def _frames(each: bytes) -> Callable[[RawTls], bytes]:
    return lambda tls: tls.data(record(each * _PIECE))


FLOODS: dict[str, Callable[[RawTls], bytes]] = {
    "KeyUpdate": _updates(answer=False),
    "KeyUpdate that wants an answer": _updates(answer=True),
    "PADDING": _frames(b"\0" + frame(FrameType.MAX_DATA, 0)),
    "MAX_DATA": _frames(frame(FrameType.MAX_DATA, 0)),
    "records": lambda tls: tls.data(record() * _PIECE),
    "STREAM": _frames(frame(FrameType.STREAM | 2, 2, 0)),
}
"""What a peer may send without end, by name: how to make some of it."""


def pour(sock: socket.socket, tls: RawTls, kind: str, until_s: float, over: threading.Event | None = None) -> int:
    """Send a flood until the other end closes, a time of the monotonic clock, or an event; return the bytes sent."""
    sent = 0
    with contextlib.suppress(OSError):
        sock.sendall(tls.data(record(PARAMETERS.encode())))
        while time.monotonic() < until_s and not (over and over.is_set()):
            piece = FLOODS[kind](tls)
            sock.sendall(piece)
            sent += len(piece)
    return sent


class Flooder:
    """Floods a server from a thread, on one connection after the other, until `stop`."""

    def __init__(self, address: tuple[str, int], kind: str) -> None:
        self._address, self._kind, self._over = address, kind, threading.Event()
        self.connections = 0
        """Connections that were flooded until the server closed them."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.01):
            with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=60.0) as sock:
                until_s = time.monotonic() + 60.0
                pour(sock, RawTls(sock, client_context(), server=False), self._kind, until_s, self._over)
                self.connections += time.monotonic() < until_s
