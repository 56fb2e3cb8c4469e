"""An HTTP server that answers as a troubled object store does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>no</Message></Error>"


class FlakyStore:
    """Keeps objects in memory; ``trouble`` sees each request first, and may answer it."""

    def __init__(
        self, trouble: Callable[[Handler], bool] = lambda _request: False, *, conditional: bool = True
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.years: dict[str, int] = {}
        """The year in which objects were written, by a part of their keys; of all others, 2026."""
        self.trouble, self.conditional = trouble, conditional
        made = type("Handler", (Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), made)
        self._server.handle_error = lambda *_: None  # clients that leave
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"s3://bucket/x?endpoint=http://127.0.0.1:{self._server.server_port}"

    @property
    def web_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/bucket/x"

    def year(self, key: str) -> int:
        return next((year for part, year in self.years.items() if part in key), 2026)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    store: FlakyStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the acknowledgement of its head

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - names that the base class calls

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.send_header("ETag", '"tag"')
        self.send_header("Last-Modified", f"23 Nov {self.store.year(self.path):04} 00:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        store, key = self.store, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store.requests.append((self.command, key))
        if store.trouble(self):
            return
        if self.command == "PUT":
            if store.conditional and "If-None-Match" in self.headers and key in store.objects:
                self.answer(412, ERROR % b"PreconditionFailed")
                return
            store.objects[key] = body
            self.answer(200)
        elif self.command in ("POST", "DELETE"):
            self.answer(200, b"<DeleteResult></DeleteResult>")
        elif "list-type=2" in self.path:
            self.answer(200, self._listed(key))
        elif key not in store.objects:
            self.answer(404, ERROR % b"NoSuchKey")
        elif (wanted := self.headers.get("Range")) is not None:
            data, (first, _, last) = store.objects[key], wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(data) - 1) + 1, len(data))
            self.answer(206, data[int(first) : end], Content_Range=f"bytes {first}-{end - 1}/{len(data)}")
        else:
            self.answer(200, store.objects[key])

    def _listed(self, bucket: str) -> bytes:
        """Return the keys of a bucket that begin with the prefix that was asked for."""
        begin = f"{bucket}/" + parse_qs(self.path.partition("?")[2]).get("prefix", [""])[0]
        entries = [
            f"<Contents><Key>{escape(key.removeprefix(bucket + '/'))}</Key><Size>{len(data)}</Size><ETag>tag"
            f"</ETag><LastModified>{_year(self.store.year(key))}-11-23T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(self.store.objects.items())
            if key.startswith(begin)
        ]
        head = f"<Name>bucket</Name><KeyCount>{len(entries)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{head}{''.join(entries)}</ListBucketResult>".encode()


def _year(year: int) -> str:
    return f"{year:04}" if year < 10_000 else f"+{year}"
