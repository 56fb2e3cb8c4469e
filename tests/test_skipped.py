"""What is skipped is listed at the end of a run, with the command that runs it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {
    "AC is not published",
    "answers at once",
    "another libc",
    "plays into blocks, which vLLM bounds",
    "random weights have no text that small changes leave alone",
    "this processor has AMX",
    "reads /proc",
    "this machine lets no one mount a small disk; the test above stands in for it",
    "this system has its configuration elsewhere",
    "vLLM has no FP8 cache on processors without AVX-512 and AMX",
}
"""Reasons for which there is no command: another machine is needed, or the case does not apply."""

SHARED = {name for name in vars(needs) if name.isupper()} | {"NEEDED", "NEEDS_GEMMA"}


def reasons():
    """Yield where a test is skipped, and the reason, as it is written."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called in {"pytest.skip", "pytest.mark.skipif", "pytest.importorskip"}:
                given = [key.value for key in node.keywords if key.arg == "reason"]
                given += node.args if called == "pytest.skip" else []
                yield f"{path.relative_to(ROOT)}:{node.lineno}", given[0] if given else None


def test_every_reason_says_what_runs_the_test():
    for where, reason in reasons():
        assert reason is not None, f"{where}: without a reason"
        said = ast.unparse(reason)
        assert said.split(".")[-1] in SHARED or ": " in said or ast.literal_eval(said) in ELSEWHERE, f"{where}: {said}"


@pytest.mark.process
def test_a_run_ends_with_what_was_skipped():
    program = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/interop/test_aiomoqt.py"]
    nowhere = os.environ | {"KVABR_PEERS": "/nowhere"}
    done = subprocess.run(program, cwd=ROOT, env=nowhere, capture_output=True, text=True, check=False)  # noqa: S603
    _, _, end = done.stdout.partition(" skipped, and what runs it ")
    assert " of tests/interop/test_aiomoqt.py: aiomoqt is not installed\n    tools/setup-peers .peers aiomoqt\n" in end
