"""The shell lines of README, quickstart and a tutorial, run in order as a reader runs them, but in this process.

They run with a model of a few thousand weights in place of SmolLM2, over two of the traces, and with a deadline that
every machine meets. Lines that install something are left out.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from kvabr.cli.main import main
from tests import tinymodels
from tests.processes import LIMIT_S
from tests.scripts import told

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md and quickstart.md": ("README.md", "docs/quickstart.md"),
    "two-processes.md": ("docs/tutorials/two-processes.md",),
}
"""Pages that one reader follows in one folder: what the first says as well is not run again.

`test_tutorial` runs those of the tutorial on policies.
"""
TRACES = ("lte.csv", "wan-far.csv")
INSTALLS = ("git clone", "python3 -m venv", "pip install", "tools/test")
BLOCK = re.compile(r'^```(sh|python)(?: title="([^"]+)")?\n(.*?)^```|^((?:    \S[^\n]*\n)+)', re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"kvabr fetch '(moqt://\S+/)#kvcache:(\S+)' .*--fingerprint (\w+)")


class Reader:
    """Follows a page in a folder that looks like a clone."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self._model = home, model
        self._server: subprocess.Popen[str] | None = None
        self._printed = ""
        """The line that the server printed."""
        (home / "traces").mkdir(parents=True)
        for name in TRACES:
            shutil.copy(ROOT / "traces" / name, home / "traces")
        shutil.copy(ROOT / "README.md", home)
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
        }

    def run(self, line: str) -> None:
        """Run a line, and check that it succeeds and writes what it should."""
        line = self._adapted(line)
        if line.startswith("kvabr serve"):
            self._serve(line)
            return
        assert not set(line) & set("|&;<>$`*?"), f"{line}: a shell makes something else of this"
        with contextlib.chdir(self.home), mock.patch.dict(os.environ, self._environment), told() as done:
            done.returncode = main(shlex.split(line)[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        for written in re.findall(r"--(?:out|html) (\S+)", line):
            assert (self.home / written).exists(), f"{line} wrote no {written}"

    def _adapted(self, line: str) -> str:
        line = line.replace("--model smollm2", f"--model {self._model}")
        if line.startswith("kvabr prefill") and "--model" not in line:
            line += f" --model {self._model}"
        elif line.startswith("kvabr encode"):
            line += f" --model {self._model} --continuation 16"
        elif line.startswith("kvabr serve"):
            line += " --bind 127.0.0.1:0"
        elif line.startswith("kvabr fetch"):
            url, asset, fingerprint = PRINTED.search(self._printed).groups()
            line = line.replace("moqt://127.0.0.1:4443/", url).replace("MODEL/DIGEST", asset)
            line = line.replace("HEX", fingerprint)
            line = line.replace("--deadline 2 ", f"--deadline {LIMIT_S:g} ")
        return line

    def _serve(self, line: str) -> None:
        """Start a server, and wait for the line that fetches from it."""
        self.close()
        self._server = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", *shlex.split(line)],
            cwd=self.home, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._printed = next(printed for printed in self._server.stdout if "kvabr fetch" in printed).strip()

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed: tools/setup-venv")
    return tinymodels.save(tmp_path_factory.mktemp("model") / "tiny-llama", max_position_embeddings=2048)


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_a_page_works_as_it_is_written(pages, tmp_path, model):
    reader, done = Reader(tmp_path / "clone", model), set[str]()
    try:
        for kind, title, code, indented in BLOCK.findall("".join((ROOT / page).read_text() for page in pages)):
            if kind == "python":
                if found := re.search(r"^class (\w+)\((?:Policy|Anytime)\)", code, re.MULTILINE):
                    (reader.home / (title or f"{found[1].lower()}.py")).write_text(code)
                continue
            for commented in (code or indented).splitlines():
                line = re.sub(r"  +#.*", "", commented.strip())
                if line and not line.startswith(INSTALLS) and line not in done:
                    assert line.startswith("kvabr "), f"{pages}: what is {line!r}?"
                    reader.run(line)
                    done.add(line)
    finally:
        reader.close()
    assert len(done) >= 4
