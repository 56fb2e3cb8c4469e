"""Guided runs: starts them one after another, shows how they go, and minimises what they find."""

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha1
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz import corpora, guided, sanitized
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import SEPARATOR

NATIVE: dict[str, tuple[str, ...]] = {"coder": sanitized.PATHS, "place": (), "analysis": sanitized.ANALYSIS}
"""Harnesses in C, ``native/NAME.c``, and the sources of kvabr that each is linked with."""
_HARNESSES = Path(__file__).parent / "native"
_MAX_NATIVE_BYTES = 1024
_MEMORY_MB = 3072
_STUCK_S = 1800
"""Seconds on the clock after which libFuzzer itself gives up on an input; `in_time` counts the processor's time."""
_SHOWN_EVERY_S = 10.0
_PROGRESS = re.compile(rb"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)/")
_WORDS = re.compile(rb'"[^"\\\s]{1,30}"|[A-Za-z_.]{4,30}')
_MISSING = """\
guided runs need {what}, which is not installed here:

  {how}

`tools/fuzz` without --guided needs neither."""


class MissingError(Exception):
    """A tool that guided runs need is not installed; the message says how to get it."""


def every() -> tuple[str, ...]:
    """Return the names of all targets of guided runs, those that strangers reach first."""
    return (*TARGETS, *NATIVE)


@dataclass(slots=True)
class Result:
    """What a run of one target has done."""

    name: str
    cpu_s: float = 0.0
    inputs: int = 0
    edges: int = 0
    features: int = 0
    kept: int = 0
    """Inputs in the corpus."""
    failures: list[Path] = field(default_factory=list)
    log: str = ""
    """Last lines of a run that failed."""


@dataclass(frozen=True)
class Campaign:
    """Runs in one folder, which keeps their corpora."""

    folder: Path
    show: Callable[[str], object] = print

    def check(self, names: Iterable[str]) -> None:
        """Raise `MissingError` unless what these targets need is installed."""
        names = set(names)
        if names - set(NATIVE) and find_spec("atheris") is None:
            how = f"{sys.executable} -m pip install atheris     (wheels for Linux)"
            raise MissingError(_MISSING.format(what="atheris", how=how))
        if names & set(NATIVE) and not _has_clang():
            how = "apt-get install clang libclang-rt-14-dev     (Debian 12; elsewhere clang with compiler-rt)"
            raise MissingError(_MISSING.format(what="clang with libFuzzer", how=how))

    def run(self, name: str, seconds: float, seed: int) -> Result:
        """Run a target for some seconds of the processor's time, or until it fails."""
        self._plant(name)
        options = [f"-seed={seed}", f"-dict={self._dictionary(name)}", "-print_final_stats=1"]
        options += [f"-timeout={_STUCK_S}", f"-report_slow_units={_STUCK_S}"]
        options += [f"-artifact_prefix={self._failures}/{name}-", f"-rss_limit_mb={_MEMORY_MB}", "-len_control=20"]
        options.append(f"-max_len={TARGETS[name].most_bytes if name in TARGETS else _MAX_NATIVE_BYTES}")
        command, environment = self._command(name)
        before = set(self._failures.iterdir())
        child = subprocess.Popen(  # noqa: S603
            [*command, *options, str(self._corpus(name))],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = Result(name)
        try:
            lines = self._watch(child, result, seconds)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        result.cpu_s = used.ru_utime - began.ru_utime + used.ru_stime - began.ru_stime
        result.failures = sorted(set(self._failures.iterdir()) - before)
        result.kept = len(list(self._corpus(name).iterdir()))
        if result.failures or not result.inputs:
            result.log = b"".join(lines[-60:]).decode(errors="replace")
        return result

    def replay(self, name: str, inputs: Sequence[Path]) -> int:
        """Run a target on these inputs alone, and show everything; return the exit status."""
        command, environment = self._command(name)
        return subprocess.run([*command, *map(str, inputs)], check=False, env=environment).returncode  # noqa: S603

    def keep(self, name: str) -> int:
        """Minimise a target's corpus, write it to the repository, and return how many inputs it has there."""
        command, environment = self._command(name)
        with tempfile.TemporaryDirectory(dir=self.folder) as least:
            given = [str(path) for path in (Path(least), self._corpus(name))]
            options = ["-merge=1", f"-rss_limit_mb={_MEMORY_MB}", f"-timeout={_STUCK_S}"]
            merge = [*command, *options, *given]
            done = subprocess.run(merge, check=False, env=environment, capture_output=True)  # noqa: S603
            found = [path.read_bytes() for path in Path(least).iterdir()]
        if done.returncode or not found:
            raise RuntimeError(f"{name}: cannot minimise the corpus\n{done.stderr.decode(errors='replace')[-2000:]}")
        valid = set(TARGETS[name].valid()) if name in TARGETS else set()
        corpora.write(name, (data for data in found if data and data not in valid))
        return len(corpora.read(name).inputs)

    def _watch(self, child: subprocess.Popen[bytes], result: Result, seconds: float) -> list[bytes]:
        """Read what libFuzzer says until it ends; stop it when its time is up."""
        lines: list[bytes] = []
        shown = time.monotonic()
        assert child.stderr is not None
        for line in child.stderr:
            lines = [*lines[-100:], line]
            found = _PROGRESS.match(line)
            if found is None:
                if line.startswith(b"stat::number_of_executed_units:"):
                    result.inputs = int(line.split()[-1])
                continue
            result.inputs, result.edges, result.features, kept = map(int, found.groups())
            used = _cpu_s(child.pid)
            if time.monotonic() > shown + _SHOWN_EVERY_S:
                shown = time.monotonic()
                self.show(
                    f"{result.name}: {used:.0f} s, {result.inputs:,} inputs, {result.edges:,} edges, {kept:,} kept"
                )
            if used > seconds:
                child.send_signal(signal.SIGTERM)
        child.wait()
        return lines

    def _plant(self, name: str) -> None:
        """Put valid inputs, and those of the repository, into the corpus."""
        self._failures.mkdir(parents=True, exist_ok=True)
        corpus = self._corpus(name)
        corpus.mkdir(parents=True, exist_ok=True)
        for data in (*(TARGETS[name].valid() if name in TARGETS else ()), *corpora.read(name).inputs):
            (corpus / sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)

    def _dictionary(self, name: str) -> Path:
        """Write the words of the valid inputs, which a parser looks for."""
        words = {SEPARATOR}
        for data in TARGETS[name].valid() if name in TARGETS else ():
            words.update(_WORDS.findall(data)[:200])
        path = self.folder / f"{name}.dict"
        escaped = ("".join(rf"\x{byte:02x}" for byte in word) for word in sorted(words))
        path.write_text("".join(f'"{word}"\n' for word in escaped))
        return path

    def _corpus(self, name: str) -> Path:
        return self.folder / "corpus" / name

    @property
    def _failures(self) -> Path:
        return self.folder / "failures"

    def _command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return how a target is started, ahead of libFuzzer's options, and its environment."""
        if name in NATIVE:
            return [str(self._harness(name))], dict(os.environ)
        environment = {**os.environ, "PYTHONPATH": str(sanitized.ROOT)}
        if TARGETS[name].native and self._modules is not None:
            environment |= sanitized.environment(self._modules, str(_atheris_library()))
            environment["PYTHONPATH"] = str(sanitized.ROOT)
        elif TARGETS[name].native:
            self.show(f"{name}: no clang, so the native code runs without sanitizers")
        command = [sys.executable, "-m", guided.__name__, name]
        again = self.folder / f"again-{name}"
        again.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        again.chmod(0o700)
        return command, environment | {guided.AGAIN: str(again)}

    def _harness(self, name: str) -> Path:
        out = self.folder / "native" / name
        if not out.exists():
            self.show(f"{name}: compiling")
            out.parent.mkdir(exist_ok=True)
            sources = [_HARNESSES / f"{name}.c", *(sanitized.ROOM / f"{each}.c" for each in NATIVE[name])]
            flags = ["-fsanitize=fuzzer", *sanitized.FLAGS, "-Wall", "-Wextra", f"-I{sanitized.ROOM}", "-pthread"]
            subprocess.run(["clang", *flags, *map(str, sources), "-o", str(out)], check=True)  # noqa: S603, S607
        return out

    @cached_property
    def _modules(self) -> Path | None:
        """Folder of the sanitized extension modules; None without clang."""
        if not _has_clang():
            return None
        folder = self.folder / "modules"
        if not folder.exists():
            self.show("compiling the native code with sanitizers")
            folder.mkdir()
            sanitized.build(folder, guided=True)
        return folder


def _atheris_library() -> Path:
    """Return the address sanitizer that comes with atheris, beside its package."""
    found = find_spec("atheris")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1] / "asan_with_fuzzer.so"


def _has_clang() -> bool:
    return shutil.which("clang") is not None


def _cpu_s(pid: int) -> float:
    """Return the processor's time that a process has used; 0.0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
