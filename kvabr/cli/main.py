"""The command line: `kvabr COMMAND`. Exit status 0 done, 1 failed, 2 wrong usage, 130 interrupted.

Wrong usage is an option or argument that is wrong by itself, or names a text, prompt, trace, asset, store, result or
plug-in that does not exist, is empty, or is of another kind. What exists but is damaged, cannot be read, or does not
answer, has failed, and so has what needs a model or certificate that is not there.

`kvabr.cli.commands` lists the commands. Only the one that runs is imported, so that `kvabr --help` takes no longer than
Python takes to start.
"""

from __future__ import annotations

import argparse
import codecs
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

Options that you always give belong in kvabr.toml, here or in your configuration folder; `kvabr doctor` says which file
is read.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; the entry point of the `kvabr` script."""
    return run_in_order(lambda: _main(argv), alone=argv is None)


def _main(argv: Sequence[str] | None) -> int:
    args = None
    _never_fail_to_print()
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        warnings.formatwarning = _format_warning
        logging.getLogger("quic").addHandler(logging.NullHandler())  # our errors say the same, once
        status = int(args.run(args))
        if sys.stdout is not None:  # None if the parent process closed it
            sys.stdout.flush()  # here, where a failure can still be handled
    except SystemExit:
        if args is None:
            raise
        return 0  # rich found the pipe broken; no command exits this way
    except BrokenPipeError:
        # The reader of our output went away, as with `| head`. That is no failure. Discard what is still buffered, or
        # the interpreter complains about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KvabrError, OSError, MemoryError, RuntimeError) as error:
        told = exhausted(error)
        if told is None and not isinstance(error, KvabrError | OSError):
            raise  # a mistake of ours
        said = told or (_of_system(error) if isinstance(error, OSError) else error)
        print(f"kvabr: {said}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt as error:
        handled()
        # Python ends by the signal, not by our status, if the exception has passed through an `exec`, as of a
        # dataclass that was being defined. Another `exec` makes it forget that.
        exec("")  # noqa: S102
        print("kvabr: interrupted", *error.args, sep="; ", file=sys.stderr)
        return INTERRUPTED
    return status


def _of_system(error: OSError) -> str:
    """Return what the system said of a file, with its name."""
    said = error.strerror or str(error)
    return said if error.filename is None else f"{os.fsdecode(error.filename)}: {said}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line over the user's configuration file, importing only the command that it names.

    Raises:
        SystemExit: The words ask for help or the version (status 0), or are wrong (status 2).
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
                raise UsageError(f"{option.replace('_', '-')}: has a NUL character, which no name or path may have")
        return args
    top = _top_parser()
    if not name.startswith("-"):
        top.error(f"no command {name!r}{did_you_mean(name, names())}; `kvabr --help` lists the commands")
    _, unknown = top.parse_known_args([name])  # exits for --help and --version
    if unknown:
        top.error(f"no option {name}{did_you_mean(name, ('--help', '--version'))}; `kvabr --help` shows what there is")
    raise SystemExit(2)


def _over_config(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command, with the configuration file's defaults."""
    parser = command_parser(name)
    if not {"-h", "--help"}.isdisjoint(words):
        return parser.parse_args(words)  # help shows the options' own defaults, and works with any file
    from kvabr.cli.config import Config

    try:
        config = Config.read()
        if config is not None:
            config.apply(parser, name, words)
    except UsageError:
        if name != "doctor":  # which reports it
            raise
    return parser.parse_args(words)


def command_parser(name: str) -> argparse.ArgumentParser:
    """Import one command and return its parser."""
    from kvabr.cli.options import CommandParser

    parser = CommandParser(prog=f"kvabr {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    declare(name, parser)
    return parser


def _top_parser() -> argparse.ArgumentParser:
    """Return a parser that knows the names of the commands, but none of their options."""
    top = argparse.ArgumentParser(
        prog="kvabr",
        description="A video player for KV caches: stream a prompt's KV cache at the quality that the network allows, "
        "in time for the first token.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--version", action=_Version, nargs=0, help="show the version, Python, and the codec's path, and exit"
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line)
    top.add_argument_group(
        f"commands of the laboratory ({installing.LAB}, {installing.WHERE})",
        "\n".join(f"  {name:<10}{line}" for name, line in LAB.items()),
    )
    return top


class _Version(argparse.Action):
    """Print the build: the version, Python, the platform, and the path of the native coder."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        import platform

        try:
            from kvabr.codec.native.coder import active_path

            coder = active_path()
        except (ImportError, KvabrError) as error:
            coder = f"none ({error})"
        where = f"{platform.system()} {platform.machine()}"
        print(f"kvabr {__version__}, Python {platform.python_version()}, {where}, coder: {coder}")
        parser.exit()


_PLAIN = str.maketrans("–—−…·×Δ≤≥→←▁▂▃▄▅▆▇██░▒▓•✓✗", "---~.xd<>><_.,:-=+##.:#*yn")  # noqa: RUF001 - looked alike
"""One ASCII character for each of the others that kvabr prints, so that tables stay aligned."""


def _never_fail_to_print() -> None:
    """Print an ASCII character, or ``?``, for what the encoding of the output lacks."""

    def replace(error: UnicodeError) -> tuple[str | bytes, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        lacking = error.object[error.start : error.end].translate(_PLAIN)
        return lacking.encode("ascii", "replace").decode(), error.end

    codecs.register_error("kvabr.plain", replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not a test's buffer, nor None
            stream.reconfigure(errors="kvabr.plain")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format kvabr's own warnings like its errors, and others with their file and line."""
    if Path(filename).is_relative_to(_PACKAGE):
        return f"kvabr: {message}\n"
    return _FORMAT(message, category, filename, lineno, line)


_FORMAT = warnings.formatwarning
_PACKAGE = Path(__file__).parent.parent


if __name__ == "__main__":
    sys.exit(main())
