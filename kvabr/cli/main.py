"""The command line: `kvabr COMMAND`. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

Wrong usage is an invalid option or argument, or the name of a file, asset, store or plug-in that does not exist, is
empty or has the wrong kind. Failures are damaged, unreadable or unreachable things, and a missing model or certificate.

Only the command that runs is imported, so that `kvabr --help` is fast.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from kvabr import __version__
from kvabr.cli.commands import COMMANDS, LAB, declare, exists, names
from kvabr.cli.interrupt import INTERRUPTED, handled, run_in_order
from kvabr.types import installing
from kvabr.types.errors import KvabrError, UsageError, did_you_mean, exhausted

_EPILOG = f"""\
a first look, without model or network:
  kvabr demo
  kvabr replay --policy all --load 0.4 --html page.html

with the real model ({installing.MODEL}, {installing.WHERE}):
  kvabr encode --text README.md --tokens 512 --out assets
  kvabr inspect assets
  kvabr replay --asset assets --deadline 2 --verify
  kvabr serve assets --dev                     and then the `kvabr fetch` line that it prints

Put options that you always give into kvabr.toml, here or in your configuration folder; `kvabr doctor` shows which file
is read.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the entry point of the `kvabr` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # neither a test's buffer nor None
            stream.reconfigure(errors="replace")
    return run_in_order(lambda: _main(argv), alone=argv is None)


def _main(argv: Sequence[str] | None) -> int:
    args = None
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        warnings.formatwarning = _format_warning
        logging.getLogger("quic").addHandler(logging.NullHandler())  # kvabr's errors say the same
        status = int(args.run(args))
        if sys.stdout is not None:  # None if the parent process closed it
            sys.stdout.flush()  # here, where a failure can still be handled
    except SystemExit:
        if args is None:
            raise
        return 0  # rich found the pipe broken
    except BrokenPipeError:
        # The reader closed the pipe, as `| head` does: not a failure. Discard the buffer, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KvabrError, OSError, MemoryError, RuntimeError) as error:
        message: object = exhausted(error)
        if message is None and not isinstance(error, KvabrError | OSError):
            raise  # a bug
        if message is None and isinstance(error, OSError):
            name = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            message = name + (error.strerror or str(error))
        print(f"kvabr: {message or error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as error:
        handled()
        # After an exception has passed through an `exec`, as of a dataclass definition, Python would end by the signal
        # instead of our status. Another `exec` resets that.
        exec("")  # noqa: S102
        print("kvabr: interrupted", *error.args, sep="; ", file=sys.stderr)
        return INTERRUPTED
    return status


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, with defaults from the user's configuration file; import only the command that runs.

    Raises:
        SystemExit: Help or version was requested (status 0), or the words are wrong (status 2).
        UsageError: The configuration file is wrong.
    """
    if not words:
        _top_parser().print_help()
        raise SystemExit(2)
    name, *rest = words
    if not name.startswith("-") and exists(name):
        args = _over_config(name, rest)
        for option, value in vars(args).items():
            if any("\0" in str(one) for one in (value if isinstance(value, list) else [value])):
                raise UsageError(f"{option.replace('_', '-')}: must not contain a NUL character")
        return args
    top = _top_parser()
    if not name.startswith("-"):
        top.error(f"unknown command {name!r}{did_you_mean(name, names())}; `kvabr --help` lists the commands")
    _, unknown = top.parse_known_args([name])  # exits for --help and --version
    if unknown:
        top.error(
            f"unknown option {name}{did_you_mean(name, ('--help', '--version'))}; `kvabr --help` lists the options"
        )
    raise SystemExit(2)


def _over_config(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words, with defaults from the configuration file."""
    parser = command_parser(name)
    if not {"-h", "--help"}.isdisjoint(words):
        return parser.parse_args(words)  # help shows the built-in defaults, even if the file is broken
    from kvabr.cli.config import Config

    try:
        config = Config.read()
        if config is not None:
            config.apply(parser, name, words)
    except UsageError:
        if name != "doctor":  # doctor reports it
            raise
    return parser.parse_args(words)


def command_parser(name: str) -> argparse.ArgumentParser:
    """Import one command and return its parser."""
    from kvabr.cli.options import CommandParser

    parser = CommandParser(prog=f"kvabr {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    declare(name, parser)
    return parser


def _top_parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="kvabr",
        description="A video player for KV caches: stream a prompt's KV cache at the quality that the network allows, "
        "in time for the first token.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvabr {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line)
    top.add_argument_group(
        f"commands of the laboratory ({installing.LAB}, {installing.WHERE})",
        "\n".join(f"  {name:<10}{line}" for name, line in LAB.items()),
    )
    return top


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format kvabr's own warnings like its errors."""
    if Path(filename).is_relative_to(_PACKAGE):
        return f"kvabr: {message}\n"
    return _FORMAT(message, category, filename, lineno, line)


_FORMAT = warnings.formatwarning
_PACKAGE = Path(__file__).parent.parent


if __name__ == "__main__":
    sys.exit(main())
