"""Runs scripts in the process of a test: to load torch and kvabr again takes longer than what most of them do."""

import contextlib
import io
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent


def run_script(path: Path, *words: object, beside: Path | None = None) -> CompletedProcess[str]:
    """Run ``python PATH WORD...``; return its exit status and what it printed.

    Args:
        path: the script.
        words: its arguments.
        beside: the folder that it imports other scripts from; None: its own.
    """
    command = [str(path), *map(str, words)]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    paths = [str(beside or path.parent), *sys.path]
    with mock.patch.object(sys, "argv", command), mock.patch.object(sys, "path", paths), told() as done:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            done.returncode = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return done


def run_tool(name: str, *words: object) -> CompletedProcess[str]:
    return run_script(ROOT / "tools" / name, *words)


@contextlib.contextmanager
def told() -> Iterator[CompletedProcess[str]]:
    """Collect what is printed; the result has it at the end."""
    out, err, done = io.StringIO(), io.StringIO(), CompletedProcess[str]((), 0)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield done
    done.stdout, done.stderr = out.getvalue(), err.getvalue()
