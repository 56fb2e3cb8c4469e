"""Commands in processes of their own that need not load transformers first, which takes longer than what they do.

A process that has loaded it forks them.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

LOADED = ["torch", "tokenizers", "transformers.models.llama.modeling_llama"]


class WarmCommand:
    """``kvabr WORD...`` in a folder and a process group of its own; like the `subprocess.Popen` of it."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LOADED)  # for the first
        out, into = os.pipe()
        self.stdout = os.fdopen(out)
        self._process = context.Process(target=_run, args=(words, folder, multiprocessing.reduction.DupFd(into)))
        self._process.start()
        os.close(into)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(words: Sequence[str], folder: Path, into: "multiprocessing.reduction.DupFd") -> None:
    os.setsid()
    os.chdir(folder)
    end = into.detach()
    os.dup2(end, 1)
    os.dup2(end, 2)
    os.close(end)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["kvabr", *words]
    runpy.run_module("kvabr", run_name="__main__")
