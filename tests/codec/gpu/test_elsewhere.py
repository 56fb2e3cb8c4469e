"""The kernels compiled for a GPU, in a process of its own, and the tool that measures them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_tool

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

ROOT = Path(__file__).parents[3]


def run(*command, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  # our own


def test_the_kernels_compile_for_a_gpu_without_fusing_what_is_rounded_twice(tmp_path):
    tool = Path(__file__).with_name("compiling.py")
    done = run(tool, 90, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [(line.split()[0], *map(int, line.split()[1:])) for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == {
        "read_rows", "prepare", "unstack", "finish", "finish-few", "centre", "powers", "to_words", "product",
        "quantise", "write_rows", "collect", "expand",
    }  # fmt: skip
    assert all(fused == 0 for _, fused, _ in lines)
    assert all(shared <= 113 << 10 for *_, shared in lines)  # two programs to a multiprocessor at least


def test_the_tool_that_measures_runs_and_compares():
    done = run_tool("bench-gpu", "--shape", "tiny", "--groups", "1", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all bits equal the processor's" in done.stdout
