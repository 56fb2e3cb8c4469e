"""Tests that need their own process: compiling the kernels, and the tool that measures them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (kvabr[gpu])")

ROOT = Path(__file__).parents[3]


def run(*command, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  # our own


def test_the_kernels_compile_for_a_gpu_without_fusing_what_is_rounded_twice(tmp_path):
    done = run(Path(__file__).with_name("compiling.py"), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == {
        "read_rows", "triple", "unstack", "finish", "centre", "powers", "to_words", "product", "quantise", "write_rows"
    }  # fmt: skip
    assert all(int(fused) == 0 and int(size) > 1000 for _, fused, size in lines)


def test_the_tool_that_measures_runs_and_compares(tmp_path):
    sizes = ("--shape", "tiny", "--groups", "2", "--tokens", "1", "--depths", "2", "--rounds", "1")
    report = tmp_path / "report.json"
    done = run(ROOT / "tools" / "bench-gpu", *sizes, "--json", report, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert [(row["what"], row["groups"]) for row in rows[4:10]] == [
        ("AC, 1 layer", 1), ("AC, 1 layer", 2), ("AC, 1 layer, into blocks", 2),
        ("AC, 2 layers", 1), ("AC, 2 layers", 2), ("AC, 2 layers, into blocks", 2),
    ]  # fmt: skip
    assert [row["what"] for row in rows[16:]] == [
        "encoder's transform",
        "encode AC, 2 layers",
        "quantise and code, 2 layers",
    ]
    assert all(row["good"] and row["seconds"] > 0 for row in rows)


def test_the_tool_says_that_there_is_no_gpu():
    done = run(ROOT / "tools" / "bench-gpu", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no GPU here, so nothing was measured" in done.stdout
