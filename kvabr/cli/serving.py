"""Code shared by `kvabr serve` and `kvabr relay`: options, log, certificate, metrics, first lines of output."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast
from urllib.parse import quote

from annotated_types import Ge, Le

from kvabr.cli.fields import first_sentence
from kvabr.cli.options import Address, is_loopback, is_wildcard, moqt_url, parse_address
from kvabr.server.limits import ServerLimits
from kvabr.types.errors import UsageError
from kvabr.types.fields import OptionGroup, Shown, docstrings
from kvabr.types.naming import TrackNamespace
from kvabr.types.peer import Quic

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

    from kvabr.server.certificates import CertificateFacts, ServerTls
    from kvabr.server.metrics import Metrics
    from kvabr.server.reload import Reloads
    from kvabr.server.server import Server
    from kvabr.telemetry.prometheus import MetricSet


_BIND = Address("127.0.0.1", 4443)
_M_MMAP_THRESHOLD = -3
"""Constant from glibc's malloc.h."""
_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOptions:
    """Options for watching a long-running process."""

    metrics: Annotated[Address | None, Shown("--metrics HOST:PORT", parse=parse_address)] = None
    """Serve /metrics (Prometheus) and /healthz over HTTP."""
    log_json: Annotated[bool, Shown()] = False
    """Log JSON lines (default if the output is not a terminal)."""
    verbose: Annotated[bool, Shown("-v --verbose")] = False
    """Log more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """The options of `kvabr serve` and `kvabr relay`."""

    bind: Annotated[Address, Shown("--bind HOST:PORT", parse=parse_address)] = _BIND
    """UDP and TCP address."""
    cert: Annotated[Path | None, Shown("--cert F")] = None
    """Certificate chain, PEM, the server's own certificate first."""
    key: Annotated[Path | None, Shown("--key F")] = None
    """Its private key, PEM, without a password."""
    dev: Annotated[bool, Shown()] = False
    """Use a development certificate, made once per user and kept for 13 days."""
    quic: Annotated[Quic, Shown()] = "auto"
    """QUIC library; ``auto`` is qh3 if installed."""
    tcp: Annotated[Literal["tls", "off"], Shown()] = "tls"
    """Accept connections over TCP with TLS."""
    announce_rates: Annotated[Literal["on", "off"], Shown()] = "on"
    """Send players the rate that recent plays from their block of addresses reached."""
    drain: Annotated[float, Ge(0), Le(3600), Shown("--drain S")] = 10.0
    """Seconds to finish work after SIGTERM; Ctrl-C waits half a second."""
    limit: Annotated[tuple[str, ...], Shown("--limit NAME=VALUE", repeated=True)] = ()
    """See below."""
    seen: Annotated[SeenOptions, OptionGroup()]


def limits_help() -> str:
    """Return the help of --limit: the limits and their defaults."""
    defaults, docs = ServerLimits(), docstrings(ServerLimits)
    lines = (
        f"  {field.name.replace('_', '-')}={getattr(defaults, field.name)}".ljust(42)
        + first_sentence(docs[field.name]).partition(";")[0]
        for field in fields(ServerLimits)
    )
    return "\n".join(
        (
            "limits (--limit NAME=VALUE, may be repeated) and defaults:",
            *lines,
            "",
        )
    )


def parse_limits(texts: Sequence[str]) -> ServerLimits:
    """Parse ``NAME=VALUE`` options; raise `UsageError` for an unknown limit or a bad value."""
    given: dict[str, Any] = {}
    known = [field.name for field in fields(ServerLimits)]
    for text in texts:
        option, _, value = text.partition("=")
        name = option.replace("-", "_")
        if name not in known:
            names = ", ".join(known).replace("_", "-")
            raise UsageError(f"--limit {text}: unknown limit {option!r}; choose from {names}")
        seconds = name.endswith("_s")
        try:
            given[name] = float(value) if seconds else int(value)
        except ValueError as error:
            raise UsageError(f"--limit {text}: {value!r} is not a {'' if seconds else 'whole '}number") from error
    return ServerLimits(**given)


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """Checked settings of a server."""

    host: str
    port: int
    tls: ServerTls
    facts: CertificateFacts
    dev: bool
    log: FilteringBoundLogger
    metrics: Metrics

    def announce(self, server: Server, event: str, open_to_all: str | None, **fields: object) -> str:
        """Log that the server is up, print its URL, and return it.

        Args:
            server: The server.
            event: Log event, with ``fields``.
            open_to_all: Hint for a server without tokens that other machines can reach.
            fields: More fields of the event.
        """
        keep_memory_flat()
        url = moqt_url(*server.address)
        self.log.info(event, url=url, quic=server.backend, tcp=server.tcp, **fields)
        if open_to_all is not None and not is_loopback(server.address[0]):
            self.log.warning("open to all", hint=open_to_all)
        print(url)
        if self.dev:
            print(f"certificate, for development: SHA-256 fingerprint {self.facts.fingerprint}")
        return url

    def fetch_options(self) -> str:
        """Return the options that a first `kvabr fetch` needs."""
        words = "--deadline 2 --out cache.safetensors"
        return f"{words} --fingerprint {self.facts.fingerprint}" if self.dev else words

    def fetch_line(self, url: str, asset: TrackNamespace, *, token: bool) -> str:
        """Return the command that fetches an asset."""
        name = f"{quote(asset.model)}/{asset.prompt}"
        entry = "KVABR_TOKEN=... " if token else ""
        return f"{entry}kvabr fetch '{url}#kvcache:{name}' {self.fetch_options()}"


@contextmanager
def prepared(args: ServingOptions) -> Iterator[ServerSetup]:
    """Check the options, and yield the settings; serve the metrics until the context ends.

    Raises:
        UsageError: An option is wrong.
        TransportError: The certificate cannot be used, or the metrics address is taken.
    """
    from kvabr.server import certificates
    from kvabr.server.metrics import Metrics

    (host, port), metrics = args.bind, Metrics()
    with observed(args.seen, metrics, lambda: not metrics.value("kvabr_draining")) as log:
        match args.dev, args.cert, args.key:
            case True, None, None:
                tls = certificates.development(socket.gethostname() if is_wildcard(host) else host)
            case False, Path() as cert, Path() as key:
                tls = certificates.ServerTls(cert, key)
            case _:
                raise UsageError("give both --cert and --key, or --dev alone for a development certificate")
        facts = certificates.check(tls)
        yield ServerSetup(host, port, tls, facts, args.dev, log, metrics)


@contextmanager
def observed(
    args: SeenOptions, metrics: MetricSet, healthy: Callable[[], bool] = lambda: True
) -> Iterator[FilteringBoundLogger]:
    """Yield a log that also receives the logs of libraries; serve the metrics until the context ends."""
    from kvabr.telemetry.prometheus import ScrapeServer

    log = logger(json=args.log_json or None, verbose=args.verbose)
    with captured(log), ExitStack() as stack:
        if args.metrics is not None:
            scrape = stack.enter_context(ScrapeServer(metrics, *args.metrics, healthy=healthy))
            log.info("metrics", url=f"http://{Address(*scrape.address)}/metrics")
        yield log


def keep_memory_flat() -> None:
    """Let a process that runs for weeks return unused memory.

    Python collects all garbage only when a quarter of all objects is new. Because of the many objects of modules, that
    may take hours, during which closed connections, which are reference cycles, keep their memory. So current objects
    are excluded from collection. Also, glibc raises its mmap threshold once large memory is freed, and then allocates
    such memory on the heap, which cannot shrink across gaps; each socket of qh3 has 2 MB of it. So the threshold is
    fixed.
    """
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def reloads(setup: ServerSetup, server: Server) -> Reloads:
    """Return the files to reload while a server runs: certificate and key, unless kvabr made them."""
    from kvabr.server import certificates
    from kvabr.server.reload import Reloads

    files = Reloads(setup.log)

    def renew() -> None:
        certificates.check(setup.tls)
        server.renew_certificates()

    if not setup.dev:
        files.add("certificate", [setup.tls.certfile, setup.tls.keyfile], renew)
    return files


def logger(*, json: bool | None = None, verbose: bool = False, stream: TextIO | None = None) -> FilteringBoundLogger:
    """Return a logger that writes one line per event.

    Args:
        json: Write JSON lines instead of text; None: if the stream is not a terminal.
        verbose: Include debug events.
        stream: Output; None: standard error.
    """
    import structlog

    stream = sys.stderr if stream is None else stream
    terminal = stream.isatty()
    if json is None:
        json = not terminal
    common: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level]
    if json:
        common += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        common += [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=terminal and not os.environ.get("NO_COLOR"), pad_event_to=24),
        ]
    made: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", _Lossy(stream))),
        processors=common,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
    )
    return made


class _Lossy:
    """Drops lines that cannot be written, since a full disk or broken pipe must not end a connection that logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def captured(log: FilteringBoundLogger) -> Iterator[None]:
    """Forward warnings of libraries that use `logging` to the log."""
    root, handler = logging.getLogger(), _Forward(log)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _Forward(logging.Handler):
    def __init__(self, log: FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.log(record.levelno, "library", logger=record.name, said=record.getMessage(), exc_info=record.exc_info)
