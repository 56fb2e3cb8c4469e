"""Tests that need their own process: compiling the kernels, and the tool that measures them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_tool_that_measures_runs_and_compares(tmp_path):
    report = tmp_path / "report.json"
    command = (ROOT / "tools" / "bench-gpu", "--shape", "tiny", "--groups", "1", "2", "--rounds", "1", "--json", report)
    done = run(*command, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert [(row["what"], row["groups"]) for row in rows[:9]] == [
        ("copy of the cache, pinned", 2), ("L0", 1), ("L0", 2), ("to L1", 1), ("to L1", 2), ("mixed depths", 2),
        ("to L1, into blocks", 2), ("encoder's transform", 2), ("quantise and code to L1", 2),
    ]  # fmt: skip
    assert {row["what"] for row in rows[9:]} >= {"FP16", "FP8", "Int8", "Int4", "FP4", "Int8, as received"}
    assert all(row["good"] and row["seconds"] > 0 for row in rows)
    assert "all bits equal the processor's" in done.stdout
