"""Logs of servers: events with fields, as text on a terminal and as JSON lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor


def logger(*, json: bool | None = None, verbose: bool = False, stream: TextIO | None = None) -> FilteringBoundLogger:
    """Return a logger that writes one line per event.

    Args:
        json: Write JSON lines instead of text; None: unless the stream is a terminal.
        verbose: Include debug events.
        stream: Output; None: standard error, which leaves standard output to results.
    """
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
            structlog.dev.ConsoleRenderer(colors=terminal, pad_event_to=24),
        ]
    made: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=common,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
    )
    return made


@contextmanager
def captured(log: FilteringBoundLogger) -> Iterator[None]:
    """Forward warnings of libraries that use `logging`, such as asyncio's lost exceptions, to the log."""
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
