"""Options and option values that several commands share."""

from __future__ import annotations

import argparse
import gc
import ipaddress
import json
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

from annotated_types import Gt, Lt

from kvabr.types.digests import KINDS
from kvabr.types.errors import UsageError, did_you_mean
from kvabr.types.fields import Shown

if TYPE_CHECKING:
    from rich.console import Console

    from kvabr.engines.transformers.model_loader import LoadedModel

_NOT_A_NUMBER = re.compile(r"argument (?:-\w/)?(\S+): invalid (float|int) value: (.*)", re.DOTALL)
_NUMBERS = {"float": "number", "int": "whole number"}
_MAX_TOKENS_BYTES = 64 << 20
SPINS = "1000"
"""Number of times that a torch thread spins, about 30 microseconds in total, before it sleeps."""
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:\[\]\s/]*)):(?P<port>\d{1,5})")


class CommandParser(argparse.ArgumentParser):
    """A parser that reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        unknown, _, words = message.partition("unrecognized arguments: ")
        if not unknown and words.startswith("-"):
            option = words.split()[0].partition("=")[0]
            shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            message = f"unknown option {option}{did_you_mean(option, shown)}"
        message = _NOT_A_NUMBER.sub(lambda found: f"{found[1]} {found[3]}: must be a {_NUMBERS[found[2]]}", message)
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; `{self.prog} --help` lists the options\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert a word to its option's type; reject NaN."""
        try:
            value: object = super()._get_value(action, arg_string)
        except UsageError as error:
            raise argparse.ArgumentError(action, str(error)) from error
        if isinstance(value, float) and math.isnan(value):
            raise argparse.ArgumentError(action, f"{arg_string}: must be a number")
        return value


class Address(NamedTuple):
    """Address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``; an empty host is the wildcard address, an IPv6 host has brackets.

    Raises:
        UsageError: The text is not an address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{text!r} must be HOST:PORT, such as 127.0.0.1:4443 or [::1]:4443")
    return Address(found["six"] or found["host"] or "0.0.0.0", int(found["port"]))  # noqa: S104 - the user's choice


def is_wildcard(host: str) -> bool:
    """Return True if a server bound to ``host`` accepts connections on every address."""
    return host in {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def moqt_url(host: str, port: int) -> str:
    """Return the URL at which other machines reach a server bound to ``host`` and ``port``."""
    if is_wildcard(host):
        host = socket.gethostname()
    return f"moqt://{Address(host, port)}/"


def prompt_text(path: Path) -> str:
    """Return the text of ``--text``; raise `UsageError` if it is empty or cannot be read."""
    from kvabr.store.files import read_text

    if not (text := read_text(path, unreadable=UsageError)).strip():
        raise UsageError(f"--text {path}: is empty; give a file with text")
    return text


Deadline = Annotated[float, Gt(0), Lt(math.inf), Shown("-d --deadline S", "TTFT deadline, seconds (default: 2)")]
DiskGib = Annotated[
    float, Gt(0), Lt(1 << 30), Shown("--disk-gib N", "maximum size of the --disk folder, GiB (default: 16)")
]
Model = Annotated[
    str,
    Shown(
        "--model smollm2|DIR",
        "the model: SmolLM2-135M from its package, or a folder with a transformers model (default: smollm2)",
    ),
]
SaltFile = Annotated[
    Path | None,
    Shown(
        "--salt-file F",
        "file with a secret for the prompt's digests: only holders of the file can request the cache; make one with: "
        "head -c 32 /dev/urandom > F",
    ),
]
Digest = Annotated[
    str,
    Shown(
        "--digest",
        "digest by which readers check groups: blake3 takes less than half of the processor time, but needs the "
        "extra fast (default: sha256)",
        choices=KINDS,
    ),
]
TextFile = Annotated[Path, Shown("--text FILE", "text that contains the prompt (UTF-8)")]


@dataclass(frozen=True, slots=True)
class ModelOption:
    """The model option alone."""

    model: Model = "smollm2"


def yield_processors() -> None:
    """Let waiting threads of torch sleep soon, for commands that compute for a long time.

    By default they spin for milliseconds, a thousand times in a forward pass, which on a busy machine takes most of the
    processor time. The thread library reads this variable when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def load(name: str, console: Console, **how: Any) -> LoadedModel:
    """Load a model (`kvabr.engines.transformers.model_loader.load_model`) with a progress line."""
    from kvabr.cli.display import waiting

    with waiting("loading the model", console) as say:

        def reading(done: int, total: int) -> None:
            say(f"reading the weights, once, to name their caches: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        # Imports and a tokenizer create a million permanent objects; collecting garbage among them takes seconds.
        gc.disable()
        try:
            from kvabr.engines.transformers.model_loader import load_model

            return load_model(name, progress=reading, **how)
        finally:
            gc.enable()


def check_text(model: str, text: str, tokens: int, continuation: int = 0) -> None:
    """Raise `UsageError` if a text is clearly too short; does not load the model's weights."""
    from kvabr.engines.transformers.model_loader import load_tokenizer
    from kvabr.publish.texts import check_length

    tokenizer = load_tokenizer(model)[1]
    check_length(lambda head: tokenizer.encode(head, add_special_tokens=False).ids, text, tokens, continuation)


def check_writable(*paths: Path | None) -> None:
    """Raise `UsageError` if a result cannot be written, before any work is done."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; create it, or give another path")
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the path of a file")
        device = path.exists() and not path.is_file()
        if not os.access(path if device else path.parent, os.W_OK):
            raise UsageError(f"{path}: this user may not write to {path.parent}")


def read_tokens(path: Path, option: str) -> tuple[int, ...]:
    """Return token ids from a JSON list, or from an asset's file below `private/`."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TOKENS_BYTES + 1)
        value = json.loads(data)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} {path}: not JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("tokens")
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 1 << 32 for i in value):
        raise UsageError(f"{option} {path}: must be a list of token ids, or an object with such a list as `tokens`")
    return tuple(value)
